//! Topology of a group, by host and rack: all that schedules need to know about it beside its size.

use std::collections::BTreeMap;
use std::ops::Range;

/// The ranks of a group by host, and the hosts by rack; equal on all ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    /// Ranks of each host in ascending order. Hosts are in the order of their first ranks, except
    /// that the hosts of a rack are in a row.
    hosts: Vec<Vec<usize>>,
    /// Hosts of each rack by index; empty where racks are unknown or make no difference.
    racks: Vec<Vec<usize>>,
}

impl Topology {
    /// All ranks on one host.
    #[must_use]
    pub fn one_host(world_size: usize) -> Self {
        Self::by_host((0..world_size).map(|_| ()))
    }

    /// Groups ranks by the host of each rank, in the order of ranks.
    #[must_use]
    pub fn by_host<Host: PartialEq>(host_of_each_rank: impl Iterator<Item = Host>) -> Self {
        let (mut known, mut hosts) = (Vec::new(), Vec::<Vec<usize>>::new());
        for (rank, host) in host_of_each_rank.enumerate() {
            match known.iter().position(|other| *other == host) {
                Some(index) => hosts[index].push(rank),
                None => {
                    known.push(host);
                    hosts.push(vec![rank]);
                }
            }
        }
        Self {
            hosts,
            racks: Vec::new(),
        }
    }

    /// The same topology with racks. The first rank of each host names its rack; an empty name
    /// means that the rack is unknown.
    ///
    /// Racks count if every host has one, there are several, and one of them has several hosts.
    #[must_use]
    pub fn in_racks<Name: AsRef<str>>(mut self, rack_of: impl Fn(usize) -> Name) -> Self {
        let named: Vec<Name> = self.hosts.iter().map(|ranks| rack_of(ranks[0])).collect();
        let mut order = BTreeMap::new();
        for name in &named {
            let next = order.len();
            order.entry(name.as_ref()).or_insert(next);
        }
        let racks = order.len();
        if named.iter().any(|name| name.as_ref().is_empty()) || racks < 2 || racks == named.len() {
            return self;
        }
        let mut placed: Vec<_> = (named.iter().map(|name| order[name.as_ref()]))
            .zip(self.hosts)
            .collect();
        placed.sort_by_key(|(rack, _)| *rack);
        let of_rack = |rack: usize| -> Range<usize> {
            let first = |rack| placed.partition_point(|(of, _)| *of < rack);
            first(rack)..first(rack + 1)
        };
        self.racks = (0..racks).map(|rack| of_rack(rack).collect()).collect();
        self.hosts = placed.into_iter().map(|(_, ranks)| ranks).collect();
        self
    }

