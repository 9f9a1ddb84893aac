use std::time::Duration;

use super::*;
use crate::parameters::identity::Point;
use crate::parameters::message::Piece;
use crate::parameters::optimizer::Hyper;
use crate::parameters::rules::{Late, Overflow};
use crate::parameters::shard::Payload;

const EVERY: Version = 4;

/// A sequencer with one asynchronous worker, which has joined.
struct Served {
    sequencer: Sequencer,
    incarnation: Incarnation,
    now: Instant,
    keepers: usize,
}

impl Served {
    fn new(keepers: Keepers) -> Self {
        let now = Instant::now();
        let rules = Rules {
            staleness: None,
            queue_max: Some(1),
            overflow: Overflow::DropNewest,
            late: Late::Keep,
            ..Rules::default()
        };
        let timing = Timing {
            again: Duration::from_secs(1),
            silence: Duration::from_secs(9),
            start: Duration::ZERO,
            snapshot_every: EVERY,
        };
        let mut sequencer = Sequencer::new(rules, timing, keepers, 7, now);
        let Output::Keeper(0, Order::Prepare { round }) = sequencer.step(now).remove(0) else {
            panic!("it asks first");
        };
        let status = Report::Status {
            round,
            terms: Terms::NONE,
            points: vec![Point::default()],
            at: None,
            entries: vec![],
        };
        let installed = Report::Installed {
            term: 1,
            applied: vec![],
            saved: 0,
        };
        for report in [status, installed] {
            for keeper in 0..keepers.count() {
                sequencer.receive(keeper, report.clone(), now);
            }
        }
        let incarnation = Incarnation(1, 1);
        let mut served = Self {
            sequencer,
            incarnation,
            now,
            keepers: keepers.count(),
        };
        let (nonce, claim) = (1, None);
        served.ask(Ask::Join { nonce, claim });
        assert_eq!(served.goes(), Some(0));
        served
    }

    fn ask(&mut self, ask: Ask) {
        let (term, worker) = (1, 0);
        let request = WorkerRequest { term, worker, ask };
        self.sequencer.answer(&request, self.now);
    }

    /// Number of dropped pushes in the next `Go` or `Left`, if there is one.
    fn dropped(&mut self) -> Option<u64> {
        let outputs = self.sequencer.step(self.now).into_iter();
        let dropped = outputs.filter_map(|it| match it {
            Output::Worker(0, Reply::Go { dropped, .. } | Reply::Left { dropped, .. }) => {
                Some(dropped)
            }
            _ => None,
        });
        dropped.last()
    }

    fn submit(&mut self, number: u64, base: Version) {
        let (worker, incarnation) = (0, self.incarnation);
        let id = PushId {
            worker,
            incarnation,
            number,
        };
        let hyper = Hyper {
            learning_rate: 0.1,
            weight_decay: 0.0,
        };
        self.ask(Ask::Submit { id, base, hyper });
    }

    /// Lets all keepers apply all entries, with their last snapshot at this version.
    fn applied(&mut self, saved: Version) -> Version {
        let all = (0..self.keepers).map(|keeper| self.applied_by(keeper, saved));
        all.max().expect("there are some")
    }

    fn applied_by(&mut self, keeper: usize, saved: Version) -> Version {
        let (_, _, version) = self.sequencer.counts().expect("it is open");
        let applied = Report::Applied {
            term: 1,
            version,
            saved,
        };
        self.sequencer.receive(keeper, applied, self.now);
        version
    }

    /// Number of the last push that the worker need not keep, from the next `Go` if there is one.
    fn goes(&mut self) -> Option<u64> {
        let outputs = self.sequencer.step(self.now).into_iter();
        let settled = outputs.filter_map(|it| match it {
            Output::Worker(0, Reply::Go { settled, .. }) => Some(settled),
            _ => None,
        });
        settled.max()
    }
}

#[test]
fn a_worker_computes_nothing_that_would_be_dropped_while_a_snapshot_is_being_written() {
    let mut served = Served::new(Keepers {
        servers: 1,
        replicas: 0,
    });
    for number in 1..=2 * EVERY + 1 {
        served.submit(number, u64::from(number > 1));
        assert_eq!(served.applied(1), number);
        assert!(served.goes().is_some());
    }
    // The log stops two intervals after the snapshot, and the queue has capacity for one gradient.
    served.submit(2 * EVERY + 2, 1);
    assert_eq!(served.applied(1), 2 * EVERY + 1);
    assert_eq!(served.goes(), None);
    served.applied(EVERY);
    assert!(served.goes().is_some());
    assert_eq!(served.applied(EVERY), 2 * EVERY + 2);
}

