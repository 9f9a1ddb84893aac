//! One directed pipe over several connections, for networks that limit each connection. The pipe in
//! the other direction has the same connections, which both leave to their owner.
//!
//! A pipe of one stream is that stream: nothing is added to its bytes. With more, the bytes of the
//! pipe are cut into *frames*, each announced by its sequence and length (`wire::frame`), and each
//! frame travels on one stream.
//!
//! *Sending.* Whichever stream has room begins the next frame, so a stream that is slow takes fewer.
//! Nothing is copied: a frame that its stream takes only in part is remembered as a range of what
//! was offered, and goes on from there with the next offer. Other streams go on with later frames
//! meanwhile. What counts as sent is the prefix of the pipe's bytes that streams have taken without
//! a gap; bytes beyond it stay the sender's to keep unchanged, as any unsent bytes are. This needs
//! one thing of the caller: an offer begins where the pipe stands and reaches at least as far as the
//! one before, which holds for whoever sends buffers in order.
//!
//! *Receiving.* The stream whose next frame is the next of the pipe is read straight into the
//! caller's memory; the bytes of the others wait in the kernel. Each stream carries its frames in
//! rising order, so the next frame is always the next of the stream that carries it, and nothing can
//! deadlock. The announcement of a stream's next frame comes with the last bytes of the one before.
//!
//! *An end.* A peer that leaves ends all streams at once, but their last bytes do not arrive at once:
//! a stream that has ended between two frames is only left out. If the next frame does not come,
//! the pipe is broken: at once if no stream is left that could bring it, or else when nothing has
//! come for a while.

use std::io::{IoSlice, IoSliceMut};

use super::Broken;

mod incoming;
mod outgoing;
#[cfg(test)]
pub(super) mod tests;

pub(super) use incoming::Incoming;
pub(super) use outgoing::Outgoing;

/// Slices in one system call, the announcement included; more take several calls.
const SLICES: usize = 66;

/// One connection of a pipe; non-blocking.
pub(super) trait Stream {
    /// Sends a prefix of `parts`; returns its length, or `None` if there is no room.
    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> Result<Option<usize>, Broken>;

    /// Receives into a prefix of `parts`, which has room; returns its length, 0 at the end of the
    /// stream, or `None` if nothing is there.
    fn try_receive(&mut self, parts: &mut [IoSliceMut<'_>]) -> Result<Option<usize>, Broken>;
}

/// Says on which of several streams something broke.
fn on_stream(index: usize) -> impl Fn(Broken) -> Broken {
    move |broken| Broken {
        reason: format!("{} (stream {index})", broken.reason),
        ..broken
    }
}
