//! Links: bytes to and from peers, non-blocking, with one place to wait.
//!
//! A [`Link`] leads to one peer; each transport has a folder with its own, and is in the list of
//! [`KINDS`]. [`framing`] makes one link of several, or one whose bytes are checked. A [`mesh::Mesh`]
//! has the links of a rank to all others, and waits.

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

/// What links can be made of, the best first. TCP leads everywhere.
pub const KINDS: &[kind::Kind] = &[shm::KIND, tcp::KIND];

/// What leads to one peer and back: a pipe of bytes in each direction, which keeps their order.
pub trait Link: Send {
    /// Sends a prefix of `parts`; returns its length, or `None` if the pipe is full.
    ///
    /// # Errors
    /// When the pipe is broken.
    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> Result<Option<usize>, Broken>;

    /// Receives into a prefix of `parts`, which has room; returns its length, or `None` if nothing
    /// is there.
    ///
    /// # Errors
    /// When the pipe is broken or its other end closed.
    fn try_receive(&mut self, parts: &mut [IoSliceMut<'_>]) -> Result<Option<usize>, Broken>;

    /// What has arrived and not been received, where it lies in memory; `None` if it must be
    /// received to be seen.
    ///
    /// # Errors
    /// As for `try_receive`.
    fn readable(&mut self) -> Result<Option<&[u8]>, Broken> {
        Ok(None)
    }

    /// Receives the first `count` readable bytes by forgetting them.
    fn consume(&mut self, _count: usize) {}

    /// Says that this side will sleep until `direction` may go on; `false` if it may already.
    fn may_sleep(&mut self, direction: Direction) -> bool;

    /// Adds what to poll until `direction` may go on, besides the mesh's doorbell.
    fn awaited<'a>(&'a self, direction: Direction, awaited: &mut Vec<PollFd<'a>>);

    /// Takes back what `may_sleep` said; it may be called without. `slept`: whether time has passed
    /// in which the other side may have ended.
    fn awake(&mut self, _slept: bool) {}

    /// The core from which the peer sent last, as the system numbers those of this host; `None` if
    /// that is not known, or another host's.
    fn core_of_peer(&self) -> Option<usize> {
        None
    }

    /// The TCP congestion control, if it has one, and why it has that.
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

    /// Receives into a prefix of `parts`, which has room; returns its length, or `None` if
    /// nothing is there.
    ///
    /// # Errors
    /// When the pipe is broken or its other end closed.
    fn try_receive(
        &mut self,
        peer: usize,
        parts: &mut [IoSliceMut<'_>],
    ) -> Result<Option<usize>, Broken>;

    /// What has arrived from `peer` and not been received, where it lies in memory; `None` if it
    /// must be received to be seen.
    ///
    /// # Errors
    /// As for `try_receive`.
    fn readable(&mut self, _peer: usize) -> Result<Option<&[u8]>, Broken> {
        Ok(None)
    }

    /// Receives the first `count` readable bytes by forgetting them.
    fn consume(&mut self, _peer: usize, _count: usize) {}

    /// The core from which `peer` sent last, if it is one of this host and known.
    fn core_of_peer(&self, _peer: usize) -> Option<usize> {
        None
    }

    /// Sleeps until one of `interests` may be served, somebody wakes this transport, or the time
    /// is over. It may return early.
    fn wait(&mut self, interests: &[Interest], timeout: Duration);

    /// A handle that ends a `wait` of this transport from another thread.
    fn waker(&self) -> Box<dyn Fn() + Send + Sync>;
}

/// Something an executor waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interest {
    /// The rank at the other end.
    pub peer: usize,
    /// Which pipe.
    pub direction: Direction,
}

/// One of the two pipes to a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Room to send.
    Send,
    /// Bytes to receive.
    Receive,
}
