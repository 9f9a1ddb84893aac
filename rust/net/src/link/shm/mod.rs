//! A link between two processes of one host over shared memory.
//!
//! Two ranks pair over an authenticated connection: one passes a memfd to the other, which
//! proves that they share a host. The memory holds one ring of bytes per direction. Sending copies
//! into the ring; the receiver copies out of it, or works on the bytes where they are.
//!
//! Neither side makes a system call while both are awake. A side that wants to sleep announces it,
//! checks once more, and polls its *doorbell*, an eventfd that the other side rings:
//!
//! ```text
//! link.announce_sleep(direction);
//! if !link.ready(direction) { poll(doorbell, sockets) }
//! link.awake();
//! read(doorbell);                    // before looking at any link again
//! ```
//!
//! A process that is killed does not close its end of the link. So a rank that waits for a link
//! also polls a TCP socket to the same rank. The kernel frees the memory with its last user.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;

use super::kind::{Introduction, Kind};
use super::tcp::connection::Connection;
use super::{Broken, Direction, Link, poll};
use arena::Arena;
use gradring_proto::error::Breakage;
use pipe::{BATCH_BYTES, Side};
use rustix::event::PollFd;

mod arena;
pub(super) mod heap;
mod pairing;
mod passing;
mod pipe;
pub(super) mod slots;

use pairing::{Own, pair};

/// Largest capacity of a ring. If ranks share a core, each switch from one to the other moves at
/// most this many bytes.
const RING_BYTES_MAX: usize = 1 << 20;
/// Smallest capacity of a ring: mappings begin with a page, and a page may be as large.
const RING_BYTES_MIN: usize = 64 << 10;
/// Largest total capacity of all rings of a host, if each has more than the smallest one.
const HOST_BYTES_MAX: usize = 256 << 20;

/// Returns the capacity of a ring on a host where `pairs` pairs of ranks share memory. It is the
/// largest with which the host stays within `HOST_BYTES_MAX`, but at least `RING_BYTES_MIN`.
fn ring_bytes(pairs: usize) -> usize {
    let most = HOST_BYTES_MAX / 2 / pairs.max(1);
    let most = most.clamp(RING_BYTES_MIN, RING_BYTES_MAX);
    1 << most.ilog2()
}

/// Links over the shared memory of one host.
pub const KIND: Kind = Kind {
    name: "shm",
    link: |introduction: &mut Introduction<'_>| {
        let stream = &mut introduction.connections[0];
        let own = Own {
            name: introduction.name,
            initiator: introduction.initiator,
            doorbell: introduction.doorbell,
            slots: introduction.slots,
        };
        let ring_bytes = ring_bytes(introduction.pairs);
        let deadline = introduction.deadline;
        let paired = pair(stream, &own, ring_bytes, deadline, &mut *introduction.go_on)?;
        Ok(paired.map(|(memory, slots)| {
            introduction.slots.take(slots);
            // One TCP connection stays open, because it ends with the peer's process.
            let witness = introduction.connections.swap_remove(0);
            introduction.connections.clear();
            vec![Box::new(WitnessedLink {
                memory,
                witness,
                ended: false,
            }) as _]
        }))
    },
};

/// A link to a rank that shares memory.
struct WitnessedLink {
    memory: ShmLink,
    /// TCP connection on which nothing arrives but its end.
    witness: Connection,
    /// `true` once the peer's process has ended.
    ended: bool,
}

impl WitnessedLink {
    /// Turns `None`, which means to wait, into an error if the peer has ended.
    fn unless_ended<T>(&self, outcome: Option<T>) -> Result<Option<T>, Broken> {
        if outcome.is_none() && self.ended {
            return Err(Breakage::ProcessEnded.into());
        }
        Ok(outcome)
    }
}

impl Link for WitnessedLink {
    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> Result<Option<usize>, Broken> {
        let sent = self.memory.try_send(parts)?;
        self.unless_ended(sent)
    }

    fn try_receive(&mut self, parts: &mut [IoSliceMut<'_>]) -> Result<Option<usize>, Broken> {
        let received = self.memory.try_receive(parts)?;
        self.unless_ended(received)
    }

    fn readable(&mut self) -> Result<Option<&[u8]>, Broken> {
        let ended = self.ended;
        let bytes = self.memory.readable()?;
        if ended && bytes.is_empty() {
            return Err(Breakage::ProcessEnded.into());
        }
        Ok(Some(bytes))
    }

    fn consume(&mut self, count: usize) {
        self.memory.consume(count);
    }

    fn core_of_peer(&self) -> Option<usize> {
        self.memory.core_of_peer()
    }

    fn may_sleep(&mut self, direction: Direction) -> bool {
        self.memory.announce_sleep(direction);
        !self.memory.ready(direction)
    }

    fn awaited<'a>(&'a self, _direction: Direction, awaited: &mut Vec<PollFd<'a>>) {
        awaited.push(poll::readable(&self.witness));
    }

    fn awake(&mut self, slept: bool) {
        self.memory.awake();
        if slept {
            self.ended = self.witness.is_readable();
        }
    }
}

