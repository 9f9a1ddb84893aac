//! The rule of a parameter server as a program says it, and as `parameters` has it.

use crate::error::{Error, Result, Unusable};
use crate::parameters::identity::Version;
use crate::parameters::rules::{Late, Overflow, Rules};

/// A rule in words and numbers, of which not all can be used together.
#[derive(Debug, Clone)]
pub struct Rule {
    /// Workers at the start.
    pub workers: usize,
    /// 0 is synchronous, `None` asynchronous.
    pub staleness: Option<u64>,
    /// Gradients of one update, unless it is synchronous.
    pub aggregate: usize,
    /// `wait`, `drop_oldest` or `drop_newest`.
    pub overflow: String,
    /// `keep`, `weight`, `compensate` or `drop`.
    pub late: String,
    /// Workers without which a synchronous update goes on.
    pub backup: usize,
    /// `mean` or `sum`.
    pub combine: String,
    /// Bound on gradients that wait.
    pub queue: Option<usize>,
    /// How stale a gradient must be to be late, and more.
    pub late_after: Option<u64>,
    /// Strength of the correction of late gradients.
    pub compensation: f64,
    /// Updates between two snapshots.
    pub snapshot_every: Version,
    /// On how many servers each shard is, beside the first.
    pub replicas: usize,
}

impl Rule {
    /// The rule as so many servers apply it.
    ///
    /// # Errors
    /// `Config` for what cannot be used; names it.
    pub fn parse(&self, servers: usize) -> Result<Rules> {
        let at_least_one = "a whole number from 1 up";
        check(self.workers >= 1, "workers", self.workers, at_least_one)?;
        check(
            self.aggregate >= 1,
            "aggregate",
            self.aggregate,
            at_least_one,
        )?;
        check(
            self.snapshot_every >= 1,
            "snapshot_every",
            self.snapshot_every,
            at_least_one,
        )?;
        check(self.queue != Some(0), "queue", 0, at_least_one)?;
        let is_synchronous = self.staleness == Some(0);
        check(
            self.aggregate == 1 || !is_synchronous,
            "aggregate",
            self.aggregate,
            "1, as it must be with staleness=0, whose updates have a gradient of each worker",
        )?;
        check(
            self.backup == 0 || is_synchronous,
            "backup",
            self.backup,
            "0, as it must be without staleness=0: only then does an update wait for all workers",
        )?;
        check(
            self.backup < self.workers,
            "backup",
            self.backup,
            "less than the number of workers",
        )?;
        let strength = self.compensation;
        check(
            strength.is_finite() && strength >= 0.0,
            "compensation",
            strength,
            "a number from 0 up",
        )?;
        check(
            self.replicas < servers,
            "replicas",
            self.replicas,
            "less than the number of parameter servers: no two copies are on the same one",
        )?;
        check(
            self.replicas == 0 || !self.compensates(),
            "late",
            &self.late,
            "weight or drop, as it must be with replicas, which do not know what workers pulled",
        )?;
        let overflow = match self.overflow.as_str() {
            "wait" => Overflow::Wait,
            "drop_oldest" => Overflow::DropOldest,
            "drop_newest" => Overflow::DropNewest,
            other => return Err(wrong("overflow", other, "wait, drop_oldest or drop_newest")),
        };
        let late = match self.late.as_str() {
            "keep" => Late::Keep,
            "weight" => Late::Weight,
            "compensate" => Late::Compensate(strength as f32),
            "drop" => Late::Drop,
            other => return Err(wrong("late", other, "weight, compensate, drop or keep")),
        };
        let is_mean = match self.combine.as_str() {
            "mean" => true,
            "sum" => false,
            other => return Err(wrong("combine", other, "mean or sum")),
        };
        // Where workers do not wait for each other, nearly every gradient is a little stale.
        let usual = self.staleness.unwrap_or(0).max(self.workers as u64);
        let late_after = match (late, is_synchronous) {
            (Late::Drop, false) => usual,
            _ => 0,
        };
        Ok(Rules {
            workers: self.workers as u32,
            staleness: self.staleness,
            aggregate: self.aggregate,
            queue_max: self
                .queue
                .unwrap_or_else(|| 2 * self.aggregate.max(self.workers)),
            overflow,
            late,
            late_after: self.late_after.unwrap_or(late_after),
            backup: self.backup as u32,
            is_mean,
        })
    }

    /// Whether late gradients are corrected.
    #[must_use]
    pub fn compensates(&self) -> bool {
        self.late == "compensate"
    }

    /// Equal for servers with the same rule.
    pub(crate) fn text(&self) -> String {
        let or_none = |number: Option<u64>| number.map_or("None".into(), |it| it.to_string());
        format!(
            "workers={}, staleness={}, aggregate={}, overflow={}, late={}, backup={}, combine={}, \
             queue={}, late_after={}, compensation={}, snapshot_every={}, \
             replicas={}",
            self.workers,
            or_none(self.staleness),
            self.aggregate,
            self.overflow,
            self.late,
            self.backup,
            self.combine,
            or_none(self.queue.map(|it| it as u64)),
            or_none(self.late_after),
            self.compensation,
            self.snapshot_every,
            self.replicas
        )
    }
}

fn check(is_right: bool, name: &str, value: impl ToString, wanted: &str) -> Result<()> {
    if is_right {
        return Ok(());
    }
    Err(wrong(name, &value.to_string(), wanted))
}

fn wrong(name: &str, value: &str, wanted: &str) -> Error {
    let (name, value, wanted) = (name.into(), value.into(), wanted.into());
    Unusable::Value {
        name,
        value,
        wanted,
    }
    .into()
}
