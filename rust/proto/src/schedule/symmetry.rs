//! Symmetry of schedules: ranks that do the same, so that one schedule is enough for all of them.

use super::Algorithm;
use super::topology::Topology;
use crate::collective::Collective;

/// Relation of all ranks' schedules to that of rank 0, apart from the ranges of elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Symmetry {
    /// No relation.
    None,
    /// Rank r does with rank r+p what rank 0 does with rank p.
    Rotation,
}

impl Symmetry {
    /// Symmetry of an all-reduce with equal chunks, or of an all-to-all; `None` for all others.
    pub fn of(
        algorithm: Algorithm,
        collective: &Collective,
        topology: &Topology,
        count: usize,
        block: usize,
    ) -> Self {
        let world_size = topology.world_size();
        let chunks = count.div_ceil(block).max(1) * world_size;
        let equal_sizes = count > 0
            && count.is_multiple_of(chunks)
            && matches!(collective, Collective::AllReduce { .. });
        let in_a_row = topology.hosts().concat().is_sorted();
        let is_exchange = matches!(collective, Collective::AllToAll);
        match algorithm {
            Algorithm::Ring if equal_sizes && in_a_row => Self::Rotation,
            Algorithm::Direct if is_exchange && in_a_row => Self::Rotation,
            _ => Self::None,
        }
    }

    /// The rank that stands to `rank` as `peer` stands to rank 0.
    pub const fn peer(self, rank: usize, peer: usize, world_size: usize) -> usize {
        match self {
            Self::None => peer,
            Self::Rotation => (rank + peer) % world_size,
        }
    }

    /// The rank that stands to rank 0 as `rank` stands to `other`.
    pub const fn seen_from(self, other: usize, rank: usize, world_size: usize) -> usize {
        match self {
            Self::None => rank,
            Self::Rotation => (rank + world_size - other) % world_size,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::super::{Schedule, build};
    use super::*;
    use crate::dtype::ReduceOp;

    /// Sends and receives of a schedule with their peers, in order, without the positions of
    /// elements.
    fn shape(
        schedule: &Schedule,
        rank: usize,
        topology: &Topology,
        symmetry: Symmetry,
    ) -> Vec<impl PartialEq + use<>> {
        let peer = |peer| symmetry.seen_from(rank, peer, topology.world_size());
        let length = |range: &Range<usize>| range.len();
        schedule
            .iter()
            .map(|step| {
                let send = step.send.as_ref();
                let receive = step.receive.as_ref();
                (
                    send.map(|send| (peer(send.peer), length(&send.range), send.contents)),
                    receive.map(|r| (peer(r.peer), length(&r.range), r.action)),
                )
            })
            .collect()
    }

    #[test]
    fn ranks_that_are_said_to_be_alike_do_the_same() {
        for collective in [
            Collective::AllReduce { op: ReduceOp::Sum },
            Collective::AllToAll,
        ] {
            let found = (2..=24).map(|world_size| count_symmetric(&collective, world_size));
            let found: usize = found.sum();
            assert!(found > 20, "{found} were symmetric");
        }
    }

    /// Number of algorithms for which a symmetry is found; checks that it holds for all ranks.
    fn count_symmetric(collective: &Collective, world_size: usize) -> usize {
        let topology = Topology::by_host((0..world_size).map(|rank| rank / 2));
        let sizes = [(world_size * 6, 100), (world_size * 60, world_size * 20)];
        let mut found = 0;
        for (algorithm, (count, block)) in Algorithm::ALL
            .into_iter()
            .filter(|algorithm| algorithm.performs(collective, &topology))
            .flat_map(|algorithm| sizes.map(|size| (algorithm, size)))
        {
            let symmetry = Symmetry::of(algorithm, collective, &topology, count, block);
            if symmetry == Symmetry::None {
                continue;
            }
            let of = |rank| {
                let schedule = build(algorithm, collective, rank, &topology, count, block);
                shape(&schedule, rank, &topology, symmetry)
            };
            let first = of(0);
            assert!((1..world_size).all(|rank| of(rank) == first));
            found += 1;
        }
        found
    }

    #[test]
    fn what_rank_0_sees_leads_back() {
        for (rank, peer) in (0..6).flat_map(|rank| (0..6).map(move |peer| (rank, peer))) {
            let seen = Symmetry::Rotation.seen_from(rank, peer, 6);
            assert_eq!(Symmetry::Rotation.peer(rank, seen, 6), peer);
        }
    }

    #[test]
    fn chunks_of_different_lengths_and_ranks_in_turn_on_hosts_are_not_alike() {
        let of = |hosts: usize, count| {
            let topology = Topology::by_host((0..8).map(|rank| rank % hosts));
            let collective = Collective::AllReduce { op: ReduceOp::Sum };
            Symmetry::of(Algorithm::Ring, &collective, &topology, count, 1000)
        };
        assert_eq!(of(1, 80), Symmetry::Rotation);
        assert_eq!(of(1, 81), Symmetry::None);
        assert_eq!(of(1, 0), Symmetry::None);
        assert_eq!(of(2, 80), Symmetry::None);
    }
}
