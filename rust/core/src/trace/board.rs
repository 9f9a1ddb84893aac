//! What ranks tell each other about how they are doing, in their own time.
//!
//! Each rank's *pulse* goes around the ring about once a second over the control connections, so
//! that every rank knows who keeps whom waiting, without a collective and also while one hangs.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::trace::stats::Stats;
use crate::wire::pulse::{Late, Pulse};

/// Bound on what a program may add to its pulse.
pub const NOTE_BYTES_MAX: usize = 1024;
/// A pulse names this many of the peers that were waited for, those waited for longest.
const LATE_MAX: usize = 8;

/// The last pulse of every rank.
#[derive(Default)]
pub struct Board {
    posted: Mutex<Posted>,
}

#[derive(Default)]
struct Posted {
    note: Vec<u8>,
    number: u64,
    pulses: BTreeMap<usize, (Pulse, Instant)>,
}

impl Board {
    /// Adds `note` to this rank's pulses from now on.
    pub fn note(&self, note: Vec<u8>) {
        self.lock().note = note;
    }

    /// This rank's next pulse.
    #[must_use]
    pub fn next_pulse(&self, rank: usize, stats: &Stats, now: Instant) -> Pulse {
        let mut posted = self.lock();
        posted.number += 1;
        let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let mut late: Vec<Late> = stats
            .lateness
            .iter()
            .map(|(&rank, lateness)| Late {
                rank,
                total_ns: ns(lateness.total),
                recent_ns: ns(lateness.recent(now)),
            })
            .collect();
        late.sort_by_key(|late| std::cmp::Reverse((late.recent_ns, late.total_ns)));
        late.truncate(LATE_MAX);
        let pulse = Pulse {
            rank,
            number: posted.number,
            collectives: stats.collectives.values().map(|totals| totals.count).sum(),
            late,
            note: posted.note.clone(),
        };
        posted.pulses.insert(rank, (pulse.clone(), now));
        pulse
    }

    /// Takes a rank's pulse, heard `now`; `false` if it is known already, or says too much.
    pub fn hear(&self, pulse: Pulse, now: Instant) -> bool {
        let mut posted = self.lock();
        let known = posted.pulses.get(&pulse.rank);
        if known.is_some_and(|(known, _)| known.number >= pulse.number)
            || pulse.note.len() > NOTE_BYTES_MAX
            || pulse.late.len() > LATE_MAX
        {
            return false;
        }
        posted.pulses.insert(pulse.rank, (pulse, now));
        true
    }

    /// The last pulse of every rank that has been heard, and when that was.
    #[must_use]
    pub fn pulses(&self) -> Vec<(Pulse, Instant)> {
        self.lock().pulses.values().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, Posted> {
        self.posted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pulse_counts_once_however_it_arrives() {
        let (here, there) = (Board::default(), Board::default());
        there.note(b"step 5".to_vec());
        let first = there.next_pulse(1, &Stats::default(), Instant::now());
        let second = there.next_pulse(1, &Stats::default(), Instant::now());
        assert!(here.hear(second.clone(), Instant::now()));
        assert!(!here.hear(second.clone(), Instant::now()));
        assert!(!here.hear(first, Instant::now()));
        let heard: Vec<_> = here.pulses().into_iter().map(|(pulse, _)| pulse).collect();
        assert_eq!(heard, [second]);
    }

    #[test]
    fn a_note_that_is_too_long_is_not_taken() {
        let (here, there) = (Board::default(), Board::default());
        there.note(vec![0; NOTE_BYTES_MAX + 1]);
        assert!(!here.hear(
            there.next_pulse(1, &Stats::default(), Instant::now()),
            Instant::now()
        ));
    }
}
