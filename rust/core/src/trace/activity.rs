//! What this rank does now, and what it did last: for those who ask from outside.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::collective::Call;

/// What one engine does now. Cheap to keep: one uncontended lock at each end of a collective.
#[derive(Debug, Default)]
pub struct Activity {
    now: Mutex<Now>,
}

/// A snapshot of an [`Activity`].
#[derive(Debug, Clone, Default)]
pub struct Now {
    /// The collective under way.
    pub entered: Option<Entered>,
    /// The collective that ended last, its ordinal, and when that was.
    pub ended: Option<(u64, Arc<Call>, Instant)>,
}

/// A collective under way.
#[derive(Debug, Clone)]
pub struct Entered {
    /// Ordinal of the collective.
    pub sequence: u64,
    /// What was called.
    pub call: Arc<Call>,
    /// When this rank began to work on it.
    pub since: Instant,
    /// The peers it waited for when it last looked, some 100 milliseconds ago at most; empty while
    /// everything moves.
    pub awaited: Vec<usize>,
}

impl Activity {
    /// A collective begins.
    pub fn enter(&self, sequence: u64, call: Arc<Call>) {
        self.lock().entered = Some(Entered {
            sequence,
            call,
            since: Instant::now(),
            awaited: Vec::new(),
        });
    }

    /// It has been waiting for a while, for these peers.
    pub fn await_peers(&self, peers: impl Iterator<Item = usize>) {
        if let Some(entered) = &mut self.lock().entered {
            entered.awaited = peers.collect();
        }
    }

    /// It has ended, well or not.
    pub fn leave(&self) {
        let mut now = self.lock();
        if let Some(entered) = now.entered.take() {
            now.ended = Some((entered.sequence, entered.call, Instant::now()));
        }
    }

    /// Forgets everything.
    pub fn forget(&self) {
        *self.lock() = Now::default();
    }

    /// What is known now.
    #[must_use]
    pub fn now(&self) -> Now {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
