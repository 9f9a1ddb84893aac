use super::*;
use crate::parameters::rules::Late;

const HYPER: Hyper = Hyper {
    learning_rate: 0.1,
    weight_decay: 0.0,
};

fn rules(staleness: Option<u64>) -> Rules {
    Rules {
        workers: 3,
        staleness,
        queue_max: Some(2),
        late: Late::Keep,
        ..Rules::default()
    }
}

/// Three members at version 1, all of which may compute.
fn queue(rules: Rules) -> Queue {
    let mut queue = Queue::new(rules, 1, &[]);
    for worker in 0..3 {
        assert_eq!(queue.join(worker, Incarnation(1, worker)), Some(0));
        assert_eq!(queue.go(worker), Some(0));
    }
    queue
}

fn push(queue: &mut Queue, worker: u32, base: Version) {
    let incarnation = queue.incarnation(worker).expect("it is a member");
    let number = queue.latest(worker) + 1;
    let id = PushId {
        worker,
        incarnation,
        number,
    };
    queue.submit(Pending {
        id,
        base,
        hyper: HYPER,
    });
}

fn waits_of(waiting: &[u32], awaited: &[u32]) -> Waits {
    Waits {
        waiting: waiting.iter().copied().collect(),
        awaited: awaited.iter().copied().collect(),
    }
}

/// Workers of the next update, with the factors of their gradients.
fn cut(queue: &mut Queue) -> Option<Vec<(u32, f64)>> {
    let entry = queue.cut()?;
    let parts = entry.contributions.iter();
    Some(
        parts
            .map(|it| (it.id.worker, it.treatment.weight))
            .collect(),
    )
}

#[test]
fn a_synchronous_update_has_all_workers_in_their_order_and_holds_each_back_until_then() {
    let mut queue = queue(rules(Some(0)));
    push(&mut queue, 2, 1);
    push(&mut queue, 0, 1);
    assert!(cut(&mut queue).is_none() && queue.go(2).is_none());
    push(&mut queue, 1, 1);
    let workers = cut(&mut queue).expect("all are there");
    assert_eq!(workers, [(0, 1.0), (1, 1.0), (2, 1.0)]);
    assert_eq!((queue.go(2), queue.version()), (Some(1), 2));
}

#[test]
fn a_lost_worker_is_not_waited_for_and_its_gradient_is_dropped() {
    let mut queue = queue(rules(Some(0)));
    for worker in 0..2 {
        push(&mut queue, worker, 1);
    }
    queue.remove(1);
    assert!(cut(&mut queue).is_none());
    queue.remove(2);
    assert_eq!(cut(&mut queue), Some(vec![(0, 1.0)]));
    assert_eq!((queue.counts().lost, queue.dropped(1)), (1, 1));
    assert_eq!(queue.join(1, Incarnation(1, 1)), None, "it has ended");
    assert_eq!(queue.join(1, Incarnation(1, 9)), Some(0));
}

#[test]
fn backups_let_the_others_go_on_and_a_straggler_counts_as_the_rule_says() {
    for (late, second) in [
        (Late::Weight, vec![(0, 1.0), (1, 1.0), (2, 0.5)]),
        (Late::Drop, vec![(0, 1.0), (1, 1.0)]),
    ] {
        let mut queue = queue(Rules {
            late,
            backup: 1,
            ..rules(Some(0))
        });
        push(&mut queue, 0, 1);
        push(&mut queue, 1, 1);
        assert_eq!(cut(&mut queue), Some(vec![(0, 1.0), (1, 1.0)]));
        push(&mut queue, 2, 1);
        assert!(cut(&mut queue).is_none());
        push(&mut queue, 0, 2);
        push(&mut queue, 1, 2);
        let late_ones = 3 - second.len() as u64;
        assert_eq!(cut(&mut queue), Some(second));
        assert_eq!(
            (queue.counts().late, queue.dropped(2)),
            (late_ones, late_ones)
        );
        assert_eq!(queue.counts().applied, 5 - late_ones);
    }
}

