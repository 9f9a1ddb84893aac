use super::*;
use crate::parameters::changes::PulledPart;
use crate::parameters::log::Contribution;
use crate::parameters::optimizer::{Hyper, Optimizer, Sgd};
use crate::parameters::rules::Treatment;
use crate::parameters::shard::{Gradient, Spec};

/// A disk that keeps everything, and at once.
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
        optimizer: Optimizer::Sgd(Sgd {
            momentum: 0.0,
            is_nesterov: false,
        }),
        parts: vec![(spec, Arc::new(vec![value].into()))],
    }
}

fn gradient(value: f32) -> Payload {
    Payload::Gradients(vec![Some(Gradient::Dense(vec![value].into()))])
}

/// A server in term 1 with snapshots of versions 1 and even ones, whose only weight is 8.
fn server() -> Server<Memory> {
    let mut server = Server::new(Memory::default(), Some(2), true);
    let terms = Terms::default().followed_by(1, 0);
    let report = install(&mut server, terms, Point::default());
    assert!(matches!(report, Some(Report::Installed { term: 1, .. })));
    stage(&mut server, id(0, 1), 0, initial(8.0));
    append(&mut server, 0, id(0, 1), None);
    server
}

fn install(server: &mut Server<Memory>, terms: Terms, point: Point) -> Option<Report> {
    let round = 7;
    server.apply(Order::Prepare { round });
    let (report, _) = server.apply(Order::Install(Start {
        round,
        terms,
        point,
        entries: vec![],
    }));
    report
}

fn ask(server: &mut Server<Memory>, worker: u32, ask: Ask) -> Option<Reply> {
    let term = 1;
    server.answer(&WorkerRequest { term, worker, ask })
}

fn whole(id: PushId, base: Version, payload: Arc<Payload>) -> Ask {
    let piece = Piece::WHOLE;
    Ask::Stage {
        id,
        base,
        piece,
        payload,
    }
}

fn stage(server: &mut Server<Memory>, id: PushId, base: Version, payload: Payload) {
    let payload = Arc::new(payload);
    let staging = whole(id, base, payload);
    let reply = ask(server, id.worker, staging);
    assert!(matches!(reply, Some(Reply::Staged(1, it, 0)) if it == id));
}

fn pull(server: &mut Server<Memory>, worker: u32, at_least: Version) -> Option<f32> {
    let (round, kept) = (1, None);
    let pull = Ask::Pull {
        round,
        at_least,
        kept,
    };
    match ask(server, worker, pull)? {
        Reply::Weights { parts, .. } => match &parts[0] {
            PulledPart::All(weights) | PulledPart::Keep(weights) => Some(weights.of::<f32>()[0]),
            rows => panic!("{rows:?}"),
        },
        other => panic!("{other:?}"),
    }
}

/// An update of one gradient with learning rate 1.
fn entry(id: PushId, compensation: Option<f64>) -> Entry {
    let treatment = Treatment {
        weight: 1.0,
        compensation,
    };
    Entry {
        contributions: vec![Contribution { id, treatment }],
        scale: 1.0,
        hyper: Hyper {
            learning_rate: 1.0,
            weight_decay: 0.0,
        },
    }
}

/// Appends one entry.
fn append(
    server: &mut Server<Memory>,
    after: Version,
    id: PushId,
    compensation: Option<f64>,
) -> (Option<Report>, usize) {
    let entry = entry(id, compensation);
    let (report, replies) = server.apply(Order::Append {
        term: 1,
        after,
        entries: vec![entry],
        acknowledged: vec![id],
        stable: 0,
    });
    (report, replies.len())
}

