//! The protocol of slots: turns, and wake-ups.
//!
//! Each rank counts turns. In a turn it writes its slot, publishes the number of the turn, and
//! reads the slots of all ranks that have published it. Each number has one writer.
//!
//! A rank that wants to sleep announces its turn, and looks for missing ranks once more. A rank
//! that publishes looks at all ranks afterwards: if none is missing, it wakes those asleep in this
//! turn. Fences between the two steps on both sides order them. So the last rank to publish sees
//! every announcement of a rank that has missed it, and no wake-up is lost. No rank is woken before
//! all have published.
//!
//! A rank whose memory others read says so before it lets the program change this memory after a
//! failure. A reader looks after it has read. Fences order both: one that has read a change sees
//! that the rank has abandoned the operation.

#[cfg(all(test, loom))]
pub(super) use loom::sync::atomic::AtomicU64;
#[cfg(all(test, loom))]
use loom::sync::atomic::fence;
#[cfg(not(all(test, loom)))]
pub(super) use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
#[cfg(not(all(test, loom)))]
use std::sync::atomic::fence;

/// Publishes this rank's slot for a turn.
pub(super) fn publish(own: &AtomicU64, turn: u64) {
    own.store(turn, Release);
    // Pairs with `announce_sleep`.
    fence(SeqCst);
}

/// Returns whether another rank has published a turn.
pub(super) fn has_published(other: &AtomicU64, turn: u64) -> bool {
    other.load(Acquire) >= turn
}

/// Announces that this rank will sleep until all have published. The caller then looks for missing
/// ranks, and sleeps only if there are some.
pub(super) fn announce_sleep(own: &AtomicU64, turn: u64) {
    own.store(turn, Relaxed);
    fence(SeqCst);
}

/// Withdraws the announcement.
pub(super) fn awake(own: &AtomicU64) {
    // Without an announcement there is no write, so the cache line stays shared.
    if own.load(Relaxed) != 0 {
        own.store(0, Relaxed);
    }
}

/// Returns whether the caller has to wake a rank, which is asleep in this turn. One of those who
/// ask wakes it.
pub(super) fn takes_sleeper(other: &AtomicU64, turn: u64) -> bool {
    other.load(Relaxed) == turn && other.compare_exchange(turn, 0, Relaxed, Relaxed).is_ok()
}

/// Tells that an operation has failed on this rank. Its memory may change afterwards.
pub(super) fn abandon(own: &AtomicU64, operation: u64) {
    own.store(operation, Relaxed);
    fence(SeqCst);
}

/// Ends the reading of others' memory. `has_abandoned` then tells whether it may have changed.
pub(super) fn has_read() {
    // Pairs with `abandon`.
    fence(SeqCst);
}

/// Returns whether a rank has abandoned an operation.
pub(super) fn has_abandoned(other: &AtomicU64, operation: u64) -> bool {
    other.load(Relaxed) == operation
}

#[cfg(all(test, loom))]
mod loom_tests;
