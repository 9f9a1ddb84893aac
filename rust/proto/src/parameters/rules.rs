//! The update rules of a parameter server, in one table.
//!
//! Each row of [`Rules`] is a field of `gradring.updates.ParameterServer`, or follows from its
//! fields.

use std::fmt::Display;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::identity::Version;
use crate::error::Result;
use crate::names::named;
use crate::settings::{named_values, table, wrong};

/// Strength of the correction of late gradients: lambda of DC-ASGD.
const COMPENSATION: f64 = 0.04;

/// Marks a value that must be equal on all servers.
const ALL: bool = true;

table! {
    /// The rule by which gradients become updates, as the program sets it.
    pub struct Rules {
        workers: u32 = "1", ALL, "Workers at the start.";
        staleness: Option<u64> = "0", ALL,
            "How far a worker may run ahead of the slowest, in pushes; 0 is synchronous, `None` asynchronous.";
        aggregate: usize = "1", ALL, "Gradients of which an update is made, unless it is synchronous.";
        overflow: Overflow = "wait", ALL, "What becomes of one that does not fit into the queue.";
        late: Late = "weight", ALL, "What becomes of one that was computed with older weights.";
        backup: u32 = "0", ALL, "Workers without which a synchronous update goes on.";
        combine: Combine = "mean", ALL, "What an update is of its gradients.";
        snapshot_every: Version = "100", ALL, "Updates between two snapshots.";
        replicas: usize = "0", ALL, "On how many servers each shard is, beside the first.";
    } and {
        /// Bound on the gradients that wait to be applied; `None` for the default.
        queue_max: Option<usize>,
        /// Largest staleness, in versions, of a gradient that is not late; `None` for the default.
        late_after: Option<u64>,
    }
}

named! {
    /// Treatment of a gradient that does not fit into the queue.
    pub enum Overflow {
        /// Its worker waits.
        Wait: "wait",
        /// The oldest gradient in the queue is dropped.
        DropOldest: "drop_oldest",
        /// The new gradient is dropped.
        DropNewest: "drop_newest",
    }
}

named! {
    /// Treatment of a late gradient.
    pub enum Late {
        /// Its weight is 1 / (1 + staleness).
        Weight: "weight",
        /// It is corrected for the change of the weights since.
        Compensate: "compensate",
        /// It is dropped.
        Drop: "drop",
        /// It counts fully.
        Keep: "keep",
    }
}

named! {
    /// Combination of the gradients of an update.
    pub enum Combine {
        /// Their mean.
        Mean: "mean",
        /// Their sum.
        Sum: "sum",
    }
}

named_values!(Overflow, Late, Combine);

/// Times of the protocol, and the interval of snapshots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timing {
    /// Time after which an unanswered message is sent again.
    pub again: Duration,
    /// Time without any message after which a worker is lost.
    pub silence: Duration,
    /// Time for which the first update waits for all workers.
    pub start: Duration,
    /// Updates between two snapshots.
    pub snapshot_every: Version,
}

/// Weight and correction of a gradient in an update.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Treatment {
    /// Factor of the gradient.
    pub weight: f64,
    /// Strength of the correction for the change of the weights since; `None` for no correction.
    pub compensation: Option<f64>,
}

impl Rules {
    /// Checks the rules for this number of servers.
    ///
    /// # Errors
    /// `Config` for an unusable value or combination, which the error names.
    pub fn check(&self, servers: usize) -> Result<()> {
        let says = |is_right: bool, name: &str, value: &dyn Display, wanted: &str| match is_right {
            true => Ok(()),
            false => Err(wrong(name, &value.to_string(), wanted)),
        };
        let at_least_one = "a whole number from 1 up";
        says(self.workers >= 1, "workers", &self.workers, at_least_one)?;
        says(
            self.aggregate >= 1,
            "aggregate",
            &self.aggregate,
            at_least_one,
        )?;
        says(
            self.snapshot_every >= 1,
            "snapshot_every",
            &self.snapshot_every,
            at_least_one,
        )?;
        says(
            self.aggregate == 1 || !self.is_synchronous(),
            "aggregate",
            &self.aggregate,
            "1, as it must be with staleness=0, whose updates have a gradient of each worker",
        )?;
        says(
            self.backup == 0 || self.is_synchronous(),
            "backup",
            &self.backup,
            "0, as it must be without staleness=0: only then does an update wait for all workers",
        )?;
        says(
            self.backup < self.workers,
            "backup",
            &self.backup,
            "less than the number of workers",
        )?;
        says(
            self.replicas < servers,
            "replicas",
            &self.replicas,
            "less than the number of parameter servers: no two copies are on the same one",
        )?;
        says(
            self.replicas == 0 || !self.compensates(),
            "late",
            &self.late.name(),
            "weight or drop, as it must be with replicas, which do not know what workers pulled",
        )
    }

    /// Bound on the gradients that wait to be applied; at least the size of one update.
    #[must_use]
    pub fn queue_max(&self) -> usize {
        let usual = || 2 * self.aggregate.max(self.workers as usize);
        self.queue_max.unwrap_or_else(usual).max(self.aggregate)
    }

