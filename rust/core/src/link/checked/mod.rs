//! Links that notice when bytes arrive other than they were sent.
//!
//! The bytes of each pipe are cut into *segments*, each announced by its length, its number and the
//! checksum of its payload (`wire::segment`). The receiver hands out a segment when all of it has
//! arrived and is right: what is wrong is neither reduced nor passed on to other ranks, so no rank
//! can end a collective with it. What is wrong ends the pipe.
//!
//! This wraps links of any kind, so the number of streams, TLS and shared memory make no difference
//! here. The price is looking at every byte once more on both sides, and on the receiving side one
//! copy inside the cache: a reduction takes its operand from where the segment was checked.

use std::io::{IoSlice, IoSliceMut};
use std::time::Duration;

use super::{Broken, Interest, Transport};
use incoming::Incoming;
use outgoing::Outgoing;

mod incoming;
mod outgoing;
#[cfg(all(test, not(loom)))]
mod tests;

/// Links whose bytes are protected by checksums, if both ends of each are.
pub struct Checked<T> {
    inner: T,
    /// Indexed by rank.
    outgoing: Vec<Outgoing>,
    incoming: Vec<Incoming>,
}

impl<T: Transport> Checked<T> {
    /// Protects what goes through `inner`, the links of a rank in a group of `world_size`.
    #[must_use]
    pub fn new(inner: T, world_size: usize) -> Self {
        Self {
            inner,
            outgoing: (0..world_size).map(|_| Outgoing::default()).collect(),
            incoming: (0..world_size).map(|_| Incoming::default()).collect(),
        }
    }

    /// What is right of the segment that comes next from `peer`; nothing if it is not complete.
    fn look(&mut self, peer: usize) -> Result<&[u8], Broken> {
        let inner = &mut self.inner;
        self.incoming[peer].look(|memory| inner.try_receive(peer, &mut [IoSliceMut::new(memory)]))
    }
}

impl<T: Transport> Transport for Checked<T> {
    fn try_send(&mut self, peer: usize, parts: &[IoSlice<'_>]) -> Result<Option<usize>, Broken> {
        let inner = &mut self.inner;
        self.outgoing[peer].try_send(parts, |segments| inner.try_send(peer, segments))
    }

    fn try_receive(
        &mut self,
        peer: usize,
        parts: &mut [IoSliceMut<'_>],
    ) -> Result<Option<usize>, Broken> {
        let bytes = self.look(peer)?;
        let mut taken = 0;
        for part in parts {
            let length = part.len().min(bytes.len() - taken);
            part[..length].copy_from_slice(&bytes[taken..taken + length]);
            taken += length;
        }
        self.incoming[peer].consume(taken);
        Ok((taken > 0).then_some(taken))
    }

    fn readable(&mut self, peer: usize) -> Result<Option<&[u8]>, Broken> {
        self.look(peer).map(Some)
    }

    fn consume(&mut self, peer: usize, count: usize) {
        self.incoming[peer].consume(count);
    }

    fn wait(&mut self, interests: &[Interest], timeout: Duration) {
        self.inner.wait(interests, timeout);
    }

    fn waker(&self) -> Box<dyn Fn() + Send + Sync> {
        self.inner.waker()
    }

    fn name(&self) -> &'static str {
        self.inner.name()
    }
}
