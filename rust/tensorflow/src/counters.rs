//! Counters of the ops of this process, for reports and for tests.

use std::sync::atomic::{AtomicU64, Ordering};

/// A sum since the process started.
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, count: usize) {
        self.0.fetch_add(count as u64, Ordering::Relaxed);
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $counter:ident: $name:literal;)*) => {
        $($(#[$doc])* pub(crate) static $counter: Counter = Counter(AtomicU64::new(0));)*

        /// Returns the names and values of all counters.
        #[must_use]
        pub fn read() -> Vec<(&'static str, u64)> {
            vec![$(($name, $counter.0.load(Ordering::Relaxed))),*]
        }
    };
}

counters! {
    /// Start ops that handed a bucket to the engine.
    STARTS: "starts";
    /// Wait ops that have ended.
    WAITS: "waits";
    /// Tensors whose memory the engine worked on in place.
    FORWARDED_TENSORS: "forwarded_tensors";
    /// Tensors that were copied because another op still needed them.
    COPIED_TENSORS: "copied_tensors";
    /// Bytes of those copies.
    COPIED_BYTES: "copied_bytes";
}

pub(crate) fn count_copy(bytes: usize) {
    COPIED_TENSORS.add(1);
    COPIED_BYTES.add(bytes);
}
