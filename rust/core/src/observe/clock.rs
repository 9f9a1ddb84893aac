//! One clock for all records: nanoseconds since 1970, without jumps.
//!
//! Ranks of one host agree on it to within a microsecond, because all of them start from the same
//! system clock. `neighbour_clock.rs` estimates the difference between hosts.

use std::sync::LazyLock;
use std::time::{Duration, Instant, SystemTime};

/// One moment on both clocks, read at the first use.
static ANCHOR: LazyLock<(Instant, Duration)> = LazyLock::new(|| {
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    (Instant::now(), since_1970.unwrap_or_default())
});

/// Nanoseconds from 1970 to `moment`.
#[must_use]
pub fn unix_ns(moment: Instant) -> u64 {
    let (instant, since_1970) = *ANCHOR;
    let at = match moment.checked_duration_since(instant) {
        Some(later) => since_1970 + later,
        None => since_1970.saturating_sub(instant - moment),
    };
    u64::try_from(at.as_nanos()).unwrap_or(u64::MAX)
}

/// Nanoseconds from 1970 to now.
#[must_use]
pub fn now_ns() -> u64 {
    unix_ns(Instant::now())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_keep_their_distance_on_both_sides_of_the_first() {
        let now = Instant::now();
        let (before, after) = (now - Duration::from_millis(5), now + Duration::from_secs(3));
        assert_eq!(unix_ns(now) - unix_ns(before), 5_000_000);
        assert_eq!(unix_ns(after) - unix_ns(now), 3_000_000_000);
    }
}
