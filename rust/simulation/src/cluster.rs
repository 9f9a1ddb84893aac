//! The world of one run: a queue of events, and ranks that do something when theirs come.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Waker};

use super::ends::{ControlEnd, Shared, SimulatedLinks};
use super::faults::Fault;
use super::network::{End, Event, Network, PipeId};
use super::process::{Outcome, Process};
use super::random::Random;
use super::scenario::Scenario;
use super::time::{Clock, MICROSECOND, MILLISECOND, Moment, NEVER, SECOND, nanoseconds};
use super::trace::Trace;
use gradring_core::config::timing::Timing;
use gradring_core::failure::requests::Request;
use gradring_core::failure::thread::MonitorThread;
use gradring_core::link::{Direction, Interest};

/// A thread that is woken waits so long for the processor, at most.
pub(super) const WAKE_MAX: Moment = 5 * MILLISECOND;
/// Bound on the events of a run.
const EVENTS_MAX: u64 = 3_000_000;
/// A rank sends its last messages for so long.
pub(super) const FLUSH_LIMIT: Moment = SECOND;

/// How a run went.
pub(super) struct Run {
    pub(super) scenario: Rc<Scenario>,
    pub(super) ranks: Vec<Ended>,
    /// By fault: when it struck, if it did.
    pub(super) struck: Vec<Option<Moment>>,
    /// The end of time for this run, if somebody reached it.
    pub(super) unfinished: Option<Moment>,
    pub(super) events: u64,
    pub(super) trace: Vec<String>,
}

/// What became of one rank.
pub(super) struct Ended {
    pub(super) outcome: Option<(Moment, Outcome)>,
    /// When its abort switch was raised.
    pub(super) aborted: Option<Moment>,
    /// When it had left the group in good order.
    pub(super) left: Option<Moment>,
    /// Whether its process was there and running when the run ended.
    pub(super) survives: bool,
    /// Which collectives it had launched by the first suspicion of all, counted from 0.
    pub(super) launched: usize,
}

struct Rank {
    process: Rc<Process>,
    /// `None` once the program has ended.
    engine: Option<Pin<Box<dyn Future<Output = ()>>>>,
    /// `None` once it has left.
    monitor: Option<MonitorThread<ControlEnd>>,
    /// Since when it only sends its last messages.
    leaving: Option<Moment>,
    /// Numbers the alarms of both threads, so that old ones are known.
    alarms: [u64; 2],
    left: Option<Moment>,
    stopped: bool,
    /// Whether a fault has ended its process.
    killed: bool,
    aborted: Option<Moment>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Thread {
    Engine,
    Monitor,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Wake(usize, Thread),
    Alarm(usize, Thread, u64),
    Network(Event),
    Strike(usize),
    Resume(usize),
}

struct World {
    scenario: Rc<Scenario>,
    clock: Clock,
    random: Random,
    network: Shared,
    ranks: Vec<Rank>,
    /// What happens next, by time, and in the order in which it was added.
    queue: BTreeMap<(Moment, u64), Next>,
    added: u64,
    events: u64,
    struck: Vec<Option<Moment>>,
    pending: Vec<usize>,
    trace: Rc<Trace>,
}

/// Runs what `seed` says.
pub(super) fn run(seed: u64, traced: bool) -> Run {
    let mut random = Random::new(seed);
    let scenario = Scenario::new(&mut random);
    play(scenario, random, traced)
}

/// Runs a scenario; what it leaves open is left to chance.
pub(super) fn play(scenario: Scenario, random: Random, traced: bool) -> Run {
    World::new(Rc::new(scenario), random, traced).run()
}

impl World {
    fn new(scenario: Rc<Scenario>, mut random: Random, traced: bool) -> Self {
        let clock = Clock::new();
        let trace = Rc::new(Trace::new(clock.clone(), traced));
        let world_size = scenario.world_size();
        let network = Shared::new(Network::new(
            world_size,
            clock.clone(),
            random.fork(),
            scenario.pipe_bytes,
            scenario.delay_max,
        ));
        let hosts: Vec<String> = (0..world_size)
            .map(|rank| format!("h{}", scenario.topology.position(rank).0))
            .collect();
        let rank = |rank| {
            let process = Process::new(rank, hosts.clone(), clock.clone(), Rc::clone(&trace));
            let process = Rc::new(process);
            let links = SimulatedLinks::new(rank, network.clone(), &scenario.sharing(rank));
            let predecessor = (rank + world_size - 1) % world_size;
            let neighbours = vec![
                (
                    (rank + 1) % world_size,
                    ControlEnd::new(network.clone(), rank, false),
                ),
                (
                    predecessor,
                    ControlEnd::new(network.clone(), predecessor, true),
                ),
            ];
            let (journal, requests) = (Arc::clone(&process.journal), Arc::clone(&process.requests));
            let program = Rc::clone(&process);
            Rank {
                engine: Some(Box::pin(program.run(
                    Rc::clone(&scenario),
                    links,
                    random.fork(),
                ))),
                monitor: Some(MonitorThread::new(
                    journal,
                    requests,
                    neighbours,
                    clock.instant(),
                    Timing::USUAL,
                    |_| (),
                )),
                process,
                leaving: None,
                left: None,
                alarms: [0; 2],
                stopped: false,
                killed: false,
                aborted: None,
            }
        };
        let ranks: Vec<Rank> = (0..world_size).map(rank).collect();
        let faults = scenario.faults.len();
        Self {
            clock,
            random,
            network,
            ranks,
            queue: BTreeMap::new(),
            added: 0,
            events: 0,
            struck: vec![None; faults],
            pending: (0..faults).collect(),
            trace,
            scenario,
        }
    }

