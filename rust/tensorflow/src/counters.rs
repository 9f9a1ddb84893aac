//! What the ops have done in this process, for reports and for tests.

use std::sync::atomic::{AtomicU64, Ordering};

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
}

static STARTS: AtomicU64 = AtomicU64::new(0);
static WAITS: AtomicU64 = AtomicU64::new(0);
static FORWARDED_TENSORS: AtomicU64 = AtomicU64::new(0);
static COPIED_TENSORS: AtomicU64 = AtomicU64::new(0);
static COPIED_BYTES: AtomicU64 = AtomicU64::new(0);

/// The sums so far.
#[must_use]
pub fn read() -> Counters {
    Counters {
        starts: STARTS.load(Ordering::Relaxed),
        waits: WAITS.load(Ordering::Relaxed),
        forwarded_tensors: FORWARDED_TENSORS.load(Ordering::Relaxed),
        copied_tensors: COPIED_TENSORS.load(Ordering::Relaxed),
        copied_bytes: COPIED_BYTES.load(Ordering::Relaxed),
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

pub(crate) fn count_wait() {
    WAITS.fetch_add(1, Ordering::Relaxed);
}
