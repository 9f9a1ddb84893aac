//! Two levels: inside hosts, where bytes are cheap, and across hosts, where they are not.
//!
//! The buffer is cut into as many shards as the largest host has ranks, and every host deals the
//! shards out to its ranks in turn: with L ranks on each of H hosts, local rank l owns shard l.
//!
//! 1. *Local reduce-scatter.* Every rank sends its elements of each shard to the owner on its
//!    host. Invariant: an owner's shard holds the contributions of its whole host.
//! 2. *Across hosts*, the owners of one shard, one on each host, are a ring: reduce-scatter and
//!    all-gather as in `ring`. Invariant: an owner's shard is final.
//! 3. *Local all-gather.* Every owner sends its shards to the other ranks of its host.
//!
//! For a reduce, owners send what is final to the root instead of steps 2b and 3.
//!
//! A host sends 2S(H-1)/H bytes to others, however many ranks it has, which is the least possible;
//! `direct` would send L times as much. The price is 2H steps in a row. Hosts may have different
//! numbers of ranks: on a smaller one, ranks own several shards and have a larger part of its
//! traffic. Partial results travel, as on a ring, in the accumulator type.
//!
//! See M. Cho, U. Finkler, D. Kung and H. Hunter, "BlueConnect: decomposing all-reduce for deep
//! learning on heterogeneous network hierarchy", Proc. Machine Learning and Systems 1 (2019).

use std::ops::Range;

use super::ring::Ring;
use super::topology::Topology;
use super::{Action, Contents, Schedule, Step, even_parts};

/// One rank's place in the two levels.
pub(super) struct Levels<'a> {
    topology: &'a Topology,
    /// The ranks of this host.
    local_ranks: &'a [usize],
    local_rank: usize,
    host: usize,
    shards: usize,
}

impl<'a> Levels<'a> {
    pub(super) fn of(rank: usize, topology: &'a Topology) -> Self {
        let (host, local_rank) = topology.position(rank);
        let sizes = topology.hosts().iter().map(Vec::len);
        Self {
            topology,
            local_ranks: &topology.hosts()[host],
            local_rank,
            host,
            shards: sizes.max().expect("there is a host"),
        }
    }

    /// Reduces `block` up to the chunks of this rank's shards that are final on this host.
    pub(super) fn reduce_scatter(&self, block: &Range<usize>) -> Schedule {
        let shards = even_parts(block, self.shards);
        let mut steps = Schedule::new();
        for (receiver, sender) in self.local_peers() {
            steps.extend(self.owned_by(receiver).map(|shard| {
                let peer = self.local_ranks[receiver];
                Step::send(peer, shards[shard].clone(), Contents::Partial)
            }));
            steps.extend(self.owned_by(self.local_rank).map(|shard| {
                let peer = self.local_ranks[sender];
                Step::receive(peer, shards[shard].clone(), Action::Reduce)
            }));
        }
        for shard in self.owned_by(self.local_rank) {
            steps.extend(
                self.across(shard)
                    .reduce_scatter(&self.chunks(&shards[shard])),
            );
        }
        steps
    }

    /// Gives every rank what all ranks' `reduce_scatter` of `block` left.
    pub(super) fn all_gather(&self, block: &Range<usize>) -> Schedule {
        let shards = even_parts(block, self.shards);
        let mut steps = Schedule::new();
        for shard in self.owned_by(self.local_rank) {
            steps.extend(self.across(shard).all_gather(&self.chunks(&shards[shard])));
        }
        for (receiver, sender) in self.local_peers() {
            steps.extend(self.owned_by(self.local_rank).map(|shard| {
                let peer = self.local_ranks[receiver];
                Step::send(peer, shards[shard].clone(), Contents::Final)
            }));
            steps.extend(self.owned_by(sender).map(|shard| {
                let peer = self.local_ranks[sender];
                Step::receive(peer, shards[shard].clone(), Action::Copy)
            }));
        }
        steps
    }

    /// Gives rank `root` what all ranks' `reduce_scatter` of `block` left.
    pub(super) fn gather(&self, block: &Range<usize>, root: usize) -> Schedule {
        let rank = self.local_ranks[self.local_rank];
        let shards = even_parts(block, self.shards).into_iter().enumerate();
        let owned = shards.flat_map(|(number, shard)| {
            let chunks = self.chunks(&shard);
            self.owners(number).into_iter().zip(chunks)
        });
        if rank == root {
            return owned
                .filter(|(owner, _)| *owner != root)
                .map(|(owner, chunk)| Step::receive(owner, chunk, Action::Copy))
                .collect();
        }
        owned
            .filter(|(owner, _)| *owner == rank)
            .map(|(_, chunk)| Step::send(root, chunk, Contents::Final))
            .collect()
    }

    /// Turn by turn, to which local rank this one sends, and which local rank sends to this one.
    fn local_peers(&self) -> impl Iterator<Item = (usize, usize)> {
        let (own, size) = (self.local_rank, self.local_ranks.len());
        (1..size).map(move |distance| ((own + distance) % size, (own + size - distance) % size))
    }

    /// The shards of a local rank of this host.
    fn owned_by(&self, local_rank: usize) -> impl Iterator<Item = usize> {
        (local_rank..self.shards).step_by(self.local_ranks.len())
    }

    /// The owners of a shard, one on each host.
    fn owners(&self, shard: usize) -> Vec<usize> {
        let hosts = self.topology.hosts().iter();
        hosts.map(|ranks| ranks[shard % ranks.len()]).collect()
    }

    /// The ring of a shard's owners.
    fn across(&self, shard: usize) -> Ring {
        Ring::new(self.owners(shard), self.host)
    }

    /// The chunks of a shard, one for each host.
    fn chunks(&self, shard: &Range<usize>) -> Vec<Range<usize>> {
        even_parts(shard, self.topology.hosts().len())
    }
}