    /// The end of time: nothing that is allowed takes longer.
    fn limit(&self) -> Moment {
        let lasting = self.scenario.faults.iter().map(Fault::lasts);
        let lasting: Moment = lasting.filter(|&lasts| lasts < NEVER).sum();
        let noticed = nanoseconds(self.scenario.limits.timeout.max(Timing::USUAL.silence));
        let collectives = self.scenario.collectives.len() as Moment;
        self.scenario.computing_max() + lasting + noticed + (40 + collectives) * SECOND
    }

    fn run(mut self) -> Run {
        for rank in 0..self.ranks.len() {
            self.wake(rank, Thread::Engine);
            self.wake(rank, Thread::Monitor);
        }
        let limit = self.limit();
        let mut unfinished = None;
        let mut suspected = false;
        let mut launched = vec![0; self.ranks.len()];
        while let Some(((moment, _), next)) = self.queue.pop_first() {
            self.clock.advance_to(moment);
            self.events += 1;
            if moment > limit || self.events > EVENTS_MAX {
                unfinished = Some(moment);
                break;
            }
            self.perform(next);
            self.follow_up();
            if !suspected {
                suspected = self.ranks.iter().any(|rank| rank.process.suspects.get());
                for (launched, rank) in launched.iter_mut().zip(&self.ranks) {
                    *launched = rank.process.launched.get();
                }
            }
            if self.ranks.iter().all(Rank::is_over) {
                break;
            }
        }
        let ended = |(rank, launched): (&Rank, usize)| Ended {
            outcome: rank.process.outcome.borrow().clone(),
            aborted: rank.aborted,
            left: rank.left,
            survives: !rank.killed && !rank.stopped,
            launched,
        };
        Run {
            ranks: self.ranks.iter().zip(launched).map(ended).collect(),
            struck: self.struck,
            unfinished,
            events: self.events,
            trace: self.trace.take(),
            scenario: self.scenario,
        }
    }

    fn at(&mut self, moment: Moment, next: Next) {
        self.added += 1;
        self.queue.insert((moment, self.added), next);
    }

    /// A thread gets the processor soon.
    fn wake(&mut self, rank: usize, thread: Thread) {
        let delay = match self.random.below(16) {
            0 => self.random.between(0, WAKE_MAX),
            _ => self.random.between(0, 50 * MICROSECOND),
        };
        self.at(self.clock.now() + delay, Next::Wake(rank, thread));
    }

    fn perform(&mut self, next: Next) {
        match next {
            Next::Wake(rank, thread) => self.go_on(rank, thread),
            Next::Alarm(rank, thread, number) => {
                if self.ranks[rank].alarms[thread as usize] == number {
                    self.go_on(rank, thread);
                }
            }
            Next::Network(event) => self.tell(event),
            Next::Strike(fault) => self.strike(fault),
            Next::Resume(rank) => {
                self.ranks[rank].process.say(|| "is resumed".into());
                self.ranks[rank].stopped = false;
                self.wake(rank, Thread::Engine);
                self.wake(rank, Thread::Monitor);
            }
        }
    }

    fn go_on(&mut self, rank: usize, thread: Thread) {
        if self.ranks[rank].stopped {
            return;
        }
        match thread {
            Thread::Engine => self.go_on_with_engine(rank),
            Thread::Monitor => self.go_on_with_monitor(rank),
        }
    }

    fn go_on_with_engine(&mut self, index: usize) {
        let rank = &mut self.ranks[index];
        let Some(engine) = &mut rank.engine else {
            return;
        };
        let mut context = Context::from_waker(Waker::noop());
        if engine.as_mut().poll(&mut context).is_ready() {
            rank.engine = None;
            return;
        }
        let alarm = rank.process.alarm.get();
        self.set_alarm(index, Thread::Engine, alarm);
    }

