//! Pulls of rows: a server remembers which rows its last updates changed, and a worker puts these
//! rows into the weights that it pulled before.
//!
//! Nothing is remembered across a start of a term: the first pull after it is whole. A worker keeps
//! only parts that have changed by rows, so other parts need no memory here.

use std::collections::VecDeque;
use std::iter::zip;
use std::mem;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::float::typed;
use super::floats::Float;
use super::floats::Floats;
use super::identity::Version;
use super::shard::{Change, Shard, Weights};

/// Bound on the updates of a part that are remembered. Their rows are bounded by those of the part.
const UPDATES_MAX: usize = 1024;

/// Identity of weights that a worker keeps of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// Round of the start with which the server began its term. It is random, so servers that have
    /// forgotten everything and count terms anew do not take other weights for these.
    pub start: u64,
    /// Version of the weights.
    pub version: Version,
}

/// Weights of a part in the answer to a pull.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum PulledPart {
    /// All weights.
    All(Weights),
    /// All weights, which the worker keeps, because the next pull may bring only rows.
    Keep(Weights),
    /// The rows that have changed since the weights that the worker keeps.
    Rows {
        /// Indices of the rows, unique and ascending. They travel behind the head of a message, as
        /// floats do.
        #[serde(skip)]
        rows: Vec<u32>,
        /// Elements of these rows.
        values: Floats,
    },
}

/// Changed rows of the last updates, by part; `None` for a part whose pulls are whole.
#[derive(Debug, Default)]
pub(super) struct Changes(Vec<Option<PartChanges>>);

#[derive(Debug)]
struct PartChanges {
    /// All updates after this version are remembered.
    since: Version,
    /// Version and rows of each update.
    updates: VecDeque<(Version, Vec<u32>)>,
    /// Number of rows in all updates, with repetitions.
    count: usize,
}

impl Changes {
    /// Records the update that led to a version.
    pub(super) fn record(&mut self, version: Version, shard: &Shard, changes: Vec<Change>) {
        self.0.resize_with(changes.len(), || None);
        for (index, (part, change)) in zip(&mut self.0, changes).enumerate() {
            match change {
                Change::Nothing => {}
                Change::All => *part = None,
                Change::Rows(rows) => match part {
                    Some(part) => part.record(version, rows, shard.rows(index)),
                    None => *part = Some(PartChanges::since(version)),
                },
            }
        }
    }

    /// The answer to a pull of a worker that keeps the weights of version `kept`.
    pub(super) fn pulled(&self, shard: &Shard, kept: Option<Version>) -> Vec<PulledPart> {
        let pulled = |(index, weights): (usize, Weights)| {
            let Some(part) = self.0.get(index).and_then(Option::as_ref) else {
                return PulledPart::All(weights);
            };
            let rows = kept.and_then(|kept| part.changed_after(kept));
            match rows.filter(|rows| !shard.are_long(index, rows.len())) {
                Some(rows) => PulledPart::Rows {
                    values: shard.values_of(index, &rows),
                    rows,
                },
                None => PulledPart::Keep(weights),
            }
        };
        let all = shard.weights().into_iter().enumerate();
        all.map(pulled).collect()
    }
}

impl PartChanges {
    const fn since(version: Version) -> Self {
        Self {
            since: version,
            updates: VecDeque::new(),
            count: 0,
        }
    }

    fn record(&mut self, version: Version, rows: Vec<u32>, count_max: usize) {
        self.count += rows.len();
        self.updates.push_back((version, rows));
        while (self.count > count_max || self.updates.len() > UPDATES_MAX)
            && let Some((version, rows)) = self.updates.pop_front()
        {
            self.count -= rows.len();
            self.since = version;
        }
    }

    /// Rows that updates after a version have changed; `None` if not all of these are remembered.
    fn changed_after(&self, version: Version) -> Option<Vec<u32>> {
        if version < self.since {
            return None;
        }
        let first = self.updates.partition_point(|(it, _)| *it <= version);
        let updates = self.updates.range(first..);
        let rows: Vec<_> = updates.map(|(_, rows)| &rows[..]).collect();
        let mut rows = rows.concat();
        // The stable sort merges what is sorted already.
        rows.sort();
        rows.dedup();
        Some(rows)
    }
}

