//! One shot: every rank sends its whole contribution to every other, and every rank folds all
//! contributions in the order of ranks.
//!
//! It takes one step, and S(N-1) bytes from each rank. So it is for small buffers, where only the
//! number of consecutive messages counts.

use super::direct::others;
use super::{Contents, Part, Schedule, Step, fold_in_rank_order, star};
use crate::collective::Collective;

pub(super) fn build(collective: &Collective, part: &Part<'_>) -> Option<Schedule> {
    match collective {
        Collective::AllReduce { .. } => Some(all_reduce(part)),
        // One step, whose result only the root gets.
        Collective::Reduce { .. } => star::build(collective, part),
        _ => None,
    }
}

fn all_reduce(part: &Part<'_>) -> Schedule {
    let (rank, world_size, all) = (part.rank, part.world_size(), 0..part.count);
    let mut steps: Schedule = others(rank, world_size)
        .map(|peer| Step::send(peer, all.clone(), Contents::Contribution))
        .collect();
    steps.extend(fold_in_rank_order(world_size, &all));
    steps
}
