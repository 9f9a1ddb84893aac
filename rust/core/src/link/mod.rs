//! Links: directed pipes of bytes to and from peers, non-blocking, with one place to wait.

use std::io::{IoSlice, IoSliceMut};
use std::time::Duration;

pub mod checked;
pub mod forks;
pub mod links;
#[cfg(any(test, feature = "testing"))]
pub mod memory;
mod parts;
pub mod poll;
pub mod shm;
mod streams;
pub mod tcp;

pub use crate::config::STREAMS_MAX;

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

    /// Sleeps until one of `interests` may be served, somebody wakes this transport, or the time
    /// is over. It may return early.
    fn wait(&mut self, interests: &[Interest], timeout: Duration);

    /// A handle that ends a `wait` of this transport from another thread.
    fn waker(&self) -> Box<dyn Fn() + Send + Sync>;

    /// What this transport is called in statistics.
    fn name(&self) -> &'static str;
}

/// A pipe that will carry nothing more, and what the system said about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Broken {
    /// The reason, to follow "the connection".
    pub reason: String,
    /// Whether bytes arrived as nobody sent them, as opposed to none arriving any more.
    pub corrupted: bool,
}

impl Broken {
    /// A pipe that has ended.
    pub fn ended(reason: impl Into<String>) -> Self {
        Self {
            reason: reason.into(),
            corrupted: false,
        }
    }

    /// A pipe through which bytes came as nobody sent them.
    pub fn corrupted(reason: impl Into<String>) -> Self {
        Self {
            reason: reason.into(),
            corrupted: true,
        }
    }
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
