//! Training of one history: its processes, its network, and its reactions to events.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::disk::SimulatedDisk;
use super::record::{
    ELEMENTS, FIRST, PARTS, PushedGradient, Record, Second, has_row, learning_rate, second, value,
};
use super::scenario::{Harm, Kind, Scenario, Who, timing};
use crate::world::every::Without;
use crate::world::faults::{Faults, Hits};
use crate::world::random::Random;
use crate::world::time::{MILLISECOND, Moment, SECOND};
use crate::world::{self, Happens, Subject, World};
use gradring_proto::parameters::changes::PulledPart;
use gradring_proto::parameters::floats::Floats;
use gradring_proto::parameters::identity::{Incarnation, Point, PushId};
use gradring_proto::parameters::message::{Ask, Order, Reply, Report, WorkerRequest};
use gradring_proto::parameters::optimizer::{Hyper, Optimizer, Sgd};
use gradring_proto::parameters::rules::Timing;
use gradring_proto::parameters::sequencer::{Output, Sequencer};
use gradring_proto::parameters::server::Server;
use gradring_proto::parameters::shard::{Gradient, Payload, Spec};
use gradring_proto::parameters::snapshot::Snapshot;
use gradring_proto::parameters::worker::{self, Worker};

/// Time after which no message triggers a fault.
const LAST_FAULT: Moment = 10 * SECOND;
/// Longest duration of a fault.
const FAULT_MAX: Moment = 5 * SECOND;
/// Time from the last fault until all must be well, and the length of the final period without
/// faults.
const SETTLES: Moment = 8 * SECOND;
const GOES_ON: Moment = 6 * SECOND;
/// Least number of computations that each worker begins in the final period.
const BEGUN_MIN: u64 = 2;

/// Messages to and from keepers; workers and the sequencer have no number.
#[derive(Clone)]
pub(super) enum Message {
    Request(usize, WorkerRequest),
    Reply(usize, Reply),
    Order(usize, Order),
    Report(usize, Report),
}

#[derive(Clone)]
pub(super) enum Event {
    Message(Who, Message),
    /// A process has asked to be woken at this time.
    Wake(Who),
    /// A worker has computed the first piece of a gradient, or all of it.
    Computed(usize, u64, u64, Extent),
    /// A snapshot of a keeper on a server is complete.
    Saved(usize, usize, u64, Snapshot),
    Strike(usize, Who),
    Restart(Who),
    Measure,
}

/// Part of a gradient that a worker has computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Extent {
    FirstPiece,
    All,
}

impl Happens for Event {
    fn process(&self) -> Option<usize> {
        match self {
            Self::Message(who, _) | Self::Wake(who) => Some(who.process()),
            Self::Computed(worker, ..) => Some(Who::Worker(*worker).process()),
            Self::Saved(server, ..) => Some(Who::Server(*server).process()),
            Self::Strike(..) | Self::Restart(_) | Self::Measure => None,
        }
    }
}

/// A process and its host.
struct Host<Process> {
    process: Option<Process>,
    /// Number of processes so far on this host.
    life: u64,
    /// Time until which the disk is busy; it writes one snapshot after the other.
    writes_until: Moment,
}

struct ServerProcess {
    /// Copies of shards; only the disk of the first outlives the process.
    copies: Vec<(Server<SimulatedDisk>, SimulatedDisk)>,
    sequencer: Option<Sequencer>,
}

struct WorkerProcess {
    worker: Worker,
    /// Number of the current computation, and its gradient to push.
    computes: Option<(u64, PushedGradient)>,
    /// Gradient of which the first piece is pushed.
    open: Option<PushId>,
    computations: u64,
}

pub(super) struct Training {
    pub(super) scenario: Scenario,
    pub(super) record: Record,
    pub(super) world: World<Event>,
    timing: Timing,
    servers: Vec<Host<ServerProcess>>,
    disks: Vec<SimulatedDisk>,
    workers: Vec<Host<WorkerProcess>>,
    faults: Faults<Kind, Who, Harm>,
    begun: Option<Vec<u64>>,
    /// Number of times that the sequencer has restored servers.
    restored: u64,
}