#[test]
fn an_entry_counts_once_and_a_pull_waits_for_its_version() {
    let mut server = server();
    stage(&mut server, id(1, 1), 1, gradient(3.0));
    assert_eq!((server.term(), server.staged()), (Some(1), 1));
    assert_eq!(pull(&mut server, 2, 2), None);
    for replies in [1, 0] {
        let (report, sent) = append(&mut server, 1, id(1, 1), None);
        assert!(matches!(report, Some(Report::Applied { version: 2, .. })));
        assert_eq!(sent, replies);
    }
    assert_eq!(pull(&mut server, 1, 2), Some(5.0));
    // A late gradient is acknowledged, but not kept.
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
    let mut restarted = Server::new(server.disk().clone(), Some(2), true);
    let point = |version| Point { term: 1, version };
    let (report, _) = restarted.apply(Order::Prepare { round: 7 });
    let Some(Report::Status { terms, points, .. }) = report else {
        panic!("{report:?}");
    };
    assert_eq!(points, [point(1), point(2), Point::default()]);
    let (report, _) = append(&mut restarted, 2, id(1, 2), None);
    assert!(matches!(report, Some(Report::Lost(1))));
    for (terms, continues) in [(terms.clone(), false), (terms.followed_by(2, 2), true)] {
        let report = install(&mut restarted, terms, point(2));
        assert_eq!(matches!(report, Some(Report::Installed { .. })), continues);
    }
    assert_eq!(restarted.at(), server.at());
    let payload = Arc::new(gradient(1.0));
    let (id, base) = (id(1, 2), 2);
    let reply = ask(&mut restarted, 1, whole(id, base, payload));
    assert!(matches!(reply, Some(Reply::OtherTerm(terms)) if terms.term() == 2));
}

#[test]
fn from_its_answer_on_a_server_changes_nothing_until_it_is_told_where_all_go_on() {
    let mut server = server();
    stage(&mut server, id(1, 1), 1, gradient(3.0));
    let mut other = server.at().expect("it is in a term").clone();
    server.apply(Order::Prepare { round: 9 });
    let (report, _) = append(&mut server, 1, id(1, 1), None);
    assert!(matches!(report, Some(Report::Lost(1))));
    assert_eq!(server.at(), Some(&other));
    other.point.version = 2;
    // A snapshot of another round may come from a server that has been lost since.
    for (round, continues) in [(8, false), (9, true)] {
        let start = Start {
            round,
            terms: Terms::default().followed_by(1, 0).followed_by(2, 2),
            point: other.point,
            entries: vec![],
        };
        let (report, _) = server.apply(Order::InstallSnapshot(start, Arc::new(other.clone())));
        assert_eq!(matches!(report, Some(Report::Installed { .. })), continues);
        assert_eq!(server.at() == Some(&other), continues);
    }
}

/// Start of term 2 at version 2.
fn second_term(round: u64, entries: Vec<Entry>) -> Start {
    Start {
        round,
        terms: Terms::default().followed_by(1, 0).followed_by(2, 2),
        point: Point {
            term: 1,
            version: 2,
        },
        entries,
    }
}

#[test]
fn what_was_read_for_others_is_given_again_without_reading_it_again() {
    let mut server = server();
    stage(&mut server, id(1, 1), 1, gradient(3.0));
    append(&mut server, 1, id(1, 1), None);
    let mut restarted = Server::new(server.disk().clone(), Some(2), true);
    for (round, gives) in [(8, [true, true]), (9, [false, false])] {
        restarted.apply(Order::Prepare { round });
        for gives in gives {
            let (report, _) = restarted.apply(Order::FetchState(second_term(round, vec![])));
            assert_eq!(matches!(report, Some(Report::FetchedState { .. })), gives);
            restarted.disk().snapshots.clear();
        }
    }
}

#[test]
fn a_server_that_lacks_what_it_was_to_apply_says_so_and_has_nothing_any_more() {
    let mut server = server();
    let round = 9;
    server.apply(Order::Prepare { round });
    let start = second_term(round, vec![entry(id(1, 1), None)]);
    let (report, _) = server.apply(Order::Install(start));
    assert!(matches!(report, Some(Report::Lost(2))));
    let (report, _) = server.apply(Order::Prepare { round });
    assert!(matches!(report, Some(Report::Status { at: None, .. })));
}

