use std::time::Duration;

use super::*;
use crate::parameters::changes::PulledPart;

const AGAIN: Duration = Duration::from_secs(1);
const ME: u32 = 3;
const INCARNATION: Incarnation = Incarnation(2, 5);

fn worker(servers: usize) -> (Worker, Instant) {
    let now = Instant::now();
    let timing = Timing {
        again: AGAIN,
        silence: AGAIN,
        start: AGAIN,
        snapshot_every: 1,
    };
    (Worker::new(ME, servers, timing, 7, now), now)
}

/// Requests that the worker sends now, by keeper.
fn asks(worker: &mut Worker, now: Instant) -> Vec<(usize, String)> {
    worker.say_again(now);
    let term = worker.term();
    let text = |(keeper, request): (usize, WorkerRequest)| {
        assert_eq!((request.term, request.worker), (term, ME));
        let text = match request.ask {
            Ask::Join { claim: None, .. } => "join".into(),
            Ask::Join { .. } => "join again".into(),
            Ask::Submit { id, base, .. } => format!("submit {} of {base}", id.number),
            Ask::Pull { at_least, .. } => format!("pull {at_least}"),
            Ask::Alive(incarnation) => format!("alive {}", incarnation.1),
            Ask::Leave(incarnation) => format!("leave {}", incarnation.1),
            Ask::Stage {
                id, base, piece, ..
            } if piece == Piece::WHOLE => format!("stage {} of {base}", id.number),
            Ask::Stage {
                id, base, piece, ..
            } => format!("stage {}.{} of {base}", id.number, piece.index),
        };
        (keeper, text)
    };
    worker.step(now).into_iter().map(text).collect()
}

fn expected(requests: &[(usize, &str)]) -> Vec<(usize, String)> {
    let owned = |&(keeper, text): &(usize, &str)| (keeper, text.to_owned());
    requests.iter().map(owned).collect()
}

fn terms(starts: &[(Term, Version)]) -> Terms {
    let next = |terms: Terms, &(term, version): &(Term, Version)| terms.followed_by(term, version);
    starts.iter().fold(Terms::NONE, next)
}

fn joined(worker: &Worker, latest: u64) -> Reply {
    Reply::Joined {
        term: worker.term(),
        nonce: worker.random,
        incarnation: INCARNATION,
        latest,
        replicas: 5,
    }
}

fn go(number: u64, version: Version, settled: u64, dropped: u64) -> Reply {
    Reply::Go {
        term: 2,
        incarnation: INCARNATION,
        number,
        version,
        settled,
        dropped,
    }
}

fn weights(round: u64, point: Point) -> Reply {
    Reply::Weights {
        round,
        point,
        start: 0,
        base: None,
        parts: vec![],
    }
}

fn push(worker: &mut Worker) -> Option<PushId> {
    let payload = Arc::new(Payload::Gradients(vec![]));
    let hyper = Hyper {
        learning_rate: 0.1,
        weight_decay: 0.0,
    };
    worker.push(vec![payload; 2], hyper)
}

fn id(number: u64) -> PushId {
    PushId {
        worker: ME,
        incarnation: INCARNATION,
        number,
    }
}

/// A worker of two servers in term 2 that may compute with weights of this version; 0 means none.
fn computing(version: Version) -> (Worker, Instant) {
    let (mut worker, now) = worker(2);
    worker.receive(0, Reply::OtherTerm(terms(&[(2, 0)])), now);
    worker.receive(0, joined(&worker, 0), now);
    worker.receive(0, go(0, version, 0, 0), now);
    if version > 0 {
        for server in 0..2 {
            let point = Point { term: 2, version };
            worker.receive(server, weights(worker.round, point), now);
        }
    }
    assert!(worker.event().is_some());
    (worker, now)
}

#[test]
fn what_is_unanswered_is_said_again_after_a_while() {
    let (mut worker, now) = worker(1);
    let ms = Duration::from_millis(1);
    for (at, says) in [
        (now, true),
        (now, false),
        (now + AGAIN - ms, false),
        (now + AGAIN, true),
        (now + AGAIN + ms, false),
    ] {
        assert_eq!(!worker.step(at).is_empty(), says);
    }
    assert_eq!(worker.wake(), now + 2 * AGAIN);
    worker.say_again(now + AGAIN + ms);
    assert!(!worker.step(now + AGAIN + ms).is_empty());
}

