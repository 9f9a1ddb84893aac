//! The protocol of two pipes in shared memory: who may touch which bytes, and who wakes whom.
//!
//! A pipe is a ring of bytes with two counters that only grow: `tail`, the bytes that its producer
//! has published, and `head`, the bytes that its consumer has given back. The bytes between them
//! are the consumer's, all others the producer's. Each side writes one counter and reads the other.
//!
//! A side that wants to sleep says so in its flag and looks once more; a side that publishes looks
//! at the flag afterwards. A fence between the two steps on both sides makes sure that at least one
//! of them sees the other, so no wake-up is lost, and that neither makes a system call while both
//! are awake.
//!
//! The other process is not trusted with this one's memory: its counters are checked on each read.
//! Loom checks the protocol (`make loom`), hence no bytes here.

#[cfg(all(test, loom))]
use loom::sync::atomic::{AtomicU32, AtomicU64, fence};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
#[cfg(not(all(test, loom)))]
use std::sync::atomic::{AtomicU32, AtomicU64, fence};

use crate::link::{Broken, Direction};
use gradring_proto::error::Breakage;

/// Bytes published or given back at a time, so that both sides of a large transfer are busy: a part
/// of an L1 cache.
pub(super) const BATCH_BYTES: usize = 16 << 10;

/// What two processes share besides the bytes; all zeros at the beginning.
#[repr(C)]
pub(super) struct Shared {
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

/// Rarely written, so that both sides keep a copy in their caches.
#[repr(C)]
struct Flags {
    /// The directions for which this side sleeps, as a sum of `bit`s.
    asleep: AtomicU32,
    /// Whether this side will neither publish nor give back anything more.
    closed: AtomicU32,
    /// From which core this side published last, plus one; zero if it has not.
    core: AtomicU32,
}

/// Two cache lines of its own, as processors fetch them in pairs.
#[repr(C, align(128))]
struct Line<T>(T);

/// One side of both pipes: what this process knows without looking at the shared counters.
pub(super) struct Side {
    /// 0 or 1.
    number: usize,
    capacity: u64,
    /// What this side has published on its outgoing pipe, and the head that it last saw there.
    tail: u64,
    head_seen: u64,
    /// What this side has read on its incoming pipe, how much of it the producer knows, and the tail
    /// that this side last saw there.
    head: u64,
    given_back: u64,
    tail_seen: u64,
    /// Bytes that are given back at a time. The producer always has as much room at least when
    /// everything has been read, so it never waits for bytes that are kept.
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

    /// How many bytes may be written at `write_position`; looks again at what the consumer gave
    /// back only if fewer than `wanted` are known.
    pub(super) fn room(&mut self, shared: &Shared, wanted: usize) -> Result<usize, Broken> {
        if self.other_closed(shared) {
            return Err(Broken::closed());
        }
        if self.capacity - (self.tail - self.head_seen) < wanted as u64 {
            self.head_seen = self.load_head(shared)?;
        }
        Ok((self.capacity - (self.tail - self.head_seen)) as usize)
    }

    /// Where in the ring the next byte is written.
    pub(super) fn write_position(&self) -> usize {
        (self.tail % self.capacity) as usize
    }

    /// Gives `count` written bytes to the consumer; `true` if it has to be woken.
    #[must_use]
    pub(super) fn publish(&mut self, shared: &Shared, count: usize) -> bool {
        assert!(count as u64 <= self.capacity - (self.tail - self.head_seen));
        self.tail += count as u64;
        self.note_core(shared);
        self.outgoing(shared).tail.0.store(self.tail, Release);
        self.should_wake(shared, Direction::Receive)
    }

    /// How many bytes may be read at `read_position`; looks for more only if fewer than `wanted`
    /// are known. None left of a closed pipe is an error.
    pub(super) fn filled(&mut self, shared: &Shared, wanted: usize) -> Result<usize, Broken> {
        if self.tail_seen - self.head < wanted as u64 {
            self.tail_seen = self.load_tail(shared)?;
            // The other side publishes before it closes: what it published last counts.
            if self.tail_seen == self.head && self.other_closed(shared) {
                self.tail_seen = self.load_tail(shared)?;
                if self.tail_seen == self.head {
                    return Err(Broken::closed());
                }
            }
        }
        Ok((self.tail_seen - self.head) as usize)
    }

    /// Where in the ring the next byte is read.
    pub(super) fn read_position(&self) -> usize {
        (self.head % self.capacity) as usize
    }

    /// Gives `count` bytes that were read back to the producer, now or with later ones; `true` if
    /// it has to be woken. Small messages need not tell it each time.
    #[must_use]
    pub(super) fn give_back(&mut self, shared: &Shared, count: usize) -> bool {
        assert!(count as u64 <= self.tail_seen - self.head);
        self.head += count as u64;
        if self.head - self.given_back < self.batch {
            return false;
        }
        self.given_back = self.head;
        self.incoming(shared).head.0.store(self.head, Release);
        self.should_wake(shared, Direction::Send)
    }

    /// Says that this side will sleep until `direction` is ready. Next comes `ready`, and sleep
    /// only if it says no.
    pub(super) fn announce_sleep(&self, shared: &Shared, direction: Direction) {
        let asleep = &shared.flags[self.number].0.asleep;
        asleep.fetch_or(bit(direction), Relaxed);
        // Pairs with `should_wake`: either it sees the flag, or `ready` sees what was published.
        fence(SeqCst);
    }

