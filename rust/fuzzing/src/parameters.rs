//! Decoder of messages between workers and parameter servers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gradring_proto::parameters::changes::{Kept, PulledPart};
use gradring_proto::parameters::float::FloatType;
use gradring_proto::parameters::floats::Floats;
use gradring_proto::parameters::identity::{Incarnation, Point, PushId, Terms, Version};
use gradring_proto::parameters::keepers::Keepers;
use gradring_proto::parameters::log::{Contribution, Entry, History};
use gradring_proto::parameters::message::{Ask, Order, Piece, Reply, Report, Start, WorkerRequest};
use gradring_proto::parameters::optimizer::{Hyper, Optimizer, Sgd};
use gradring_proto::parameters::rules::{Late, Overflow, Rules, Timing, Treatment};
use gradring_proto::parameters::sequencer::{Output, Sequencer};
use gradring_proto::parameters::server::{Disk, Server};
use gradring_proto::parameters::shard::{Gradient, Payload, Shard, Spec, Weights};
use gradring_proto::parameters::snapshot::Snapshot;
use gradring_proto::parameters::worker::{Event, Worker};
use gradring_servers::message::{Counted, Incoming, Message, Outgoing};

/// Most bytes of values for which a receiver would allocate memory.
const VALUES_BYTES_MAX: u64 = 1 << 20;