#[test]
fn a_fast_worker_is_held_back_at_the_bound() {
    let mut queue = queue(rules(Some(2)));
    for version in 1..=2 {
        push(&mut queue, 0, version);
        assert!(cut(&mut queue).is_some() && queue.go(0).is_some());
    }
    push(&mut queue, 0, 3);
    assert!(cut(&mut queue).is_some());
    assert!(queue.go(0).is_none(), "it is three ahead");
    push(&mut queue, 1, 1);
    assert!(cut(&mut queue).is_some() && queue.go(0).is_none());
    push(&mut queue, 2, 1);
    assert!(cut(&mut queue).is_some() && queue.go(0).is_some());
}

#[test]
fn one_that_comes_back_holds_nobody_up_for_what_it_has_missed() {
    let mut queue = queue(rules(Some(1)));
    for version in 1..=3 {
        for worker in 0..2 {
            push(&mut queue, worker, version);
        }
        queue.remove(2);
        while queue.cut().is_some() {}
    }
    assert_eq!(queue.join(2, Incarnation(2, 1)), Some(0));
    assert!((0..3).all(|worker| queue.go(worker).is_some()));
}

#[test]
fn an_update_is_the_mean_of_as_many_as_the_rule_says_or_of_all_there_can_be() {
    let mut queue = queue(Rules {
        aggregate: 2,
        ..rules(Some(1))
    });
    push(&mut queue, 0, 1);
    assert!(cut(&mut queue).is_none());
    push(&mut queue, 1, 1);
    assert_eq!(cut(&mut queue), Some(vec![(0, 1.0), (1, 1.0)]));
    push(&mut queue, 2, 2);
    queue.remove(0);
    queue.remove(1);
    assert!(cut(&mut queue).is_none(), "it may push another one");
    assert!(queue.go(2).is_some());
    push(&mut queue, 2, 2);
    assert_eq!(cut(&mut queue).map(|parts| parts.len()), Some(2));
}

#[test]
fn what_does_not_fit_waits_or_is_dropped() {
    for (overflow, left, by_worker) in [
        (Overflow::Wait, vec![0, 1, 2], [0, 0, 0]),
        (Overflow::DropOldest, vec![1, 2], [1, 0, 0]),
        (Overflow::DropNewest, vec![0, 1], [0, 0, 1]),
    ] {
        let mut queue = queue(Rules {
            overflow,
            ..rules(None)
        });
        for worker in 0..3 {
            push(&mut queue, worker, 1);
        }
        let (counts, dropped) = (queue.counts(), by_worker.iter().sum());
        assert_eq!(
            (queue.len(), counts.overflowed, counts.held),
            (2, dropped, 1 - dropped)
        );
        assert_eq!([0, 1, 2].map(|worker| queue.dropped(worker)), by_worker);
        assert_eq!(queue.go(2).is_some(), overflow != Overflow::Wait);
        let parts: Vec<_> = std::iter::from_fn(|| cut(&mut queue)).flatten().collect();
        let workers: Vec<_> = parts.into_iter().map(|(worker, _)| worker).collect();
        assert_eq!(workers, left);
        assert!(queue.go(2).is_some());
        assert_eq!(queue.counts().applied, left.len() as u64);
    }
}

#[test]
fn initial_weights_are_no_gradient_whatever_becomes_of_them() {
    let mut queue = Queue::new(rules(None), 0, &[]);
    for worker in 0..2 {
        assert_eq!(queue.join(worker, Incarnation(1, worker)), Some(0));
        push(&mut queue, worker, 0);
    }
    assert_eq!(cut(&mut queue), Some(vec![(0, 1.0)]));
    assert!(cut(&mut queue).is_none());
    let counts = queue.counts();
    assert_eq!((counts.applied, counts.late, counts.superfluous), (0, 0, 1));
    assert_eq!((queue.dropped(0), queue.dropped(1)), (0, 0));
    assert_eq!((queue.version(), queue.go(1)), (1, Some(1)));
}

