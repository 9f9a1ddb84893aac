//! For whom a rank waits, for others to see.

use std::sync::Mutex;
use std::time::Instant;

use crate::lock::lock;

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
pub struct Waits(Mutex<Option<Waiting>>);

impl Waits {
    /// For whom this rank waits, if it has done so for a while.
    #[must_use]
    pub fn now(&self) -> Option<Waiting> {
        lock(&self.0).clone()
    }

    pub(super) fn note(&self, waiting: Option<Waiting>) {
        *lock(&self.0) = waiting;
    }
}
