//! Halving: ranks talk to one other at a time, each time about half as much, and then the way back.
//!
//! P of N ranks take part, and the others are guests (`pairs`).
//!
//! 1. *Guests* send all they have to their hosts. Invariant: the P ranks hold all contributions.
//! 2. *Reduce-scatter.* In step k rank r exchanges halves with the rank that it meets: both have the
//!    same part of the buffer; the lower one keeps its lower half, and reduces what it gets of it.
//!    Invariant after step k: a part of 1/2^(k+1) holds the contributions of the 2^(k+1) ranks that
//!    differ in the lowest k+1 bits. log2(P) steps, S(P-1)/P bytes.
//! 3. *All-gather* is the same in reverse, with final values. As many steps and bytes.
//! 4. Guests get the result.
//!
//! With N a power of two a rank sends 2S(N-1)/N bytes, as few as possible, in 2log2(N) steps, where
//! a ring takes 2(N-1); with guests, two steps and 2S bytes more. The largest parts travel
//! between neighbours, which are on one host if several ranks are. Partial results travel, as on a
//! ring, in the accumulator type.
//!
//! It is the recursive halving and doubling of R. Rabenseifner, "Optimization of collective reduction
//! operations", Proc. International Conference on Computational Science (2004).

use std::ops::Range;

use super::pairs::Pairs;
use super::{Action, Contents, Part, Receive, Schedule, Send, Step, even_parts};
use crate::collective::Collective;

/// A reduce is an all-reduce whose result the others do not look at: the same bits.
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

/// One rank's part.
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

    /// Leaves each of the members with a part of `block` that is final.
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

    /// Gives every rank what all ranks' `reduce_scatter` of `block` left.
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

    /// With whom this rank exchanges which halves of `block`, the nearest first.
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
