//! Two ranks on one core, of which one waits for the other.

use std::fs;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

use gradring_net::link::{Interest, Transport};

/// Where threads run changes with every few milliseconds; moving takes up to 80 microseconds.
const ATTEMPT_INTERVAL: Duration = Duration::from_millis(1);

/// Who else runs on the core of a thread that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Company {
    /// No peer for which it waits.
    Other,
    /// A peer for which it waits, and some core is idle: one of the two moves there when it runs.
    Parting,
    /// A peer for which it waits, and no core is idle.
    Staying,
}

/// What a rank does about the core on which it waits.
pub(super) struct Cores {
    rank: usize,
    world_size: usize,
    looked_at: Option<Instant>,
    is_any_idle: bool,
}

impl Cores {
    pub(super) const fn new(rank: usize, world_size: usize) -> Self {
        Self {
            rank,
            world_size,
            looked_at: None,
            is_any_idle: false,
        }
    }

    /// Who runs on this core, after the calling thread may have moved to an idle one.
    pub(super) fn company(
        &mut self,
        transport: &dyn Transport,
        interests: &[Interest],
        now: Instant,
    ) -> Company {
        let core = sched_getcpu();
        let peers = || interests.iter().map(|interest| interest.peer);
        let Some(peer) = peers().find(|&peer| transport.core_of_peer(peer) == Some(core)) else {
            return Company::Other;
        };
        if self.is_due(now) {
            let peers = (0..self.world_size).filter_map(|peer| transport.core_of_peer(peer));
            let idle = idle_cores(core, peers).unwrap_or_default();
            self.is_any_idle = idle.is_some();
            // If both moved they would meet again.
            if let Some(idle) = idle
                && peer < self.rank
                && idle.enter().is_ok()
            {
                return Company::Other;
            }
        }
        match self.is_any_idle {
            true => Company::Parting,
            false => Company::Staying,
        }
    }

    fn is_due(&mut self, now: Instant) -> bool {
        let due = self.looked_at.map(|before| before + ATTEMPT_INTERVAL);
        let is_due = due.is_none_or(|due| now >= due);
        if is_due {
            self.looked_at = Some(now);
        }
        is_due
    }
}

/// Where a thread may run, and where it had better.
struct Idle {
    usable: CpuSet,
    better: CpuSet,
}

/// The cores that the calling thread may use besides `core`, which it shares, and those of its
/// `peers`; `None` if there are none, or all cores have something to do.
fn idle_cores(core: usize, peers: impl Iterator<Item = usize>) -> rustix::io::Result<Option<Idle>> {
    let usable = sched_getaffinity(None)?;
    // All threads of the host, though the usable cores may be fewer: if these are enough for them,
    // and this core has two, another one has none.
    let threads = fs::read_to_string("/proc/loadavg").ok();
    let running = threads.as_deref().and_then(running);
    if running.is_none_or(|running| running > usable.count()) {
        return Ok(None);
    }
    let mut better = usable;
    for taken in peers.chain([core]).filter(|&core| core < CpuSet::MAX_CPU) {
        better.unset(taken);
    }
    Ok((better.count() > 0).then_some(Idle { usable, better }))
}

impl Idle {
    /// Moves the calling thread there. Where it may run is the same afterwards.
    fn enter(self) -> rustix::io::Result<()> {
        sched_setaffinity(None, &self.better)?;
        // First wherever this process may run at all: the set of the cores that are usable now would
        // keep this thread from those that the process may be given later.
        let mut all = CpuSet::new();
        (0..CpuSet::MAX_CPU).for_each(|core| all.set(core));
        let widened = sched_setaffinity(None, &all).and_then(|()| sched_getaffinity(None));
        match widened {
            Ok(usable) if usable == self.usable => Ok(()),
            _ => sched_setaffinity(None, &self.usable),
        }
    }
}

/// How many threads run or want to: `3` in `0.20 0.18 0.12 3/80 11206`.
fn running(loadavg: &str) -> Option<u32> {
    let (running, _) = loadavg.split(' ').nth(3)?.split_once('/')?;
    running.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_run_are_counted_by_the_system() {
        assert_eq!(running("0.20 0.18 0.12 3/80 11206\n"), Some(3));
        assert_eq!(running(""), None);
        let found = running(&fs::read_to_string("/proc/loadavg").unwrap());
        assert!(found >= Some(1), "this thread runs: {found:?}");
    }

    #[test]
    fn a_thread_that_has_moved_may_use_the_same_cores_as_before() {
        let all = sched_getaffinity(None).unwrap();
        let mut first = CpuSet::new();
        first.set(sched_getcpu());
        for usable in [all, first, all] {
            sched_setaffinity(None, &usable).unwrap();
            let better = first;
            Idle { usable, better }.enter().unwrap();
            assert_eq!(sched_getaffinity(None).unwrap(), usable);
        }
    }

    #[test]
    fn neither_the_own_core_nor_one_of_a_peer_is_better() {
        let usable = sched_getaffinity(None).unwrap();
        let core = sched_getcpu();
        // Nothing is idle where other tests keep all cores busy.
        if let Some(idle) = idle_cores(core, [].into_iter()).unwrap() {
            assert_eq!(idle.usable, usable);
            assert!(!idle.better.is_set(core) && idle.better.count() == usable.count() - 1);
        }
        let everywhere = 0..CpuSet::MAX_CPU + 1;
        assert!(idle_cores(core, everywhere).unwrap().is_none());
    }

    #[test]
    fn looks_at_the_host_are_rare() {
        let (mut cores, now) = (Cores::new(1, 2), Instant::now());
        assert!(cores.is_due(now));
        assert!(!cores.is_due(now + ATTEMPT_INTERVAL / 2));
        assert!(cores.is_due(now + ATTEMPT_INTERVAL));
    }
}