/// Runs the history of `seed`.
pub(super) fn run(seed: u64, without: &Without, traced: bool) -> (Training, Result<(), String>) {
    let mut random = Random::new(seed);
    let mut scenario = Scenario::new(&mut random);
    without.apply(&mut scenario.faults);
    let mut training = Training::new(scenario, random.fork(), traced);
    training.begin();
    let result = world::run(&mut training).and_then(|()| training.check_end());
    (training, result)
}

impl<Process> Host<Process> {
    const fn new() -> Self {
        Self {
            process: None,
            life: 0,
            writes_until: 0,
        }
    }
}

impl Training {
    fn new(scenario: Scenario, random: Random, traced: bool) -> Self {
        let processes = 2 * scenario.keepers.servers.max(scenario.paces.len());
        Self {
            record: Record::new(&scenario),
            world: World::new(processes, scenario.weather, random, traced),
            timing: timing(),
            servers: (0..scenario.keepers.servers).map(|_| Host::new()).collect(),
            disks: (0..scenario.keepers.servers)
                .map(|_| SimulatedDisk::default())
                .collect(),
            workers: scenario.paces.iter().map(|_| Host::new()).collect(),
            faults: Faults::new(scenario.faults.clone()),
            begun: None,
            restored: 0,
            scenario,
        }
    }

    fn begin(&mut self) {
        for server in 0..self.servers.len() {
            self.start_soon(Who::Server(server));
        }
        for worker in 0..self.workers.len() {
            self.start_soon(Who::Worker(worker));
        }
        for (index, at, who) in self.faults.timed() {
            self.world.at(at, Event::Strike(index, who));
        }
        self.world.at(self.calm() + SETTLES, Event::Measure);
    }

    /// Starts a process soon after the beginning, together with the others.
    fn start_soon(&mut self, who: Who) {
        let longest = match who {
            Who::Server(_) => 50 * MILLISECOND,
            Who::Worker(_) => 500 * MILLISECOND,
        };
        let after = self.world.random.between(0, longest);
        self.world.after(after, Event::Restart(who));
    }

    /// Time at which the last fault is over.
    fn calm(&self) -> Moment {
        match self.scenario.faults.is_empty() {
            true => 2 * SECOND,
            false => LAST_FAULT + FAULT_MAX,
        }
    }

    fn check_end(&mut self) -> Result<(), String> {
        let before = self.begun.clone().unwrap_or_default();
        for (worker, host) in self.workers.iter().enumerate() {
            let begun = self.record.begun[worker] - before[worker];
            if host.process.is_some() && begun < BEGUN_MIN {
                return Err(format!("worker {worker} does not go on"));
            }
        }
        let versions = self.servers.iter().map(|host| {
            let at = host.process.as_ref().and_then(|it| it.copies[0].0.at());
            at.map_or(0, |at| at.point.version)
        });
        let (least, most) = (versions.clone().min(), versions.max());
        if most > least.map(|least| least + 4) {
            return Err(format!("a server stays at version {least:?} of {most:?}"));
        }
        Ok(())
    }

    /// Returns whether each shard has a live copy.
    fn has_all(&self) -> bool {
        let keepers = self.scenario.keepers;
        let is_there = |keeper: &usize| {
            let process = &self.servers[keepers.server(*keeper)].process;
            let copy = process.as_ref().map(|it| &it.copies[keepers.copy(*keeper)]);
            copy.is_some_and(|(server, _)| server.at().is_some())
        };
        let there = (0..keepers.count()).filter(is_there);
        let shards: BTreeSet<_> = there.map(|keeper| keepers.shard(keeper)).collect();
        shards.len() == keepers.servers
    }

    fn server_of(&self, keeper: usize) -> Who {
        Who::Server(self.scenario.keepers.server(keeper))
    }

    fn restart(&mut self, who: Who) -> Result<(), String> {
        let (now, random, timing) = (
            self.world.instant(),
            self.world.random.next(),
            self.timing.clone(),
        );
        self.world.say(|| format!("{who:?} starts"));
        match who {
            Who::Server(server) => {
                let disk = self.disks[server].clone();
                disk.0.borrow_mut().writing.clear();
                self.servers[server].writes_until = 0;
                let rules = self.scenario.rules.clone();
                let every = timing.snapshot_every;
                let keepers = self.scenario.keepers;
                let sequencer =
                    (server == 0).then(|| Sequencer::new(rules, timing, keepers, random, now));
                let forgetful = (0..keepers.replicas).map(|_| SimulatedDisk::default());
                let disks = [disk].into_iter().chain(forgetful);
                let copy = |(copy, disk): (usize, SimulatedDisk)| {
                    let every = (copy == 0).then_some(every);
                    (Server::new(disk.clone(), every, false), disk)
                };
                let host = &mut self.servers[server];
                host.life += 1;
                host.process = Some(ServerProcess {
                    copies: disks.enumerate().map(copy).collect(),
                    sequencer,
                });
                self.drive_server(server);
                Ok(())
            }
            Who::Worker(index) => {
                let worker = Worker::new(index as u32, self.servers.len(), timing, random, now);
                let host = &mut self.workers[index];
                host.life += 1;
                host.process = Some(WorkerProcess {
                    worker,
                    computes: None,
                    open: None,
                    computations: 0,
                });
                self.drive_worker(index)
            }
        }
    }