#[test]
fn a_further_copy_answers_no_pull() {
    let mut first = server();
    let mut further = Server::new(first.disk().clone(), None, false);
    let (round, terms) = (9, Terms::default().followed_by(1, 0).followed_by(2, 1));
    let state = Arc::new(first.at().expect("it is in a term").clone());
    further.apply(Order::Prepare { round });
    let start = Start {
        round,
        terms,
        point: state.point,
        entries: vec![],
    };
    let (report, _) = further.apply(Order::InstallSnapshot(start, state));
    assert!(matches!(report, Some(Report::Installed { term: 2, .. })));
    for (server, term, answers) in [(&mut first, 1, true), (&mut further, 2, false)] {
        let (round, at_least, kept) = (1, 1, None);
        let reply = server.answer(&WorkerRequest {
            term,
            worker: 0,
            ask: Ask::Pull {
                round,
                at_least,
                kept,
            },
        });
        assert_eq!(reply.is_some(), answers);
    }
}

#[test]
fn what_cannot_be_initial_weights_or_a_gradient_is_not_staged() {
    let mut empty = Server::new(Memory::default(), Some(2), true);
    assert_eq!(empty.term(), None);
    install(
        &mut empty,
        Terms::default().followed_by(1, 0),
        Point::default(),
    );
    let Payload::Initial { optimizer, parts } = initial(8.0) else {
        panic!("these are");
    };
    let broken = || {
        let mut parts = parts.clone();
        parts[0].0.rows = 2;
        Payload::Initial { optimizer, parts }
    };
    let long = || Payload::Gradients(vec![Some(Gradient::Dense(vec![1.0; 2].into()))]);
    for (base, payload, before, after) in [
        (0, initial(8.0), true, true),
        (1, initial(8.0), false, false),
        (0, broken(), false, false),
        (1, gradient(3.0), false, true),
        (0, gradient(3.0), false, false),
        (1, long(), false, false),
    ] {
        for (server, staged) in [(&mut empty, before), (&mut server(), after)] {
            let (id, payload) = (id(1, 9), Arc::new(payload.clone()));
            let reply = ask(server, 1, whole(id, base, payload));
            assert_eq!(reply.is_some(), staged, "{base}");
        }
    }
}

#[test]
fn a_gradient_in_pieces_is_applied_once_all_have_arrived() {
    let piece = |index, count, payload| Ask::Stage {
        id: id(1, 1),
        base: 1,
        piece: Piece { index, count },
        payload: Arc::new(payload),
    };
    let nothing = || Payload::Gradients(vec![None]);
    for (with_all, version) in [(true, 2), (false, 1)] {
        let mut server = server();
        for (ask_of, keeps) in [
            (piece(0, 0, nothing()), false),
            (piece(2, 2, nothing()), false),
            (piece(0, Piece::COUNT_MAX + 1, nothing()), false),
            (piece(0, 2, initial(8.0)), false),
            (piece(1, 2, gradient(3.0)), true),
            (piece(0, 3, nothing()), false),
        ] {
            assert_eq!(ask(&mut server, 1, ask_of).is_some(), keeps);
        }
        if with_all {
            let reply = ask(&mut server, 1, piece(0, 2, nothing()));
            assert!(matches!(reply, Some(Reply::Staged(1, _, 0))));
        }
        assert_eq!(server.staged(), 1);
        let (report, _) = append(&mut server, 1, id(1, 1), None);
        let has_applied = matches!(report, Some(Report::Applied { version: 2, .. }));
        assert_eq!(has_applied, with_all);
        let at = server.at().map(|at| at.point.version);
        assert_eq!(at, with_all.then_some(version));
    }
}

#[test]
fn pieces_of_abandoned_pushes_are_forgotten_when_the_worker_stages_another() {
    let mut server = server();
    let piece = Piece { index: 0, count: 2 };
    let mut staged = Vec::new();
    for id in [id(1, 1), id(2, 1), id(1, 2), id(1, 3)] {
        let (base, payload) = (1, Arc::new(gradient(3.0)));
        let ask_of = Ask::Stage {
            id,
            base,
            piece,
            payload,
        };
        assert!(ask(&mut server, id.worker, ask_of).is_some());
        staged.push(server.staged());
    }
    // The first push of the other worker stays.
    assert_eq!(staged, [1, 2, 2, 2]);
    stage(&mut server, id(1, 4), 1, gradient(3.0));
    stage(&mut server, id(1, 5), 1, gradient(3.0));
    // Whole pushes stay, too.
    assert_eq!(server.staged(), 3);
}

