//! A snapshot: the state of one copy of a shard at one point.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::identity::{Incarnation, Point};
use super::log::History;
use super::shard::Shard;

/// Everything about one copy of a shard at one point; disks and other servers receive it whole.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Term and version of the state.
    pub point: Point,
    /// Hash of the log up to this point.
    pub history: History,
    /// Incarnation and number of the last push in the log, by worker.
    pub applied: BTreeMap<u32, (Incarnation, u64)>,
    /// Weights and slots; `None` before the first entry.
    pub shard: Option<Shard>,
}

impl Snapshot {
    /// The state before the first entry.
    #[must_use]
    pub fn empty() -> Self {
        Self {
            point: Point::default(),
            history: History::default(),
            applied: BTreeMap::new(),
            shard: None,
        }
    }
}