#[test]
fn with_copies_a_worker_keeps_a_gradient_until_all_of_them_have_applied_it() {
    let mut served = Served::new(Keepers {
        servers: 2,
        replicas: 1,
    });
    served.submit(1, 0);
    assert_eq!(served.goes(), Some(0));
    // Without copies, the push is settled once it is in an update.
    let (servers, replicas) = (1, 0);
    let mut alone = Served::new(Keepers { servers, replicas });
    alone.submit(1, 0);
    assert_eq!(alone.goes(), Some(1));
    for keeper in 0..4 {
        served.ask(Ask::Alive(served.incarnation));
        assert_eq!(served.goes(), Some(0), "keeper {keeper} has not applied it");
        served.applied_by(keeper, 0);
    }
    served.ask(Ask::Alive(served.incarnation));
    assert_eq!(served.goes(), Some(1));
}

#[test]
fn after_all_servers_have_forgotten_their_terms_a_new_one_is_later_than_what_workers_have_heard() {
    let served = Served::new(Keepers {
        servers: 1,
        replicas: 0,
    });
    let (mut sequencer, now) = (served.sequencer, served.now);
    let (nonce, claim) = (2, None);
    let request = WorkerRequest {
        term: 5,
        worker: 0,
        ask: Ask::Join { nonce, claim },
    };
    sequencer.answer(&request, now);
    let Some(Output::Keeper(0, Order::Prepare { round })) = sequencer.step(now).pop() else {
        panic!("it asks what servers have");
    };
    let status = Report::Status {
        round,
        terms: Terms::NONE.followed_by(1, 0),
        points: vec![Point::default()],
        at: None,
        entries: vec![],
    };
    sequencer.receive(0, status, now);
    let orders = sequencer.step(now).into_iter();
    let terms: Vec<_> = orders
        .filter_map(|order| match order {
            Output::Keeper(0, Order::Install(start)) => Some(start.terms.term()),
            _ => None,
        })
        .collect();
    assert_eq!(terms, [6]);
}

#[test]
fn a_worker_hears_what_was_dropped_when_it_may_go_on_and_when_it_leaves() {
    let mut served = Served::new(Keepers {
        servers: 1,
        replicas: 0,
    });
    for number in 1..=2 * EVERY + 1 {
        served.submit(number, u64::from(number > 1));
        served.applied(1);
    }
    // The first one fits into the queue, the second does not.
    for number in 2 * EVERY + 2..=2 * EVERY + 3 {
        served.submit(number, 1);
    }
    served.dropped();
    served.applied(EVERY);
    assert_eq!(served.dropped(), Some(1));
    let (counts, waiting, version) = served.sequencer.counts().expect("it is open");
    assert_eq!(
        (counts.applied, counts.overflowed, waiting),
        (version - 1, 1, 0)
    );
    // The log has capacity for two more, so the last gradient is in no update yet.
    for number in 2 * EVERY + 4..=2 * EVERY + 6 {
        served.submit(number, 1);
        served.applied(EVERY);
    }
    served.dropped();
    served.ask(Ask::Leave(served.incarnation));
    assert_eq!(served.dropped(), Some(2));
}

const SECOND: Duration = Duration::from_secs(1);

fn timing() -> Timing {
    Timing {
        again: SECOND,
        silence: 90 * SECOND,
        start: 5 * SECOND,
        snapshot_every: EVERY,
    }
}

fn point(version: Version) -> Point {
    Point { term: 1, version }
}

fn prepared(outputs: Vec<Output>) -> u64 {
    let rounds = outputs.into_iter().filter_map(|it| match it {
        Output::Keeper(0, Order::Prepare { round }) => Some(round),
        _ => None,
    });
    rounds.last().expect("it asks what servers have")
}

fn status(round: u64, version: Option<Version>) -> Report {
    Report::Status {
        round,
        terms: Terms::NONE.followed_by(1, 0),
        points: vec![Point::default()],
        at: version.map(point),
        entries: vec![],
    }
}

/// A sequencer of one server that has begun term 2 at this version.
fn leading(rules: Rules, version: Version, now: Instant) -> Sequencer {
    let (servers, replicas) = (1, 0);
    let keepers = Keepers { servers, replicas };
    let mut sequencer = Sequencer::new(rules, timing(), keepers, 7, now);
    lead(&mut sequencer, version, now);
    sequencer
}

