//! The protocol of two pipes in shared memory: ownership of bytes, and wake-ups.
//!
//! A pipe is a ring of bytes with two counters that only grow. `tail` counts the bytes that the
//! producer has published, `head` those that the consumer has given back. The bytes between them
//! belong to the consumer, all others to the producer. Each side writes one counter and reads the
//! other.
//!
//! A side that wants to sleep sets its flag and reads the counter once more. A side that publishes
//! reads the flag afterwards. Fences between the two steps on both sides ensure that at least one
//! side sees the other's write, so no wake-up is lost. Neither side makes a system call while both
//! are awake.
//!
//! The other process is not trusted, so its counters are checked on each read. The bytes are
//! handled elsewhere, so that Loom can check the protocol (`make loom`).

#[cfg(all(test, loom))]
use loom::sync::atomic::{AtomicU32, AtomicU64, fence};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
#[cfg(not(all(test, loom)))]
use std::sync::atomic::{AtomicU32, AtomicU64, fence};

use crate::link::{Broken, Direction};
use gradring_proto::error::Breakage;

/// Bytes published or given back at a time, so that both sides are busy during a large transfer; a
/// part of an L1 cache.
pub(super) const BATCH_BYTES: usize = 16 << 10;

/// State that two processes share besides the bytes; all zeros at the start.
#[repr(C)]
pub(super) struct ControlBlock {
    /// Indexed by the side that produces.
    counters: [Counters; 2],
    /// Indexed by the side that writes them.
    flags: [Line<Flags>; 2],
}

#[repr(C)]
struct Counters {
    /// Bytes published, written by the producer.
    tail: Line<AtomicU64>,
    /// Bytes given back, written by the consumer.
    head: Line<AtomicU64>,
}

/// Flags of one side. They are written rarely, so both sides keep a copy in their caches.
#[repr(C)]
struct Flags {
    /// The directions for which this side sleeps, as a sum of `bit`s.
    asleep: AtomicU32,
    /// 1 once this side will neither publish nor give back more bytes.
    closed: AtomicU32,
    /// CPU core from which this side published last, plus one; zero before that.
    core: AtomicU32,
}

/// A value in two cache lines of its own, because processors fetch lines in pairs.
#[repr(C, align(128))]
struct Line<T>(T);

/// One side of both pipes, with this process's copies of the shared counters.
pub(super) struct Side {
    /// 0 or 1.
    number: usize,
    capacity: u64,
    /// Bytes published on the outgoing pipe, and its head when last read.
    tail: u64,
    head_seen: u64,
    /// Bytes read from the incoming pipe, those of them given back, and its tail when last read.
    head: u64,
    given_back: u64,
    tail_seen: u64,
    /// Bytes given back at a time; small enough that a drained ring never blocks the producer.
    batch: u64,
}

const fn bit(direction: Direction) -> u32 {
    match direction {
        Direction::Send => 1,
        Direction::Receive => 2,
    }
}

impl Side {
    /// Side 0 or 1 of pipes that hold `capacity` bytes each.
    pub(super) fn new(number: usize, capacity: usize) -> Self {
        assert!(number < 2);
        Self {
            number,
            capacity: capacity as u64,
            tail: 0,
            head_seen: 0,
            head: 0,
            given_back: 0,
            tail_seen: 0,
            batch: BATCH_BYTES.min(capacity / 2).max(1) as u64,
        }
    }

    /// Returns the number of bytes that may be written at `write_position`. Reads the consumer's
    /// counter only if it knows of fewer than `wanted`.
    pub(super) fn free_capacity(
        &mut self,
        shared: &ControlBlock,
        wanted: usize,
    ) -> Result<usize, Broken> {
        if self.other_closed(shared) {
            return Err(Broken::closed());
        }
        if self.capacity - (self.tail - self.head_seen) < wanted as u64 {
            self.head_seen = self.load_head(shared)?;
        }
        Ok((self.capacity - (self.tail - self.head_seen)) as usize)
    }

    /// Returns the position in the ring of the next byte to write.
    pub(super) fn write_position(&self) -> usize {
        (self.tail % self.capacity) as usize
    }

