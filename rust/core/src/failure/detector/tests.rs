use super::*;
use crate::observe::flight_recorder::FlightRecorder;
use gradring_proto::wire::gossip::Gossip;

const SECOND: Duration = Duration::from_secs(1);

/// The detector of one of four ranks.
fn detector(rank: usize, now: Instant) -> Detector {
    let hosts = vec![String::from("h"); 4];
    let journal = Journal::new(rank, hosts, Arc::<FlightRecorder>::default());
    let neighbours = [(rank + 1) % 4, (rank + 3) % 4];
    Detector::new(
        Arc::new(journal),
        Arc::default(),
        &neighbours,
        now,
        Timing::USUAL,
        |_| (),
    )
}

fn blamed(detector: &Detector) -> Option<usize> {
    detector.abort.cause()?.blamed.map(|blamed| blamed.rank)
}

fn questions(detector: &mut Detector) -> Vec<u64> {
    let messages = detector.take_messages();
    messages
        .filter_map(|(_, message)| match message {
            Message::Query { sequence } => Some(sequence),
            _ => None,
        })
        .collect()
}

#[test]
fn a_neighbour_is_lost_when_it_was_silent_for_too_long_and_not_before() {
    let start = Instant::now();
    let mut detector = detector(1, start);
    let silence = Timing::USUAL.silence;
    for beat in (1..).map(|beat| beat * Timing::USUAL.heartbeat) {
        if beat >= silence {
            break;
        }
        detector.sign_of_life(0, start + beat);
        detector.keep_time(start + beat);
        assert_eq!(blamed(&detector), None);
    }
    detector.keep_time(start + silence);
    assert_eq!(
        blamed(&detector),
        Some(0),
        "the predecessor has said nothing"
    );
}

#[test]
fn a_rank_that_was_stopped_blames_no_neighbour_for_the_time() {
    let start = Instant::now();
    let mut detector = detector(1, start);
    let resumed = start + 3 * Timing::USUAL.silence;
    for beat in (0..10).map(|beat| beat * Timing::USUAL.heartbeat) {
        detector.keep_time(resumed + beat);
        assert_eq!(blamed(&detector), None);
    }
    detector.keep_time(resumed + Timing::USUAL.silence);
    assert!(
        blamed(&detector).is_some(),
        "nobody has said anything since"
    );
}

#[test]
fn of_several_questions_the_one_about_the_earliest_position_is_answered() {
    let now = Instant::now();
    let mut detector = detector(0, now);
    for sequence in [5, 4, 7] {
        detector.receive(Message::Query { sequence }, 0, now);
    }
    assert_eq!(questions(&mut detector), [5, 4]);
    detector.keep_time(now + SECOND);
    let messages: Vec<_> = detector
        .take_messages()
        .map(|(_, message)| message)
        .collect();
    assert!(
        messages
            .iter()
            .any(|message| matches!(message, Message::Report(Report { sequence: 4, .. })))
    );
}

#[test]
fn what_was_suspected_elsewhere_does_not_mix_with_an_earlier_question() {
    let now = Instant::now();
    let mut detector = detector(0, now);
    detector.receive(Message::Query { sequence: 3 }, 0, now);
    let suspicion = Suspicion::HeadersDiffer {
        peer: 2,
        sequence: 4,
        theirs: "something else".into(),
        own: "this".into(),
    };
    detector.investigate(suspicion, now);
    for rank in 1..4 {
        let report = Report {
            rank,
            sequence: 3,
            entered: None,
            waits: None,
        };
        detector.receive(Message::Report(report), 0, now);
    }
    detector.keep_time(now + SECOND);
    let cause = detector.abort.cause().expect("all have spoken");
    assert_eq!(cause.kind.exception(), "CollectiveTimeoutError");
}

#[test]
fn of_two_ranks_that_lose_each_other_one_speaks_first() {
    let now = Instant::now();
    let (mut first, mut second) = (detector(1, now), detector(2, now));
    for (detector, peer) in [(&mut first, 2), (&mut second, 1)] {
        let broken = Broken::closed();
        detector.investigate(Suspicion::LinkBroken { peer, broken }, now);
        detector.keep_time(now + Timing::USUAL.link_grace);
    }
    assert_eq!((blamed(&first), blamed(&second)), (Some(2), None));
    second.keep_time(now + SECOND);
    assert_eq!(blamed(&second), Some(1));
}

#[test]
fn of_two_ranks_that_lose_each_other_the_one_that_noticed_first_speaks_first() {
    let now = Instant::now();
    let later = now + Timing::USUAL.link_grace / 2;
    let (mut first, mut second) = (detector(1, now), detector(2, now));
    let lost = |peer| Suspicion::LinkBroken {
        peer,
        broken: Broken::closed(),
    };
    second.investigate(lost(1), now);
    let news: Vec<_> = second.take_messages().map(|(_, message)| message).collect();
    for message in [&news[..], &news].concat() {
        first.receive(message, 0, now);
    }
    assert_eq!(
        first.take_messages().count(),
        1,
        "it passes news on, and once"
    );
    first.investigate(lost(2), later);
    for detector in [&mut first, &mut second] {
        detector.keep_time(later + Timing::USUAL.link_grace);
    }
    assert_eq!((blamed(&first), blamed(&second)), (None, Some(1)));
}

#[test]
fn what_is_said_of_ranks_that_do_not_exist_or_in_this_ranks_name_changes_nothing() {
    let now = Instant::now();
    let mut detector = detector(1, now);
    let gossip = |rank| {
        Message::Gossip(Gossip {
            rank,
            number: 1,
            collectives: 3,
            moves_in: None,
            late: Vec::new(),
            note: Vec::new(),
        })
    };
    let line = |rank| {
        let text = String::from("a line");
        Message::LogLine(LogLine {
            rank,
            number: 1,
            text,
        })
    };
    let broken = |rank, peer| Message::LinkBroken { rank, peer };
    let untrue = [
        gossip(1),
        gossip(4),
        line(1),
        line(4),
        broken(4, 0),
        broken(0, 4),
    ];
    for message in untrue {
        detector.receive(message, 0, now);
    }
    assert_eq!(detector.take_messages().count(), 0, "nobody is told of it");
    for message in [gossip(3), line(3), broken(3, 0)] {
        detector.receive(message, 0, now);
    }
    assert_eq!(detector.take_messages().count(), 3);
    assert_eq!(blamed(&detector), None);
}
