//! Levels: first inside hosts, where bytes are cheap; then between the hosts of a rack, if racks
//! are known; and then across, where bytes are expensive.
//!
//! A level has *units* and puts them into groups: the lowest level puts ranks into hosts, the next
//! one puts hosts into racks. On a level, a part of the buffer is cut into as many shards as the
//! largest group has units. Every group deals the shards out to its units in turn: with L units in
//! each group, unit l owns shard l. The owners of one shard, one in each group, are the units of
//! the level above.
//!
//! 1. *Reduce-scatter in groups*, from the lowest level up. Every unit sends its elements of each
//!    shard to the owner in its group. Invariant: an owner's shard holds the contributions of its
//!    whole group.
//! 2. *Across*, the owners of one shard, one in each group of the highest level, are a ring:
//!    reduce-scatter and all-gather as in `ring`. Invariant: an owner's shard is final.
//! 3. *All-gather in groups*, from the highest level down. Every owner sends its shards to the
//!    others of its group.
//!
//! Above 64 ranks few ranks are connected, so the units of a group are a ring, too, if there are
//! equally many in each group. Then a unit owns one shard, and exchanges with two others on each
//! level. Otherwise the links for it are missing.
//!
//! For a reduce, owners send final chunks to the root instead of the all-gathers in steps 2 and 3.
//!
//! If there are two levels and H hosts, a host sends 2S(H-1)/H bytes to others, however many ranks
//! it has. This is the minimum; `direct` would send as much for each rank of the host. The price is
//! 2H steps in a row. If there are R racks, each of them sends 2S(R-1)/R bytes, in 2R+2 steps.
//! Groups may have different numbers of units: the units of a smaller group own several shards, and
//! carry a larger part of its traffic. Partial results travel, as on a ring, in the accumulator
//! type.
//!
//! See M. Cho, U. Finkler, D. Kung and H. Hunter, "BlueConnect: decomposing all-reduce for deep
//! learning on heterogeneous network hierarchy", Proc. Machine Learning and Systems 1 (2019).

use std::ops::Range;

use super::choice::MESH_RANKS_MAX;
use super::ring::Ring;
use super::topology::Topology;
use super::{Action, Contents, Part, Schedule, Step, even_parts};
use crate::collective::Collective;

pub(super) fn build(collective: &Collective, part: &Part<'_>) -> Option<Schedule> {
    if !part.topology.has_levels() {
        return None;
    }
    let levels = Levels::of(part.rank, part.topology);
    let reduce_scatter = |block: &Range<usize>| levels.reduce_scatter(block);
    match collective {
        Collective::AllReduce { .. } => {
            Some(part.in_blocks(reduce_scatter, |block| levels.all_gather(block)))
        }
        Collective::Reduce { root, .. } => {
            Some(part.in_blocks(reduce_scatter, |block| levels.gather(block, *root)))
        }
        _ => None,
    }
}

/// Position of one rank in all levels.
pub(super) struct Levels<'a> {
    rank: usize,
    ranks: Vec<usize>,
    /// The units of each group, the lowest level first.
    groups: Vec<&'a [Vec<usize>]>,
    /// True if only neighbours in the ring of a group are connected.
    has_few_links: bool,
}

/// One level for a part of the buffer. Its units are ranks, one for each group of the level below.
struct Level<'a> {
    groups: &'a [Vec<usize>],
    units: &'a [usize],
    shards: Vec<Range<usize>>,
}

/// The group of a rank on one level, and the index of the rank there.
struct Place {
    members: Vec<usize>,
    own: usize,
}

impl<'a> Levels<'a> {
    pub(super) fn of(rank: usize, topology: &'a Topology) -> Self {
        let levels = [topology.hosts(), topology.racks()];
        Self {
            rank,
            has_few_links: topology.world_size() > MESH_RANKS_MAX && topology.has_even_racks(),
            ranks: (0..topology.world_size()).collect(),
            groups: levels
                .into_iter()
                .filter(|level| !level.is_empty())
                .collect(),
        }
    }