#[test]
fn a_worker_joins_brings_weights_pulls_and_pushes_and_hears_no_answer_to_another_question() {
    let (mut worker, now) = worker(2);
    assert_eq!(asks(&mut worker, now), expected(&[(0, "join")]));
    let first = worker.random;
    worker.receive(0, Reply::OtherTerm(terms(&[(2, 0)])), now);
    assert_eq!((worker.term(), worker.random == first), (2, false));
    let second = worker.random;
    for known in [1, 2] {
        worker.receive(0, Reply::OtherTerm(terms(&[(known, 0)])), now);
        assert_eq!((worker.term(), worker.random), (2, second));
    }
    let other = |term, nonce| Reply::Joined {
        term,
        nonce,
        incarnation: Incarnation(9, 9),
        latest: 0,
        replicas: 0,
    };
    for (term, nonce) in [(1, second), (3, second), (2, first)] {
        worker.receive(0, other(term, nonce), now);
        assert_eq!(asks(&mut worker, now), expected(&[(0, "join")]));
    }
    worker.receive(0, joined(&worker, 0), now);
    assert_eq!(worker.keepers().replicas, 1);
    assert_eq!(asks(&mut worker, now), expected(&[(0, "join again")]));
    assert!(!worker.has_gone_on() && !worker.computes());
    assert!(push(&mut worker).is_none());

    worker.receive(0, go(0, 0, 0, 0), now);
    assert!(worker.has_gone_on() && worker.computes() && worker.has_event());
    assert!(matches!(worker.event(), Some(Event::WantsInitial)));
    assert!(!worker.has_event() && worker.event().is_none());
    assert_eq!(push(&mut worker), Some(id(1)));
    assert!(!worker.has_gone_on() && !worker.computes());
    assert_eq!(worker.unsettled(), 1);

    let stage = "stage 1 of 0";
    let alive = (0, "alive 5");
    let staging = [(0, stage), (1, stage), (2, stage), (3, stage), alive];
    assert_eq!(asks(&mut worker, now), expected(&staging));
    for (keeper, reply) in [
        (0, Reply::Staged(1, id(1), 0)),
        (0, Reply::Staged(2, id(2), 0)),
        (0, Reply::Staged(2, PushId { worker: 4, ..id(1) }, 0)),
        (0, Reply::Staged(2, id(1), 1)),
        (4, Reply::Staged(2, id(1), 0)),
    ] {
        worker.receive(keeper, reply, now);
        assert_eq!(asks(&mut worker, now), expected(&staging));
    }
    for keeper in 0..4 {
        worker.receive(keeper, Reply::Staged(2, id(1), 0), now);
        let left = match keeper {
            3 => expected(&[(0, "submit 1 of 0")]),
            _ => expected(&staging[keeper + 1..]),
        };
        assert_eq!(asks(&mut worker, now), left);
    }

    for (term, incarnation, number) in [
        (1, INCARNATION, 1),
        (2, Incarnation(2, 4), 1),
        (2, INCARNATION, 0),
    ] {
        let (version, settled, dropped) = (1, 0, 0);
        let reply = Reply::Go {
            term,
            incarnation,
            number,
            version,
            settled,
            dropped,
        };
        worker.receive(0, reply, now);
        assert_eq!(asks(&mut worker, now), expected(&[(0, "submit 1 of 0")]));
    }
    worker.receive(0, go(1, 1, 0, 0), now);
    assert!(worker.has_gone_on() && !worker.has_event());
    assert_eq!(worker.unsettled(), 1);
    let pulling = [(0, "pull 1"), (1, "pull 1"), alive];
    assert_eq!(asks(&mut worker, now), expected(&pulling));
    let (round, version, term) = (worker.round, 1, 2);
    let point = Point { term, version };
    for (server, round) in [(0, round - 1), (0, round + 1), (2, round)] {
        worker.receive(server, weights(round, point), now);
        assert_eq!(asks(&mut worker, now), expected(&pulling));
    }
    worker.receive(0, weights(round, point), now);
    assert_eq!(asks(&mut worker, now), expected(&pulling[1..]));
    worker.receive(1, weights(round, point), now);
    assert_eq!(asks(&mut worker, now), expected(&[alive]));
    assert!(matches!(worker.event(), Some(Event::Weights(all)) if all.len() == 2));
    worker.receive(0, go(1, 1, 1, 0), now);
    assert_eq!(worker.unsettled(), 0);
    assert_eq!(push(&mut worker), Some(id(2)));
    assert_eq!(asks(&mut worker, now)[0], (0, "stage 2 of 1".to_owned()));
    let leave = worker.leave();
    assert!(matches!(leave.ask, Ask::Leave(INCARNATION)) && leave.term == 2);
}