    /// Largest staleness, in versions, of a gradient that is not late. If workers do not wait for
    /// each other, nearly every gradient is a little stale, so [`Late::Drop`] then has a larger
    /// default.
    #[must_use]
    pub fn late_after(&self) -> u64 {
        let usual = || match self.late {
            Late::Drop if !self.is_synchronous() => {
                self.staleness.unwrap_or(0).max(self.workers.into())
            }
            _ => 0,
        };
        self.late_after.unwrap_or_else(usual)
    }

    /// Returns whether late gradients are corrected.
    #[must_use]
    pub const fn compensates(&self) -> bool {
        matches!(self.late, Late::Compensate)
    }

    /// Returns whether an update waits for a gradient of each worker, except for backups.
    #[must_use]
    pub fn is_synchronous(&self) -> bool {
        self.staleness == Some(0)
    }

    /// Number of gradients that a synchronous update needs from `living` workers. A lost worker
    /// counts as one of the backups.
    #[must_use]
    pub fn needed(&self, living: usize) -> usize {
        let lost = (self.workers as usize).saturating_sub(living);
        let spare = (self.backup as usize).saturating_sub(lost);
        living.saturating_sub(spare).max(1)
    }

    /// Treatment of a gradient of this staleness; `None` if it is dropped.
    #[must_use]
    pub fn treatment(&self, staleness: u64) -> Option<Treatment> {
        let whole = Treatment {
            weight: 1.0,
            compensation: None,
        };
        if staleness <= self.late_after() {
            return Some(whole);
        }
        match self.late {
            Late::Keep => Some(whole),
            Late::Weight => Some(Treatment {
                weight: 1.0 / (1 + staleness) as f64,
                ..whole
            }),
            Late::Compensate => Some(Treatment {
                compensation: Some(COMPENSATION),
                ..whole
            }),
            Late::Drop => None,
        }
    }

    /// Factor of the sum of `count` gradients.
    #[must_use]
    pub fn scale(&self, count: usize) -> f64 {
        match self.combine {
            Combine::Mean => 1.0 / count as f64,
            Combine::Sum => 1.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASYNCHRONOUS: Option<u64> = None;

    #[test]
    fn rules_that_cannot_be_used_or_not_together_are_refused_by_name() {
        let with = |change: fn(&mut Rules)| {
            let mut rules = Rules {
                workers: 3,
                ..Rules::default()
            };
            change(&mut rules);
            rules
        };
        for (rules, servers, refused) in [
            (with(|_| ()), 1, None),
            (with(|it| it.workers = 0), 1, Some("workers=0")),
            (with(|it| it.aggregate = 0), 1, Some("aggregate=0")),
            (with(|it| it.aggregate = 2), 1, Some("aggregate=2")),
            (
                with(|it| it.snapshot_every = 0),
                1,
                Some("snapshot_every=0"),
            ),
            (with(|it| it.snapshot_every = 1), 1, None),
            (with(|it| it.backup = 2), 1, None),
            (with(|it| it.backup = 3), 1, Some("backup=3")),
            (with(|it| it.backup = 4), 1, Some("backup=4")),
            (with(|it| it.replicas = 1), 2, None),
            (with(|it| it.replicas = 2), 2, Some("replicas=2")),
            (with(|it| it.replicas = 3), 2, Some("replicas=3")),
            (with(|it| it.late = Late::Compensate), 2, None),
        ] {
            let error = rules.check(servers).err().map(|error| error.to_string());
            let is_right = match (&error, refused) {
                (Some(error), Some(refused)) => error.contains(refused),
                (error, refused) => error.is_none() && refused.is_none(),
            };
            assert!(is_right, "{refused:?}: {error:?}");
        }
        let apart = |change: fn(&mut Rules)| {
            let mut rules = with(|it| it.staleness = ASYNCHRONOUS);
            change(&mut rules);
            rules.check(2).is_ok()
        };
        assert!(apart(|_| ()) && apart(|it| it.aggregate = 2) && !apart(|it| it.backup = 1));
        let copied = |late| {
            let mut rules = with(|it| it.replicas = 1);
            rules.late = late;
            rules.check(2).is_ok()
        };
        assert!(copied(Late::Weight) && copied(Late::Drop) && !copied(Late::Compensate));
    }

    #[test]
    fn what_rules_leave_open_follows_from_the_workers() {
        for (staleness, aggregate, late, queue_max, late_after) in [
            (Some(0), 1, Late::Drop, 6, 0),
            (Some(2), 1, Late::Drop, 6, 3),
            (Some(5), 4, Late::Drop, 8, 5),
            (ASYNCHRONOUS, 1, Late::Drop, 6, 3),
            (ASYNCHRONOUS, 1, Late::Weight, 6, 0),
        ] {
            let mut rules = Rules {
                workers: 3,
                staleness,
                aggregate,
                late,
                ..Rules::default()
            };
            assert_eq!(rules.queue_max(), queue_max);
            assert_eq!(rules.late_after(), late_after);
            rules.late_after = Some(7);
            rules.queue_max = Some(1);
            assert_eq!((rules.late_after(), rules.queue_max()), (7, aggregate));
        }
        let scale = |combine| {
            let rules = Rules {
                combine,
                ..Rules::default()
            };
            rules.scale(4)
        };
        assert_eq!((scale(Combine::Mean), scale(Combine::Sum)), (0.25, 1.0));
    }
}