fn lead(sequencer: &mut Sequencer, version: Version, now: Instant) {
    let round = prepared(sequencer.step(now));
    sequencer.receive(0, status(round, Some(version)), now);
    let orders = sequencer.step(now).into_iter();
    let term = orders.filter_map(|it| match it {
        Output::Keeper(0, Order::Install(start)) => Some(start.terms.term()),
        _ => None,
    });
    let term = term.last().expect("it says where to go on");
    let (applied, saved) = (vec![], version);
    let installed = Report::Installed {
        term,
        applied,
        saved,
    };
    sequencer.receive(0, installed, now);
    sequencer.step(now);
}

fn say(sequencer: &mut Sequencer, worker: u32, ask: Ask, now: Instant) -> Vec<Reply> {
    let term = 2;
    sequencer.answer(&WorkerRequest { term, worker, ask }, now);
    replies(sequencer, worker, now)
}

fn replies(sequencer: &mut Sequencer, worker: u32, now: Instant) -> Vec<Reply> {
    let outputs = sequencer.step(now).into_iter();
    let own = outputs.filter_map(|it| match it {
        Output::Worker(to, reply) if to == worker => Some(reply),
        _ => None,
    });
    own.collect()
}

/// Incarnation of a worker from before the servers were restored.
const SURVIVOR: Incarnation = Incarnation(1, 9);

fn join(claim: Option<Incarnation>) -> Ask {
    let nonce = 1;
    Ask::Join { nonce, claim }
}

fn submit(worker: u32, base: Version) -> Ask {
    let id = PushId {
        worker,
        incarnation: Incarnation(2, 1 + worker),
        number: 1,
    };
    let hyper = Hyper {
        learning_rate: 0.1,
        weight_decay: 0.0,
    };
    Ask::Submit { id, base, hyper }
}

fn goes(replies: &[Reply]) -> bool {
    replies.iter().any(|it| matches!(it, Reply::Go { .. }))
}

fn two(staleness: Option<u64>) -> Rules {
    Rules {
        workers: 2,
        staleness,
        late: Late::Keep,
        ..Rules::default()
    }
}

#[test]
fn workers_go_when_all_are_there_or_there_are_weights_or_the_time_to_wait_is_over() {
    let now = Instant::now();
    let ms = Duration::from_millis(1);
    let mut sequencer = leading(two(None), 1, now);
    assert!(goes(&say(&mut sequencer, 1, join(Some(SURVIVOR)), now)));
    let mut sequencer = leading(two(None), 0, now);
    assert!(!goes(&say(&mut sequencer, 1, join(None), now)));
    assert!(goes(&say(&mut sequencer, 0, join(None), now)));
    let mut sequencer = leading(two(None), 0, now);
    assert!(!goes(&say(&mut sequencer, 0, join(None), now)));
    let start = now + timing().start;
    assert!(!goes(&replies(&mut sequencer, 0, start - ms)));
    assert!(goes(&replies(&mut sequencer, 0, start)));
}

#[test]
fn after_all_processes_have_started_anew_workers_go_as_they_do_at_first() {
    let now = Instant::now();
    let start = now + timing().start;
    let before = start - Duration::from_millis(1);
    for staleness in [Some(0), Some(2), None] {
        let mut sequencer = leading(two(staleness), 7, now);
        // It joins again with the incarnation that it has in this term.
        for claim in [None, Some(Incarnation(2, 1))] {
            assert!(!goes(&say(&mut sequencer, 0, join(claim), now)));
        }
        assert!(!goes(&replies(&mut sequencer, 0, before)));
        assert!(goes(&replies(&mut sequencer, 0, start)));
        let mut sequencer = leading(two(staleness), 7, now);
        say(&mut sequencer, 0, join(None), now);
        assert!(goes(&say(&mut sequencer, 1, join(None), before)));
        assert!(!sequencer.has_survivors());
        // Once workers compute, they do not wait for a lost worker.
        say(&mut sequencer, 1, Ask::Leave(Incarnation(2, 2)), before);
        let nonce = 9;
        let again = Ask::Join { nonce, claim: None };
        assert!(goes(&say(&mut sequencer, 0, again, before)));
        // A worker that outlived the servers does not wait for workers that did not.
        let mut sequencer = leading(two(staleness), 7, now);
        say(&mut sequencer, 0, join(None), now);
        say(&mut sequencer, 1, join(Some(SURVIVOR)), now);
        assert!(sequencer.has_survivors());
        let mut sequencer = leading(two(staleness), 7, now);
        assert!(goes(&say(&mut sequencer, 1, join(Some(SURVIVOR)), now)));
    }
}