    fn send(&mut self, from: Who, to: Who, message: Message) {
        self.world
            .say(|| format!("{from:?} -> {to:?}  {}", shown(&message)));
        if let Message::Reply(_, Reply::Weights { base, parts, .. }) = &message {
            self.note_rows(base.is_some(), parts);
        }
        let kind = kind(&message);
        self.world
            .send(from.process(), to.process(), Event::Message(to, message));
        let Some(kind) = kind else { return };
        for (hits, who) in [(Hits::Sender, from), (Hits::Receiver, to)] {
            for index in self.faults.count(kind, hits) {
                if self.world.now() < LAST_FAULT {
                    // The sender finishes its current action before the fault strikes.
                    self.world.after(0, Event::Strike(index, who));
                }
            }
        }
    }

    fn note_rows(&mut self, has_base: bool, parts: &[PulledPart]) {
        let mut rows = parts.iter().map(|part| match part {
            PulledPart::Rows { rows, .. } => Some(rows.len()),
            PulledPart::All(_) | PulledPart::Keep(_) => None,
        });
        if rows.clone().any(|rows| rows > Some(0)) {
            self.record.note("a pull brought rows");
        }
        if has_base && rows.all(|rows| rows.is_none()) {
            self.record.note("too many rows had changed since a pull");
        }
    }

    fn strike(&mut self, index: usize, who: Who) {
        let Some(fault) = self.faults.strike(index, who) else {
            return;
        };
        let now = self.world.now();
        self.world.say(|| format!("{who:?}: {:?}", fault.harm));
        self.record.note(fault.harm.name());
        match (&fault.harm, who) {
            (Harm::Kill(back), Who::Server(server)) => {
                if self.servers[server].process.take().is_some() {
                    self.record.has_all &= self.has_all();
                    let back = back.unwrap_or(SECOND);
                    self.world.after(back, Event::Restart(who));
                    self.record.note("a server was killed");
                }
            }
            (Harm::Kill(back), Who::Worker(worker)) => {
                if self.workers[worker].process.take().is_some() {
                    self.record.note("a worker was killed");
                    if let Some(back) = *back {
                        self.world.after(back, Event::Restart(who));
                    }
                }
            }
            (Harm::Crash, _) => {
                self.record.has_all = false;
                self.record.crashed = true;
                for server in 0..self.servers.len() {
                    if self.servers[server].process.take().is_some() {
                        self.start_soon(Who::Server(server));
                    }
                }
                for worker in 0..self.workers.len() {
                    if self.workers[worker].process.take().is_some() {
                        self.start_soon(Who::Worker(worker));
                    }
                }
            }
            (Harm::GoOn, _) => {
                self.record.went_on = true;
                let now = self.world.instant();
                if let Some(process) = &mut self.servers[0].process
                    && let Some(sequencer) = &mut process.sequencer
                {
                    let awaited = sequencer.waits().awaited;
                    sequencer.go_on_without(&awaited, now);
                }
                self.drive_server(0);
            }
            (Harm::Stop(lasts), who) => self.world.stop(who.process(), *lasts),
            (Harm::Cut(lasts), who) => {
                let (own, until) = (who.process(), now + lasts);
                self.world
                    .cut_where(|from, to| (from == own || to == own).then_some(until));
            }
        }
    }

