//! What a drive notices, and who finds the cause.

use std::time::Duration;

use crate::collective::Call;
use crate::error::Error;

/// Something a drive noticed and cannot explain alone.
#[derive(Debug)]
pub enum Suspicion {
    /// The pipe to or from a peer broke.
    LinkBroken {
        /// The rank at the other end.
        peer: usize,
        /// The reason, to follow "the connection".
        reason: String,
    },
    /// A peer sent what no correct peer sends.
    Garbled {
        /// The rank that sent it.
        peer: usize,
        /// What is wrong.
        problem: String,
    },
    /// Bytes from a peer arrived other than they were sent, and were not used.
    Corrupted {
        /// The rank that sent them.
        peer: usize,
        /// What was seen, to follow "the connection".
        reason: String,
        /// The collective, for people.
        call: String,
        /// Its ordinal.
        sequence: u64,
    },
    /// A peer's header differs from this rank's at the same position.
    HeadersDiffer {
        /// The rank that sent the other header.
        peer: usize,
        /// Ordinal of the collective.
        sequence: u64,
    },
    /// Nothing has moved for as long as the timeout allows.
    Stalled {
        /// The ranks without which nothing moves.
        awaited: Vec<usize>,
        /// Ordinal of the collective.
        sequence: u64,
        /// How long nothing moved.
        idle: Duration,
    },
}

/// Investigates suspicions for the whole group, and spreads aborts.
pub trait Supervisor {
    /// Has the cause found and the abort switch raised with it, on all ranks, in bounded time.
    /// Does not wait for that.
    fn investigate(&self, suspicion: Suspicion);

    /// Raises the abort switch on all ranks, unless it has been raised before.
    fn abort(&self, cause: Error);

    /// Tells people about a collective that may be in trouble.
    fn warn(&self, stall: &Stall);
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
