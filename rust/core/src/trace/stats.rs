//! Counters of one communicator.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::collective::Call;

/// What a communicator has done so far.
#[derive(Debug, Clone, Default)]
pub struct Stats {
    /// Totals of each kind of collective, by its name.
    pub collectives: BTreeMap<&'static str, Totals>,
    /// How much each algorithm was used, by its name.
    pub algorithms: BTreeMap<&'static str, Used>,
    /// The algorithm that was used last.
    pub last_algorithm: &'static str,
    /// For each peer that this rank listens to: how long it kept this rank waiting at the start
    /// of collectives.
    pub lateness: BTreeMap<usize, Duration>,
}

/// Totals of one kind of collective.
#[derive(Debug, Clone, Default)]
pub struct Totals {
    /// Number of collectives that ended well.
    pub count: u64,
    /// Bytes of the buffers they worked on.
    pub bytes: u64,
    /// Bytes of payload that this rank sent.
    pub bytes_sent: u64,
    /// From the start on this rank until the peers it listens to had entered as well.
    pub waiting: Duration,
    /// From then on to the end.
    pub moving: Duration,
    /// The algorithm that was used last.
    pub algorithm: &'static str,
}

/// How much one algorithm was used.
#[derive(Debug, Clone, Copy, Default)]
pub struct Used {
    /// Number of collectives that ended well.
    pub count: u64,
    /// Bytes of the buffers they worked on.
    pub bytes: u64,
}

/// How one collective went.
pub struct Measured {
    /// Algorithm used.
    pub algorithm: &'static str,
    /// Bytes of payload that this rank sent.
    pub bytes_sent: u64,
    /// Time until the peers had entered.
    pub waiting: Duration,
    /// Time from then on.
    pub moving: Duration,
    /// The peer whose entering was waited for.
    pub awaited: usize,
}

impl Stats {
    /// Adds a collective that ended well.
    pub fn add(&mut self, call: &Call, measured: &Measured) {
        let totals = self.collectives.entry(call.collective.name()).or_default();
        totals.count += 1;
        totals.bytes += call.bytes() as u64;
        totals.bytes_sent += measured.bytes_sent;
        totals.waiting += measured.waiting;
        totals.moving += measured.moving;
        totals.algorithm = measured.algorithm;
        let used = self.algorithms.entry(measured.algorithm).or_default();
        used.count += 1;
        used.bytes += call.bytes() as u64;
        self.last_algorithm = measured.algorithm;
        *self.lateness.entry(measured.awaited).or_default() += measured.waiting;
    }
}
