//! Exposed time, in which communication blocked the program.

use std::time::{Duration, Instant};

/// Time in which at least one thread was blocked; several threads at once count once.
#[derive(Debug, Default)]
pub struct Exposure {
    threads: usize,
    since: Option<Instant>,
    total: Duration,
}

impl Exposure {
    /// Records that a thread is blocked from now on.
    pub fn enter(&mut self, now: Instant) {
        self.threads += 1;
        self.since.get_or_insert(now);
    }

    /// Records that a thread continues.
    pub fn leave(&mut self, now: Instant) {
        self.threads = self.threads.saturating_sub(1);
        if self.threads == 0
            && let Some(since) = self.since.take()
        {
            self.total += now - since;
        }
    }

    /// Adds a wait of one thread that is over now, and that nothing had to know of before.
    pub fn add(&mut self, from: Instant, to: Instant) {
        match &mut self.since {
            // The others began later, so the time before them is this thread's alone.
            Some(since) => *since = from.min(*since),
            None => self.total += to - from,
        }
    }

    /// Returns `true` while a thread is blocked.
    #[must_use]
    pub const fn is_any(&self) -> bool {
        self.threads > 0
    }

    /// Sum of the periods that have ended.
    #[must_use]
    pub const fn total(&self) -> Duration {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_are_blocked_at_once_count_once() {
        let mut exposure = Exposure::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        exposure.enter(at(0));
        exposure.enter(at(1));
        exposure.leave(at(2));
        exposure.leave(at(5));
        exposure.enter(at(8));
        exposure.leave(at(9));
        assert_eq!(exposure.total(), Duration::from_secs(6));
        exposure.add(at(10), at(12));
        assert_eq!(exposure.total(), Duration::from_secs(8));
        exposure.enter(at(14));
        exposure.add(at(13), at(15));
        exposure.leave(at(16));
        assert_eq!(exposure.total(), Duration::from_secs(11));
    }
}
