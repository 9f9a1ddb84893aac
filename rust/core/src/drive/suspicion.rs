//! The interface to those who find the cause of what a drive notices.

use std::time::Duration;

use gradring_proto::collective::Call;
use gradring_proto::error::{Error, Suspicion};

/// Investigates suspicions for the whole group, and spreads aborts.
pub trait Supervisor {
    /// Has the cause found and the abort switch raised with it, on all ranks, in bounded time.
    /// Does not wait for that.
    fn investigate(&self, suspicion: Suspicion);

    /// Raises the abort switch on all ranks, unless it has been raised before.
    fn abort(&self, cause: Error);

    /// Tells people about a collective that may be in trouble.
    fn warn(&self, stall: &Stall);

    /// How a rank is called in the group whose failures these are.
    fn in_group(&self, rank: usize) -> usize {
        rank
    }
}

/// A collective in which nothing has moved for a while.
#[derive(Debug)]
pub struct Stall<'a> {
    /// The ranks waited for.
    pub awaited: Vec<usize>,
    /// Whether those ranks have entered the collective.
    pub entered: bool,
    /// The collective.
    pub call: &'a Call,
    /// Its ordinal.
    pub sequence: u64,
    /// How long nothing moved.
    pub idle: Duration,
    /// When it will fail, counted as `idle` is.
    pub timeout: Duration,
}
