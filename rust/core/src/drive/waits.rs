//! Waits of a rank, for other ranks to see, and signs that the awaited ranks still move.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use gradring_proto::lock::lock;

/// A collective under way that does not move.
#[derive(Debug, Clone)]
pub struct Waiting {
    /// The ranks without which nothing moves.
    pub awaited: Vec<usize>,
    /// Time of the last move.
    pub since: Instant,
}

/// Record of a wait that lasts, read by the failure monitor and by inquiries.
#[derive(Debug, Default)]
pub struct WaitRecord {
    waiting: Mutex<Option<Waiting>>,
    /// Set by every move; cleared when the others are informed of it.
    moved: AtomicBool,
    /// Time at which a rank last reported a move in an earlier collective.
    earlier_moved: Mutex<Option<Instant>>,
}

impl WaitRecord {
    /// The present wait, if it has lasted for a while.
    #[must_use]
    pub fn now(&self) -> Option<Waiting> {
        lock(&self.waiting).clone()
    }

    pub(super) fn note(&self, waiting: Option<Waiting>) {
        *lock(&self.waiting) = waiting;
    }

    #[inline]
    pub(super) fn note_move(&self) {
        self.moved.store(true, Ordering::Relaxed);
    }

    /// Returns `true` if something has moved since the last call.
    pub(crate) fn take_moved(&self) -> bool {
        self.moved.swap(false, Ordering::Relaxed)
    }

    /// Records that another rank moves in a collective that this one has ended.
    pub(crate) fn note_earlier_move(&self, now: Instant) {
        *lock(&self.earlier_moved) = Some(now);
    }

    pub(super) fn earlier_moved(&self) -> Option<Instant> {
        *lock(&self.earlier_moved)
    }
}
