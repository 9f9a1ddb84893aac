//! Halving: in each step a rank exchanges with one other, half as much as before, and then returns
//! the same way.
//!
//! P of N ranks take part, and the others are guests (`pairs`).
//!
//! 1. *Guests* send their whole buffers to their hosts. Invariant: the P ranks hold all
//!    contributions.
//! 2. *Reduce-scatter.* In step k rank r exchanges halves with the rank that it meets. Both have
//!    the same part of the buffer. The lower rank keeps the lower half, the higher rank the upper
//!    one, and each reduces the received half into its own. Invariant after step k: a part of
//!    1/2^(k+1) holds the contributions of the 2^(k+1) ranks that differ in the lowest k+1 bits.
//!    This takes log2(P) steps and S(P-1)/P bytes.
//! 3. *All-gather* is the same in reverse, with final values, in as many steps and bytes.
//! 4. *Guests* get the result.
//!
//! If N is a power of two, a rank sends 2S(N-1)/N bytes, which is the minimum, in 2log2(N) steps; a
//! ring takes 2(N-1) steps. Guests cost two steps and 2S bytes more. The largest parts travel
//! between neighbours, which are on one host if hosts have several ranks. Partial results travel,
//! as on a ring, in the accumulator type.
//!
//! It is the recursive halving and doubling of R. Rabenseifner, "Optimization of collective reduction
//! operations", Proc. International Conference on Computational Science (2004).

use std::ops::Range;

use super::pairs::Pairs;
use super::{Action, Contents, Part, Receive, Schedule, Send, Step, even_parts};
use crate::collective::Collective;

/// A reduce is an all-reduce whose result the other ranks ignore, so it has the same bits.
pub(super) fn build(collective: &Collective, part: &Part<'_>) -> Option<Schedule> {
    let halving = Halving::new(part.rank, part.world_size());
    matches!(
        collective,
        Collective::AllReduce { .. } | Collective::Reduce { .. }
    )
    .then(|| {
        part.in_blocks(
            |block| halving.reduce_scatter(block),
            |block| halving.all_gather(block),
        )
    })
}

/// Schedules of one rank.
struct Halving {
    pairs: Pairs,
}

/// One exchange of halves.
struct Exchange {
    peer: usize,
    kept: Range<usize>,
    given: Range<usize>,
}

impl Halving {
    const fn new(rank: usize, world_size: usize) -> Self {
        Self {
            pairs: Pairs::new(rank, world_size),
        }
    }

    /// Leaves each member with a final part of `block`.
    fn reduce_scatter(&self, block: &Range<usize>) -> Schedule {
        if let Some(host) = self.pairs.host() {
            return vec![Step::send(host, block.clone(), Contents::Partial)];
        }
        let guest = self.pairs.guest();
        let of_guest = guest.map(|peer| Step::receive(peer, block.clone(), Action::Reduce));
        let exchanges = self.exchanges(block);
        let last = exchanges.len() - 1;
        let halves = exchanges.into_iter().enumerate().map(|(step, exchange)| {
            let action = match step == last {
                true => Action::ReduceAndFinish,
                false => Action::Reduce,
            };
            both(exchange.peer, exchange.given, exchange.kept, action)
        });
        of_guest.into_iter().chain(halves).collect()
    }

    /// Gives every rank the results of all ranks' `reduce_scatter` of `block`.
    fn all_gather(&self, block: &Range<usize>) -> Schedule {
        if let Some(host) = self.pairs.host() {
            return vec![Step::receive(host, block.clone(), Action::Copy)];
        }
        let exchanges = self.exchanges(block).into_iter().rev();
        let halves = exchanges
            .map(|exchange| both(exchange.peer, exchange.kept, exchange.given, Action::Copy));
        let to_guest = self.pairs.guest();
        let to_guest = to_guest.map(|peer| Step::send(peer, block.clone(), Contents::Final));
        halves.chain(to_guest).collect()
    }

    /// Partners of this rank, with the halves of `block` that it keeps and gives; nearest partners
    /// first.
    fn exchanges(&self, block: &Range<usize>) -> Vec<Exchange> {
        let mut part = block.clone();
        let exchange = |(peer, is_lower)| {
            let [lower, upper] = <[_; 2]>::try_from(even_parts(&part, 2)).expect("two halves");
            let (kept, given) = match is_lower {
                true => (lower, upper),
                false => (upper, lower),
            };
            part = kept.clone();
            Exchange { peer, kept, given }
        };
        self.pairs.meetings().map(exchange).collect()
    }
}

/// Sends one range to a rank and receives another one from it.
const fn both(peer: usize, sent: Range<usize>, received: Range<usize>, action: Action) -> Step {
    Step {
        send: Some(Send {
            peer,
            range: sent,
            contents: action.contents(),
        }),
        receive: Some(Receive {
            peer,
            range: received,
            action,
        }),
    }
}