/// A decoded message can be encoded again in the same bytes, and no receiver panics.
pub fn parameters(bytes: &[u8]) {
    let (mut incoming, mut rest) = (Incoming::NEW, bytes);
    let mut jobs = Job::all();
    while !rest.is_empty() {
        let spare = incoming.spare_capacity();
        let count = spare.len().min(rest.len());
        spare[..count].copy_from_slice(&rest[..count]);
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
            let spare = decoded.spare_capacity();
            let count = spare.len().min(left.len());
            spare[..count].copy_from_slice(&left[..count]);
            left = &left[count..];
            let message = decoded.filled(count, VALUES_BYTES_MAX);
            assert!(message.is_ok_and(|it| it.is_some() == left.is_empty()));
        }
        for job in &mut jobs {
            job.receive(message.clone());
        }
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

/// A job with worker 1 and all messages. Messages from outside come from the last server.
struct Job {
    keepers: Keepers,
    optimizer: Optimizer,
    servers: Vec<Server<Forgetful>>,
    sequencer: Sequencer,
    worker: Worker,
    now: Instant,
}

impl Job {
    /// Makes a job in its first term.
    fn new(keepers: Keepers, optimizer: Optimizer) -> Self {
        let now = Instant::now();
        let mut job = Self {
            keepers,
            optimizer,
            servers: (0..keepers.count()).map(|_| new_server()).collect(),
            sequencer: new_sequencer(keepers, 7, now),
            worker: Worker::new(1, keepers.servers, timing(), 7, now),
            now,
        };
        while job.sequencer.restored() == 0 {
            for output in job.sequencer.step(now) {
                job.deliver(output);
            }
        }
        job
    }

    /// Makes a job of two servers with copies after a first update. One server has lost all data,
    /// and the others have been asked for theirs.
    fn restoring(lost: usize) -> Self {
        let keepers = Keepers {
            servers: 2,
            replicas: 1,
        };
        let mut job = Self::new(keepers, OPTIMIZER);
        let now = job.now;
        while job.servers.iter().any(|server| {
            let version = server.at().map(|at| at.point.version);
            version != Some(1)
        }) {
            job.turn();
        }
        for keeper in 0..keepers.count() {
            if keepers.server(keeper) == lost {
                job.servers[keeper] = new_server();
            }
        }
        if lost == 0 {
            job.sequencer = new_sequencer(keepers, 8, now);
        }
        loop {
            let outputs = job.sequencer.step(now);
            let is_asked = |it: &Output| matches!(it, Output::Keeper(_, Order::FetchState(_)));
            if outputs.iter().any(is_asked) {
                return job;
            }
            for output in outputs {
                job.deliver(output);
            }
        }
    }

    /// Makes a job whose worker keeps weights and waits for a pull. Returns the answer, too.
    fn pulling() -> (Self, Message) {
        let mut job = Self::new(ONE_SERVER, SGD);
        loop {
            if let Some(reply) = job.turn() {
                return (job, Message::Reply(0, reply));
            }
        }
    }

    /// All jobs that receive an input.
    fn all() -> [Self; 4] {
        [
            Self::new(ONE_SERVER, OPTIMIZER),
            Self::restoring(0),
            Self::restoring(1),
            Self::pulling().0,
        ]
    }

    /// Carries messages and performs the program's work. Returns the first reply with rows instead
    /// of delivering it.
    fn turn(&mut self) -> Option<Reply> {
        for (keeper, request) in self.worker.step(self.now) {
            if keeper == 0 {
                self.sequencer.answer(&request, self.now);
            }
            if let Some(reply) = self.servers[keeper].answer(&request) {
                if matches!(reply, Reply::Weights { base: Some(_), .. }) {
                    return Some(reply);
                }
                self.worker.receive(keeper, reply, self.now);
            }
        }
        let payload = match self.worker.event() {
            Some(Event::WantsInitial) => Some(initial(self.optimizer)),
            Some(Event::Weights(_)) => Some(Payload::Gradients(vec![Some(rows())])),
            None => None,
        };
        if let Some(payload) = payload.map(Arc::new) {
            self.worker.push(vec![payload; self.keepers.servers], HYPER);
        }
        for output in self.sequencer.step(self.now) {
            self.deliver(output);
        }
        None
    }

    /// Delivers an output. Returns the messages that server 1 receives and sends.
    fn deliver(&mut self, output: Output) -> Vec<Message> {
        match output {
            Output::Keeper(keeper, order) => {
                let (report, _) = self.servers[keeper].apply(order.clone());
                let copy = self.keepers.copy(keeper);
                let mut messages = vec![Message::Order(copy, order)];
                if let Some(report) = report {
                    self.sequencer.receive(keeper, report.clone(), self.now);
                    messages.push(Message::Report(copy, report));
                }
                messages.retain(|_| self.keepers.server(keeper) == 1);
                messages
            }
            Output::Worker(worker, reply) => {
                if worker == 1 {
                    self.worker.receive(0, reply, self.now);
                }
                vec![]
            }
        }
    }

    /// Restores the job. Returns the messages that server 1 receives and sends meanwhile.
    fn restore(mut self) -> Vec<Message> {
        let (mut messages, before) = (Vec::new(), self.sequencer.restored());
        while self.sequencer.restored() == before {
            for output in self.sequencer.step(self.now) {
                messages.extend(self.deliver(output));
            }
        }
        messages
    }

    /// Delivers a message from outside. Orders of the sequencer to other servers than its own are
    /// lost.
    fn receive(&mut self, message: Message) {
        let (keepers, now) = (self.keepers, self.now);
        let from = |copy: usize| {
            let is_one = copy <= keepers.replicas;
            is_one.then(|| keepers.on(keepers.servers - 1, copy))
        };
        match message {
            Message::Request(copy, request) => {
                if let Some(keeper) = from(copy) {
                    let _ = self.servers[keeper].answer(&request);
                }
                self.sequencer.answer(&request, now);
            }
            Message::Reply(copy, reply) => {
                if let Some(keeper) = from(copy) {
                    self.worker.receive(keeper, reply, now);
                }
            }
            Message::Order(copy, order) => {
                if let Some(keeper) = from(copy) {
                    drop(self.servers[keeper].apply(order));
                }
            }
            Message::Report(copy, report) => {
                if let Some(keeper) = from(copy) {
                    self.sequencer.receive(keeper, report, now);
                }
            }
            Message::Retry(_)
            | Message::Alive
            | Message::Goodbye
            | Message::Snapshot(_)
            | Message::Counted(_) => {}
        }
        for output in self.sequencer.step(now) {
            if let Output::Keeper(keeper, _) = &output
                && keepers.server(*keeper) == 0
            {
                self.deliver(output);
            }
        }
        let _ = self.worker.step(now);
    }
}

fn timing() -> Timing {
    Timing {
        again: Duration::ZERO,
        silence: Duration::from_secs(10),
        start: Duration::ZERO,
        snapshot_every: 4,
    }
}

fn new_server() -> Server<Forgetful> {
    Server::new(Forgetful(Terms::default()), Some(4), true)
}

fn new_sequencer(keepers: Keepers, random: u64, now: Instant) -> Sequencer {
    let rules = Rules {
        workers: 2,
        staleness: None,
        queue_max: Some(4),
        overflow: Overflow::DropOldest,
        late: Late::Compensate,
        ..Rules::default()
    };
    Sequencer::new(rules, timing(), keepers, random, now)
}

const HYPER: Hyper = Hyper {
    learning_rate: 0.5,
    weight_decay: 0.0,
};
const SPEC: Spec = Spec {
    rows: 2,
    width: 2,
    decays: true,
};
const OPTIMIZER: Optimizer = Optimizer::Sgd(Sgd {
    momentum: 0.5,
    is_nesterov: true,
});

const SGD: Optimizer = Optimizer::Sgd(Sgd {
    momentum: 0.0,
    is_nesterov: false,
});
const ONE_SERVER: Keepers = Keepers {
    servers: 1,
    replicas: 0,
};

fn initial(optimizer: Optimizer) -> Payload {
    Payload::Initial {
        optimizer,
        parts: vec![(SPEC, Arc::new(vec![1.0; 4].into()))],
    }
}

/// Gradients of other element types.
fn others() -> Vec<Option<Gradient>> {
    let types = FloatType::ALL.into_iter();
    let dense = types.map(|it| Some(Gradient::Dense(Floats::repeated(it, 1.0, 4))));
    dense.collect()
}

fn rows() -> Gradient {
    Gradient::Rows {
        rows: vec![1],
        values: vec![1.0; 2].into(),
    }
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
    let gradients = vec![
        Some(Gradient::Dense(vec![1.0; 4].into())),
        None,
        Some(Gradient::Rows {
            rows: vec![0, 1],
            values: vec![1.0; 4].into(),
        }),
    ];
    let hyper = HYPER;
    let (nonce, claim) = (7, Some(Incarnation(1, 1)));
    let stage = |base, payload| Ask::Stage {
        id,
        base,
        piece: Piece { index: 1, count: 3 },
        payload: Arc::new(payload),
    };
    let asks = [
        Ask::Join { nonce, claim },
        stage(0, initial(OPTIMIZER)),
        stage(1, Payload::Gradients(gradients)),
        stage(1, Payload::Gradients(others())),
        Ask::Submit { id, base: 0, hyper },
        Ask::Pull {
            round: 3,
            at_least: 1,
            kept: Some(Kept {
                start: 7,
                version: 1,
            }),
        },
        Ask::Alive(Incarnation(1, 1)),
        Ask::Leave(Incarnation(1, 1)),
    ];
    let request = |ask| {
        let (term, worker) = (1, 1);
        Message::Request(1, WorkerRequest { term, worker, ask })
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
    let weights: Weights = Arc::new(vec![1.0; 4].into());
    let replies = [
        Reply::OtherTerm(terms.clone()),
        Reply::NotMember(1, Incarnation(1, 1)),
        Reply::Go {
            term: 1,
            incarnation: Incarnation(1, 1),
            number: 3,
            version: 2,
            settled: 2,
            dropped: 1,
        },
        Reply::Left {
            term: 1,
            incarnation: Incarnation(1, 1),
            dropped: 1,
        },
        Reply::Staged(1, id, 2),
        Reply::Weights {
            round: 8,
            point,
            start: 7,
            base: None,
            parts: vec![
                PulledPart::All(weights.clone()),
                PulledPart::Keep(weights.clone()),
            ],
        },
        Reply::Weights {
            round: 9,
            point,
            start: 7,
            base: Some(Kept {
                start: 7,
                version: 0,
            }),
            parts: vec![
                PulledPart::All(weights.clone()),
                PulledPart::Rows {
                    rows: vec![1],
                    values: vec![1.0; 2].into(),
                },
            ],
        },
    ];
    let start = Start {
        round: 7,
        terms: terms.clone(),
        point,
        entries: vec![entry.clone()],
    };
    let shard = Shard::new(OPTIMIZER, &[(SPEC, weights)]);
    let state = Arc::new(Snapshot {
        point,
        history: History(7),
        applied: [(1, (Incarnation(1, 1), 1))].into(),
        shard: Some(shard),
    });
    let orders = [
        Order::Prepare { round: 7 },
        Order::FetchState(start.clone()),
        Order::InstallSnapshot(start.clone(), state.clone()),
        Order::Install(start),
        Order::Append {
            term,
            after: 0,
            entries: vec![entry.clone()],
            acknowledged: vec![id],
            stable: 0,
        },
    ];
    let points = vec![point];
    let reports = [
        Report::Status {
            round: 7,
            terms,
            points,
            at: Some(point),
            entries: vec![entry],
        },
        Report::FetchedState { round: 7, state },
        Report::Installed {
            term,
            applied: vec![id],
            saved: 1,
        },
        Report::Applied {
            term,
            version: 1,
            saved: 1,
        },
        Report::Lost(1),
    ];
    let messages = asks.into_iter().map(request);
    let messages = messages.chain(replies.into_iter().map(|it| Message::Reply(0, it)));
    let messages = messages.chain(orders.into_iter().map(|it| Message::Order(1, it)));
    let messages = messages.chain(reports.into_iter().map(|it| Message::Report(1, it)));
    let others = [
        Message::Retry(1),
        Message::Alive,
        Message::Goodbye,
        Message::Counted(Counted::default()),
    ];
    let all: Vec<_> = messages.chain(others).collect();
    let encode = |message: &Message, checks| {
        let encoded = Outgoing::new(message.clone(), checks);
        encoded.expect("samples can be encoded").slices().concat()
    };
    let mut samples: Vec<_> = all.iter().map(|it| encode(it, true)).collect();
    samples.push(encode(&Job::pulling().1, true));
    let restored = [0, 1].map(|lost| Job::restoring(lost).restore());
    for together in restored.iter().chain([&all]) {
        samples.push(together.iter().flat_map(|it| encode(it, false)).collect());
    }
    samples
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_restore_a_lost_server() {
        for lost in [0, 1] {
            let mut job = Job::restoring(lost);
            let before = job.sequencer.restored();
            let messages = Job::restoring(lost).restore();
            for message in &messages {
                job.receive(message.clone());
            }
            assert_eq!(job.sequencer.restored(), before + 1);
            let has = |is: fn(&Message) -> bool| messages.iter().any(is);
            assert_eq!(
                has(|it| matches!(it, Message::Report(_, Report::FetchedState { .. }))),
                lost == 0
            );
            assert_eq!(
                has(|it| matches!(it, Message::Order(_, Order::InstallSnapshot(..)))),
                lost == 1
            );
        }
    }

    #[test]
    fn a_sample_has_rows_for_a_worker_that_waits_for_a_pull() {
        let (mut job, answer) = Job::pulling();
        assert!(!job.worker.has_event());
        job.receive(answer);
        let Some(Event::Weights(pulled)) = job.worker.event() else {
            panic!("it pulls");
        };
        assert_eq!(pulled[0].1[0].of::<f32>()[..], [1.0, 1.0, 0.0, 0.0]);
    }
}
