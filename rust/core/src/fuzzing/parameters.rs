//! What workers and parameter servers say.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::parameters::identity::{Incarnation, Point, PushId, Terms, Version};
use crate::parameters::log::{Contribution, Entry};
use crate::parameters::message::{Ask, Order, Reply, Report, Request};
use crate::parameters::optimizer::{Hyper, Optimizer};
use crate::parameters::rules::{Late, Overflow, Rules, Timing, Treatment};
use crate::parameters::sequencer::Sequencer;
use crate::parameters::server::{Disk, Server, Snapshot};
use crate::parameters::shard::{Gradient, Payload, Spec};
use crate::parameters::worker::Worker;
use crate::serving::message::{Counted, Incoming, Message, Outgoing};

/// Values for which a receiver would take memory.
const VALUES_BYTES_MAX: u64 = 1 << 20;

/// What can be read can be said again in the same bytes, and who hears it does not panic.
pub fn parameters(bytes: &[u8]) {
    let (mut incoming, mut rest) = (Incoming::NEW, bytes);
    let (mut server, mut sequencer, mut worker) = participants();
    let now = Instant::now();
    while !rest.is_empty() {
        let room = incoming.room();
        let count = room.len().min(rest.len());
        room[..count].copy_from_slice(&rest[..count]);
        rest = &rest[count..];
        let Ok(filled) = incoming.filled(count, VALUES_BYTES_MAX) else {
            return;
        };
        let Some(message) = filled else {
            continue;
        };
        let again = Outgoing::new(message.clone(), false).expect("it was short enough");
        let mut decoded = Incoming::NEW;
        let slices = again.slices().concat();
        let mut left = &slices[..];
        while !left.is_empty() {
            let room = decoded.room();
            let count = room.len().min(left.len());
            room[..count].copy_from_slice(&left[..count]);
            left = &left[count..];
            let heard = decoded.filled(count, VALUES_BYTES_MAX);
            assert!(heard.is_ok_and(|it| it.is_some() == left.is_empty()));
        }
        match message {
            Message::Request(request) => {
                let _ = server.answer(&request);
                sequencer.answer(&request, now);
            }
            Message::Reply(reply) => worker.heard(0, reply, now),
            Message::Order(order) => drop(server.obey(order)),
            Message::Report(report) => sequencer.heard(0, report, now),
            Message::Unheard
            | Message::Alive
            | Message::Over
            | Message::Snapshot(_)
            | Message::Counted(_) => {}
        }
        let _ = (sequencer.step(now), worker.step(now));
    }
}

/// A disk that keeps nothing.
struct Forgetful(Terms);

impl Disk for Forgetful {
    fn terms(&self) -> Terms {
        self.0.clone()
    }

    fn points(&self) -> Vec<Point> {
        Vec::new()
    }

    fn load(&mut self, _: Point) -> Option<Snapshot> {
        None
    }

    fn begin(&mut self, terms: &Terms) {
        self.0 = terms.clone();
    }

    fn save(&mut self, _: Snapshot) {}

    fn forget_before(&mut self, _: Version) {}
}

/// In the first term, which has one server and worker 1.
fn participants() -> (Server<Forgetful>, Sequencer, Worker) {
    let now = Instant::now();
    let timing = Timing {
        again: Duration::ZERO,
        silence: Duration::from_secs(10),
        start: Duration::ZERO,
        snapshot_every: 4,
    };
    let rules = Rules {
        workers: 2,
        staleness: None,
        aggregate: 1,
        queue_max: 4,
        overflow: Overflow::DropOldest,
        late: Late::Compensate(0.5),
        late_after: 0,
        backup: 0,
        is_mean: true,
    };
    let mut server = Server::new(Forgetful(Terms::default()), 4, true);
    let mut sequencer = Sequencer::new(rules, timing.clone(), 1, 7, now);
    let worker = Worker::new(1, 1, timing, 7, now);
    let term = first_term();
    let point = Point::default();
    let (report, _) = server.obey(Order::Install { terms: term, point });
    for output in sequencer.step(now) {
        if let crate::parameters::sequencer::Output::Server(_, order) = output
            && let (Some(report), _) = server.obey(order)
        {
            sequencer.heard(0, report, now);
        }
    }
    if let Some(report) = report {
        sequencer.heard(0, report, now);
    }
    (server, sequencer, worker)
}

