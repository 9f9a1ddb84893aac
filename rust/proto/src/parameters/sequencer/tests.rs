use std::time::Duration;

use super::*;
use crate::parameters::identity::Point;
use crate::parameters::optimizer::Hyper;
use crate::parameters::rules::{Late, Overflow};

const EVERY: Version = 4;

/// Of one worker, who does not wait for anything.
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
        let request = Request { term, worker, ask };
        self.sequencer.answer(&request, self.now);
    }

    /// With what it is told to go on, or that it has left: how many of its pushes were dropped.
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

    /// All keepers have applied all, and saved this.
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

    /// Up to which push the worker need not keep any, if it is told to go on.
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
    // The log does not run further ahead of the snapshot, and the queue has room for one.
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
    let request = Request {
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
    // One fits into the queue, and the next does not.
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
    // The log has room for two more, so the last is in no update yet.
    for number in 2 * EVERY + 4..=2 * EVERY + 6 {
        served.submit(number, 1);
        served.applied(EVERY);
    }
    served.dropped();
    served.ask(Ask::Leave(served.incarnation));
    assert_eq!(served.dropped(), Some(2));
}
