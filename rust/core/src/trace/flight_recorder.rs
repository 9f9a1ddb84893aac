//! The last collectives that this rank entered, so that ranks can tell each other about them.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use crate::collective::Call;
use crate::wire::contract::Header;

/// How many collectives are remembered: more than ranks can be apart from each other.
const CAPACITY: usize = 256;

/// The last collectives that this rank entered.
#[derive(Default)]
pub struct FlightRecorder {
    entries: Mutex<VecDeque<Entry>>,
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
