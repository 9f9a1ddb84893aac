//! Counters of one communicator.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::drive::Measured;
use gradring_proto::collective::Call;

/// Half of the period that counts as recent.
const RECENT_HALF: Duration = Duration::from_secs(5);

/// Counters of a communicator.
#[derive(Debug, Clone, Default)]
pub struct Stats {
    /// Totals of all collectives.
    pub all: Totals,
    /// Totals of each kind of collective, by its name.
    pub collectives: BTreeMap<&'static str, Totals>,
    /// Use of each algorithm, by its name.
    pub algorithms: BTreeMap<&'static str, Used>,
    /// Time that each peer kept this rank waiting at the start of collectives. The peer was the
    /// last to enter of those from which this rank receives.
    pub lateness: BTreeMap<usize, Lateness>,
    /// Exposed time, in which collectives blocked the program.
    pub exposed: Duration,
}

/// Totals of collectives.
#[derive(Debug, Clone, Default)]
pub struct Totals {
    /// Number of collectives that ended well.
    pub count: u64,
    /// Bytes of their buffers.
    pub bytes: u64,
    /// Bytes of payload that this rank sent.
    pub bytes_sent: u64,
    /// Time from the start on this rank until all peers from which it receives had entered.
    pub waiting: Duration,
    /// Time from then to the end.
    pub moving: Duration,
    /// The algorithm that was used last.
    pub algorithm: &'static str,
}

/// Use of one algorithm.
#[derive(Debug, Clone, Copy, Default)]
pub struct Used {
    /// Number of collectives that ended well.
    pub count: u64,
    /// Bytes of their buffers.
    pub bytes: u64,
}

/// Time for which this rank waited for a peer.
#[derive(Debug, Clone, Copy, Default)]
pub struct Lateness {
    /// Total since the communicator was made.
    pub total: Duration,
    half_ends: Option<Instant>,
    this_half: Duration,
    last_half: Duration,
}

impl Stats {
    /// Adds a collective that ended well.
    pub fn add(&mut self, call: &Call, measured: &Measured) {
        let entered = measured
            .everyone_entered
            .map_or(measured.started, |(at, _)| at);
        let waiting = entered - measured.started;
        let of_this_kind = self.collectives.entry(call.collective.name()).or_default();
        for totals in [&mut self.all, of_this_kind] {
            totals.count += 1;
            totals.bytes += call.bytes() as u64;
            totals.bytes_sent += measured.bytes_sent;
            totals.waiting += waiting;
            totals.moving += measured.ended - entered;
            totals.algorithm = measured.algorithm;
        }
        let used = self.algorithms.entry(measured.algorithm).or_default();
        used.count += 1;
        used.bytes += call.bytes() as u64;
        if let Some((_, last)) = measured.everyone_entered {
            let lateness = self.lateness.entry(last).or_default();
            lateness.add(waiting, measured.ended);
        }
    }

    /// Adds the counters of a channel, except lateness: its two ranks may wait for each other by
    /// design of the program.
    pub fn add_beside(&mut self, other: &Self) {
        self.all.add(&other.all);
        for (name, totals) in &other.collectives {
            self.collectives.entry(name).or_default().add(totals);
        }
        for (name, used) in &other.algorithms {
            let of_both = self.algorithms.entry(name).or_default();
            of_both.count += used.count;
            of_both.bytes += used.bytes;
        }
        self.exposed += other.exposed;
    }
}

impl Totals {
    fn add(&mut self, other: &Self) {
        self.count += other.count;
        self.bytes += other.bytes;
        self.bytes_sent += other.bytes_sent;
        self.waiting += other.waiting;
        self.moving += other.moving;
        if other.count > 0 {
            self.algorithm = other.algorithm;
        }
    }
}

impl Lateness {
    fn add(&mut self, waiting: Duration, now: Instant) {
        self.turn(now);
        self.total += waiting;
        self.this_half += waiting;
    }

    /// Waiting time in the last 5 to 10 seconds before `now`.
    #[must_use]
    pub fn recent(mut self, now: Instant) -> Duration {
        self.turn(now);
        self.last_half + self.this_half
    }

    fn turn(&mut self, now: Instant) {
        if self.half_ends.is_some_and(|end| now < end) {
            return;
        }
        let follows = self.half_ends.is_some_and(|end| now < end + RECENT_HALF);
        self.last_half = if follows {
            self.this_half
        } else {
            Duration::ZERO
        };
        self.this_half = Duration::ZERO;
        let begun = self.half_ends.filter(|_| follows).unwrap_or(now);
        self.half_ends = Some(begun + RECENT_HALF);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_long_ago_is_not_recent() {
        let mut lateness = Lateness::default();
        let (ms, start) = (Duration::from_millis, Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        lateness.add(ms(3), at(0));
        lateness.add(ms(4), at(6));
        assert_eq!(lateness.recent(at(9)), ms(7));
        assert_eq!(lateness.recent(at(11)), ms(4));
        assert_eq!(lateness.recent(at(60)), ms(0));
        assert_eq!(lateness.total, ms(7));
    }
}