    fn deliver(&mut self, to: Who, message: Message) -> Result<(), String> {
        let now = self.world.instant();
        match (to, message) {
            (Who::Server(server), Message::Request(keeper, request)) => {
                let Some(process) = &mut self.servers[server].process else {
                    return Ok(());
                };
                let copy = self.scenario.keepers.copy(keeper);
                let reply = process.copies[copy].0.answer(&request);
                if let (Ask::Pull { kept: Some(_), .. }, Some(Reply::Weights { base: None, .. })) =
                    (&request.ask, &reply)
                {
                    self.record
                        .note("a worker kept weights that a server did not know");
                }
                if let Some(sequencer) = &mut process.sequencer
                    && copy == 0
                {
                    sequencer.answer(&request, now);
                }
                if let Some(reply) = reply {
                    let worker = Who::Worker(request.worker as usize);
                    self.send(to, worker, Message::Reply(keeper, reply));
                }
                self.drive_server(server);
            }
            (Who::Server(_), Message::Order(keeper, order)) => self.apply(keeper, order)?,
            (Who::Server(server), Message::Report(from, report)) => {
                if let Some(process) = &mut self.servers[server].process
                    && let Some(sequencer) = &mut process.sequencer
                {
                    sequencer.receive(from, report, now);
                }
                self.drive_server(server);
            }
            (Who::Worker(worker), Message::Reply(from, reply)) => {
                if let Some(process) = &mut self.workers[worker].process {
                    process.worker.receive(from, reply, now);
                    self.drive_worker(worker)?;
                }
            }
            _ => return Err("a message for another".into()),
        }
        Ok(())
    }

    fn apply(&mut self, keeper: usize, order: Order) -> Result<(), String> {
        let keepers = self.scenario.keepers;
        let (server, copy) = (keepers.server(keeper), keepers.copy(keeper));
        let Some(process) = &mut self.servers[server].process else {
            return Ok(());
        };
        let (there, disk) = &mut process.copies[copy];
        let before = there.at().map(|at| at.point);
        let (report, replies) = there.apply(order.clone());
        let at = there.at().cloned();
        let staged = there.staged();
        let writing = std::mem::take(&mut disk.0.borrow_mut().writing);
        if let (Some(mut point), Some(at)) = (before, &at) {
            let (term, after, entries) = match &order {
                Order::Append {
                    term,
                    after,
                    entries,
                    ..
                } => (*term, *after, &entries[..]),
                Order::Install(start) | Order::FetchState(start) => {
                    let after = start.point.version - start.entries.len() as u64;
                    (start.point.term, after, &start.entries[..])
                }
                Order::Prepare { .. } | Order::InstallSnapshot(..) => (0, 0, &[][..]),
            };
            for (version, entry) in (after + 1..).zip(entries) {
                if version == point.version + 1 && version <= at.point.version {
                    let next = Point { term, version };
                    self.record.applied(&self.scenario, point, next, entry)?;
                    point = next;
                }
            }
            let restored = matches!(report, Some(Report::Installed { .. }));
            if point != at.point && !restored {
                return Err(format!(
                    "keeper {keeper} is at {:?} and not {point:?}",
                    at.point
                ));
            }
            self.record.check_server(keepers.shard(keeper), at)?;
        }
        if let (Order::Install(start) | Order::InstallSnapshot(start, _), Some(at)) = (&order, &at)
            && let Some(Report::Installed { .. }) = report
        {
            let point = start.point;
            if at.point != point {
                return Err(format!("keeper {keeper} has {:?} for {point:?}", at.point));
            }
            self.record.check_server(keepers.shard(keeper), at)?;
            self.record.check_term_start(&self.scenario, start)?;
            if point.version < self.record.stable {
                return Err(format!(
                    "{point:?} was restored, though there were later ones"
                ));
            }
            if before.is_some_and(|before| before.version > point.version) {
                self.record.taken_back(point)?;
            }
            if point.version > 0 {
                self.record.note(match (&order, before) {
                    (Order::InstallSnapshot(..), _) => "a copy was filled from another server",
                    (_, Some(_)) => "a server went on with what it had",
                    (_, None) => "a snapshot was restored",
                });
            }
        }
        if let Order::Append { stable, .. } = order {
            self.record.stable = self.record.stable.max(stable);
            if before.is_some() && at.is_none() {
                return Err(format!("keeper {keeper} lacks a gradient that was ordered"));
            }
        }
        let rules = &self.scenario.rules;
        let workers = self.workers.len();
        let queued = rules.queue_max().max(workers);
        if staged > queued + 4 * rules.aggregate.max(workers) + 4 * workers {
            return Err(format!("{staged} gradients are staged"));
        }
        let life = self.servers[server].life;
        for snapshot in writing {
            let delay = self.world.random.between(1, self.scenario.save_max);
            let host = &mut self.servers[server];
            host.writes_until = host.writes_until.max(self.world.now()) + delay;
            let at = host.writes_until;
            self.world
                .at(at, Event::Saved(server, keeper, life, snapshot));
        }
        let me = Who::Server(server);
        if let Some(report) = report {
            self.send(me, Who::Server(0), Message::Report(keeper, report));
        }
        for (worker, reply) in replies {
            self.send(
                me,
                Who::Worker(worker as usize),
                Message::Reply(keeper, reply),
            );
        }
        Ok(())
    }