    /// Whether an attempt in `direction` would come to something, be it an error.
    pub(super) fn ready(&self, shared: &Shared, direction: Direction) -> bool {
        let moved = match direction {
            Direction::Send => {
                self.load_head(shared).map(|head| self.tail - head) != Ok(self.capacity)
            }
            Direction::Receive => self.load_tail(shared) != Ok(self.head),
        };
        moved || self.other_closed(shared)
    }

    /// Takes back all announcements.
    pub(super) fn awake(&self, shared: &Shared) {
        let asleep = &shared.flags[self.number].0.asleep;
        // Without an announcement the line stays where it is.
        if asleep.load(Relaxed) != 0 {
            asleep.store(0, Relaxed);
        }
    }

    /// Ends both pipes; what was published before can still be read. `true` if the other side has
    /// to be woken.
    #[must_use]
    pub(super) fn close(&self, shared: &Shared) -> bool {
        shared.flags[self.number].0.closed.store(1, Release);
        let sends = self.should_wake(shared, Direction::Send);
        let receives = self.should_wake(shared, Direction::Receive);
        sends || receives
    }

    /// Lets the other side know the core of this thread.
    fn note_core(&self, shared: &Shared) {
        let core = rustix::thread::sched_getcpu() as u32 + 1;
        let noted = &shared.flags[self.number].0.core;
        if noted.load(Relaxed) != core {
            noted.store(core, Relaxed);
        }
    }

    /// The core from which the other side published last, if it has.
    pub(super) fn core_of_peer(&self, shared: &Shared) -> Option<usize> {
        let noted = shared.flags[1 - self.number].0.core.load(Relaxed);
        (noted as usize).checked_sub(1)
    }

    /// Whether the other side sleeps for `direction`, of which something was just published. It is
    /// woken once per announcement.
    fn should_wake(&self, shared: &Shared, direction: Direction) -> bool {
        fence(SeqCst);
        let asleep = &shared.flags[1 - self.number].0.asleep;
        asleep.load(Relaxed) & bit(direction) != 0
            && asleep.fetch_and(!bit(direction), Relaxed) & bit(direction) != 0
    }

    fn load_head(&self, shared: &Shared) -> Result<u64, Broken> {
        let head = self.outgoing(shared).head.0.load(Acquire);
        if self.tail.wrapping_sub(head) > self.capacity {
            return Err(impossible(false, self.tail, head));
        }
        Ok(head)
    }

    fn load_tail(&self, shared: &Shared) -> Result<u64, Broken> {
        let tail = self.incoming(shared).tail.0.load(Acquire);
        if tail.wrapping_sub(self.head) > self.capacity {
            return Err(impossible(true, self.head, tail));
        }
        Ok(tail)
    }

    fn other_closed(&self, shared: &Shared) -> bool {
        shared.flags[1 - self.number].0.closed.load(Acquire) != 0
    }

    fn outgoing<'a>(&self, shared: &'a Shared) -> &'a Counters {
        &shared.counters[self.number]
    }

    fn incoming<'a>(&self, shared: &'a Shared) -> &'a Counters {
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
impl Shared {
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
            let shared = Shared::new();
            let (mut producer, mut consumer) = (Side::new(0, capacity), Side::new(1, capacity));
            for wanted in [1, 2, capacity].repeat(20) {
                let room = producer.room(&shared, wanted).unwrap();
                assert!(room > 0 && room <= capacity);
                assert!(producer.ready(&shared, Direction::Send));
                let count = room.min(wanted);
                assert!(!producer.publish(&shared, count));
                assert_eq!(consumer.filled(&shared, count), Ok(count));
                assert!(!consumer.give_back(&shared, count));
            }
        }
    }

    #[test]
    fn impossible_counters_are_noticed_and_never_used() {
        let shared = Shared::new();
        let mut side = Side::new(0, 8);
        for wrong in [9, u64::MAX, 1 << 63] {
            shared.counters[1].tail.0.store(wrong, Relaxed);
            let reason = side.filled(&shared, 1).unwrap_err().to_string();
            assert!(reason.contains(&format!("published up to byte {wrong}")));
            assert!(side.ready(&shared, Direction::Receive));
        }
        shared.counters[1].tail.0.store(8, Relaxed);
        assert_eq!(side.filled(&shared, 1), Ok(8));

        assert_eq!(side.room(&shared, 8), Ok(8));
        assert!(!side.publish(&shared, 8));
        for wrong in [9, u64::MAX, 1 << 63] {
            shared.counters[0].head.0.store(wrong, Relaxed);
            let reason = side.room(&shared, 1).unwrap_err().to_string();
            assert!(reason.contains(&format!("took back up to byte {wrong}")));
            assert!(side.ready(&shared, Direction::Send));
        }
        // A counter that goes back leaves room that is wrong, but not too much of it.
        shared.counters[0].head.0.store(8, Relaxed);
        assert_eq!(side.room(&shared, 8), Ok(8));
        assert!(!side.publish(&shared, 4));
        shared.counters[0].head.0.store(4, Relaxed);
        assert_eq!(side.room(&shared, 8), Ok(0));
    }
}

#[cfg(all(test, loom))]
mod loom_tests;
