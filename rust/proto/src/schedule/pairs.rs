//! Pairs of ranks: neighbours, then neighbours of these, and so on.
//!
//! Among N ranks the first P take part, where P is the largest power of two up to N. In step k rank
//! r meets rank r XOR 2^k. So after log2(P) steps each has met all others, directly or not. Each of
//! the remaining ranks is the *guest* of one that takes part: rank P+g is the guest of rank g.

/// Position of one rank.
pub(super) struct Pairs {
    rank: usize,
    /// Ranks that take part: a power of two.
    members: usize,
    world_size: usize,
}

impl Pairs {
    pub(super) const fn new(rank: usize, world_size: usize) -> Self {
        Self {
            rank,
            members: 1 << world_size.ilog2(),
            world_size,
        }
    }

    /// The ranks that a member meets, in order, and whether this one is the lower of the two.
    pub(super) fn meetings(&self) -> impl ExactSizeIterator<Item = (usize, bool)> {
        let rank = self.rank;
        (0..self.members.ilog2()).map(move |step| {
            let bit = 1 << step;
            (rank ^ bit, rank & bit == 0)
        })
    }

    /// The host of this rank, if this rank is a guest.
    pub(super) const fn host(&self) -> Option<usize> {
        self.rank.checked_sub(self.members)
    }

    pub(super) fn guest(&self) -> Option<usize> {
        let guest = self.rank + self.members;
        (guest < self.world_size).then_some(guest)
    }

    /// All ranks with which this one exchanges.
    pub(super) fn partners(&self) -> Vec<usize> {
        match self.host() {
            Some(host) => vec![host],
            None => self
                .meetings()
                .map(|(peer, _)| peer)
                .chain(self.guest())
                .collect(),
        }
    }
}
