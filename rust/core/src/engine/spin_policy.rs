//! How a blocked caller waits.

use std::time::Duration;

/// How a blocked caller waits before it sleeps in the kernel.
#[derive(Debug, Clone, Copy, Default)]
pub struct SpinPolicy {
    /// At first it keeps its core to itself.
    pub spinning: Duration,
    /// Counted from the same moment, longer: then everything else that wants to run on its core
    /// goes first.
    pub yielding: Duration,
}

/// So many ranks may share a core that those which wait hand it round: with more, one that has
/// something to do gets it sooner if the others sleep.
const YIELDING_RANKS_PER_CORE: usize = 2;

impl SpinPolicy {
    /// For this many ranks and cores of the host.
    ///
    /// A few times as long as waking a thread takes, where every rank of the host has a core.
    /// Where they share cores, a rank that spins takes the core from those it waits for, and a rank
    /// that sleeps is woken late: so it yields at once.
    #[must_use]
    pub fn of(ranks: usize, cores: usize) -> Self {
        let (has_core, yields) = (ranks <= cores, ranks <= YIELDING_RANKS_PER_CORE * cores);
        Self {
            spinning: Duration::from_micros(if has_core { 20 } else { 0 }),
            yielding: Duration::from_micros(if yields { 300 } else { 0 }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_more_ranks_share_a_core_the_less_they_keep_it() {
        let of = |ranks| SpinPolicy::of(ranks, 2);
        assert!(!of(2).spinning.is_zero());
        assert!(of(3).spinning.is_zero() && !of(3).yielding.is_zero());
        assert!(!of(4).yielding.is_zero());
        assert!(of(5).yielding.is_zero());
    }
}