#[test]
fn one_that_joins_again_under_its_name_keeps_its_count_and_submits_again_what_was_open() {
    let mut queue = queue(Rules {
        overflow: Overflow::DropNewest,
        ..rules(None)
    });
    for worker in [1, 0, 1] {
        push(&mut queue, worker, 1);
    }
    assert_eq!(queue.join(1, Incarnation(1, 1)), Some(0));
    assert_eq!((queue.dropped(1), queue.len()), (1, 1));
    assert_eq!(queue.join(1, Incarnation(1, 9)), Some(0));
    assert_eq!(queue.dropped(1), 0, "another process counts for itself");
}

#[test]
fn gradients_of_updates_are_counted_by_how_many_versions_they_are_late() {
    let mut initial = Queue::new(rules(None), 0, &[]);
    assert_eq!(initial.join(0, Incarnation(1, 0)), Some(0));
    push(&mut initial, 0, 0);
    assert!(cut(&mut initial).is_some() && initial.staleness().is_empty());
    let mut queue = queue(rules(None));
    for (worker, base) in [(0, 1), (1, 1), (2, 1), (0, 3)] {
        assert!(queue.is_empty());
        push(&mut queue, worker, base);
        assert!(!queue.is_empty() && cut(&mut queue).is_some());
    }
    assert_eq!(*queue.staleness(), [(0, 1), (1, 2), (2, 1)].into());
    // No server has these weights.
    push(&mut queue, 1, 9);
    assert_eq!((queue.counts().late, queue.is_empty()), (1, true));
}

#[test]
fn before_there_are_weights_the_first_member_goes_and_brings_them() {
    let mut queue = Queue::new(rules(None), 0, &[]);
    for worker in 0..2 {
        assert_eq!(queue.join(worker, Incarnation(1, 5)), Some(0));
    }
    assert_eq!(queue.join(0, Incarnation(1, 4)), None, "it was here before");
    assert_eq!((queue.go(1), queue.go(0)), (None, Some(0)));
    assert_eq!([0, 1].map(|it| queue.computes(it)), [true, false]);
    push(&mut queue, 0, 0);
    assert!(queue.go(0).is_none() && !queue.computes(0));
    // Initial weights are not counted as a lost gradient.
    queue.remove(0);
    assert_eq!((queue.counts().lost, queue.go(1)), (0, Some(0)));
}

#[test]
fn what_waits_for_room_goes_with_its_worker_and_no_other() {
    for (lost, left) in [(2, [0, 1]), (0, [1, 2])] {
        let mut queue = queue(rules(None));
        for worker in 0..3 {
            push(&mut queue, worker, 1);
        }
        queue.remove(lost);
        assert_eq!(queue.counts().lost, 1);
        let parts: Vec<_> = std::iter::from_fn(|| cut(&mut queue)).flatten().collect();
        let workers: Vec<_> = parts.into_iter().map(|(worker, _)| worker).collect();
        assert_eq!(workers, left);
    }
}

#[test]
fn an_update_without_a_worker_has_the_others_gradients_and_its_own_is_late_in_the_next() {
    let mut queue = queue(rules(Some(0)));
    assert_eq!(queue.waits().waiting, [].into());
    push(&mut queue, 0, 1);
    push(&mut queue, 2, 1);
    assert_eq!(cut(&mut queue), None);
    let waits = queue.waits();
    assert_eq!(waits, waits_of(&[0, 2], &[1]));
    queue.go_on_without(&waits.awaited);
    assert_eq!(cut(&mut queue), Some(vec![(0, 1.0), (2, 1.0)]));
    push(&mut queue, 1, 1);
    assert_eq!(cut(&mut queue), None);
    for worker in [0, 2] {
        assert!(queue.go(worker).is_some());
        push(&mut queue, worker, 2);
    }
    assert_eq!(cut(&mut queue), Some(vec![(0, 1.0), (1, 1.0), (2, 1.0)]));
    assert_eq!(queue.staleness(), &[(0, 4), (1, 1)].into());
}

