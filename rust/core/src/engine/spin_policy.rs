//! Spinning and yielding of a blocked caller, before it sleeps.

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

/// A wait as long as this costs little more if the caller sleeps meanwhile.
const LONG_WAIT: Duration = Duration::from_micros(100);
/// One long wait is often for a rank that comes late, and the next ones are short.
const LONG_WAITS: u32 = 2;

/// What the waits of one collective so far tell about the next one: on a slow network all are long,
/// and one that yields meanwhile takes its core from others for nothing.
///
/// See A. R. Karlin, K. Li, M. S. Manasse and S. Owicki, "Empirical studies of competitive spinning
/// for a shared-memory multiprocessor", SOSP 1991.
#[derive(Debug, Default)]
pub(super) struct Patience {
    /// The present wait, as long as it is known to be.
    waited: Duration,
    /// How many waits in a row were long.
    long_waits: u32,
}

impl Patience {
    /// Nothing has moved for this long.
    pub(super) const fn waits(&mut self, idle: Duration) {
        self.waited = idle;
    }

    /// Something has moved.
    pub(super) fn moved(&mut self) {
        if self.waited.is_zero() {
            return;
        }
        self.long_waits = match self.waited >= LONG_WAIT {
            true => self.long_waits + 1,
            false => 0,
        };
        self.waited = Duration::ZERO;
    }

    /// How long the present wait may take before the caller sleeps.
    pub(super) const fn yielding(&self, policy: SpinPolicy) -> Duration {
        match self.long_waits < LONG_WAITS {
            true => policy.yielding,
            false => policy.spinning,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_waited_long_twice_sleeps_until_a_wait_is_short() {
        let policy = SpinPolicy::of(2, 2);
        let mut patience = Patience::default();
        let mut after = |wait_us: u64| {
            patience.waits(Duration::from_micros(wait_us) / 2);
            patience.waits(Duration::from_micros(wait_us));
            patience.moved();
            patience.moved();
            patience.yielding(policy)
        };
        assert_eq!(after(5000), policy.yielding);
        assert_eq!(after(30), policy.yielding);
        assert_eq!(after(150), policy.yielding);
        assert_eq!(after(150), policy.spinning);
        assert_eq!(after(150), policy.spinning);
        assert_eq!(after(30), policy.yielding);
    }

    #[test]
    fn the_more_ranks_share_a_core_the_less_they_keep_it() {
        let of = |ranks| SpinPolicy::of(ranks, 2);
        assert!(!of(2).spinning.is_zero());
        assert!(of(3).spinning.is_zero() && !of(3).yielding.is_zero());
        assert!(!of(4).yielding.is_zero());
        assert!(of(5).yielding.is_zero());
    }
}
