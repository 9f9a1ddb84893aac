//! Doubling: in each step a rank exchanges its whole buffer with one other, each time for twice as
//! many ranks.
//!
//! P of N ranks take part, and the others are guests (`pairs`).
//!
//! 1. *Guests* send their whole buffers to their hosts. Invariant: the P ranks hold all
//!    contributions.
//! 2. In step k rank r exchanges partial results with the rank that it meets, and each reduces the
//!    received ones into its own. Invariant after step k: a rank's whole buffer holds the
//!    contributions of the 2^(k+1) ranks that differ in the lowest k+1 bits. After the last step,
//!    number log2(P), it is final.
//! 3. *Guests* get the result.
//!
//! Doubling sends S log2(N) bytes in log2(N) steps, where `halving` sends 2S(N-1)/N in twice as
//! many steps. Guests cost two more steps. So it is for buffers that take less time than a step's
//! latency. Both combine the same pairs of partial results, and kernels give equal bits for a pair
//! in either order, so doubling and halving have the same bits.
//!
//! If two ranks each reduced the other's elements in place, each would have to send first. Without
//! any buffer between them, they would wait for each other. So the higher rank sets aside the
//! received elements. The lower rank has sent by then, and receives into place.
//!
//! It is the recursive doubling of R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective
//! communication operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005).

use std::ops::Range;

use super::pairs::Pairs;
use super::{Action, Contents, Part, Schedule, Step};
use crate::collective::Collective;

/// A reduce is an all-reduce whose result the other ranks ignore, so it has the same bits.
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

/// Schedules of one rank.
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

    /// Leaves each member with the whole `block`, final.
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

    /// Gives guests the results of their hosts' `reduce` of `block`.
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
