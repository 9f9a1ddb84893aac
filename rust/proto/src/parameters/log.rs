//! The order of updates, which is the same on all servers.

use std::hash::{DefaultHasher, Hash, Hasher};

use serde::{Deserialize, Serialize};

use super::identity::PushId;
use super::optimizer::Hyper;
use super::rules::Treatment;

/// Entries that not all have applied, at most. Gradients wait in the queue instead.
pub(super) const IN_FLIGHT_MAX: usize = 4;

/// One gradient of an update.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Contribution {
    /// Which.
    pub id: PushId,
    /// How it counts.
    pub treatment: Treatment,
}

/// One update. The first of a log brings the initial weights.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// In the order in which they are summed up, from left to right.
    pub contributions: Vec<Contribution>,
    /// By what the sum is multiplied.
    pub scale: f32,
    /// Of the first contribution.
    pub hyper: Hyper,
}

/// A number for all entries so far: servers at one version with the same number had the same log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct History(pub u64);

impl History {
    /// With one entry more.
    #[must_use]
    pub fn followed_by(self, entry: &Entry) -> Self {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        for Contribution { id, treatment } in &entry.contributions {
            (id, treatment.weight.to_bits()).hash(&mut hasher);
        }
        Self(hasher.finish())
    }
}