#[test]
fn a_worker_that_sends_the_pieces_of_a_gradient_is_not_lost() {
    let now = Instant::now();
    let mut sequencer = leading(two(None), 1, now);
    say(&mut sequencer, 0, join(None), now);
    let incarnation = Incarnation(2, 1);
    let is_member = |sequencer: &mut Sequencer, at| {
        let replies = say(sequencer, 0, Ask::Alive(incarnation), at);
        !replies.iter().any(|it| matches!(it, Reply::NotMember(..)))
    };
    let stage = Ask::Stage {
        id: PushId {
            worker: 0,
            incarnation,
            number: 1,
        },
        base: 1,
        piece: Piece { index: 0, count: 9 },
        payload: Payload::Gradients(vec![]).into(),
    };
    let mut at = now;
    for _ in 0..3 {
        at += timing().silence - SECOND;
        say(&mut sequencer, 0, stage.clone(), at);
    }
    assert!(is_member(&mut sequencer, at));
    at += timing().silence;
    sequencer.step(at);
    assert!(!is_member(&mut sequencer, at));
}

/// Origin and version of the new term, for servers with these snapshots and versions in memory.
fn origin(servers: [(&[Version], Option<Version>); 2]) -> (Option<Origin>, Version) {
    let now = Instant::now();
    let keepers = Keepers {
        servers: 2,
        replicas: 0,
    };
    let mut sequencer = Sequencer::new(two(None), timing(), keepers, 7, now);
    assert_eq!(sequencer.origin(), None);
    let round = prepared(sequencer.step(now));
    for (keeper, (saved, at)) in servers.into_iter().enumerate() {
        let Report::Status {
            round,
            terms,
            mut points,
            at,
            entries,
        } = status(round, at)
        else {
            unreachable!("it is one");
        };
        points.extend(saved.iter().map(|version| point(*version)));
        let status = Report::Status {
            round,
            terms,
            points,
            at,
            entries,
        };
        sequencer.receive(keeper, status, now);
    }
    for keeper in 0..2 {
        let (term, applied, saved) = (2, vec![], 0);
        let installed = Report::Installed {
            term,
            applied,
            saved,
        };
        sequencer.receive(keeper, installed, now);
    }
    (sequencer.origin(), sequencer.start())
}

#[test]
fn it_is_known_where_the_weights_of_a_term_come_from() {
    for (servers, found) in [
        ([(&[][..], None), (&[][..], None)], (Origin::Initial, 0)),
        ([(&[], Some(0)), (&[], Some(0))], (Origin::Initial, 0)),
        ([(&[1], Some(3)), (&[1], Some(3))], (Origin::Memory, 3)),
        ([(&[1, 3], None), (&[1, 3], None)], (Origin::Snapshots, 3)),
        ([(&[1, 3], None), (&[1], Some(4))], (Origin::Snapshots, 1)),
        ([(&[3], None), (&[1], None)], (Origin::NothingInCommon, 0)),
        ([(&[], None), (&[1], None)], (Origin::NothingInCommon, 0)),
        ([(&[], None), (&[], Some(3))], (Origin::NothingInCommon, 0)),
    ] {
        let (from, version) = found;
        assert_eq!(origin(servers), (Some(from), version), "{servers:?}");
    }
}

#[test]
fn a_synchronous_update_after_a_restart_waits_for_those_that_come_back() {
    let now = Instant::now();
    let version = |sequencer: &Sequencer| sequencer.counts().map(|(_, _, version)| version);
    let mut sequencer = leading(two(Some(0)), 1, now);
    say(&mut sequencer, 0, join(None), now);
    say(&mut sequencer, 0, submit(0, 1), now);
    let end = now + GATHERING * timing().again;
    for (at, reached) in [(now, 1), (end - Duration::from_millis(1), 1), (end, 2)] {
        sequencer.step(at);
        assert_eq!(version(&sequencer), Some(reached));
    }
    let mut sequencer = leading(two(Some(0)), 1, now);
    for worker in 0..2 {
        say(&mut sequencer, worker, join(None), now);
    }
    say(&mut sequencer, 0, submit(0, 1), now);
    // A member that joins again keeps its submitted gradient; a new incarnation has none.
    for (claim, latest) in [(Incarnation(2, 1), 1), (Incarnation(2, 9), 0)] {
        let replies = say(&mut sequencer, 0, join(Some(claim)), now);
        let Some(Reply::Joined {
            incarnation,
            latest: known,
            ..
        }) = replies.first()
        else {
            panic!("{replies:?}");
        };
        assert_eq!((*incarnation, *known), (claim, latest));
    }
    assert_eq!(version(&sequencer), Some(1));
    let mut sequencer = leading(two(Some(0)), 1, now);
    for worker in 0..2 {
        say(&mut sequencer, worker, join(None), now);
    }
    for worker in 0..2 {
        say(&mut sequencer, worker, submit(worker, 1), now);
    }
    assert_eq!(version(&sequencer), Some(2));
}

