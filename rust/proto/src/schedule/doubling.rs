//! Doubling: ranks exchange all they have with one other at a time, each time for twice as many ranks.
//!
//! P of N ranks take part, and the others are guests (`pairs`).
//!
//! 1. *Guests* send all they have to their hosts. Invariant: the P ranks hold all contributions.
//! 2. In step k rank r exchanges partial results with the rank that it meets, and both reduce what
//!    they get. Invariant after step k: all that a rank has holds the contributions of the 2^(k+1)
//!    ranks that differ in the lowest k+1 bits. After the last step, of log2(P), it is final.
//! 3. Guests get the result.
//!
//! Each step takes S bytes: S log2(N) in log2(N) steps, where `halving` sends 2S(N-1)/N in twice as
//! many; with guests, two steps more. So it is for buffers that take less time than a step's latency.
//! Both combine the same pairs of partial results, and kernels combine a pair alike in either order,
//! so they have the same bits.
//!
//! Two ranks that each reduce in place what the other sends would each have to send first, and wait
//! for each other where nothing between them holds a byte. So the higher one sets aside what it
//! receives; the lower one has then sent, and receives into place.
//!
//! It is the recursive doubling of R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective
//! communication operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005).

use std::ops::Range;

use super::pairs::Pairs;
use super::{Action, Contents, Part, Schedule, Step};
use crate::collective::Collective;

/// A reduce is an all-reduce whose result the others do not look at: the same bits.
pub(super) fn build(collective: &Collective, part: &Part<'_>) -> Option<Schedule> {
    let doubling = Doubling::new(part.rank, part.world_size());
    matches!(
        collective,
        Collective::AllReduce { .. } | Collective::Reduce { .. }
    )
    .then(|| {
        part.in_blocks(
            |block| doubling.reduce(block),
            |block| doubling.spread(block),
        )
    })
}

/// One rank's part.
struct Doubling {
    rank: usize,
    pairs: Pairs,
}

impl Doubling {
    const fn new(rank: usize, world_size: usize) -> Self {
        Self {
            rank,
            pairs: Pairs::new(rank, world_size),
        }
    }

    /// Leaves each of those that take part with all of `block`, final.
    fn reduce(&self, block: &Range<usize>) -> Schedule {
        if let Some(host) = self.pairs.host() {
            return vec![Step::send(host, block.clone(), Contents::Partial)];
        }
        let guest = self.pairs.guest();
        let of_guest = guest.map(|peer| Step::receive(peer, block.clone(), Action::Reduce));
        let meetings = self.pairs.meetings();
        let last = meetings.len() - 1;
        let exchanges = meetings.enumerate().flat_map(|(step, (peer, is_lower))| {
            let action = match step == last {
                true => Action::ReduceAndFinish,
                false => Action::Reduce,
            };
            self.exchange(peer, is_lower, block, action)
        });
        of_guest.into_iter().chain(exchanges).collect()
    }

    /// Gives guests what their hosts' `reduce` of `block` left.
    fn spread(&self, block: &Range<usize>) -> Schedule {
        if let Some(host) = self.pairs.host() {
            return vec![Step::receive(host, block.clone(), Action::Copy)];
        }
        let guest = self.pairs.guest();
        let to_guest = guest.map(|peer| Step::send(peer, block.clone(), Contents::Final));
        to_guest.into_iter().collect()
    }

    fn exchange(
        &self,
        peer: usize,
        is_lower: bool,
        block: &Range<usize>,
        action: Action,
    ) -> Schedule {
        let send = Step::send(peer, block.clone(), Contents::Partial);
        if is_lower {
            return vec![send, Step::receive(peer, block.clone(), action)];
        }
        vec![
            Step::receive(peer, block.clone(), Action::SetAside),
            send,
            Step::receive(self.rank, block.clone(), action),
        ]
    }
}
