//! Circles of workers: under a rule that bounds the staleness, one waits in a model for another,
//! which waits in another model for the first.
//!
//! Workers that use their optimizers in one order and have counted the same updates make no circle:
//! one that has reached a later push has made all earlier ones. A worker that starts again in the
//! middle of a job may, because it becomes a member of each model at another point of the others'
//! programs. Servers that were restored may, too, and so do workers of which one has ended its
//! training earlier and begins the next. Server 0 finds a circle, and lets the workers that wait in
//! one of its models go on. The awaited ones count there again from their next gradients on, which
//! may be late.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use gradring_proto::parameters::identity::Version;
use gradring_proto::parameters::queue::Waits;

/// Bytes received from awaited workers that show that a gradient is on its way; more than they send
/// to prove that they live.
const MOVED_BYTES: u64 = 64 << 10;

/// A model's workers at one version, and the bytes received from those that are awaited.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ModelWaits {
    pub(super) version: Version,
    pub(super) waits: Waits,
    pub(super) received: u64,
}

/// The circle that was there when it was looked for last, and since when.
#[derive(Debug, Default)]
pub(super) struct Circles {
    last: Option<(Instant, BTreeMap<usize, ModelWaits>)>,
}

impl Circles {
    /// Returns the model that must go on without some workers, and these workers, once nothing has
    /// changed for `patience`.
    pub(super) fn overdue(
        &mut self,
        models: BTreeMap<usize, ModelWaits>,
        patience: Duration,
        now: Instant,
    ) -> Option<(usize, BTreeSet<u32>)> {
        let found = circle(&models);
        if found.is_empty() {
            self.last = None;
            return None;
        }
        let is_same = |then: &BTreeMap<usize, ModelWaits>| {
            then.len() == models.len()
                && std::iter::zip(then, &models).all(|((one, then), (other, now))| {
                    one == other
                        && then.version == now.version
                        && then.waits == now.waits
                        && now.received.saturating_sub(then.received) < MOVED_BYTES
                })
        };
        match &self.last {
            Some((since, then)) if is_same(then) => {
                if now.saturating_duration_since(*since) < patience {
                    return None;
                }
            }
            _ => {
                self.last = Some((now, models));
                return None;
            }
        }
        self.last = None;
        // A model without weights is one of a later part of the program.
        let has_weights = |number: &usize| models[number].version > 0;
        found
            .into_iter()
            .max_by_key(|(number, _)| (has_weights(number), *number))
    }
}

/// Models in which workers of a circle wait for others of it, with the latter.
fn circle(models: &BTreeMap<usize, ModelWaits>) -> BTreeMap<usize, BTreeSet<u32>> {
    let waits = || models.values().map(|it| &it.waits);
    let mut stuck: BTreeSet<u32> = waits().flat_map(|it| &it.waiting).copied().collect();
    loop {
        // In a circle, each waits for one of it and is awaited by one of it.
        let meets = |those: &BTreeSet<u32>| those.iter().any(|it| stuck.contains(it));
        let is_in = |worker: &u32| {
            let mut all = waits();
            all.any(|it| it.waiting.contains(worker) && meets(&it.awaited))
                && waits().any(|it| it.awaited.contains(worker) && meets(&it.waiting))
        };
        let kept: BTreeSet<u32> = stuck.iter().copied().filter(is_in).collect();
        if kept.len() == stuck.len() {
            break;
        }
        stuck = kept;
    }
    let awaited = |(number, model): (&usize, &ModelWaits)| {
        let waits = &model.waits;
        let awaited: BTreeSet<_> = waits.awaited.intersection(&stuck).copied().collect();
        let is_of_it = !awaited.is_empty() && waits.waiting.iter().any(|it| stuck.contains(it));
        is_of_it.then_some((*number, awaited))
    };
    models.iter().filter_map(awaited).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);

    fn models(all: &[(&[u32], &[u32])], received: u64) -> BTreeMap<usize, ModelWaits> {
        let model = |(waiting, awaited): &(&[u32], &[u32])| ModelWaits {
            version: 3,
            waits: Waits {
                waiting: waiting.iter().copied().collect(),
                awaited: awaited.iter().copied().collect(),
            },
            received,
        };
        all.iter().map(model).enumerate().collect()
    }

    #[test]
    fn workers_that_wait_for_one_that_computes_are_no_circle() {
        for all in [
            &[(&[0, 1][..], &[2][..])][..],
            // Worker 0 is behind in both models, worker 1 in the second.
            &[(&[1, 2], &[0]), (&[2], &[0, 1])],
            &[(&[], &[]), (&[0], &[1])],
        ] {
            assert_eq!(circle(&models(all, 0)), BTreeMap::new(), "{all:?}");
        }
    }

    #[test]
    fn a_circle_of_two_or_three_is_found_without_those_who_wait_for_it() {
        let two = models(&[(&[0, 2], &[1]), (&[1], &[0, 2])], 0);
        let expected = [(0, [1].into()), (1, [0, 2].into())];
        assert_eq!(circle(&two), expected.into());
        let three = models(&[(&[0], &[1]), (&[1], &[2]), (&[2], &[0])], 0);
        assert_eq!(circle(&three).len(), 3);
        // Worker 3 waits for the circle, which does not wait for it.
        let outside = models(&[(&[0], &[1]), (&[1], &[0]), (&[3], &[0])], 0);
        assert_eq!(circle(&outside).into_keys().collect::<Vec<_>>(), [0, 1]);
    }

    #[test]
    fn a_model_that_has_weights_goes_on_first() {
        let all: &[(&[u32], &[u32])] = &[(&[0], &[1]), (&[1], &[0])];
        let now = Instant::now();
        for (versions, expected) in [([3, 0], 0), ([0, 3], 1), ([3, 3], 1), ([0, 0], 1)] {
            let mut circles = Circles::default();
            let mut models = models(all, 0);
            for (model, version) in models.values_mut().zip(versions) {
                model.version = version;
            }
            assert_eq!(circles.overdue(models.clone(), PATIENCE, now), None);
            let found = circles.overdue(models, PATIENCE, now + PATIENCE).unwrap();
            assert_eq!(found.0, expected, "{versions:?}");
        }
    }

    #[test]
    fn a_circle_is_overdue_when_nothing_has_moved_for_a_while() {
        let all: &[(&[u32], &[u32])] = &[(&[0], &[1]), (&[1], &[0])];
        let mut circles = Circles::default();
        let mut now = Instant::now();
        let mut received = 0;
        assert_eq!(circles.overdue(models(all, received), PATIENCE, now), None);
        for _ in 0..3 {
            now += PATIENCE;
            received += MOVED_BYTES;
            assert_eq!(circles.overdue(models(all, received), PATIENCE, now), None);
        }
        now += PATIENCE;
        let found = circles.overdue(models(all, received + 100), PATIENCE, now);
        assert_eq!(found, Some((1, [0].into())));
        now += PATIENCE;
        assert_eq!(circles.overdue(models(all, received), PATIENCE, now), None);
    }
}
