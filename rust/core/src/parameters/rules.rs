//! What distinguishes the update rules of a parameter server.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::identity::Version;

/// The rule by which gradients become updates, as the program has it.
#[derive(Debug, Clone, PartialEq)]
pub struct Rules {
    /// Workers at the start.
    pub workers: u32,
    /// How far a worker may run ahead of the slowest, in pushes; 0 is synchronous, `None` asynchronous.
    pub staleness: Option<u64>,
    /// Gradients of which an update is the mean, unless it is synchronous.
    pub aggregate: usize,
    /// Bound on the gradients that wait to be applied.
    pub queue_max: usize,
    /// What becomes of one that does not fit into the queue.
    pub overflow: Overflow,
    /// What becomes of one that was computed with older weights.
    pub late: Late,
    /// Updates by which weights may be older before a gradient is late.
    pub late_after: u64,
    /// Workers without which a synchronous update goes on.
    pub backup: u32,
    /// Whether an update is the mean of its gradients, or their sum.
    pub is_mean: bool,
}

/// What happens when the queue is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overflow {
    /// The worker waits.
    Wait,
    /// The one that has waited longest is dropped.
    DropOldest,
    /// The new one is dropped.
    DropNewest,
}

/// What happens to a late gradient.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Late {
    /// It counts like any other.
    Keep,
    /// It counts 1 / (1 + staleness).
    Weight,
    /// It is corrected for what has changed since, with this strength.
    Compensate(f32),
    /// It is dropped.
    Drop,
}

/// How long the servers wait for what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timing {
    /// What was not answered is said again after so long.
    pub again: Duration,
    /// A worker of which nothing is heard for so long is lost.
    pub silence: Duration,
    /// The first update waits so long for all workers.
    pub start: Duration,
    /// Updates between two snapshots.
    pub snapshot_every: Version,
}

/// How a gradient counts in an update.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Treatment {
    /// By what it is multiplied.
    pub weight: f32,
    /// The strength of the correction for what has changed since.
    pub compensation: Option<f32>,
}

impl Rules {
    /// Whether an update has a gradient of each worker, but for backups.
    #[must_use]
    pub fn is_synchronous(&self) -> bool {
        self.staleness == Some(0)
    }

    /// Of how many of the living workers a synchronous update needs a gradient. A lost worker counts
    /// as one of the backups.
    #[must_use]
    pub fn needed(&self, living: usize) -> usize {
        let lost = (self.workers as usize).saturating_sub(living);
        let spare = (self.backup as usize).saturating_sub(lost);
        living.saturating_sub(spare).max(1)
    }

    /// How a gradient of weights that have become older by so many updates counts; nothing if it is
    /// dropped.
    #[must_use]
    pub fn treatment(&self, staleness: u64) -> Option<Treatment> {
        let whole = Treatment {
            weight: 1.0,
            compensation: None,
        };
        if staleness <= self.late_after {
            return Some(whole);
        }
        match self.late {
            Late::Keep => Some(whole),
            Late::Weight => Some(Treatment {
                weight: 1.0 / (1 + staleness) as f32,
                ..whole
            }),
            Late::Compensate(strength) => Some(Treatment {
                compensation: Some(strength),
                ..whole
            }),
            Late::Drop => None,
        }
    }

    /// By what the sum of so many gradients is multiplied.
    #[must_use]
    pub fn scale(&self, count: usize) -> f32 {
        if self.is_mean {
            1.0 / count as f32
        } else {
            1.0
        }
    }
}
