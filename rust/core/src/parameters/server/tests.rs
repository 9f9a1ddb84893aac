use super::*;
use crate::parameters::log::Contribution;
use crate::parameters::optimizer::{Hyper, Optimizer};
use crate::parameters::rules::Treatment;
use crate::parameters::shard::{Gradient, Spec};

/// A disk that keeps everything, at once.
#[derive(Default, Clone)]
struct Memory {
    terms: Terms,
    snapshots: Vec<Snapshot>,
}

impl Disk for Memory {
    fn terms(&self) -> Terms {
        self.terms.clone()
    }

    fn points(&self) -> Vec<Point> {
        self.snapshots.iter().map(|it| it.point).collect()
    }

    fn load(&mut self, point: Point) -> Option<Snapshot> {
        self.snapshots.iter().find(|it| it.point == point).cloned()
    }

    fn begin(&mut self, terms: &Terms) {
        self.terms = terms.clone();
    }

    fn save(&mut self, snapshot: Snapshot) {
        self.snapshots.push(snapshot);
    }

    fn forget_before(&mut self, version: Version) {
        self.snapshots.retain(|it| it.point.version >= version);
    }
}

fn id(worker: u32, number: u64) -> PushId {
    PushId {
        worker,
        incarnation: Incarnation(1, worker),
        number,
    }
}

fn initial(value: f32) -> Payload {
    let spec = Spec {
        rows: 1,
        width: 1,
        decays: false,
    };
    Payload::Initial {
        optimizer: Optimizer::Sgd {
            momentum: 0.0,
            is_nesterov: false,
        },
        parts: vec![(spec, Arc::new(vec![value].into()))],
    }
}

fn gradient(value: f32) -> Payload {
    Payload::Gradients(vec![Some(Gradient::Dense(vec![value].into()))])
}

/// A server in term 1 with snapshots of versions 1 and even ones, whose only weight is 8.
fn server() -> Server<Memory> {
    let mut server = Server::new(Memory::default(), 2, true);
    let terms = Terms::default().followed_by(1, 0);
    let point = Point::default();
    let (report, _) = server.obey(Order::Install { terms, point });
    assert!(matches!(report, Some(Report::Installed { term: 1, .. })));
    stage(&mut server, id(0, 1), 0, initial(8.0));
    append(&mut server, 0, id(0, 1), None);
    server
}

fn ask(server: &mut Server<Memory>, worker: u32, ask: Ask) -> Option<Reply> {
    let term = 1;
    server.answer(&Request { term, worker, ask })
}

fn stage(server: &mut Server<Memory>, id: PushId, base: Version, payload: Payload) {
    let payload = Arc::new(payload);
    let staging = Ask::Stage { id, base, payload };
    let reply = ask(server, id.worker, staging);
    assert!(matches!(reply, Some(Reply::Staged(1, it)) if it == id));
}

fn pull(server: &mut Server<Memory>, worker: u32, at_least: Version) -> Option<f32> {
    let round = 1;
    match ask(server, worker, Ask::Pull { round, at_least })? {
        Reply::Weights { parts, .. } => Some(parts[0][0]),
        other => panic!("{other:?}"),
    }
}

/// Appends an update of one gradient, whose learning rate is 1.
fn append(
    server: &mut Server<Memory>,
    after: Version,
    id: PushId,
    compensation: Option<f32>,
) -> (Option<Report>, usize) {
    let treatment = Treatment {
        weight: 1.0,
        compensation,
    };
    let entry = Entry {
        contributions: vec![Contribution { id, treatment }],
        scale: 1.0,
        hyper: Hyper {
            learning_rate: 1.0,
            weight_decay: 0.0,
        },
    };
    let (report, replies) = server.obey(Order::Append {
        term: 1,
        after,
        entries: vec![entry],
        over: vec![id],
        stable: 0,
    });
    (report, replies.len())
}

#[test]
fn an_entry_counts_once_and_a_pull_waits_for_its_version() {
    let mut server = server();
    stage(&mut server, id(1, 1), 1, gradient(3.0));
    assert_eq!(pull(&mut server, 2, 2), None);
    for replies in [1, 0] {
        let (report, sent) = append(&mut server, 1, id(1, 1), None);
        assert!(matches!(report, Some(Report::Applied { version: 2, .. })));
        assert_eq!(sent, replies);
    }
    assert_eq!(pull(&mut server, 1, 2), Some(5.0));
    // What comes late is acknowledged, and not kept.
    stage(&mut server, id(1, 1), 1, gradient(3.0));
    assert_eq!(server.staged(), 0);
}

#[test]
fn a_late_gradient_is_corrected_with_the_weights_that_its_worker_had_pulled() {
    let mut server = server();
    assert_eq!(pull(&mut server, 1, 1), Some(8.0));
    stage(&mut server, id(2, 1), 1, gradient(2.0));
    append(&mut server, 1, id(2, 1), None);
    stage(&mut server, id(1, 1), 1, gradient(3.0));
    append(&mut server, 2, id(1, 1), Some(0.5));
    // The gradient is 3 + 0.5 * 3 * 3 * (6 - 8).
    assert_eq!(pull(&mut server, 1, 3), Some(6.0 + 6.0));
}

#[test]
fn a_restarted_server_knows_its_snapshots_and_takes_its_term_up_no_more() {
    let mut server = server();
    stage(&mut server, id(1, 1), 1, gradient(3.0));
    append(&mut server, 1, id(1, 1), None);
    let mut restarted = Server::new(server.disk().clone(), 2, true);
    let point = |version| Point { term: 1, version };
    let (report, _) = restarted.obey(Order::Look { question: 7 });
    let Some(Report::Status { terms, points, .. }) = report else {
        panic!("{report:?}");
    };
    assert_eq!(points, [point(1), point(2), Point::default()]);
    let (report, _) = append(&mut restarted, 2, id(1, 2), None);
    assert!(matches!(report, Some(Report::Lost(1))));
    for (terms, goes_on) in [(terms.clone(), false), (terms.followed_by(2, 2), true)] {
        let point = point(2);
        let (report, _) = restarted.obey(Order::Install { terms, point });
        assert_eq!(matches!(report, Some(Report::Installed { .. })), goes_on);
    }
    assert_eq!(restarted.at(), server.at());
    let payload = Arc::new(gradient(1.0));
    let (id, base) = (id(1, 2), 2);
    let reply = ask(&mut restarted, 1, Ask::Stage { id, base, payload });
    assert!(matches!(reply, Some(Reply::OtherTerm(terms)) if terms.term() == 2));
}