#[test]
fn the_last_entries_and_the_last_weights_of_each_pull_are_kept() {
    let mut server = server();
    for number in 1..=6 {
        for _ in 0..2 {
            assert!(pull(&mut server, 2, number).is_some());
        }
        let state = server.state.as_ref().expect("it is in a term");
        let versions: Vec<_> = state.pulled_versions[&2].iter().map(|it| it.0).collect();
        let first = number.saturating_sub(1).max(1);
        assert_eq!(versions, (first..=number).collect::<Vec<_>>());
        stage(&mut server, id(1, number), number, gradient(1.0));
        append(&mut server, number, id(1, number), None);
    }
    let (report, _) = server.apply(Order::Prepare { round: 9 });
    let Some(Report::Status { entries, .. }) = report else {
        panic!("{report:?}");
    };
    let numbers = entries.iter().map(|entry| entry.contributions[0].id.number);
    assert_eq!(numbers.collect::<Vec<_>>(), [3, 4, 5, 6]);
}

#[test]
fn orders_of_an_earlier_term_or_beyond_what_a_server_has_change_nothing() {
    let mut server = server();
    let terms = Terms::default().followed_by(1, 0).followed_by(2, 1);
    let point = Point {
        term: 1,
        version: 1,
    };
    let round = 9;
    server.apply(Order::Prepare { round });
    let start = Start {
        round,
        terms: terms.clone(),
        point,
        entries: vec![],
    };
    let (report, _) = server.apply(Order::Install(start));
    assert!(matches!(report, Some(Report::Installed { term: 2, .. })));
    // The round is over, so a repeated `Prepare` gets no status.
    let (report, _) = server.apply(Order::Prepare { round });
    assert!(report.is_none());
    let append = |server: &mut Server<Memory>, term, after| {
        let (report, _) = server.apply(Order::Append {
            term,
            after,
            entries: vec![entry(id(1, 1), None)],
            acknowledged: vec![],
            stable: 0,
        });
        report
    };
    assert!(append(&mut server, 1, 1).is_none());
    let beyond = append(&mut server, 2, 2);
    assert!(matches!(beyond, Some(Report::Applied { version: 1, .. })));
    assert_eq!(server.at().map(|at| at.point), Some(point));
    assert!(matches!(append(&mut server, 3, 1), Some(Report::Lost(3))));
    // A restarted server on the same disk enters no term that it was in, and no older one.
    let mut restarted = Server::new(server.disk().clone(), Some(2), true);
    assert!(matches!(
        install(&mut restarted, terms, point),
        Some(Report::Lost(2))
    ));
    let first = Terms::default().followed_by(1, 0);
    assert!(install(&mut restarted, first, Point::default()).is_none());
}

#[test]
fn a_server_that_lags_applies_the_entries_with_which_all_go_on() {
    let mut server = server();
    stage(&mut server, id(1, 1), 1, gradient(3.0));
    let round = 9;
    server.apply(Order::Prepare { round });
    let start = second_term(round, vec![entry(id(1, 1), None)]);
    let (report, _) = server.apply(Order::Install(start));
    assert!(matches!(report, Some(Report::Installed { term: 2, .. })));
    let shard = server.at().and_then(|at| at.shard.as_ref());
    assert_eq!(
        shard.map(|shard| shard.weights()[0].of::<f32>()[0]),
        Some(5.0)
    );
}

/// A server at version 1 with a part of eight rows, which all are 0, and a part of one weight.
fn server_of_rows() -> Server<Memory> {
    let part = |rows| {
        let spec = Spec {
            rows,
            width: 1,
            decays: false,
        };
        (spec, Arc::new(vec![0.0; rows].into()))
    };
    let optimizer = Optimizer::Sgd(Sgd {
        momentum: 0.0,
        is_nesterov: false,
    });
    let parts = vec![part(8), part(1)];
    let mut server = Server::new(Memory::default(), Some(2), true);
    let terms = Terms::default().followed_by(1, 0);
    install(&mut server, terms, Point::default());
    let initial = Payload::Initial { optimizer, parts };
    stage(&mut server, id(0, 1), 0, initial);
    append(&mut server, 0, id(0, 1), None);
    server
}

