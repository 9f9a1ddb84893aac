//! For whom a rank waits, for others to see; and whether those that it waits for still move.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use gradring_proto::lock::lock;

/// A collective under way that does not move.
#[derive(Debug, Clone)]
pub struct Waiting {
    /// The ranks without which nothing moves.
    pub awaited: Vec<usize>,
    /// When something moved last.
    pub since: Instant,
}

/// Where a drive notes that its rank has waited for a while; read by the failure monitor and by
/// those who ask how the rank is.
#[derive(Debug, Default)]
pub struct Waits {
    waiting: Mutex<Option<Waiting>>,
    /// Whether something has moved since the others were told last.
    moved: AtomicBool,
    /// When a rank has said last that something moves in an earlier collective.
    earlier_moved: Mutex<Option<Instant>>,
}

impl Waits {
    /// For whom this rank waits, if it has done so for a while.
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

    /// Whether something has moved here since this was asked last.
    pub(crate) fn take_moved(&self) -> bool {
        self.moved.swap(false, Ordering::Relaxed)
    }

    /// Another rank moves in a collective that this one has ended.
    pub(crate) fn note_earlier_move(&self, now: Instant) {
        *lock(&self.earlier_moved) = Some(now);
    }

    pub(super) fn earlier_moved(&self) -> Option<Instant> {
        *lock(&self.earlier_moved)
    }
}
