//! Copies of shards, and the servers that have them.

/// Placement of the copies of shards. A keeper is one copy of one shard. The first `servers`
/// keepers are the first copies, by shard, and workers pull from them. Each further group of
/// `servers` keepers has the next copies, each one server further.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keepers {
    /// Number of servers, and of shards.
    pub servers: usize,
    /// Copies of each shard beside the first; fewer than `servers`.
    pub replicas: usize,
}

impl Keepers {
    /// Number of keepers.
    #[must_use]
    pub const fn count(&self) -> usize {
        self.servers * (1 + self.replicas)
    }

    /// Shard of a keeper.
    #[must_use]
    pub const fn shard(&self, keeper: usize) -> usize {
        keeper % self.servers
    }

    /// Index of a keeper among the copies of its shard; 0 for the first copy.
    #[must_use]
    pub const fn copy(&self, keeper: usize) -> usize {
        keeper / self.servers
    }

    /// Server that has a keeper.
    #[must_use]
    pub const fn server(&self, keeper: usize) -> usize {
        (self.shard(keeper) + self.copy(keeper)) % self.servers
    }

    /// The keeper on `server` that is the copy of this index.
    #[must_use]
    pub const fn on(&self, server: usize, copy: usize) -> usize {
        copy * self.servers + (server + self.servers - copy % self.servers) % self.servers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_copies_of_a_shard_are_on_as_many_servers() {
        for servers in 1..6 {
            for replicas in 0..servers {
                let keepers = Keepers { servers, replicas };
                for shard in 0..servers {
                    let of = (0..keepers.count()).filter(|&it| keepers.shard(it) == shard);
                    let mut on: Vec<_> = of.map(|it| keepers.server(it)).collect();
                    on.sort_unstable();
                    on.dedup();
                    assert_eq!(on.len(), 1 + replicas);
                }
                for keeper in 0..keepers.count() {
                    let (server, copy) = (keepers.server(keeper), keepers.copy(keeper));
                    assert_eq!(keepers.on(server, copy), keeper);
                }
            }
        }
    }
}