#[test]
fn after_it_has_joined_again_a_worker_stages_what_is_not_over() {
    for (latest, next) in [(0, "stage 1 of 4"), (1, "join again")] {
        let (mut worker, now) = computing(4);
        push(&mut worker);
        worker.receive(0, Reply::OtherTerm(terms(&[(2, 0), (3, 4)])), now);
        worker.receive(0, joined(&worker, latest), now);
        assert_eq!(asks(&mut worker, now)[0], (0, next.to_owned()));
        assert_eq!(worker.unsettled() as u64, 1 - latest);
    }
}

#[test]
fn gradients_of_weights_that_were_given_up_are_dropped_and_counted_once() {
    let (mut worker, now) = computing(5);
    push(&mut worker);
    worker.receive(0, go(0, 5, 0, 2), now);
    // An older reply may arrive later.
    worker.receive(0, go(0, 5, 0, 1), now);
    assert_eq!((worker.unsettled(), worker.dropped()), (1, 2));
    worker.receive(0, Reply::OtherTerm(terms(&[(2, 0), (3, 5)])), now);
    assert_eq!((worker.unsettled(), worker.dropped()), (1, 2));
    worker.receive(0, Reply::OtherTerm(terms(&[(2, 0), (4, 4)])), now);
    assert_eq!((worker.unsettled(), worker.dropped()), (0, 3));
    worker.receive(0, joined(&worker, 0), now);
    let (term, incarnation, number, version) = (4, INCARNATION, 0, 4);
    let reply = Reply::Go {
        term,
        incarnation,
        number,
        version,
        settled: 0,
        dropped: 4,
    };
    worker.receive(0, reply, now);
    assert_eq!(worker.dropped(), 7);
    worker.receive(0, Reply::OtherTerm(terms(&[(5, 0)])), now);
    assert_eq!(worker.dropped(), 7);
}

#[test]
fn who_is_no_member_any_more_drops_all_that_it_keeps_and_begins_anew() {
    // Initial weights are not counted as a gradient.
    for (version, dropped) in [(0, 0), (5, 1)] {
        let (mut worker, now) = computing(version);
        push(&mut worker);
        for (term, incarnation) in [(1, INCARNATION), (2, Incarnation(2, 4))] {
            worker.receive(0, Reply::NotMember(term, incarnation), now);
            assert_eq!(worker.unsettled(), 1);
        }
        worker.receive(0, Reply::NotMember(2, INCARNATION), now);
        assert_eq!((worker.unsettled(), worker.dropped()), (0, dropped));
        assert_eq!(asks(&mut worker, now), expected(&[(0, "join")]));
        worker.receive(0, joined(&worker, 0), now);
        worker.receive(0, go(0, 0, 0, 0), now);
        assert_eq!(push(&mut worker), Some(id(1)));
    }
}

#[test]
fn a_worker_that_has_left_keeps_nothing() {
    let (mut worker, now) = computing(5);
    push(&mut worker);
    let left = |term, incarnation| Reply::Left {
        term,
        incarnation,
        dropped: 6,
    };
    for (term, incarnation, kept, dropped) in [
        (1, INCARNATION, 1, 0),
        (2, Incarnation(2, 4), 1, 0),
        (2, INCARNATION, 0, 6),
    ] {
        worker.receive(0, left(term, incarnation), now);
        assert_eq!((worker.unsettled(), worker.dropped()), (kept, dropped));
    }
}

#[test]
fn what_is_pushed_while_it_waits_is_staged_before_it_goes_on() {
    let (mut worker, now) = computing(5);
    push(&mut worker);
    for keeper in 0..4 {
        worker.receive(keeper, Reply::Staged(2, id(1), 0), now);
    }
    // The program's weights are still in the servers' past.
    worker.base = Some(vec![
        Point {
            term: 2,
            version: 5
        };
        2
    ]);
    assert_eq!(push(&mut worker), Some(id(2)));
    assert_eq!(asks(&mut worker, now), expected(&[(0, "submit 1 of 5")]));
    worker.receive(0, go(1, 6, 0, 0), now);
    assert_eq!(asks(&mut worker, now)[0], (0, "stage 2 of 5".to_owned()));
}

const HYPER: Hyper = Hyper {
    learning_rate: 0.1,
    weight_decay: 0.0,
};

fn piece() -> Vec<Arc<Payload>> {
    let payload = Arc::new(Payload::Gradients(vec![]));
    vec![payload; 2]
}

