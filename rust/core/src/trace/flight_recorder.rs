//! The last collectives that this rank entered, so that ranks can tell each other about them.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crate::collective::Call;
use crate::wire::contract::Header;

/// How many collectives are remembered: more than ranks can be apart from each other.
const CAPACITY: usize = 256;

/// The last collectives that this rank entered.
#[derive(Default)]
pub struct FlightRecorder {
    entries: Mutex<VecDeque<Entry>>,
    waiting: Mutex<Option<Waiting>>,
}

/// A collective under way that does not move.
#[derive(Debug, Clone, Copy)]
pub struct Waiting {
    /// The rank from which something is expected.
    pub awaited: usize,
    /// When something moved last.
    pub since: Instant,
}

/// One collective that this rank entered.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Ordinal of the collective.
    pub sequence: u64,
    /// The contract header that was sent.
    pub header: Header,
    /// What was called.
    pub call: Arc<Call>,
}

impl FlightRecorder {
    /// Remembers a collective, and forgets the oldest if there are too many.
    pub fn record(&self, entry: Entry) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        if entries.len() == CAPACITY {
            entries.pop_front();
        }
        entries.push_back(entry);
    }

    /// Remembers that this rank waits, or that it does not.
    pub fn note_waiting(&self, waiting: Option<Waiting>) {
        *self.waiting.lock().unwrap_or_else(PoisonError::into_inner) = waiting;
    }

    /// For whom this rank waits, if it has done so for a while.
    #[must_use]
    pub fn waiting(&self) -> Option<Waiting> {
        *self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets everything.
    pub fn forget(&self) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.clear();
    }

    /// The collective of this ordinal, if it was entered and is still remembered.
    #[must_use]
    pub fn find(&self, sequence: u64) -> Option<Entry> {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries
            .iter()
            .rev()
            .find(|entry| entry.sequence == sequence)
            .cloned()
    }
}
