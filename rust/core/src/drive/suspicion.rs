//! Interface to the supervisor, which finds the causes of a drive's suspicions.

use std::time::Duration;

use gradring_proto::collective::Call;
use gradring_proto::error::{Error, Suspicion};

/// Investigates suspicions for the whole group, and spreads aborts.
pub trait Supervisor {
    /// Starts the search for a cause, and returns without waiting. In bounded time the abort switch
    /// is raised with the cause on all ranks.
    fn investigate(&self, suspicion: Suspicion);

    /// Raises the abort switch on all ranks, unless it has been raised before.
    fn abort(&self, cause: Error);

    /// Warns people about a stall.
    fn warn(&self, stall: &Stall);

    /// Converts a rank of this engine into its rank in the group that fails with it.
    fn in_group(&self, rank: usize) -> usize {
        rank
    }
}

/// A collective in which nothing has moved for a while.
#[derive(Debug)]
pub struct Stall<'a> {
    /// The awaited ranks.
    pub awaited: Vec<usize>,
    /// `true` if those ranks have entered the collective.
    pub entered: bool,
    /// The collective.
    pub call: &'a Call,
    /// Its ordinal.
    pub sequence: u64,
    /// Duration of the stall.
    pub idle: Duration,
    /// Duration of a stall at which the collective fails.
    pub timeout: Duration,
}
