//! The board: status messages that ranks exchange outside of collectives.
//!
//! The *gossip* of each rank goes around the ring about once a second, over the control
//! connections. So every rank knows which ranks keep others waiting, without a collective and even
//! while one hangs.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::observe::stats::Stats;
use gradring_proto::lock::lock;
use gradring_proto::wire::gossip::{Gossip, Late};

/// Most bytes that a program may add to its gossip.
pub const NOTE_BYTES_MAX: usize = 1024;
/// Most awaited peers in one gossip: those with the longest waits.
const LATE_MAX: usize = 8;

/// The last gossip of every rank.
#[derive(Default)]
pub struct Board {
    posted: Mutex<Posted>,
}

#[derive(Default)]
struct Posted {
    note: Vec<u8>,
    number: u64,
    received: BTreeMap<usize, Gossip>,
}

impl Board {
    /// Adds `note` to this rank's gossip from now on.
    pub fn note(&self, note: Vec<u8>) {
        lock(&self.posted).note = note;
    }

    /// This rank's next gossip.
    #[must_use]
    pub fn next_gossip(
        &self,
        rank: usize,
        stats: &Stats,
        moves_in: Option<u64>,
        now: Instant,
    ) -> Gossip {
        let mut posted = lock(&self.posted);
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
        let gossip = Gossip {
            rank,
            number: posted.number,
            collectives: stats.all.count,
            moves_in,
            late,
            note: posted.note.clone(),
        };
        posted.received.insert(rank, gossip.clone());
        gossip
    }

    /// Stores a rank's gossip. Returns `false` if it is known already or too large.
    pub fn receive(&self, gossip: Gossip) -> bool {
        let mut posted = lock(&self.posted);
        let known = posted.received.get(&gossip.rank);
        if known.is_some_and(|known| known.number >= gossip.number)
            || gossip.note.len() > NOTE_BYTES_MAX
            || gossip.late.len() > LATE_MAX
        {
            return false;
        }
        posted.received.insert(gossip.rank, gossip);
        true
    }

    /// Last gossip of every rank that has sent one, this rank included.
    #[must_use]
    pub fn gossip(&self) -> Vec<Gossip> {
        lock(&self.posted).received.values().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gossip_counts_once_however_it_arrives() {
        let (here, there) = (Board::default(), Board::default());
        there.note(b"step 5".to_vec());
        let first = there.next_gossip(1, &Stats::default(), None, Instant::now());
        let second = there.next_gossip(1, &Stats::default(), None, Instant::now());
        assert!(here.receive(second.clone()));
        assert!(!here.receive(second.clone()));
        assert!(!here.receive(first));
        assert_eq!(here.gossip(), [second]);
    }

    #[test]
    fn a_note_that_is_too_long_is_not_taken() {
        let (here, there) = (Board::default(), Board::default());
        there.note(vec![0; NOTE_BYTES_MAX + 1]);
        assert!(!here.receive(there.next_gossip(1, &Stats::default(), None, Instant::now())));
    }
}
