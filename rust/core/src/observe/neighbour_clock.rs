//! Difference between the clocks of two neighbours, from the heartbeats between them.
//!
//! A heartbeat carries its time of sending, by the sender's clock, and the smallest *lag* that the
//! sender has seen of late. A lag is the time of arrival minus the time of sending, by two
//! different clocks. If both directions take equally long, half of the difference of the two lags
//! is the difference of the clocks. Half of their sum is the time on the way, which bounds the
//! error (D. Mills, RFC 5905). The smallest of several lags is the one that met no queue.

use std::collections::VecDeque;

use gradring_proto::wire::gossip::{ClockOffset, Tick};

/// Number of heartbeats whose lags count, so few that a drift of the clocks shows.
const LAGS: usize = 16;

/// Facts about the clock of one neighbour.
#[derive(Debug, Default)]
pub(crate) struct NeighbourClock {
    lags_ns: VecDeque<i64>,
    their_lag_ns: Option<i64>,
    to_first: Option<ClockOffset>,
}

impl NeighbourClock {
    /// Records a heartbeat that arrived at `now_ns` by this rank's clock.
    pub(crate) fn receive(&mut self, tick: Tick, now_ns: u64) {
        if self.lags_ns.len() == LAGS {
            self.lags_ns.pop_front();
        }
        self.lags_ns.push_back(difference(now_ns, tick.sent_ns));
        self.their_lag_ns = tick.lag_ns.or(self.their_lag_ns);
        self.to_first = tick.to_first.or(self.to_first);
    }

    /// Smallest lag of late.
    pub(crate) fn lag_ns(&self) -> Option<i64> {
        self.lags_ns.iter().min().copied()
    }

    /// Offset from this rank's clock to that of rank 0, by way of this neighbour.
    pub(crate) fn to_first(&self) -> Option<ClockOffset> {
        let (first, step) = (self.to_first?, self.offset()?);
        Some(ClockOffset {
            ns: first.ns.saturating_add(step.ns),
            within_ns: first.within_ns.saturating_add(step.within_ns),
        })
    }

    /// Offset from this rank's clock to the neighbour's.
    fn offset(&self) -> Option<ClockOffset> {
        let (own, theirs) = (self.lag_ns()?, self.their_lag_ns?);
        let ns = theirs.saturating_sub(own) / 2;
        let within_ns = theirs.saturating_add(own).unsigned_abs() / 2;
        // Clocks that may be equal count as equal: those of one host are.
        let ns = if ns.unsigned_abs() <= within_ns {
            0
        } else {
            ns
        };
        Some(ClockOffset { ns, within_ns })
    }
}

fn difference(one: u64, other: u64) -> i64 {
    let apart = i64::try_from(one.abs_diff(other)).unwrap_or(i64::MAX);
    if one >= other { apart } else { -apart }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Exchanges heartbeats between rank 0 and a rank whose clock is `ahead_ns` ahead.
    fn offset_after(ahead_ns: i64, delays_ns: &[(i64, i64)]) -> ClockOffset {
        let (mut first, mut second) = (NeighbourClock::default(), NeighbourClock::default());
        let zero = ClockOffset {
            ns: 0,
            within_ns: 0,
        };
        for (beat, &(forth_ns, back_ns)) in delays_ns.iter().enumerate() {
            let sent_ns = 1_000_000_000_000 + beat as i64 * 1_000_000_000;
            let forth = Tick {
                sent_ns: sent_ns as u64,
                lag_ns: first.lag_ns(),
                to_first: Some(zero),
            };
            second.receive(forth, (sent_ns + forth_ns + ahead_ns) as u64);
            let back = Tick {
                sent_ns: (sent_ns + ahead_ns) as u64,
                lag_ns: second.lag_ns(),
                to_first: None,
            };
            first.receive(back, (sent_ns + back_ns) as u64);
        }
        second.to_first().unwrap()
    }

    #[test]
    fn an_offset_is_found_under_noise_to_within_what_it_says() {
        let delays = [(900_000, 50_000), (60_000, 700_000), (55_000, 80_000)];
        for ahead_ns in [-7_000_000_000, -3_000_000, 3_000_000, 40_000_000] {
            let found = offset_after(ahead_ns, &delays);
            assert!((found.ns + ahead_ns).unsigned_abs() <= found.within_ns);
            assert!(found.within_ns < 400_000, "{found:?}");
            assert_ne!(found.ns, 0);
        }
    }

    #[test]
    fn clocks_that_may_be_equal_are_taken_to_be() {
        assert_eq!(offset_after(0, &[(900_000, 50_000); 3]).ns, 0);
    }
}
