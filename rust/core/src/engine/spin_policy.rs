//! Spinning and yielding of a blocked caller, before it sleeps.

use std::time::Duration;

/// How a blocked caller waits before it sleeps in the kernel.
#[derive(Debug, Clone, Copy, Default)]
pub struct SpinPolicy {
    /// Time from the start of a wait during which the caller keeps its core.
    pub spinning: Duration,
    /// Longer time from the start of a wait during which the caller yields after spinning: all
    /// other threads that want to run on its core go first.
    pub yielding: Duration,
    /// Number of yields in a wait for slots, where the caller would sleep at once otherwise.
    pub yields_for_slots: u32,
}

/// Most ranks per core for which waiting ranks yield to each other. If there are more, a rank with
/// work gets the core sooner if the others sleep.
const YIELDING_RANKS_PER_CORE: usize = 2;

/// Longest time for which a rank yields.
const YIELDING: Duration = Duration::from_micros(300);

impl SpinPolicy {
    /// Policy of a host with this many ranks and cores.
    ///
    /// If every rank of the host has a core, spinning lasts a few times as long as waking a thread.
    /// On a shared core, a spinning rank takes the core from those it waits for, and a sleeping
    /// rank is woken late. There a rank yields at once.
    #[must_use]
    pub fn of(ranks: usize, cores: usize) -> Self {
        let (has_core, yields) = (ranks <= cores, ranks <= YIELDING_RANKS_PER_CORE * cores);
        Self {
            spinning: Duration::from_micros(if has_core { 20 } else { 0 }),
            yielding: if yields { YIELDING } else { Duration::ZERO },
            yields_for_slots: YIELDS_FOR_SLOTS,
        }
    }
}

/// Duration of a wait from which on sleeping costs little more than yielding.
const LONG_WAIT: Duration = Duration::from_micros(100);
/// Consecutive long waits after which a caller no longer yields. A single long wait is often for a
/// late rank, and the next waits are short.
const LONG_WAITS: u32 = 2;

/// Yields of a rank that waits for slots where more ranks share a core than yield otherwise. After
/// as many, ranks with work have probably had the core.
const YIELDS_FOR_SLOTS: u32 = 16;

/// Prediction of the next wait from the previous ones in a collective. On a slow network all waits
/// are long, and yielding then takes the core from other threads for nothing.
///
/// A rank that waits for slots yields, however many ranks share its core. Those that yield to each
/// other have all published, so the core soon is with one that has work.
///
/// See A. R. Karlin, K. Li, M. S. Manasse and S. Owicki, "Empirical studies of competitive spinning
/// for a shared-memory multiprocessor", SOSP 1991.
#[derive(Debug, Default)]
pub(super) struct Patience {
    /// Duration of the present wait so far.
    waited: Duration,
    /// Number of consecutive long waits.
    long_waits: u32,
    /// Number of yields in the present wait.
    yields: u32,
    /// `true` if the waits are for slots.
    for_slots: bool,
}

impl Patience {
    /// Patience in a collective that travels through slots or over links.
    pub(super) fn new(for_slots: bool) -> Self {
        Self {
            for_slots,
            ..Self::default()
        }
    }

    /// Records that the caller has yielded.
    pub(super) const fn yielded(&mut self) {
        self.yields += 1;
    }

    /// Records that nothing has moved for this long.
    pub(super) const fn waits(&mut self, idle: Duration) {
        self.waited = idle;
    }

    /// Records a move.
    pub(super) fn moved(&mut self) {
        self.yields = 0;
        if self.waited.is_zero() {
            return;
        }
        self.long_waits = match self.waited >= LONG_WAIT {
            true => self.long_waits + 1,
            false => 0,
        };
        self.waited = Duration::ZERO;
    }

    /// Longest time before the caller sleeps in the present wait.
    pub(super) const fn yielding(&self, policy: SpinPolicy) -> Duration {
        if self.for_slots && self.yields < policy.yields_for_slots {
            return YIELDING;
        }
        match self.for_slots || self.long_waits < LONG_WAITS {
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
    fn who_waits_for_slots_yields_some_times_however_many_ranks_share_a_core() {
        let policy = SpinPolicy::of(64, 2);
        assert!(Patience::new(false).yielding(policy).is_zero());
        let mut patience = Patience::new(true);
        for _ in 0..YIELDS_FOR_SLOTS {
            assert!(!patience.yielding(policy).is_zero());
            patience.yielded();
        }
        assert!(patience.yielding(policy).is_zero());
        patience.moved();
        assert!(!patience.yielding(policy).is_zero());
        assert!(patience.yielding(SpinPolicy::default()).is_zero());
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
