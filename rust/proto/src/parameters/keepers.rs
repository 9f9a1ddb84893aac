//! Copies of shards: which server has which.

/// Who keeps a copy of a shard: first those that workers pull from, by shard, and then, as often as
/// shards are replicated, those of the same shards on the servers behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keepers {
    /// As many as there are shards.
    pub servers: usize,
    /// Copies of each shard beside the first; fewer than servers.
    pub replicas: usize,
}

impl Keepers {
    /// How many there are.
    #[must_use]
    pub const fn count(&self) -> usize {
        self.servers * (1 + self.replicas)
    }

    /// Of which shard a keeper has a copy.
    #[must_use]
    pub const fn shard(&self, keeper: usize) -> usize {
        keeper % self.servers
    }

    /// Which of the shard's copies it is.
    #[must_use]
    pub const fn copy(&self, keeper: usize) -> usize {
        keeper / self.servers
    }

    /// Which server it is in.
    #[must_use]
    pub const fn server(&self, keeper: usize) -> usize {
        (self.shard(keeper) + self.copy(keeper)) % self.servers
    }

    /// The keeper of a server whose copy of its shard is this one.
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