    /// Reduces `block` until this rank's chunks of its shards are final.
    fn reduce_scatter(&self, block: &Range<usize>) -> Schedule {
        self.reduce_scatter_from(0, &self.ranks, block)
    }

    /// Gives every rank the results of all ranks' `reduce_scatter` of `block`.
    fn all_gather(&self, block: &Range<usize>) -> Schedule {
        self.all_gather_from(0, &self.ranks, block)
    }

    /// Gives rank `root` the results of all ranks' `reduce_scatter` of `block`.
    fn gather(&self, block: &Range<usize>, root: usize) -> Schedule {
        let owned = self.owned_from(0, &self.ranks, block).into_iter();
        if self.rank == root {
            return owned
                .filter(|(owner, _)| *owner != root)
                .map(|(owner, chunk)| Step::receive(owner, chunk, Action::Copy))
                .collect();
        }
        owned
            .filter(|(owner, _)| *owner == self.rank)
            .map(|(_, chunk)| Step::send(root, chunk, Contents::Final))
            .collect()
    }

    /// All ranks with which this one exchanges, if all groups of a level have equally many units.
    pub(super) fn partners(&self) -> Vec<usize> {
        let (mut partners, mut units) = (Vec::new(), self.ranks.clone());
        for groups in &self.groups {
            let level = Level {
                groups,
                units: &units,
                shards: Vec::new(),
            };
            let place = level.place(self.rank);
            partners.extend(self.around(&place).neighbours());
            units = level.owners(place.own);
        }
        partners.extend(self.across(&units).neighbours());
        partners
    }

    fn reduce_scatter_from(&self, height: usize, units: &[usize], part: &Range<usize>) -> Schedule {
        let Some(level) = self.level(height, units, part) else {
            let ring = self.across(units);
            return ring.reduce_scatter(&ring.parts(part));
        };
        let place = level.place(self.rank);
        let mut steps = match self.has_few_links {
            true => self.around(&place).reduce_scatter_partially(&level.shards),
            false => level.reduce_scatter_directly(&place),
        };
        for shard in level.owned_by(&place, place.own) {
            let owners = level.owners(shard);
            steps.extend(self.reduce_scatter_from(height + 1, &owners, &level.shards[shard]));
        }
        steps
    }

    fn all_gather_from(&self, height: usize, units: &[usize], part: &Range<usize>) -> Schedule {
        let Some(level) = self.level(height, units, part) else {
            let ring = self.across(units);
            return ring.all_gather(&ring.parts(part));
        };
        let place = level.place(self.rank);
        let mut steps = Schedule::new();
        for shard in level.owned_by(&place, place.own) {
            let owners = level.owners(shard);
            steps.extend(self.all_gather_from(height + 1, &owners, &level.shards[shard]));
        }
        steps.extend(match self.has_few_links {
            true => self.around(&place).all_gather(&level.shards),
            false => level.all_gather_directly(&place),
        });
        steps
    }

    /// Owners of the parts of `part` after a reduce-scatter.
    fn owned_from(
        &self,
        height: usize,
        units: &[usize],
        part: &Range<usize>,
    ) -> Vec<(usize, Range<usize>)> {
        let Some(level) = self.level(height, units, part) else {
            let chunks = even_parts(part, units.len());
            return units.iter().copied().zip(chunks).collect();
        };
        let of_shard = |(number, shard)| self.owned_from(height + 1, &level.owners(number), shard);
        level.shards.iter().enumerate().flat_map(of_shard).collect()
    }

