//! What the ops have done in this process, for reports and for tests.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use gradring_core::observe::exposure::Exposure;

/// Sums since the process started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Start ops that handed a bucket to the engine.
    pub starts: u64,
    /// Wait ops that came to an end.
    pub waits: u64,
    /// Tensors whose memory the engine worked on in place.
    pub forwarded_tensors: u64,
    /// Tensors that were copied because somebody else still needed them.
    pub copied_tensors: u64,
    /// Bytes of those copies.
    pub copied_bytes: u64,
    /// Nanoseconds in which at least one Wait op was blocked: communication that nothing hid.
    pub blocked_ns: u64,
}

static STARTS: AtomicU64 = AtomicU64::new(0);
static WAITS: AtomicU64 = AtomicU64::new(0);
static FORWARDED_TENSORS: AtomicU64 = AtomicU64::new(0);
static COPIED_TENSORS: AtomicU64 = AtomicU64::new(0);
static COPIED_BYTES: AtomicU64 = AtomicU64::new(0);
static BLOCKED: Mutex<Exposure> = Mutex::new(Exposure::new());

/// The sums so far.
#[must_use]
pub fn read() -> Counters {
    Counters {
        starts: STARTS.load(Ordering::Relaxed),
        waits: WAITS.load(Ordering::Relaxed),
        forwarded_tensors: FORWARDED_TENSORS.load(Ordering::Relaxed),
        copied_tensors: COPIED_TENSORS.load(Ordering::Relaxed),
        copied_bytes: COPIED_BYTES.load(Ordering::Relaxed),
        blocked_ns: u64::try_from(lock().total().as_nanos()).unwrap_or(u64::MAX),
    }
}

pub(crate) fn count_start() {
    STARTS.fetch_add(1, Ordering::Relaxed);
}

pub(crate) fn count_forwarded() {
    FORWARDED_TENSORS.fetch_add(1, Ordering::Relaxed);
}

pub(crate) fn count_copied(bytes: usize) {
    COPIED_TENSORS.fetch_add(1, Ordering::Relaxed);
    COPIED_BYTES.fetch_add(bytes as u64, Ordering::Relaxed);
}

/// Runs `wait`, which blocks the calling thread.
pub(crate) fn count_wait<T>(wait: impl FnOnce() -> T) -> T {
    lock().enter(Instant::now());
    let result = wait();
    lock().leave(Instant::now());
    WAITS.fetch_add(1, Ordering::Relaxed);
    result
}

fn lock() -> MutexGuard<'static, Exposure> {
    BLOCKED.lock().unwrap_or_else(PoisonError::into_inner)
}
