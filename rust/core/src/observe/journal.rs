//! Everything that one rank writes down, and where.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::Error;
use crate::observe::board::Board;
use crate::observe::flight_recorder::FlightRecorder;
use crate::observe::record;
use crate::wire::gossip::ClockOffset;

/// Everything that one rank writes down.
pub struct Journal {
    /// The rank.
    pub rank: usize,
    /// Host names of all ranks.
    pub hosts: Vec<String>,
    /// The last collectives.
    pub recorder: Arc<FlightRecorder>,
    /// How the ranks are doing.
    pub board: Board,
    clock: Mutex<Option<ClockOffset>>,
    directory: Mutex<Option<PathBuf>>,
}

impl Journal {
    /// An empty journal.
    #[must_use]
    pub fn new(rank: usize, hosts: Vec<String>, recorder: Arc<FlightRecorder>) -> Self {
        // Rank 0's clock is the one that counts.
        let own = (rank == 0).then_some(ClockOffset {
            ns: 0,
            within_ns: 0,
        });
        Self {
            rank,
            hosts,
            recorder,
            board: Board::default(),
            clock: Mutex::new(own),
            directory: Mutex::default(),
        }
    }

    /// This rank's clock against that of rank 0, as far as it is known.
    #[must_use]
    pub fn clock(&self) -> Option<ClockOffset> {
        *self.clock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_clock(&self, offset: ClockOffset) {
        *self.clock.lock().unwrap_or_else(PoisonError::into_inner) = Some(offset);
    }

    /// Records are written to `directory` from now on, when the group fails or somebody asks.
    pub fn write_to(&self, directory: &Path) {
        *self
            .directory
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(directory.into());
        // What an earlier run has left there is not about this one.
        let _ = std::fs::remove_file(record::path_in(directory, self.rank));
    }

    /// Writes the record, if a directory for it was named. There is nobody to tell if that fails
    /// but the person at the terminal.
    pub(crate) fn write(&self, failure: Option<&Error>, reason: &str) {
        let directory = self
            .directory
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let Some(directory) = directory else {
            return;
        };
        let json = record::to_json(self, failure, reason, 0);
        if let Err(error) = record::write(&directory, self.rank, &json) {
            eprintln!(
                "gradring: rank {} on {} cannot write its flight record to {} ({error}); set \
                 GRADRING_FLIGHT_DIR to a directory that it can write to",
                self.rank,
                self.hosts[self.rank],
                directory.display()
            );
        }
    }
}