    fn drive_server(&mut self, server: usize) {
        let now = self.world.instant();
        let Some(process) = &mut self.servers[server].process else {
            return;
        };
        let Some(sequencer) = &mut process.sequencer else {
            return;
        };
        let outputs = sequencer.step(now);
        let wake = self.world.clock.moment(sequencer.wake());
        if let Some((counts, waiting, _)) = sequencer.counts() {
            let rules = &self.scenario.rules;
            assert!(rules.is_synchronous() || waiting <= rules.queue_max());
            self.record.dropped =
                counts.late + counts.overflowed + counts.superfluous + counts.lost;
            for (count, example) in [
                (counts.late, "a late gradient was dropped"),
                (counts.overflowed, "the queue was full"),
                (counts.superfluous, "initial weights came twice"),
                (counts.lost, "a lost worker's gradient was dropped"),
            ] {
                if count > 0 {
                    self.record.note(example);
                }
            }
        }
        let restored = sequencer.restored();
        if restored > 1 {
            self.record.note("the servers were restored");
        }
        if self.restored != restored {
            self.restored = restored;
            self.record.has_all |= restored > 0 && self.has_all();
        }
        for output in &outputs {
            if let Output::Keeper(_, Order::Append { term, entries, .. }) = output {
                self.record.ordered(*term, entries);
            }
        }
        for output in &outputs {
            if let Output::Worker(worker, reply) = output
                && let Reply::Go {
                    incarnation,
                    settled,
                    ..
                } = reply
            {
                self.record.settled(*worker, *incarnation, *settled);
            }
        }
        let me = Who::Server(server);
        self.world.set_alarm(me.process(), wake, Event::Wake(me));
        for output in outputs {
            match output {
                Output::Keeper(to, order) => {
                    let server = self.server_of(to);
                    self.send(me, server, Message::Order(to, order));
                }
                Output::Worker(to, reply) => {
                    let reply = Message::Reply(server, reply);
                    self.send(me, Who::Worker(to as usize), reply);
                }
            }
        }
    }

    fn drive_worker(&mut self, index: usize) -> Result<(), String> {
        let now = self.world.instant();
        let host = &mut self.workers[index];
        let Some(process) = &mut host.process else {
            return Ok(());
        };
        let requests = process.worker.step(now);
        let event = process.worker.event();
        let wake = self.world.clock.moment(process.worker.wake());
        let me = Who::Worker(index);
        self.world.set_alarm(me.process(), wake, Event::Wake(me));
        for (keeper, request) in requests {
            let to = self.server_of(keeper);
            self.send(me, to, Message::Request(keeper, request));
        }
        let pushed = match event {
            None => return Ok(()),
            Some(worker::Event::WantsInitial) => PushedGradient {
                base: Point::default(),
                is_initial: true,
                is_torn: false,
            },
            Some(worker::Event::Weights(pulled)) => {
                self.record.begins(&self.scenario, index, &pulled)?;
                let points = pulled.iter().map(|(point, _)| *point);
                PushedGradient {
                    base: points.min_by_key(|point| point.version).unwrap_or_default(),
                    is_initial: false,
                    is_torn: pulled.iter().any(|(point, _)| *point != pulled[0].0),
                }
            }
        };
        self.compute(index, pushed);
        Ok(())
    }

    /// Begins to compute a gradient.
    fn compute(&mut self, index: usize, pushed: PushedGradient) {
        let host = &mut self.workers[index];
        let life = host.life;
        if let Some(process) = &mut host.process {
            process.computations += 1;
            process.computes = Some((process.computations, pushed));
            process.open = None;
            let computation = process.computations;
            self.compute_on(index, life, computation, Extent::FirstPiece);
        }
    }