#[test]
fn pieces_leave_before_the_gradient_is_complete_and_all_are_staged_before_it_is_submitted() {
    let (mut worker, now) = computing(5);
    let alive = (0, "alive 5");
    assert_eq!(worker.open(2), Some(id(1)));
    assert!(worker.is_open() && !worker.computes() && !worker.has_gone_on());
    assert_eq!(asks(&mut worker, now), expected(&[alive]));
    worker.put(id(2), 1, piece());
    assert_eq!(asks(&mut worker, now), expected(&[alive]));
    worker.put(id(1), 1, piece());
    let second = [0, 1, 2, 3].map(|keeper| (keeper, "stage 1.1 of 5"));
    let staging = [&second[..], &[alive]].concat();
    assert_eq!(asks(&mut worker, now), expected(&staging));
    for keeper in 0..4 {
        worker.receive(keeper, Reply::Staged(2, id(1), 1), now);
    }
    worker.put(id(1), 0, piece());
    for keeper in 0..4 {
        worker.receive(keeper, Reply::Staged(2, id(1), 0), now);
    }
    // The program may still be computing.
    assert_eq!(asks(&mut worker, now), expected(&[alive]));
    assert!(!worker.close(id(2), HYPER) && worker.close(id(1), HYPER));
    assert!(!worker.is_open() && !worker.close(id(1), HYPER));
    assert_eq!(asks(&mut worker, now), expected(&[(0, "submit 1 of 5")]));
}

#[test]
fn another_gradient_may_follow_an_abandoned_one_and_counts_with_the_same_weights() {
    let (mut worker, now) = computing(5);
    assert_eq!(worker.open(2), Some(id(1)));
    worker.put(id(1), 0, piece());
    assert_eq!(worker.open(1), Some(id(2)));
    assert_eq!((worker.unsettled(), worker.dropped()), (1, 0));
    worker.put(id(1), 0, piece());
    assert!(!worker.close(id(1), HYPER));
    worker.put(id(2), 0, piece());
    assert_eq!(asks(&mut worker, now)[0], (0, "stage 2 of 5".to_owned()));
    worker.abandon();
    assert!(worker.computes() && worker.has_gone_on());
    assert_eq!(push(&mut worker), Some(id(3)));
    worker.abandon();
    assert_eq!(worker.unsettled(), 1);
}

#[test]
fn an_open_gradient_does_not_count_once_its_weights_are_gone() {
    let (mut worker, now) = computing(5);
    worker.open(1);
    worker.receive(0, Reply::OtherTerm(terms(&[(2, 0), (4, 5)])), now);
    assert!(worker.is_open());
    worker.receive(0, Reply::OtherTerm(terms(&[(2, 0), (6, 4)])), now);
    assert_eq!((worker.is_open(), worker.dropped()), (false, 0));
    assert!(!worker.close(id(1), HYPER) && worker.open(1).is_none());

    // One server has gone on, which the others have not.
    let (mut worker, now) = computing(5);
    let points = [5, 7].map(|version| Point { term: 2, version });
    worker.base = Some(points.to_vec());
    worker.open(1);
    worker.receive(0, Reply::OtherTerm(terms(&[(2, 0), (4, 6)])), now);
    worker.receive(0, joined(&worker, 0), now);
    assert!(worker.is_open());
    worker.abandon();
    assert!(!worker.computes());
    assert_eq!(asks(&mut worker, now), expected(&[(0, "join again")]));
}

/// Rounds and kept weights of the pulls that the worker sends now, by server.
fn pulls(worker: &mut Worker, now: Instant) -> Vec<(usize, u64, Option<Kept>)> {
    worker.say_again(now);
    let requests = worker.step(now).into_iter();
    let pulls = requests.filter_map(|(server, request)| match request.ask {
        Ask::Pull { round, kept, .. } => Some((server, round, kept)),
        _ => None,
    });
    pulls.collect()
}

fn answer(round: u64, version: Version, base: Option<Kept>, part: PulledPart) -> Reply {
    Reply::Weights {
        round,
        point: Point { term: 2, version },
        start: 9,
        base,
        parts: vec![part],
    }
}

/// A worker of two servers that has computed with version 5, keeps the weights of the first server,
/// and pulls again.
fn pulling() -> (Worker, Instant) {
    let (mut worker, now) = computing(0);
    push(&mut worker);
    for (number, version) in [(1, 5), (2, 6)] {
        for keeper in 0..4 {
            worker.receive(keeper, Reply::Staged(2, id(number), 0), now);
        }
        worker.receive(0, go(number, version, number, 0), now);
        if number == 1 {
            let weights: Weights = Arc::new(vec![1.0; 4].into());
            let keep = PulledPart::Keep(weights.clone());
            let round = worker.round;
            worker.receive(0, answer(round, 5, None, keep), now);
            worker.receive(1, answer(round, 5, None, PulledPart::All(weights)), now);
            assert!(worker.event().is_some());
            push(&mut worker);
        }
    }
    (worker, now)
}

