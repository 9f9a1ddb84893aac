//! Star: every rank sends its whole contribution to rank 0, and rank 0 sends the result to every
//! other. A reduce is the first half, to its root.
//!
//! *Gathering.* Every rank sends its contribution to rank 0. Rank 0 folds all contributions in the
//! order of ranks: g0 + g1 + .. + gN-1. *Spreading.* Rank 0 sends the finished values to all
//! others.
//!
//! No algorithm has fewer messages: 2(N-1) in all, where `one_shot` has N(N-1). This number decides
//! on a host with fewer cores than ranks, because each message may wake a rank that still waits for
//! many others. The price is that rank 0 moves S(N-1) bytes in each direction and folds them alone.

use std::ops::Range;

use super::{Action, Contents, Part, Schedule, Step, fold_in_rank_order};
use crate::collective::Collective;

pub(super) fn build(collective: &Collective, part: &Part<'_>) -> Option<Schedule> {
    let (rank, world_size) = (part.rank, part.world_size());
    match collective {
        Collective::AllReduce { .. } => Some(part.in_blocks(
            |block| gather(rank, world_size, CENTRE, block),
            |block| spread(rank, world_size, block),
        )),
        Collective::Reduce { root, .. } => {
            let gather = |block| gather(rank, world_size, *root, &block);
            Some(part.blocks().into_iter().flat_map(gather).collect())
        }
        _ => None,
    }
}

/// The rank that folds for all.
const CENTRE: usize = 0;

fn gather(rank: usize, world_size: usize, centre: usize, range: &Range<usize>) -> Schedule {
    if rank == centre {
        return fold_in_rank_order(world_size, range);
    }
    vec![Step::send(centre, range.clone(), Contents::Contribution)]
}

fn spread(rank: usize, world_size: usize, range: &Range<usize>) -> Schedule {
    if rank != CENTRE {
        return vec![Step::receive(CENTRE, range.clone(), Action::Copy)];
    }
    (0..world_size)
        .filter(|&peer| peer != CENTRE)
        .map(|peer| Step::send(peer, range.clone(), Contents::Final))
        .collect()
}
