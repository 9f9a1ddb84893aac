//! Links: non-blocking pipes to and from peers, with one place to wait for all of them.
//!
//! A [`Link`] leads to one peer. Each transport implements it in a folder of its own and is listed
//! in [`KINDS`]. [`framing`] combines several links into one, and adds checksums. A [`mesh::Mesh`]
//! holds the links of a rank to all others, and waits for them.

use std::io::{IoSlice, IoSliceMut};
use std::time::Duration;

use rustix::event::PollFd;

pub mod forks;
pub mod framing;
pub mod kind;
#[cfg(any(test, feature = "testing"))]
pub mod memory;
pub mod mesh;
pub mod negotiation;
mod parts;
pub mod poll;
pub mod shm;
pub mod tcp;

pub use crate::config::STREAMS_MAX;
pub use gradring_proto::error::Broken;
pub use shm::heap::{Block, Heap};
pub use shm::slots::{SlotFile, Slots};

/// Kinds of links, the best first. TCP reaches every peer.
pub const KINDS: &[kind::Kind] = &[shm::KIND, tcp::KIND];

/// A link to one peer: an ordered pipe of bytes in each direction.
pub trait Link: Send {
    /// Sends a prefix of `parts`; returns its length, or `None` if the pipe is full.
    ///
    /// # Errors
    /// When the pipe is broken.
    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> Result<Option<usize>, Broken>;

    /// Receives into a prefix of `parts`, which must not be empty; returns its length, or `None` if
    /// no bytes have arrived.
    ///
    /// # Errors
    /// When the pipe is broken or its other end closed.
    fn try_receive(&mut self, parts: &mut [IoSliceMut<'_>]) -> Result<Option<usize>, Broken>;

    /// Returns the bytes that have arrived and not been received, in place; `None` if the link
    /// cannot show them before they are received.
    ///
    /// # Errors
    /// As for `try_receive`.
    fn readable(&mut self) -> Result<Option<&[u8]>, Broken> {
        Ok(None)
    }

    /// Marks the first `count` readable bytes as received.
    fn consume(&mut self, _count: usize) {}

    /// Announces that this side will sleep until `direction` is ready. Returns `false` if it is
    /// ready already.
    fn may_sleep(&mut self, direction: Direction) -> bool;

    /// Adds the descriptors to poll until `direction` is ready, besides the mesh's doorbell.
    fn awaited<'a>(&'a self, direction: Direction, awaited: &mut Vec<PollFd<'a>>);

    /// Withdraws the announcement of `may_sleep`, if there was one. `slept` is `true` if this side
    /// has slept, so that the peer may have ended meanwhile.
    fn awake(&mut self, _slept: bool) {}

    /// Returns the number of the CPU core from which the peer sent last; `None` if it is unknown or
    /// on another host.
    fn core_of_peer(&self) -> Option<usize> {
        None
    }

    /// Returns the TCP congestion control and the reason for it, if the link has one.
    fn congestion(&self) -> Option<(String, String)> {
        None
    }
}

/// All links of one rank.
///
/// Each direction of each pair of ranks is a pipe of its own: bytes keep their order inside a
/// pipe and have none across pipes.
pub trait Transport: Send {
    /// Sends a prefix of `parts` to `peer`; returns its length, or `None` if the pipe is full.
    ///
    /// # Errors
    /// When the pipe is broken.
    fn try_send(&mut self, peer: usize, parts: &[IoSlice<'_>]) -> Result<Option<usize>, Broken>;

    /// Receives into a prefix of `parts`, which must not be empty; returns its length, or `None` if
    /// no bytes have arrived.
    ///
    /// # Errors
    /// When the pipe is broken or its other end closed.
    fn try_receive(
        &mut self,
        peer: usize,
        parts: &mut [IoSliceMut<'_>],
    ) -> Result<Option<usize>, Broken>;

    /// Returns the bytes from `peer` that have arrived and not been received, in place; `None` if
    /// the link cannot show them before they are received.
    ///
    /// # Errors
    /// As for `try_receive`.
    fn readable(&mut self, _peer: usize) -> Result<Option<&[u8]>, Broken> {
        Ok(None)
    }

    /// Marks the first `count` readable bytes as received.
    fn consume(&mut self, _peer: usize, _count: usize) {}

    /// Returns the slots of memory that all ranks share, if there are any.
    fn slots(&mut self) -> Option<&mut Slots> {
        None
    }

    /// Returns the CPU core from which `peer` sent last, if it is known and on this host.
    fn core_of_peer(&self, _peer: usize) -> Option<usize> {
        None
    }

    /// Sleeps until one of `interests` is ready, a waker is called, or `timeout` has passed. It may
    /// return early.
    fn wait(&mut self, interests: &[Interest], timeout: Duration);

    /// Returns a function that ends a `wait` of this transport from another thread.
    fn waker(&self) -> Box<dyn Fn() + Send + Sync>;
}

/// A pipe for which an executor waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interest {
    /// The rank at the other end.
    pub peer: usize,
    /// Direction of the pipe.
    pub direction: Direction,
}

/// One of the two pipes to a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Outgoing; ready when it has capacity.
    Send,
    /// Incoming; ready when bytes have arrived.
    Receive,
}