    /// Computes half of a gradient.
    fn compute_on(&mut self, index: usize, life: u64, computation: u64, until: Extent) {
        let pace = self.scenario.paces[index];
        let delay = self.world.random.between(pace / 4, pace / 2);
        let computed = Event::Computed(index, life, computation, until);
        self.world.after(delay, computed);
    }

    fn computed(
        &mut self,
        index: usize,
        life: u64,
        computation: u64,
        extent: Extent,
    ) -> Result<(), String> {
        let servers = self.servers.len();
        let host = &mut self.workers[index];
        if host.life != life {
            return Ok(());
        }
        let Some(process) = &mut host.process else {
            return Ok(());
        };
        let Some((_, pushed)) = process.computes.filter(|(it, _)| *it == computation) else {
            return Ok(());
        };
        let pieces = if pushed.is_initial { 1 } else { 2 };
        if extent == Extent::FirstPiece {
            process.open = process.worker.open(pieces);
            if let Some(id) = process.open.filter(|_| pieces > 1) {
                let payload = |server| Arc::new(gradients(id, server, 0));
                process
                    .worker
                    .put(id, 0, (0..servers).map(payload).collect());
            }
            self.compute_on(index, life, computation, Extent::All);
            return self.drive_worker(index);
        }
        process.computes = None;
        let open = process.open.take();
        if !pushed.is_initial && self.world.random.once_in(24) {
            self.record.note("a computation failed after a part of it");
            self.compute(index, pushed);
            return Ok(());
        }
        let momentum = self.scenario.momentum;
        let is_counted = open.filter(|id| {
            let payload = |server| match pushed.is_initial {
                true => initial(*id, server, momentum),
                false => gradients(*id, server, 1),
            };
            let payloads = (0..servers).map(|server| Arc::new(payload(server)));
            let hyper = Hyper {
                learning_rate: learning_rate(*id),
                weight_decay: 0.0,
            };
            process.worker.put(*id, pieces - 1, payloads.collect());
            process.worker.close(*id, hyper)
        });
        let Some(id) = is_counted else {
            self.record.note("a gradient was not worth pushing");
            return Ok(());
        };
        let kept = process.worker.unsettled();
        let rules = &self.scenario.rules;
        if kept > 2 + 4 * rules.queue_max() + 4 * rules.aggregate {
            return Err(format!("worker {index} keeps {kept} gradients"));
        }
        self.record.pushes(id, pushed)?;
        self.drive_worker(index)
    }
}

impl Subject for Training {
    type Event = Event;
    const EVENTS_MAX: u64 = 400_000;

    fn world(&mut self) -> &mut World<Event> {
        &mut self.world
    }

    fn limit(&self) -> Moment {
        self.calm() + SETTLES + GOES_ON
    }

    fn happen(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::Message(who, message) => self.deliver(who, message)?,
            Event::Wake(Who::Server(server)) => self.drive_server(server),
            Event::Wake(Who::Worker(worker)) => self.drive_worker(worker)?,
            Event::Computed(worker, life, computation, extent) => {
                self.computed(worker, life, computation, extent)?;
            }
            Event::Saved(server, keeper, life, snapshot) => {
                let keepers = self.scenario.keepers;
                let host = &mut self.servers[server];
                if host.life == life
                    && let Some(process) = &mut host.process
                {
                    let point = snapshot.point;
                    let (server, disk) = &mut process.copies[keepers.copy(keeper)];
                    disk.finish(snapshot);
                    server.saved(point);
                    self.world
                        .say(|| format!("keeper {keeper} has saved {point:?}"));
                }
            }
            Event::Strike(index, who) => self.strike(index, who),
            Event::Restart(who) => self.restart(who)?,
            Event::Measure => self.begun = Some(self.record.begun.clone()),
        }
        Ok(())
    }
}

fn initial(id: PushId, server: usize, momentum: f32) -> Payload {
    let part = |index: usize, first: usize| {
        let (rows, width) = PARTS[index];
        let values = floats(id, server, index, first..first + rows * width);
        let spec = Spec {
            rows,
            width,
            decays: true,
        };
        (spec, Arc::new(values))
    };
    Payload::Initial {
        optimizer: Optimizer::Sgd(Sgd {
            momentum: f64::from(momentum),
            is_nesterov: false,
        }),
        parts: vec![part(0, 0), part(1, FIRST)],
    }
}

