//! The journal: all records of one rank, and their directory.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::observe::board::Board;
use crate::observe::flight_recorder::FlightRecorder;
use gradring_proto::lock::lock;
use gradring_proto::wire::gossip::ClockOffset;

/// All records of one rank.
pub struct Journal {
    /// The rank.
    pub rank: usize,
    /// Host names of all ranks.
    pub hosts: Vec<String>,
    /// The last collectives.
    pub recorder: Arc<FlightRecorder>,
    /// Status of all ranks.
    pub board: Board,
    clock: Mutex<Option<ClockOffset>>,
    directory: Mutex<Option<PathBuf>>,
}

impl Journal {
    /// An empty journal.
    #[must_use]
    pub fn new(rank: usize, hosts: Vec<String>, recorder: Arc<FlightRecorder>) -> Self {
        // The clock of rank 0 is the reference.
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

    /// Offset from this rank's clock to that of rank 0, if it is known.
    #[must_use]
    pub fn clock(&self) -> Option<ClockOffset> {
        *lock(&self.clock)
    }

    pub(crate) fn set_clock(&self, offset: ClockOffset) {
        *lock(&self.clock) = Some(offset);
    }

    /// Sets the directory for records, which are written when the group fails and on request.
    pub fn write_to(&self, directory: &Path) {
        *lock(&self.directory) = Some(directory.into());
        // An earlier run may have left its record there.
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
