//! Which ranks share a host: what schedules need to know about a group beside its size.

/// The ranks of a group by host; equal on all ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    /// Ranks of each host in ascending order; hosts in the order of their first ranks.
    hosts: Vec<Vec<usize>>,
}

impl Topology {
    /// All ranks on one host.
    #[must_use]
    pub fn one_host(world_size: usize) -> Self {
        Self::by_host((0..world_size).map(|_| ()))
    }

    /// From each rank's host, in the order of ranks.
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
        Self { hosts }
    }

    /// Number of ranks.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.hosts.iter().map(Vec::len).sum()
    }

    /// The ranks of each host in ascending order; hosts in the order of their first ranks.
    #[must_use]
    pub fn hosts(&self) -> &[Vec<usize>] {
        &self.hosts
    }

    /// Index of the host of `rank`, and of `rank` among the ranks there.
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

    /// Whether there are several hosts, and one of them has several ranks.
    #[must_use]
    pub fn has_levels(&self) -> bool {
        self.hosts.len() > 1 && self.hosts.iter().any(|ranks| ranks.len() > 1)
    }

    /// Ranks of the host that has most.
    #[must_use]
    pub fn local_ranks_max(&self) -> usize {
        self.hosts.iter().map(Vec::len).max().unwrap_or_default()
    }

    /// Whether all hosts have equally many ranks, a power of two, and those of a host stand in a row.
    #[must_use]
    pub fn has_even_blocks(&self) -> bool {
        let size = self.local_ranks_max();
        let mut hosts = self.hosts.iter().flatten().copied().zip(0..);
        let in_order = hosts.all(|(rank, position)| rank == position);
        let is_even = self.hosts.iter().all(|ranks| ranks.len() == size);
        in_order && is_even && size.is_power_of_two()
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
    }

    #[test]
    fn one_host_and_one_rank_on_each_host_have_no_levels() {
        assert!(!Topology::one_host(4).has_levels());
        assert!(!Topology::by_host(0..4).has_levels());
    }
}