/// This process's end of a link.
pub struct ShmLink {
    arena: Arena,
    /// 0 or 1; also the ring on which this side sends.
    number: usize,
    side: Side,
    /// Rung when the other side sleeps and can continue.
    other_doorbell: OwnedFd,
}

impl ShmLink {
    fn new(arena: Arena, number: usize, other_doorbell: OwnedFd) -> Self {
        let side = Side::new(number, arena.capacity());
        Self {
            arena,
            number,
            side,
            other_doorbell,
        }
    }

    /// Sends a prefix of `parts`; returns its length, or `None` if the ring is full.
    ///
    /// # Errors
    /// When the other side has closed the link, or breaks the protocol.
    pub fn try_send(&mut self, parts: &[IoSlice<'_>]) -> Result<Option<usize>, Broken> {
        let wanted = parts.iter().map(|part| part.len()).sum();
        let free = self
            .side
            .free_capacity(self.arena.shared(), wanted)?
            .min(wanted);
        let (mut left, mut written) = (free, 0);
        for part in parts {
            let mut part = &part[..part.len().min(left)];
            left -= part.len();
            while !part.is_empty() {
                let (now, later) = part.split_at(part.len().min(BATCH_BYTES - written));
                let position = (self.side.write_position() + written) % self.arena.capacity();
                // SAFETY: at most `free` bytes from the position are written in all.
                unsafe { self.arena.write(self.number, position, now) };
                written += now.len();
                part = later;
                if written == BATCH_BYTES {
                    self.publish(std::mem::take(&mut written));
                }
            }
        }
        if written > 0 {
            self.publish(written);
        }
        Ok((free > 0 || wanted == 0).then_some(free))
    }

    /// Receives into a prefix of `parts`; returns its length, or `None` if nothing is there.
    ///
    /// # Errors
    /// When the other side has closed the link and everything was received, or breaks the protocol.
    pub fn try_receive(&mut self, parts: &mut [IoSliceMut<'_>]) -> Result<Option<usize>, Broken> {
        let wanted = parts.iter().map(|part| part.len()).sum();
        let filled = self.poll(wanted)?.min(wanted);
        let (mut left, mut read) = (filled, 0);
        for part in parts {
            let length = part.len().min(left);
            left -= length;
            let mut part = &mut part[..length];
            while !part.is_empty() {
                let (now, later) = part.split_at_mut(part.len().min(BATCH_BYTES - read));
                let position = (self.side.read_position() + read) % self.arena.capacity();
                // SAFETY: at most `filled` bytes from the position are read in all.
                now.copy_from_slice(unsafe {
                    self.arena.read(1 - self.number, position, now.len())
                });
                read += now.len();
                part = later;
                if read == BATCH_BYTES {
                    self.consume(std::mem::take(&mut read));
                }
            }
        }
        if read > 0 {
            self.consume(read);
        }
        Ok((filled > 0 || wanted == 0).then_some(filled))
    }

    /// Returns all bytes that have arrived, in place and contiguous; `consume` frees their
    /// capacity.
    ///
    /// # Errors
    /// As for `try_receive`.
    pub fn readable(&mut self) -> Result<&[u8], Broken> {
        let filled = self.poll(self.arena.capacity())?;
        // SAFETY: the bytes between head and tail are this side's until it gives them back, for
        // which it needs a mutable borrow.
        Ok(unsafe {
            self.arena
                .read(1 - self.number, self.side.read_position(), filled)
        })
    }

    /// Gives the first `count` of the readable bytes back to the other side.
    ///
    /// # Panics
    /// When fewer were readable.
    pub fn consume(&mut self, count: usize) {
        if self.side.give_back(self.arena.shared(), count) {
            self.ring();
        }
    }

    /// Announces that this side will sleep until `direction` is ready; see the module's text.
    pub fn announce_sleep(&self, direction: Direction) {
        self.side.announce_sleep(self.arena.shared(), direction);
    }

    /// Returns `true` if sending or receiving would not have to wait; it may also fail.
    #[must_use]
    pub fn ready(&self, direction: Direction) -> bool {
        self.side.ready(self.arena.shared(), direction)
    }

    /// Withdraws all announcements.
    pub fn awake(&self) {
        self.side.awake(self.arena.shared());
    }

    fn core_of_peer(&self) -> Option<usize> {
        self.side.core_of_peer(self.arena.shared())
    }

    fn poll(&mut self, wanted: usize) -> Result<usize, Broken> {
        self.side.filled(self.arena.shared(), wanted)
    }

    fn publish(&mut self, count: usize) {
        if self.side.publish(self.arena.shared(), count) {
            self.ring();
        }
    }

    fn ring(&self) {
        poll::ring(&self.other_doorbell);
    }
}

impl Drop for ShmLink {
    /// Ends the link; the other side can still receive the bytes sent before.
    fn drop(&mut self) {
        if self.side.close(self.arena.shared()) {
            self.ring();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod bench;
#[cfg(all(test, not(loom)))]
pub(in crate::link) mod tests;