#[test]
fn the_log_runs_a_few_entries_ahead_of_the_servers() {
    // A job without snapshots sets the largest possible interval.
    for every in [EVERY, 1 << 63, Version::MAX] {
        let mut served = Served::new(Keepers {
            servers: 1,
            replicas: 0,
        });
        served.sequencer.timing.snapshot_every = every;
        for number in 1..=6 {
            served.submit(number, u64::from(number > 1));
        }
        let (_, waiting, version) = served.sequencer.counts().expect("it leads");
        assert_eq!((waiting, version), (1, IN_FLIGHT_MAX as Version));
    }
}

#[test]
fn a_sequencer_tells_who_counts_and_how_often_servers_were_restored() {
    let now = Instant::now();
    let mut sequencer = leading(two(None), 3, now);
    say(&mut sequencer, 1, join(None), now);
    assert_eq!(sequencer.members(), [(1, Incarnation(2, 1))]);
    assert_eq!((sequencer.start(), sequencer.restored()), (3, 1));
    assert!(sequencer.staleness().is_empty());
    let ask = Ask::Submit {
        id: PushId {
            worker: 1,
            incarnation: Incarnation(2, 1),
            number: 1,
        },
        base: 1,
        hyper: Hyper {
            learning_rate: 0.1,
            weight_decay: 0.0,
        },
    };
    say(&mut sequencer, 1, ask, now);
    assert_eq!(sequencer.staleness(), [(2, 1)].into());
    sequencer.receive(0, Report::Lost(2), now);
    assert_eq!((sequencer.start(), sequencer.counts()), (0, None));
    assert!(sequencer.members().is_empty() && sequencer.staleness().is_empty());
    lead(&mut sequencer, 3, now);
    assert_eq!((sequencer.start(), sequencer.restored()), (3, 2));
}

#[test]
fn who_lacks_a_shard_gets_that_of_its_copy_and_the_first_server_is_told_before_the_others() {
    let now = Instant::now();
    let (servers, replicas) = (2, 1);
    let keepers = Keepers { servers, replicas };
    let mut sequencer = Sequencer::new(two(None), timing(), keepers, 7, now);
    let round = prepared(sequencer.step(now));
    for keeper in 0..4 {
        let version = (keeper != 2).then_some(3);
        sequencer.receive(keeper, status(round, version), now);
    }
    let orders = |sequencer: &mut Sequencer| -> Vec<(usize, &str)> {
        let outputs = sequencer.step(now).into_iter();
        let orders = outputs.filter_map(|it| match it {
            Output::Keeper(keeper, Order::FetchState(_)) => Some((keeper, "give")),
            Output::Keeper(keeper, Order::Install(_)) => Some((keeper, "go on")),
            Output::Keeper(keeper, Order::InstallSnapshot(..)) => Some((keeper, "take")),
            _ => None,
        });
        orders.collect()
    };
    assert_eq!(orders(&mut sequencer), [(0, "give")]);
    let given = |round, version| {
        let state = Snapshot {
            point: point(version),
            ..Snapshot::empty()
        };
        let state = Arc::new(state);
        Report::FetchedState { round, state }
    };
    for (round, version, expected) in [
        (round + 1, 3, &[][..]),
        (round, 2, &[]),
        (round, 3, &[(0, "go on")]),
    ] {
        sequencer.receive(0, given(round, version), now);
        assert_eq!(orders(&mut sequencer), expected);
    }
    let installed = |term| Report::Installed {
        term,
        applied: vec![],
        saved: 0,
    };
    sequencer.receive(0, installed(1), now);
    assert_eq!(orders(&mut sequencer), []);
    sequencer.receive(0, installed(2), now);
    let others = [(1, "go on"), (2, "take"), (3, "go on")];
    assert_eq!(orders(&mut sequencer), others);
}
