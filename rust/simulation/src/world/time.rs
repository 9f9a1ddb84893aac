//! Virtual clock. Moments are nanoseconds since the start of a run.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Nanoseconds since the start of a run.
pub(crate) type Moment = u64;

pub(crate) const MICROSECOND: Moment = 1_000;
pub(crate) const MILLISECOND: Moment = 1_000_000;
pub(crate) const SECOND: Moment = 1_000_000_000;
pub(crate) const NEVER: Moment = Moment::MAX;

/// One clock for all ranks.
#[derive(Clone)]
pub(crate) struct Clock {
    start: Instant,
    now: Arc<AtomicU64>,
}

impl Clock {
    pub(crate) fn new() -> Self {
        Self {
            start: Instant::now(),
            now: Arc::default(),
        }
    }

    pub(crate) fn now(&self) -> Moment {
        self.now.load(Ordering::Relaxed)
    }

    pub(crate) fn advance_to(&self, moment: Moment) {
        self.now.store(moment, Ordering::Relaxed);
    }

    /// The present time as the code under test receives it.
    pub(crate) fn instant(&self) -> Instant {
        self.start + Duration::from_nanos(self.now())
    }

    pub(crate) fn moment(&self, instant: Instant) -> Moment {
        nanoseconds(instant.saturating_duration_since(self.start))
    }
}

pub(crate) fn nanoseconds(duration: Duration) -> Moment {
    u64::try_from(duration.as_nanos()).unwrap_or(NEVER)
}