    fn go_on_with_monitor(&mut self, index: usize) {
        let (now, clock) = (self.clock.now(), self.clock.clone());
        let rank = &mut self.ranks[index];
        let Some(monitor) = &mut rank.monitor else {
            return;
        };
        let alarm = if rank.leaving.is_none() && monitor.turn(|| clock.instant()) {
            clock.moment(monitor.next_turn(clock.instant()))
        } else {
            let since = *rank.leaving.get_or_insert(now);
            if !monitor.flush() || now >= since + FLUSH_LIMIT {
                rank.monitor = None;
                rank.left = Some(now);
                return;
            }
            now + MILLISECOND
        };
        self.set_alarm(index, Thread::Monitor, alarm);
    }

    fn set_alarm(&mut self, rank: usize, thread: Thread, moment: Moment) {
        let number = &mut self.ranks[rank].alarms[thread as usize];
        *number += 1;
        let next = Next::Alarm(rank, thread, *number);
        self.at(moment.max(self.clock.now() + 1), next);
    }

    /// Wakes the rank that waits for what has become possible.
    fn tell(&mut self, event: Event) {
        let (Event::Arrival(id) | Event::Room(id)) = event;
        let (from, to) = id.ends(self.ranks.len());
        let (rank, peer, direction) = match event {
            Event::Arrival(_) => (to, from, Direction::Receive),
            Event::Room(_) => (from, to, Direction::Send),
        };
        match id {
            PipeId::Control { .. } => self.wake(rank, Thread::Monitor),
            PipeId::Data { .. } => {
                let interest = Interest { peer, direction };
                let process = &self.ranks[rank].process;
                if process.interests.borrow().contains(&interest) {
                    self.wake(rank, Thread::Engine);
                }
            }
        }
    }

    /// What follows from the last step: calls of threads, news of the network, faults.
    fn follow_up(&mut self) {
        let events = self.network.lock().take_events();
        for (moment, event) in events {
            self.at(moment, Next::Network(event));
        }
        for index in 0..self.ranks.len() {
            let process = &self.ranks[index].process;
            let called = |flag: &AtomicBool| flag.swap(false, Ordering::Relaxed);
            let (engine, monitor) = (
                called(&process.engine_called),
                called(&process.monitor_called),
            );
            if engine {
                process.say(|| format!("is told: {:?}", process.aborted()));
                self.ranks[index].aborted = Some(self.clock.now());
                self.wake(index, Thread::Engine);
            }
            if monitor {
                self.wake(index, Thread::Monitor);
            }
        }
        let (scenario, ranks) = (&self.scenario, &self.ranks);
        let mut network = self.network.lock();
        let mut due = |fault: &usize| {
            let trigger = scenario.faults[*fault].trigger();
            let reached = ranks[trigger.rank].process.reached.get();
            let sent = network.sent_in(trigger.rank, trigger.number);
            reached.is_some_and(|number| number >= trigger.number) && sent >= trigger.sent
        };
        let (due, pending) = self.pending.iter().partition(|fault| due(fault));
        self.pending = pending;
        drop(network);
        let due: Vec<usize> = due;
        for fault in due {
            let after = self.scenario.faults[fault].trigger().after;
            self.at(self.clock.now() + after, Next::Strike(fault));
        }
    }

    fn strike(&mut self, number: usize) {
        let scenario = Rc::clone(&self.scenario);
        let (now, fault) = (self.clock.now(), &scenario.faults[number]);
        self.struck[number] = Some(now);
        self.trace.say(|| format!("strikes: {fault:?}"));
        let mut network = self.network.lock();
        fault.harm(&mut network, self.ranks.len(), now);
        let index = fault.trigger().rank;
        let rank = &mut self.ranks[index];
        match fault {
            Fault::Killed { end, .. } => {
                let ids = network
                    .all()
                    .filter(|id| id.ends(scenario.world_size()).0 == index);
                for id in ids.filter(|_| *end) {
                    network.end_by_sender(id, End::Reset);
                }
                drop(network);
                rank.killed = true;
                rank.engine = None;
                rank.monitor = None;
            }
            Fault::Stopped { lasts, .. } => {
                drop(network);
                rank.stopped = true;
                if *lasts < NEVER {
                    self.at(now + lasts, Next::Resume(index));
                }
            }
            Fault::Exits { .. } => {
                drop(network);
                rank.killed = true;
                rank.engine = None;
                rank.process.requests.request(Request::Close);
            }
            Fault::Aborts { .. } => {
                drop(network);
                if rank.engine.is_some() {
                    rank.process.program_aborts();
                }
            }
            _ => {}
        }
    }
}

impl Rank {
    /// Whether nothing will happen here any more.
    fn is_over(&self) -> bool {
        self.engine.is_none() && self.monitor.is_none()
    }
}