    /// Number of ranks.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.hosts.iter().map(Vec::len).sum()
    }

    /// Ranks of each host in ascending order. Hosts are in the order of their first ranks, except
    /// that the hosts of a rack are in a row.
    #[must_use]
    pub fn hosts(&self) -> &[Vec<usize>] {
        &self.hosts
    }

    /// Hosts of each rack by index, one rack after the other; empty where racks are unknown or make
    /// no difference.
    #[must_use]
    pub fn racks(&self) -> &[Vec<usize>] {
        &self.racks
    }

    /// Index of the host of `rank`, and index of `rank` among the ranks of that host.
    ///
    /// # Panics
    /// When there is no such rank.
    #[must_use]
    pub fn position(&self, rank: usize) -> (usize, usize) {
        let mut hosts = self.hosts.iter().enumerate();
        let position = hosts.find_map(|(host, ranks)| {
            let local_rank = ranks.iter().position(|&other| other == rank)?;
            Some((host, local_rank))
        });
        position.expect("every rank has a host")
    }

    /// Returns whether there are several hosts, and one of them has several ranks, or one rack has
    /// several hosts.
    #[must_use]
    pub fn has_levels(&self) -> bool {
        let shares_host = self.hosts.iter().any(|ranks| ranks.len() > 1);
        self.hosts.len() > 1 && (shares_host || !self.racks.is_empty())
    }

    /// Number of ranks of the largest host.
    #[must_use]
    pub fn local_ranks_max(&self) -> usize {
        self.hosts.iter().map(Vec::len).max().unwrap_or_default()
    }

    /// Returns whether racks are known, all racks have equally many hosts, and all hosts equally
    /// many ranks.
    #[must_use]
    pub fn has_even_racks(&self) -> bool {
        let equal_sizes =
            |groups: &[Vec<usize>]| groups.iter().all(|of| of.len() == groups[0].len());
        !self.racks.is_empty() && equal_sizes(&self.racks) && equal_sizes(&self.hosts)
    }

    /// Returns whether all hosts have equally many ranks, a power of two, and the ranks of each
    /// host are in a row. If there are racks, the same must hold for the hosts of each rack.
    #[must_use]
    pub fn has_even_blocks(&self) -> bool {
        let size = self.local_ranks_max();
        let is_even = self.hosts.iter().all(|ranks| ranks.len() == size);
        let hosts = self.racks.first().map_or(1, Vec::len);
        let are_even = self.racks.iter().all(|rack| rack.len() == hosts);
        let powers = size.is_power_of_two() && hosts.is_power_of_two();
        self.has_blocks() && is_even && are_even && powers
    }

    /// Returns whether the ranks of each host are in a row.
    #[must_use]
    pub fn has_blocks(&self) -> bool {
        let mut ranks = self.hosts.iter().flatten().copied().zip(0..);
        ranks.all(|(rank, position)| rank == position)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_grouped_by_host_wherever_they_are() {
        let topology = Topology::by_host(["a", "b", "a", "b", "b"].iter());
        assert_eq!(topology.hosts(), [vec![0, 2], vec![1, 3, 4]]);
        assert_eq!(topology.world_size(), 5);
        assert_eq!(topology.position(3), (1, 1));
        assert!(topology.has_levels());
    }

    fn in_racks(hosts: &str, racks: &'static str) -> Topology {
        let rack_of = |rank| racks[rank..=rank].trim().to_owned();
        Topology::by_host(hosts.chars()).in_racks(rack_of)
    }

    #[test]
    fn hosts_of_a_rack_stand_in_a_row() {
        let topology = in_racks("abcabc", "xyxxyx");
        assert_eq!(topology.hosts(), [vec![0, 3], vec![2, 5], vec![1, 4]]);
        assert_eq!(topology.racks(), [vec![0, 1], vec![2]]);
        assert_eq!(topology.position(2), (1, 0));
        // If ranks of one host name different racks, the first one counts.
        assert_eq!(in_racks("abcabc", "xyxyyx"), topology);
        assert!(in_racks("abc", "xxy").has_levels());
    }

    #[test]
    fn racks_count_if_all_are_known_and_differ_from_hosts_and_from_the_group() {
        for racks in ["xx x", "xxxx", "abcd", "    "] {
            assert_eq!(in_racks("abcd", racks), Topology::by_host("abcd".chars()));
        }
    }

    #[test]
    fn blocks_are_even_if_hosts_have_the_same_power_of_two_of_ranks_in_a_row() {
        let is_even = |hosts: &str| Topology::by_host(hosts.chars()).has_even_blocks();
        assert!(
            ["a", "ab", "aabb", "aabbcc", "aaaa"]
                .into_iter()
                .all(is_even)
        );
        assert!(
            !["abab", "aab", "aaabbb", "aaa", "abb"]
                .into_iter()
                .any(is_even)
        );
        assert!(in_racks("aabbccdd", "xxxxyyyy").has_even_blocks());
        assert!(!in_racks("aabbccdd", "xxyyxxyy").has_even_blocks());
        assert!(!in_racks("aabbccdd", "xxxxxxyy").has_even_blocks());
    }

    #[test]
    fn one_host_and_one_rank_on_each_host_have_no_levels() {
        assert!(!Topology::one_host(4).has_levels());
        assert!(!Topology::by_host(0..4).has_levels());
    }
}