#[test]
fn a_worker_says_which_weights_it_keeps_and_puts_rows_into_them_once() {
    let (mut worker, now) = pulling();
    let (start, round) = (9, worker.round);
    let kept = Kept { start, version: 5 };
    let asked = [(0, round, Some(kept)), (1, round, None)];
    assert_eq!(pulls(&mut worker, now), asked);
    let rows = |value| PulledPart::Rows {
        rows: vec![1],
        values: vec![value].into(),
    };
    // Answers to an earlier pull and repeated answers change nothing.
    worker.receive(0, answer(round - 1, 6, Some(kept), rows(7.0)), now);
    worker.receive(0, answer(round, 6, Some(kept), rows(2.0)), now);
    worker.receive(0, answer(round, 7, Some(kept), rows(8.0)), now);
    assert_eq!(pulls(&mut worker, now), asked[1..]);
    let second = PulledPart::All(Arc::new(vec![3.0].into()));
    worker.receive(1, answer(round, 6, None, second), now);
    let Some(Event::Weights(pulled)) = worker.event() else {
        panic!("all have answered");
    };
    let weights = pulled
        .iter()
        .map(|(point, parts)| (point.version, parts[0].of::<f32>().to_vec()));
    let expected = [(6, vec![1.0, 2.0, 1.0, 1.0]), (6, vec![3.0])];
    assert_eq!(weights.collect::<Vec<_>>(), expected);
    assert_eq!(worker.changed(), [[Some(vec![1])], [None]]);
}

#[test]
fn rows_of_pulls_that_a_program_did_not_take_come_with_the_next() {
    let (mut worker, now) = pulling();
    let pull = |worker: &mut Worker, version, row| {
        let kept = worker.kept[0].kept();
        let rows = PulledPart::Rows {
            rows: vec![row],
            values: vec![2.0].into(),
        };
        worker.receive(0, answer(worker.round, version, kept, rows), now);
    };
    let again = |worker: &mut Worker, version| {
        let second = PulledPart::All(Arc::new(vec![3.0].into()));
        worker.receive(1, answer(worker.round, version, None, second), now);
    };
    let next = |worker: &mut Worker, at_least| {
        let pulled = vec![None, None];
        worker.phase = WorkerPhase::Pulling { at_least, pulled };
    };
    // The first server has answered, and the worker pulls anew.
    pull(&mut worker, 6, 2);
    next(&mut worker, 7);
    pull(&mut worker, 7, 1);
    again(&mut worker, 7);
    assert!(worker.event().is_some());
    assert_eq!(worker.changed(), [[Some(vec![1, 2])], [None]]);
    // The program does not take the next event.
    for version in [8, 9] {
        next(&mut worker, version);
        pull(&mut worker, version, 0);
        again(&mut worker, version);
    }
    assert!(worker.event().is_some());
    assert_eq!(worker.changed(), Vec::<Vec<ChangedRows>>::new());
    // An event becomes invalid before the program takes it.
    next(&mut worker, 10);
    pull(&mut worker, 10, 0);
    again(&mut worker, 10);
    worker.base = None;
    worker.rejoin();
    next(&mut worker, 11);
    pull(&mut worker, 11, 3);
    again(&mut worker, 11);
    assert!(worker.event().is_some());
    assert_eq!(worker.changed(), Vec::<Vec<ChangedRows>>::new());
    next(&mut worker, 12);
    pull(&mut worker, 12, 3);
    again(&mut worker, 12);
    assert_eq!(worker.changed(), [[Some(vec![3])], [None]]);
}

#[test]
fn a_worker_that_gets_rows_of_other_weights_pulls_them_whole() {
    let (mut worker, now) = pulling();
    let round = worker.round;
    let other = Kept {
        start: 9,
        version: 4,
    };
    let rows = PulledPart::Rows {
        rows: vec![1],
        values: vec![2.0].into(),
    };
    let second = PulledPart::All(Arc::new(vec![3.0].into()));
    worker.receive(1, answer(round, 6, None, second), now);
    worker.receive(0, answer(round, 6, Some(other), rows), now);
    // A pull of the same round would not be sent again over the same connection.
    assert_eq!(pulls(&mut worker, now), [(0, round + 1, None)]);
    let whole = PulledPart::All(Arc::new(vec![4.0].into()));
    worker.receive(0, answer(round + 1, 6, None, whole), now);
    let Some(Event::Weights(pulled)) = worker.event() else {
        panic!("all have answered");
    };
    assert_eq!(
        (pulled[0].1[0].of::<f32>().to_vec(), pulled.len()),
        (vec![4.0], 2)
    );
}