/// Some elements of a part. The first part is float32, and the second one float64.
fn floats(id: PushId, server: usize, part: usize, elements: impl Iterator<Item = usize>) -> Floats {
    let values = elements.map(|it| value(id, server, it));
    match part {
        0 => values.map(|it| it as f32).collect::<Vec<_>>().into(),
        _ => Floats::F64(values.collect::<Vec<_>>().into()),
    }
}

/// A piece of a gradient. The first one has the second part of each server.
fn gradients(id: PushId, server: usize, piece: usize) -> Payload {
    let first = floats(id, server, 0, 0..FIRST);
    let first = if id.number.is_multiple_of(3) {
        Gradient::Rows {
            rows: (0..PARTS[0].0 as u32).collect(),
            values: first,
        }
    } else {
        Gradient::Dense(first)
    };
    let (rows, width) = PARTS[1];
    let second = match second(id) {
        Second::Nothing => None,
        Second::Dense => Some(Gradient::Dense(floats(id, server, 1, FIRST..ELEMENTS))),
        Second::Rows => {
            let rows: Vec<_> = (0..rows).filter(|row| has_row(id, *row)).collect();
            let place = |row: &usize| FIRST + row * width;
            let some = rows.iter().flat_map(|row| place(row)..place(row) + width);
            Some(Gradient::Rows {
                rows: rows.iter().map(|row| *row as u32).collect(),
                values: floats(id, server, 1, some),
            })
        }
    };
    Payload::Gradients(match piece {
        0 => vec![None, second],
        _ => vec![Some(first), None],
    })
}

fn kind(message: &Message) -> Option<Kind> {
    Some(match message {
        Message::Request(_, request) => match request.ask {
            Ask::Join { .. } => Kind::Join,
            Ask::Stage { .. } => Kind::Stage,
            Ask::Submit { .. } => Kind::Submit,
            Ask::Pull { .. } => Kind::Pull,
            Ask::Alive(_) | Ask::Leave(_) => return None,
        },
        Message::Reply(_, reply) => match reply {
            Reply::Staged(..) => Kind::Staged,
            Reply::Go { .. } => Kind::Go,
            Reply::Weights { .. } => Kind::Weights,
            _ => return None,
        },
        Message::Order(_, order) => match order {
            Order::Append { entries, .. } if !entries.is_empty() => Kind::Append,
            Order::Install(_) | Order::InstallSnapshot(..) => Kind::Install,
            Order::FetchState(_) => Kind::FetchState,
            _ => return None,
        },
        Message::Report(_, report) => match report {
            Report::Applied { .. } => Kind::Applied,
            Report::Installed { .. } => Kind::Installed,
            Report::FetchedState { .. } => Kind::FetchedState,
            _ => return None,
        },
    })
}

fn shown(message: &Message) -> String {
    match message {
        Message::Request(_, it) => match &it.ask {
            Ask::Stage {
                id, base, piece, ..
            } => {
                let (id, piece) = (named(*id), piece.index);
                format!("Stage {id}, piece {piece}, in {} at {base}", it.term)
            }
            Ask::Submit { id, base, .. } => {
                format!("Submit {} in {} at {base}", named(*id), it.term)
            }
            ask => format!("{ask:?} in {}", it.term),
        },
        Message::Reply(
            _,
            Reply::Weights {
                round, point, base, ..
            },
        ) => {
            format!("Weights of {point:?} for {round} on {base:?}")
        }
        Message::Reply(_, reply) => format!("{reply:?}"),
        Message::Order(
            to,
            Order::Append {
                term,
                after,
                entries,
                stable,
                ..
            },
        ) => {
            let ids = entries.iter().map(|entry| {
                let ids = entry.contributions.iter().map(|it| named(it.id));
                ids.collect::<Vec<_>>().join("+")
            });
            let ids: Vec<_> = ids.collect();
            format!("{to}: Append {ids:?} after {after} in {term}, {stable} is stable")
        }
        Message::Order(to, order) => format!("{to}: {order:?}"),
        Message::Report(from, report) => format!("{from}: {report:?}"),
    }
}

fn named(id: PushId) -> String {
    let Incarnation(term, count) = id.incarnation;
    format!("{}/{term}.{count}/{}", id.worker, id.number)
}