    /// The level at this height; `None` above the highest.
    fn level<'b>(
        &'b self,
        height: usize,
        units: &'b [usize],
        part: &Range<usize>,
    ) -> Option<Level<'b>> {
        let groups = self.groups.get(height)?;
        let sizes = groups.iter().map(Vec::len);
        Some(Level {
            groups,
            units,
            shards: even_parts(part, sizes.max().expect("there is a group")),
        })
    }

    /// The ring through a group.
    fn around(&self, place: &Place) -> Ring {
        Ring::through(place.members.clone(), self.rank)
    }

    /// The ring of a shard's owners, one in each of the largest groups.
    fn across(&self, owners: &[usize]) -> Ring {
        Ring::through(owners.to_vec(), self.rank)
    }
}

impl Level<'_> {
    /// Every unit sends its elements of each shard to the owner in its group.
    fn reduce_scatter_directly(&self, place: &Place) -> Schedule {
        let mut steps = Schedule::new();
        for (receiver, sender) in place.turns() {
            steps.extend(self.owned_by(place, receiver).map(|shard| {
                let peer = place.members[receiver];
                Step::send(peer, self.shards[shard].clone(), Contents::Partial)
            }));
            steps.extend(self.owned_by(place, place.own).map(|shard| {
                let peer = place.members[sender];
                Step::receive(peer, self.shards[shard].clone(), Action::Reduce)
            }));
        }
        steps
    }

    /// Every owner sends its shards to the others of its group.
    fn all_gather_directly(&self, place: &Place) -> Schedule {
        let mut steps = Schedule::new();
        for (receiver, sender) in place.turns() {
            steps.extend(self.owned_by(place, place.own).map(|shard| {
                let peer = place.members[receiver];
                Step::send(peer, self.shards[shard].clone(), Contents::Final)
            }));
            steps.extend(self.owned_by(place, sender).map(|shard| {
                let peer = place.members[sender];
                Step::receive(peer, self.shards[shard].clone(), Action::Copy)
            }));
        }
        steps
    }

    /// The ranks of a group.
    fn members(&self, group: &[usize]) -> Vec<usize> {
        group.iter().map(|&unit| self.units[unit]).collect()
    }

    fn place(&self, rank: usize) -> Place {
        let mut groups = self.groups.iter().map(|group| self.members(group));
        let place = groups.find_map(|members| {
            let own = members.iter().position(|&member| member == rank)?;
            Some(Place { members, own })
        });
        place.expect("the rank is a unit")
    }

    /// The shards of the unit at `index` in a group.
    fn owned_by(&self, place: &Place, index: usize) -> impl Iterator<Item = usize> + use<> {
        (index..self.shards.len()).step_by(place.members.len())
    }

    /// The owners of a shard, one in each group.
    fn owners(&self, shard: usize) -> Vec<usize> {
        let groups = self.groups.iter();
        groups
            .map(|group| self.units[group[shard % group.len()]])
            .collect()
    }
}

impl Place {
    /// Indices in the group, turn by turn: the receiver from this unit, and the sender to it.
    fn turns(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (own, size) = (self.own, self.members.len());
        (1..size).map(move |distance| ((own + distance) % size, (own + size - distance) % size))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_each_turn_a_rank_receives_from_the_one_that_sends_to_it() {
        for size in 2..6 {
            let turns = |own| {
                let members = (0..size).collect();
                Place { members, own }.turns().collect::<Vec<_>>()
            };
            for own in 0..size {
                for (turn, (receiver, sender)) in turns(own).into_iter().enumerate() {
                    assert_eq!((turns(receiver)[turn].1, turns(sender)[turn].0), (own, own));
                }
            }
        }
    }

    #[test]
    fn levels_have_few_links_where_many_ranks_are_in_even_racks() {
        for (ranks, in_a_rack, has_few) in [
            (16, 8, false),
            (64, 16, false),
            (72, 40, false),
            (80, 16, true),
        ] {
            let topology = Topology::by_host((0..ranks).map(|rank| rank / 4));
            let topology = topology.in_racks(|rank| (rank / in_a_rack).to_string());
            let levels = Levels::of(0, &topology);
            assert_eq!(levels.has_few_links, has_few, "{ranks}");
        }
    }
}
