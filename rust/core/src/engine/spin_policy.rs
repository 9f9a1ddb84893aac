//! How a blocked caller waits.

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

impl SpinPolicy {
    /// A few times as long as waking a thread takes, where every rank of the host has a core.
    /// Where they share cores, a rank that spins takes the core from those it waits for, and a rank
    /// that sleeps is woken late: so it yields at once.
    #[must_use]
    pub fn of(cores_suffice: bool) -> Self {
        Self {
            spinning: Duration::from_micros(if cores_suffice { 20 } else { 0 }),
            yielding: Duration::from_micros(300),
        }
    }
}
