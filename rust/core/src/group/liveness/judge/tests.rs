use super::*;
use crate::trace::flight_recorder::FlightRecorder;

const SECOND: Duration = Duration::from_secs(1);

/// The judge of one of four ranks.
fn judge(rank: usize, now: Instant) -> Judge {
    let hosts = vec![String::from("h"); 4];
    let journal = Journal::new(rank, hosts, Arc::<FlightRecorder>::default());
    let neighbours = [(rank + 1) % 4, (rank + 3) % 4];
    Judge::new(Arc::new(journal), Arc::default(), &neighbours, now, |_| ())
}

fn blamed(judge: &Judge) -> Option<usize> {
    judge.abort.cause()?.blamed.map(|blamed| blamed.rank)
}

fn questions(judge: &mut Judge) -> Vec<u64> {
    let told = judge.take_messages();
    told.filter_map(|(_, message)| match message {
        Message::Inquest { sequence } => Some(sequence),
        _ => None,
    })
    .collect()
}

#[test]
fn a_neighbour_is_lost_when_it_was_silent_for_too_long_and_not_before() {
    let start = Instant::now();
    let mut judge = judge(1, start);
    judge.sign_of_life(0, start + SECOND);
    judge.keep_time(start + PEER_TIMEOUT - SECOND);
    assert_eq!(blamed(&judge), None);
    judge.keep_time(start + PEER_TIMEOUT);
    assert_eq!(blamed(&judge), Some(0), "the predecessor has said nothing");
}

#[test]
fn of_several_questions_the_one_about_the_earliest_position_is_answered() {
    let now = Instant::now();
    let mut judge = judge(0, now);
    for sequence in [5, 4, 7] {
        judge.hear(Message::Inquest { sequence }, 0, now);
    }
    assert_eq!(questions(&mut judge), [5, 4]);
    judge.keep_time(now + SECOND);
    let told: Vec<_> = judge.take_messages().map(|(_, message)| message).collect();
    assert!(
        told.iter()
            .any(|message| matches!(message, Message::Testimony(Testimony { sequence: 4, .. })))
    );
}

#[test]
fn what_was_suspected_elsewhere_does_not_mix_with_an_earlier_question() {
    let now = Instant::now();
    let mut judge = judge(0, now);
    judge.hear(Message::Inquest { sequence: 3 }, 0, now);
    let suspicion = Suspicion::HeadersDiffer {
        peer: 2,
        sequence: 4,
    };
    judge.investigate(suspicion, now);
    for rank in 1..4 {
        let testimony = Testimony {
            rank,
            sequence: 3,
            entered: None,
            waits: None,
        };
        judge.hear(Message::Testimony(testimony), 0, now);
    }
    judge.keep_time(now + SECOND);
    let cause = judge.abort.cause().expect("all have spoken");
    assert_eq!(cause.kind.exception(), "CollectiveTimeoutError");
}

#[test]
fn of_two_ranks_that_lose_each_other_one_speaks_first() {
    let now = Instant::now();
    let (mut first, mut second) = (judge(1, now), judge(2, now));
    for (judge, peer) in [(&mut first, 2), (&mut second, 1)] {
        let reason = "was reset".into();
        judge.investigate(Suspicion::LinkBroken { peer, reason }, now);
        judge.keep_time(now + LINK_GRACE);
    }
    assert_eq!((blamed(&first), blamed(&second)), (Some(2), None));
    second.keep_time(now + SECOND);
    assert_eq!(blamed(&second), Some(1));
}