#[test]
fn nobody_waits_for_a_worker_that_is_away_until_it_pushes_again() {
    for staleness in [0, 2] {
        let mut queue = queue(Rules {
            late: Late::Drop,
            ..rules(Some(staleness))
        });
        let steps = |queue: &mut Queue, workers: &[u32], count| {
            for _ in 0..count {
                let version = queue.version();
                for worker in workers {
                    assert!(queue.go(*worker).is_some(), "{staleness} {version}");
                    push(queue, *worker, version);
                }
                while cut(queue).is_some() {}
            }
        };
        steps(&mut queue, &[0, 1, 2], 3);
        // Worker 1 goes on with another model.
        assert!(queue.go(1).is_some());
        steps(&mut queue, &[0, 2], staleness + 1);
        assert_eq!(cut(&mut queue), None);
        let waits = queue.waits();
        assert_eq!(waits, waits_of(&[0, 2], &[1]));
        queue.go_on_without(&waits.awaited);
        while cut(&mut queue).is_some() {}
        steps(&mut queue, &[0, 2], 10);
        assert_eq!(queue.waits().awaited, [0, 2].into());
        // Its late gradient is dropped, and its next one counts.
        push(&mut queue, 1, 4);
        assert_eq!(cut(&mut queue), None);
        assert_eq!(queue.counts().late, 1);
        steps(&mut queue, &[0, 1, 2], 10);
        if staleness == 0 {
            assert!(queue.go(0).is_some());
            let version = queue.version();
            push(&mut queue, 0, version);
            assert_eq!(cut(&mut queue), None);
        }
    }
}

#[test]
fn an_update_waits_for_a_worker_that_nobody_was_told_to_go_on_without() {
    let mut queue = queue(rules(Some(0)));
    push(&mut queue, 0, 1);
    assert_eq!(queue.waits(), waits_of(&[0], &[1, 2]));
    queue.go_on_without(&[1].into());
    assert_eq!(cut(&mut queue), None);
    assert_eq!(queue.waits(), waits_of(&[0], &[2]));
    push(&mut queue, 2, 1);
    assert_eq!(cut(&mut queue), Some(vec![(0, 1.0), (2, 1.0)]));
}

#[test]
fn a_worker_whose_gradients_make_no_update_alone_is_awaited() {
    let mut queue = queue(Rules {
        aggregate: 2,
        ..rules(Some(1))
    });
    queue.remove(2);
    for _ in 0..2 {
        push(&mut queue, 0, 1);
        assert!(cut(&mut queue).is_none() || queue.go(0).is_none());
        queue.go(0);
    }
    // It makes its next step elsewhere.
    push(&mut queue, 1, 2);
    assert!(queue.go(1).is_some());
    assert_eq!(cut(&mut queue), None);
    assert_eq!(queue.waits(), waits_of(&[0], &[1]));
    queue.go_on_without(&[1].into());
    assert!(queue.go(0).is_some());
    push(&mut queue, 0, 2);
    assert_eq!(cut(&mut queue), Some(vec![(0, 1.0), (1, 1.0)]));
}

#[test]
fn a_worker_that_joins_while_the_others_are_away_counts_as_they_do() {
    let mut queue = queue(rules(Some(2)));
    queue.remove(2);
    for _ in 0..9 {
        for worker in [0, 1] {
            let version = queue.version();
            push(&mut queue, worker, version);
            assert!(cut(&mut queue).is_some());
            assert!(queue.go(worker).is_some());
        }
    }
    queue.go_on_without(&[0].into());
    queue.remove(1);
    assert!(queue.join(1, Incarnation(2, 0)).is_some());
    let version = queue.version();
    push(&mut queue, 0, version);
    assert!(cut(&mut queue).is_some());
    assert!(queue.go(0).is_some());
}