    /// Gives `count` written bytes to the consumer; returns `true` if it has to be woken.
    #[must_use]
    pub(super) fn publish(&mut self, shared: &ControlBlock, count: usize) -> bool {
        assert!(count as u64 <= self.capacity - (self.tail - self.head_seen));
        self.tail += count as u64;
        self.note_core(shared);
        self.outgoing(shared).tail.0.store(self.tail, Release);
        self.should_wake(shared, Direction::Receive)
    }

    /// Returns the number of bytes that may be read at `read_position`. Reads the producer's
    /// counter only if it knows of fewer than `wanted`. A drained pipe that is closed is an error.
    pub(super) fn filled(&mut self, shared: &ControlBlock, wanted: usize) -> Result<usize, Broken> {
        if self.tail_seen - self.head < wanted as u64 {
            self.tail_seen = self.load_tail(shared)?;
            // The other side publishes before it closes, so the counter is read again after the
            // flag.
            if self.tail_seen == self.head && self.other_closed(shared) {
                self.tail_seen = self.load_tail(shared)?;
                if self.tail_seen == self.head {
                    return Err(Broken::closed());
                }
            }
        }
        Ok((self.tail_seen - self.head) as usize)
    }

    /// Returns the position in the ring of the next byte to read.
    pub(super) fn read_position(&self) -> usize {
        (self.head % self.capacity) as usize
    }

    /// Gives `count` read bytes back to the producer, now or with later ones, so that small
    /// messages do not each write the counter. Returns `true` if the producer has to be woken.
    #[must_use]
    pub(super) fn give_back(&mut self, shared: &ControlBlock, count: usize) -> bool {
        assert!(count as u64 <= self.tail_seen - self.head);
        self.head += count as u64;
        if self.head - self.given_back < self.batch {
            return false;
        }
        self.given_back = self.head;
        self.incoming(shared).head.0.store(self.head, Release);
        self.should_wake(shared, Direction::Send)
    }

    /// Announces that this side will sleep until `direction` is ready. The caller then calls
    /// `ready`, and sleeps only if it returns `false`.
    pub(super) fn announce_sleep(&self, shared: &ControlBlock, direction: Direction) {
        let asleep = &shared.flags[self.number].0.asleep;
        asleep.fetch_or(bit(direction), Relaxed);
        // Pairs with `should_wake`: either that sees the flag, or `ready` sees the new counter.
        fence(SeqCst);
    }

    /// Returns `true` if an attempt in `direction` would not have to wait; it may also fail.
    pub(super) fn ready(&self, shared: &ControlBlock, direction: Direction) -> bool {
        let moved = match direction {
            Direction::Send => {
                self.load_head(shared).map(|head| self.tail - head) != Ok(self.capacity)
            }
            Direction::Receive => self.load_tail(shared) != Ok(self.head),
        };
        moved || self.other_closed(shared)
    }

    /// Withdraws all announcements.
    pub(super) fn awake(&self, shared: &ControlBlock) {
        let asleep = &shared.flags[self.number].0.asleep;
        // Without an announcement there is no write, so the cache line stays shared.
        if asleep.load(Relaxed) != 0 {
            asleep.store(0, Relaxed);
        }
    }

    /// Ends both pipes; bytes published before can still be read. Returns `true` if the other side
    /// has to be woken.
    #[must_use]
    pub(super) fn close(&self, shared: &ControlBlock) -> bool {
        shared.flags[self.number].0.closed.store(1, Release);
        let sends = self.should_wake(shared, Direction::Send);
        let receives = self.should_wake(shared, Direction::Receive);
        sends || receives
    }

    /// Publishes the CPU core of this thread.
    fn note_core(&self, shared: &ControlBlock) {
        // Loom runs a model again and again, and each run must do the same.
        let core = match cfg!(all(test, loom)) {
            true => 1,
            false => rustix::thread::sched_getcpu() as u32 + 1,
        };
        let noted = &shared.flags[self.number].0.core;
        if noted.load(Relaxed) != core {
            noted.store(core, Relaxed);
        }
    }

    /// Returns the CPU core from which the other side published last, if it has published.
    pub(super) fn core_of_peer(&self, shared: &ControlBlock) -> Option<usize> {
        let noted = shared.flags[1 - self.number].0.core.load(Relaxed);
        (noted as usize).checked_sub(1)
    }

