//! A snapshot: all that a server has at one point.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::identity::{Incarnation, Point};
use super::log::History;
use super::shard::Shard;

/// Everything about a copy of a shard at one point, as a disk or another server gets it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Which.
    pub point: Point,
    /// The log up to there.
    pub history: History,
    /// By worker, its last push in the log.
    pub applied: BTreeMap<u32, (Incarnation, u64)>,
    /// Nothing before the first entry.
    pub shard: Option<Shard>,
}

impl Snapshot {
    /// Before the first entry.
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
