//! Cores shared by two ranks of which one waits for the other.

use std::fs;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

use gradring_net::link::{Interest, Transport};

/// Interval between attempts to move: the system moves threads every few milliseconds, and a move
/// takes up to 80 microseconds.
const ATTEMPT_INTERVAL: Duration = Duration::from_millis(1);

/// Record of whether an awaited peer shares the core of a waiting thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SharedCore {
    /// No awaited peer shares the core.
    None,
    /// An awaited peer shares the core, and some core is idle: one of the two moves there when it
    /// runs.
    Moving,
    /// An awaited peer shares the core, and no core is idle.
    Staying,
}

/// Detector of awaited peers on the core of this rank, which moves the rank away from them.
pub(super) struct Cores {
    rank: usize,
    world_size: usize,
    attempted_at: Option<Instant>,
    is_any_idle: bool,
}

impl Cores {
    pub(super) const fn new(rank: usize, world_size: usize) -> Self {
        Self {
            rank,
            world_size,
            attempted_at: None,
            is_any_idle: false,
        }
    }

    /// Finds the peer on this core. The calling thread may first have moved to an idle core.
    pub(super) fn shared_core(
        &mut self,
        transport: &dyn Transport,
        interests: &[Interest],
        now: Instant,
    ) -> SharedCore {
        let core = sched_getcpu();
        let peers = || interests.iter().map(|interest| interest.peer);
        let Some(peer) = peers().find(|&peer| transport.core_of_peer(peer) == Some(core)) else {
            return SharedCore::None;
        };
        if self.is_due(now) {
            let peers = (0..self.world_size).filter_map(|peer| transport.core_of_peer(peer));
            let idle = idle_cores(core, peers).unwrap_or_default();
            self.is_any_idle = idle.is_some();
            // Only the higher rank moves: if both moved, they would meet again.
            if let Some(idle) = idle
                && peer < self.rank
                && idle.enter().is_ok()
            {
                return SharedCore::None;
            }
        }
        match self.is_any_idle {
            true => SharedCore::Moving,
            false => SharedCore::Staying,
        }
    }

    fn is_due(&mut self, now: Instant) -> bool {
        let due = self.attempted_at.map(|before| before + ATTEMPT_INTERVAL);
        let is_due = due.is_none_or(|due| now >= due);
        if is_due {
            self.attempted_at = Some(now);
        }
        is_due
    }
}

/// Cores on which a thread may run, and the better ones among them.
struct Idle {
    usable: CpuSet,
    better: CpuSet,
}

/// Returns the cores that the calling thread may use, and among them those that neither it nor its
/// `peers` run on. Returns `None` if there are none, or if all cores are busy.
fn idle_cores(core: usize, peers: impl Iterator<Item = usize>) -> rustix::io::Result<Option<Idle>> {
    let usable = sched_getaffinity(None)?;
    // `/proc/loadavg` counts all threads of the host, though the usable cores may be fewer. If
    // these are enough for all threads, and this core has two, another core is idle.
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
    /// Moves the calling thread to a better core, and restores its set of usable cores.
    fn enter(self) -> rustix::io::Result<()> {
        sched_setaffinity(None, &self.better)?;
        // First widens the set to every core on which this process may run. The set of now usable
        // cores would keep this thread from cores that the process gets later.
        let mut all = CpuSet::new();
        (0..CpuSet::MAX_CPU).for_each(|core| all.set(core));
        let widened = sched_setaffinity(None, &all).and_then(|()| sched_getaffinity(None));
        match widened {
            Ok(usable) if usable == self.usable => Ok(()),
            _ => sched_setaffinity(None, &self.usable),
        }
    }
}

/// Number of threads that run or want to: `3` in `0.20 0.18 0.12 3/80 11206`.
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
        // No core is idle while other tests keep all of them busy.
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