    /// Returns `true` if the other side sleeps for `direction`, whose counter was just written. It
    /// is woken once per announcement.
    fn should_wake(&self, shared: &ControlBlock, direction: Direction) -> bool {
        fence(SeqCst);
        let asleep = &shared.flags[1 - self.number].0.asleep;
        asleep.load(Relaxed) & bit(direction) != 0
            && asleep.fetch_and(!bit(direction), Relaxed) & bit(direction) != 0
    }

    fn load_head(&self, shared: &ControlBlock) -> Result<u64, Broken> {
        let head = self.outgoing(shared).head.0.load(Acquire);
        if self.tail.wrapping_sub(head) > self.capacity {
            return Err(impossible(false, self.tail, head));
        }
        Ok(head)
    }

    fn load_tail(&self, shared: &ControlBlock) -> Result<u64, Broken> {
        let tail = self.incoming(shared).tail.0.load(Acquire);
        if tail.wrapping_sub(self.head) > self.capacity {
            return Err(impossible(true, self.head, tail));
        }
        Ok(tail)
    }

    fn other_closed(&self, shared: &ControlBlock) -> bool {
        shared.flags[1 - self.number].0.closed.load(Acquire) != 0
    }

    fn outgoing<'a>(&self, shared: &'a ControlBlock) -> &'a Counters {
        &shared.counters[self.number]
    }

    fn incoming<'a>(&self, shared: &'a ControlBlock) -> &'a Counters {
        &shared.counters[1 - self.number]
    }
}

fn impossible(published: bool, own: u64, other: u64) -> Broken {
    Breakage::Counter {
        own,
        published,
        other,
    }
    .into()
}

#[cfg(test)]
impl ControlBlock {
    fn new() -> Self {
        let counter = || Line(AtomicU64::new(0));
        let flag = || AtomicU32::new(0);
        Self {
            counters: [(); 2].map(|()| Counters {
                tail: counter(),
                head: counter(),
            }),
            flags: [(); 2].map(|()| {
                Line(Flags {
                    asleep: flag(),
                    closed: flag(),
                    core: flag(),
                })
            }),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn who_reads_everything_never_keeps_the_other_side_waiting() {
        for capacity in 1..=9 {
            let shared = ControlBlock::new();
            let (mut producer, mut consumer) = (Side::new(0, capacity), Side::new(1, capacity));
            for wanted in [1, 2, capacity].repeat(20) {
                let free = producer.free_capacity(&shared, wanted).unwrap();
                assert!(free > 0 && free <= capacity);
                assert!(producer.ready(&shared, Direction::Send));
                let count = free.min(wanted);
                assert!(!producer.publish(&shared, count));
                assert_eq!(consumer.filled(&shared, count), Ok(count));
                assert!(!consumer.give_back(&shared, count));
            }
        }
    }

    #[test]
    fn impossible_counters_are_noticed_and_never_used() {
        let shared = ControlBlock::new();
        let mut side = Side::new(0, 8);
        for wrong in [9, u64::MAX, 1 << 63] {
            shared.counters[1].tail.0.store(wrong, Relaxed);
            let reason = side.filled(&shared, 1).unwrap_err().to_string();
            assert!(reason.contains(&format!("published up to byte {wrong}")));
            assert!(side.ready(&shared, Direction::Receive));
        }
        shared.counters[1].tail.0.store(8, Relaxed);
        assert_eq!(side.filled(&shared, 1), Ok(8));

        assert_eq!(side.free_capacity(&shared, 8), Ok(8));
        assert!(!side.publish(&shared, 8));
        for wrong in [9, u64::MAX, 1 << 63] {
            shared.counters[0].head.0.store(wrong, Relaxed);
            let reason = side.free_capacity(&shared, 1).unwrap_err().to_string();
            assert!(reason.contains(&format!("took back up to byte {wrong}")));
            assert!(side.ready(&shared, Direction::Send));
        }
        // A counter that goes backwards gives a wrong capacity, but never too much.
        shared.counters[0].head.0.store(8, Relaxed);
        assert_eq!(side.free_capacity(&shared, 8), Ok(8));
        assert!(!side.publish(&shared, 4));
        shared.counters[0].head.0.store(4, Relaxed);
        assert_eq!(side.free_capacity(&shared, 8), Ok(0));
    }
}

#[cfg(all(test, loom))]
mod loom_tests;