impl PulledPart {
    /// Returns whether rows are ascending, and have equally many values.
    #[must_use]
    pub fn fits_itself(&self) -> bool {
        match self {
            Self::All(_) | Self::Keep(_) => true,
            Self::Rows { rows, values } => {
                let width = values.len().checked_div(rows.len()).unwrap_or(0);
                rows.is_sorted_by(|one, next| one < next) && values.len() == rows.len() * width
            }
        }
    }

    /// Returns whether the rows can be put into weights that the worker keeps.
    fn fits(&self, kept: Option<&Weights>) -> bool {
        let Self::Rows { rows, values } = self else {
            return true;
        };
        let (Some(kept), true) = (kept, self.fits_itself()) else {
            return false;
        };
        if kept.float_type() != values.float_type() {
            return false;
        }
        let width = values.len().checked_div(rows.len()).unwrap_or(0);
        let is_inside = |last: &u32| (*last as usize + 1) * width <= kept.len();
        rows.last()
            .is_none_or(|last| width > 0 && kept.len().is_multiple_of(width) && is_inside(last))
    }
}

/// The weights of one server that a worker keeps.
#[derive(Debug, Default)]
pub(super) struct KeptWeights {
    /// Identity of the weights; `None` if nothing is kept.
    kept: Option<Kept>,
    /// Weights by part; `None` for a part whose pulls are whole.
    parts: Vec<Option<Weights>>,
    /// Rows that have changed since `take_changed`, by part.
    changed: Vec<ChangedRows>,
}

/// Rows of a part that have changed since the program took weights, unique and ascending; `None` if
/// any weight may have changed.
pub type ChangedRows = Option<Vec<u32>>;

impl KeptWeights {
    /// Returns the rows that have changed since the last call, by part.
    pub(super) fn take_changed(&mut self) -> Vec<ChangedRows> {
        let nothing = vec![Some(Vec::new()); self.changed.len()];
        let mut changed = mem::replace(&mut self.changed, nothing);
        for rows in changed.iter_mut().flatten() {
            rows.sort();
            rows.dedup();
        }
        changed
    }

    pub(super) const fn kept(&self) -> Option<Kept> {
        self.kept
    }

    /// Takes the weights of a pull, and returns all of them. Forgets everything and returns `None`
    /// if rows are of other weights than those that are kept.
    pub(super) fn take(
        &mut self,
        base: Option<Kept>,
        now: Kept,
        pulled: Vec<PulledPart>,
    ) -> Option<Vec<Weights>> {
        let mut before = mem::take(self);
        before.changed.resize(pulled.len(), None);
        if before.kept != base || base.is_none() {
            before.parts.clear();
        }
        before.parts.resize(pulled.len(), None);
        if !zip(&pulled, &before.parts).all(|(part, kept)| part.fits(kept.as_ref())) {
            return None;
        }
        let mut all = Vec::new();
        for ((part, kept), mut changed) in zip(zip(pulled, before.parts), before.changed) {
            let (weights, keeps) = match (part, kept) {
                (PulledPart::Rows { rows, values }, Some(mut kept)) => {
                    put_rows(&mut kept, &rows, &values);
                    if let Some(changed) = &mut changed {
                        changed.extend_from_slice(&rows);
                    }
                    self.changed.push(changed);
                    (kept, true)
                }
                (PulledPart::Rows { .. }, None) => return None,
                (PulledPart::Keep(weights), _) => {
                    self.changed.push(None);
                    (weights, true)
                }
                (PulledPart::All(weights), _) => {
                    self.changed.push(None);
                    (weights, false)
                }
            };
            self.parts.push(keeps.then(|| weights.clone()));
            all.push(weights);
        }
        self.kept = self.parts.iter().any(Option::is_some).then_some(now);
        Some(all)
    }
}

/// Copies rows into weights; also copies the weights if the program still reads them.
fn put_rows(weights: &mut Weights, rows: &[u32], values: &Floats) {
    fn put<T: Float>(weights: &mut [T], rows: &[u32], values: &[T]) {
        let width = values.len() / rows.len();
        for (&row, values) in zip(rows, values.chunks_exact(width)) {
            weights[row as usize * width..][..width].copy_from_slice(values);
        }
    }
    if !values.is_empty() {
        let weights = Arc::make_mut(weights);
        typed!(values.float_type(), T => put::<T>(weights.of_mut::<T>(), rows, values.of::<T>()));
    }
}

#[cfg(test)]
mod tests;