fn first_term() -> Terms {
    Terms::default().followed_by(1, 0)
}

pub(super) fn samples() -> Vec<Vec<u8>> {
    let id = PushId {
        worker: 1,
        incarnation: Incarnation(1, 1),
        number: 1,
    };
    let spec = Spec {
        rows: 2,
        width: 2,
        decays: true,
    };
    let optimizer = Optimizer::Sgd {
        momentum: 0.5,
        is_nesterov: true,
    };
    let parts = vec![(spec, Arc::new(vec![1.0; 4].into()))];
    let gradients = vec![
        Some(Gradient::Dense(vec![1.0; 4].into())),
        None,
        Some(Gradient::Rows {
            rows: vec![0, 1],
            values: vec![1.0; 4],
        }),
    ];
    let hyper = Hyper {
        learning_rate: 0.5,
        weight_decay: 0.0,
    };
    let (nonce, claim) = (7, Some(Incarnation(1, 1)));
    let stage = |base, payload| Ask::Stage {
        id,
        base,
        payload: Arc::new(payload),
    };
    let asks = [
        Ask::Join { nonce, claim },
        stage(0, Payload::Initial { optimizer, parts }),
        stage(1, Payload::Gradients(gradients)),
        Ask::Submit { id, base: 0, hyper },
        Ask::Pull {
            round: 3,
            at_least: 1,
        },
        Ask::Alive(Incarnation(1, 1)),
        Ask::Leave(Incarnation(1, 1)),
    ];
    let request = |ask| {
        Message::Request(Request {
            term: 1,
            worker: 1,
            ask,
        })
    };
    let treatment = Treatment {
        weight: 1.0,
        compensation: Some(0.5),
    };
    let entry = Entry {
        contributions: vec![Contribution { id, treatment }],
        scale: 0.5,
        hyper,
    };
    let (term, point) = (1, Point::default());
    let terms = first_term();
    let replies = [
        Reply::OtherTerm(terms.clone()),
        Reply::NotMember(1, Incarnation(1, 1)),
        Reply::Staged(1, id),
        Reply::Weights {
            round: 8,
            point,
            parts: vec![Arc::new(vec![1.0; 4].into())],
        },
    ];
    let orders = [
        Order::Look { question: 7 },
        Order::Install {
            terms: terms.clone(),
            point,
        },
        Order::Append {
            term,
            after: 0,
            entries: vec![entry],
            over: vec![id],
            stable: 0,
        },
    ];
    let points = vec![point];
    let reports = [
        Report::Status {
            question: 7,
            terms,
            points,
        },
        Report::Installed {
            term,
            applied: vec![id],
        },
        Report::Applied {
            term,
            version: 1,
            saved: 1,
        },
        Report::Lost(1),
    ];
    let messages = asks.into_iter().map(request);
    let messages = messages.chain(replies.into_iter().map(Message::Reply));
    let messages = messages.chain(orders.into_iter().map(Message::Order));
    let messages = messages.chain(reports.into_iter().map(Message::Report));
    let others = [
        Message::Unheard,
        Message::Alive,
        Message::Over,
        Message::Counted(Counted::default()),
    ];
    let all: Vec<_> = messages.chain(others).collect();
    let encode = |message: &Message, checks| {
        let encoded = Outgoing::new(message.clone(), checks);
        encoded.expect("samples can be encoded").slices().concat()
    };
    let mut samples: Vec<_> = all.iter().map(|it| encode(it, true)).collect();
    samples.push(all.iter().flat_map(|it| encode(it, false)).collect());
    samples
}
