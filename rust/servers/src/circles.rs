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

use gradring_proto::parameters::queue::Waits;

/// Bytes received from awaited workers that show that a gradient is on its way; more than they send
/// to prove that they live.
const MOVED_BYTES: u64 = 64 << 10;

/// A model's workers.
#[derive(Debug, Clone, Default)]
pub(super) struct ModelWaits {
    pub(super) has_weights: bool,
    pub(super) waits: Waits,
    /// Time of each worker's last push.
    pub(super) pushed: BTreeMap<u32, Instant>,
    /// Bytes received from each worker.
    pub(super) received: BTreeMap<u32, u64>,
}

/// A model in which workers of a circle wait for others of it.
#[derive(Debug, PartialEq, Eq)]
struct Edge {
    awaited: BTreeSet<u32>,
    /// Time of the last push of an awaited worker.
    pushed: Option<Instant>,
    /// Bytes received from each awaited worker.
    received: BTreeMap<u32, u64>,
}

impl Edge {
    fn new(awaited: BTreeSet<u32>, model: &ModelWaits) -> Self {
        let of = |it: &u32| Some((*it, *model.received.get(it)?));
        Self {
            pushed: awaited
                .iter()
                .filter_map(|it| model.pushed.get(it))
                .max()
                .copied(),
            received: awaited.iter().filter_map(of).collect(),
            awaited,
        }
    }

    /// Returns whether nothing has come from the awaited workers since an earlier look.
    fn stands_still(&self, earlier: &Self) -> bool {
        let moved = |(worker, now): (&u32, &u64)| {
            let then = earlier.received.get(worker);
            then.is_none_or(|then| now.abs_diff(*then) >= MOVED_BYTES)
        };
        self.awaited == earlier.awaited
            && self.pushed == earlier.pushed
            && !self.received.iter().any(moved)
    }
}

/// The circle that was there when it was looked for last, and since when.
#[derive(Debug, Default)]
pub(super) struct Circles {
    last: Option<(Instant, BTreeMap<usize, Edge>)>,
}

impl Circles {
    /// Returns the model that must go on without some workers, and these workers, once nothing has
    /// changed for `patience`.
    pub(super) fn overdue(
        &mut self,
        models: &BTreeMap<usize, ModelWaits>,
        patience: Duration,
        now: Instant,
    ) -> Option<(usize, BTreeSet<u32>)> {
        let edge = |(number, awaited)| (number, Edge::new(awaited, &models[&number]));
        let found: BTreeMap<_, _> = circle(models).into_iter().map(edge).collect();
        if found.is_empty() {
            self.last = None;
            return None;
        }
        let stands_still = |earlier: &BTreeMap<usize, Edge>| {
            earlier.keys().eq(found.keys())
                && std::iter::zip(found.values(), earlier.values())
                    .all(|(edge, earlier)| edge.stands_still(earlier))
        };
        match &self.last {
            Some((since, earlier)) if stands_still(earlier) => {
                if now.saturating_duration_since(*since) < patience {
                    return None;
                }
            }
            _ => {
                self.last = Some((now, found));
                return None;
            }
        }
        self.last = None;
        // The awaited workers have left the model in which they pushed last. The others have yet to
        // come to it in the other models.
        let order =
            |(number, edge): &(usize, Edge)| (edge.pushed, models[number].has_weights, *number);
        let chosen = found.into_iter().max_by_key(order)?;
        Some((chosen.0, chosen.1.awaited))
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
            has_weights: true,
            waits: Waits {
                waiting: waiting.iter().copied().collect(),
                awaited: awaited.iter().copied().collect(),
            },
            received: awaited.iter().map(|it| (*it, received)).collect(),
            pushed: BTreeMap::new(),
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
    fn the_model_goes_on_in_which_its_awaited_workers_have_pushed_last() {
        let all: &[(&[u32], &[u32])] = &[(&[0], &[1]), (&[1], &[0]), (&[0], &[2])];
        let now = Instant::now();
        let at = |seconds| now - Duration::from_secs(seconds);
        for (pushed, have_weights, expected) in [
            ([Some(at(5)), None], [true, false], 0),
            ([Some(at(5)), Some(at(9))], [true, true], 0),
            ([Some(at(9)), Some(at(5))], [true, true], 1),
            ([None, None], [true, false], 0),
            ([None, None], [true, true], 1),
            ([None, None], [false, false], 1),
        ] {
            let mut circles = Circles::default();
            let mut models = models(all, 0);
            for (number, model) in &mut models {
                let awaited = model.waits.awaited.iter().copied();
                // Worker 2, which is in no circle, has just pushed.
                let at = pushed.get(*number).map_or(Some(now), |it| *it);
                model.pushed = awaited.filter_map(|it| Some((it, at?))).collect();
                model.has_weights = have_weights.get(*number).is_none_or(|it| *it);
            }
            assert_eq!(circles.overdue(&models, PATIENCE, now), None);
            let found = circles.overdue(&models, PATIENCE, now + PATIENCE).unwrap();
            assert_eq!(found.0, expected, "{pushed:?} {have_weights:?}");
            assert_eq!(found.1, all[expected].1.iter().copied().collect());
        }
    }

    #[test]
    fn signs_of_life_of_many_workers_are_no_progress() {
        let many: Vec<u32> = (1..100).collect();
        let all: &[(&[u32], &[u32])] = &[(&[0], &many), (&many, &[0])];
        let mut circles = Circles::default();
        let now = Instant::now();
        assert_eq!(circles.overdue(&models(all, 0), PATIENCE, now), None);
        let found = circles.overdue(&models(all, 2 << 10), PATIENCE, now + PATIENCE);
        assert!(found.is_some());
    }

    #[test]
    fn workers_outside_of_a_circle_do_not_count_as_its_progress() {
        let circle: &[(&[u32], &[u32])] = &[(&[0], &[1]), (&[1], &[0])];
        let mut circles = Circles::default();
        let now = Instant::now();
        let mut all = models(circle, 0);
        assert_eq!(circles.overdue(&all, PATIENCE, now), None);
        for model in all.values_mut() {
            model.pushed.insert(2, now);
            model.received.insert(2, MOVED_BYTES);
        }
        let mut pushed = all.clone();
        assert!(circles.overdue(&all, PATIENCE, now + PATIENCE).is_some());
        assert_eq!(circles.overdue(&all, PATIENCE, now), None);
        pushed.get_mut(&0).unwrap().pushed.insert(1, now);
        assert_eq!(circles.overdue(&pushed, PATIENCE, now + PATIENCE), None);
    }

    #[test]
    fn a_circle_is_overdue_when_nothing_has_moved_for_a_while() {
        let all: &[(&[u32], &[u32])] = &[(&[0], &[1]), (&[1], &[0])];
        let mut circles = Circles::default();
        let mut now = Instant::now();
        let mut received = 0;
        assert_eq!(circles.overdue(&models(all, received), PATIENCE, now), None);
        for _ in 0..3 {
            now += PATIENCE;
            received += MOVED_BYTES;
            assert_eq!(circles.overdue(&models(all, received), PATIENCE, now), None);
        }
        now += PATIENCE;
        let found = circles.overdue(&models(all, received + 100), PATIENCE, now);
        assert_eq!(found, Some((1, [0].into())));
        now += PATIENCE;
        assert_eq!(circles.overdue(&models(all, received), PATIENCE, now), None);
    }
}
