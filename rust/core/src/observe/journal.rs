//! Everything that one rank writes down, and where.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::observe::board::Board;
use crate::observe::flight_recorder::FlightRecorder;
use gradring_proto::lock::lock;
use gradring_proto::wire::gossip::ClockOffset;

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
        *lock(&self.clock)
    }

    pub(crate) fn set_clock(&self, offset: ClockOffset) {
        *lock(&self.clock) = Some(offset);
    }

    /// Records are written to `directory` from now on, when the group fails or somebody asks.
    pub fn write_to(&self, directory: &Path) {
        *lock(&self.directory) = Some(directory.into());
        // What an earlier run has left there is not about this one.
        let _ = std::fs::remove_file(path_in(directory, self.rank));
    }

    /// The directory to which records are written, if one was named.
    #[must_use]
    pub fn directory(&self) -> Option<PathBuf> {
        lock(&self.directory).clone()
    }
}

/// Name of a rank's file in the directory of records.
#[must_use]
pub fn path_in(directory: &Path, rank: usize) -> PathBuf {
    directory.join(format!("rank-{rank}.json"))
}
