//! The log: one order of updates for all servers.

use std::hash::{DefaultHasher, Hash, Hasher};

use serde::{Deserialize, Serialize};

use super::identity::PushId;
use super::optimizer::Hyper;
use super::rules::Treatment;

/// Bound on the entries that some keeper has not applied. Further gradients wait in the queue.
pub(super) const IN_FLIGHT_MAX: usize = 4;

/// One gradient of an update.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Contribution {
    /// Identity of the gradient.
    pub id: PushId,
    /// Weight and correction of the gradient.
    pub treatment: Treatment,
}

/// One update. The first of a log brings the initial weights.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// The gradients, in the order in which they are summed from left to right.
    pub contributions: Vec<Contribution>,
    /// Factor of the sum.
    pub scale: f64,
    /// Learning rate and weight decay of the first contribution.
    pub hyper: Hyper,
}

/// Hash of all entries so far. Servers at one version with equal hashes had the same log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct History(pub u64);

impl History {
    /// The history with one more entry.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parameters::identity::Incarnation;

    #[test]
    fn histories_are_equal_for_equal_entries_in_the_same_order() {
        let entry = |worker, weight| {
            let id = PushId {
                worker,
                incarnation: Incarnation(1, 1),
                number: 1,
            };
            let treatment = Treatment {
                weight,
                compensation: None,
            };
            Entry {
                contributions: vec![Contribution { id, treatment }],
                scale: 1.0,
                hyper: Hyper {
                    learning_rate: 0.1,
                    weight_decay: 0.0,
                },
            }
        };
        let of = |entries: &[(u32, f64)]| {
            let entries = entries
                .iter()
                .map(|&(worker, weight)| entry(worker, weight));
            entries.fold(History::default(), |history, it| history.followed_by(&it))
        };
        assert_eq!(of(&[(1, 1.0), (2, 1.0)]), of(&[(1, 1.0), (2, 1.0)]));
        let others: [&[_]; 4] = [
            &[],
            &[(1, 1.0)],
            &[(2, 1.0), (1, 1.0)],
            &[(1, 1.0), (2, 0.5)],
        ];
        assert!(others.iter().all(|it| of(it) != of(&[(1, 1.0), (2, 1.0)])));
    }
}