/// Subtracts 1 from a row.
fn change(server: &mut Server<Memory>, number: u64, row: u32) {
    let rows = Gradient::Rows {
        rows: vec![row],
        values: vec![1.0].into(),
    };
    let one = Gradient::Dense(vec![1.0].into());
    let payload = Payload::Gradients(vec![Some(rows), Some(one)]);
    stage(server, id(1, number), number, payload);
    append(server, number, id(1, number), None);
}

/// Changed rows of the first part, or `None` if the answer has all of them. The identity is that of
/// the weights.
fn changed_rows(reply: Option<Reply>) -> (Kept, Option<Vec<u32>>) {
    let Some(Reply::Weights {
        point,
        start,
        base,
        parts,
        ..
    }) = reply
    else {
        panic!("{reply:?}");
    };
    assert!(matches!(parts[1], PulledPart::All(_)));
    let version = point.version;
    let rows = match &parts[0] {
        PulledPart::All(_) | PulledPart::Keep(_) => None,
        PulledPart::Rows { rows, values } => {
            assert!(base.is_some());
            assert_eq!(*values, vec![-1.0; rows.len()].into());
            Some(rows.clone())
        }
    };
    (Kept { start, version }, rows)
}

fn pull_with(server: &mut Server<Memory>, at_least: Version, kept: Option<Kept>) -> Option<Reply> {
    let pull = Ask::Pull {
        round: 1,
        at_least,
        kept,
    };
    let (term, worker) = (server.term()?, 2);
    server.answer(&WorkerRequest {
        term,
        worker,
        ask: pull,
    })
}

#[test]
fn a_pull_of_a_worker_that_keeps_weights_brings_the_rows_that_have_changed() {
    let mut server = server_of_rows();
    change(&mut server, 1, 3);
    let (kept, rows) = changed_rows(pull_with(&mut server, 2, None));
    assert_eq!((kept.version, rows), (2, None));
    assert!(pull_with(&mut server, 3, Some(kept)).is_none());
    change(&mut server, 2, 5);
    // The waiting pull was answered, and a repeated one has the same answer.
    change(&mut server, 3, 0);
    for _ in 0..2 {
        let (now, rows) = changed_rows(pull_with(&mut server, 3, Some(kept)));
        assert_eq!((now.version, rows), (4, Some(vec![0, 5])));
    }
    for other in [
        Kept {
            start: kept.start + 1,
            ..kept
        },
        Kept { version: 1, ..kept },
        Kept { version: 9, ..kept },
    ] {
        let (_, rows) = changed_rows(pull_with(&mut server, 3, Some(other)));
        assert_eq!(rows, None, "{other:?}");
    }
}

#[test]
fn after_a_start_no_weights_are_known_that_workers_keep() {
    let mut server = server_of_rows();
    change(&mut server, 1, 3);
    let (kept, _) = changed_rows(pull_with(&mut server, 2, None));
    let round = 9;
    let second_start = || second_term(round, vec![]);
    let mut restarted = Server::new(server.disk().clone(), Some(2), true);
    for server in [&mut server, &mut restarted] {
        server.apply(Order::Prepare { round });
        let (report, _) = server.apply(Order::Install(second_start()));
        assert!(matches!(report, Some(Report::Installed { term: 2, .. })));
        let reply = pull_with(server, 2, Some(kept));
        assert!(matches!(reply, Some(Reply::Weights { base: None, .. })));
        let reply = pull_with(
            server,
            2,
            Some(Kept {
                start: round,
                ..kept
            }),
        );
        let Some(Reply::Weights { parts, .. }) = reply else {
            panic!("{reply:?}");
        };
        assert!(matches!(parts[0], PulledPart::All(_)));
    }
}
