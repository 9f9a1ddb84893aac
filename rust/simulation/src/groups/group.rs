//! Group of one run: ranks that act when their events arrive.

use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Waker};

use super::faults::Fault;
use super::links::{ControlEnd, SharedPipes, SimulatedLinks};
use super::process::{Outcome, Process};
use super::scenario::Scenario;
use crate::world::network::Weather;
use crate::world::pipes::{End, Event, PipeId, Pipes};
use crate::world::random::Random;
use crate::world::time::{MICROSECOND, MILLISECOND, Moment, NEVER, SECOND, nanoseconds};
use crate::world::{self, Happens, Subject, World};
use gradring_core::failure::requests::MonitorRequest;
use gradring_core::failure::thread::MonitorThread;
use gradring_net::config::timing::Timing;
use gradring_net::link::{Direction, Interest};

/// Most time until a woken thread gets the processor.
pub(super) const WAKE_MAX: Moment = 5 * MILLISECOND;
/// Most time that a rank spends on sending its last messages.
pub(super) const FLUSH_LIMIT: Moment = SECOND;

/// Result of a run.
pub(super) struct Run {
    pub(super) scenario: Rc<Scenario>,
    pub(super) ranks: Vec<Ended>,
    /// Time at which each fault struck; `None` if it did not strike.
    pub(super) struck: Vec<Option<Moment>>,
    /// Limit of the run's time, if the run exceeded it.
    pub(super) unfinished: Option<Moment>,
    pub(super) trace: Vec<String>,
}

/// Result of one rank.
pub(super) struct Ended {
    pub(super) outcome: Option<(Moment, Outcome)>,
    /// Time at which the rank's abort switch was raised.
    pub(super) aborted: Option<Moment>,
    /// Time at which the rank left the group in good order.
    pub(super) left: Option<Moment>,
    /// True if the process was there and running at the end of the run.
    pub(super) survives: bool,
    /// Number of collectives that the rank had launched at the first suspicion of any rank.
    pub(super) launched: usize,
}

struct Rank {
    process: Rc<Process>,
    /// `None` once the program has ended.
    engine: Option<Pin<Box<dyn Future<Output = ()>>>>,
    /// `None` once the rank has left.
    monitor: Option<MonitorThread<ControlEnd>>,
    /// Time since which the rank only sends its last messages.
    leaving: Option<Moment>,
    left: Option<Moment>,
    /// True if a fault has killed the process.
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
    /// A thread of a rank runs.
    Turn(usize, Thread),
    Pipe(Event),
    Strike(usize),
}

impl Happens for Next {
    fn process(&self) -> Option<usize> {
        match self {
            Self::Turn(rank, _) => Some(*rank),
            Self::Pipe(_) | Self::Strike(_) => None,
        }
    }
}

struct Group {
    scenario: Rc<Scenario>,
    world: World<Next>,
    network: SharedPipes,
    ranks: Vec<Rank>,
    /// True if any rank has suspected another.
    suspected: bool,
    /// Number of collectives that each rank had launched at the first suspicion of any rank.
    launched: Vec<usize>,
    struck: Vec<Option<Moment>>,
    pending: Vec<usize>,
}

/// Runs a scenario; `random` decides all that the scenario leaves open.
pub(super) fn run(scenario: Scenario, random: Random, traced: bool) -> Run {
    Group::new(Rc::new(scenario), random, traced).run()
}

impl Group {
    fn new(scenario: Rc<Scenario>, random: Random, traced: bool) -> Self {
        let world_size = scenario.world_size();
        let mut world = World::new(world_size, Weather::CALM, random, traced);
        let (clock, trace) = (world.clock.clone(), Rc::clone(&world.trace));
        let network = SharedPipes::new(Pipes::new(
            world_size,
            clock.clone(),
            world.random.fork(),
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
                    world.random.fork(),
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
                killed: false,
                aborted: None,
            }
        };
        let ranks: Vec<Rank> = (0..world_size).map(rank).collect();
        let faults = scenario.faults.len();
        Self {
            suspected: false,
            launched: vec![0; world_size],
            struck: vec![None; faults],
            pending: (0..faults).collect(),
            scenario,
            world,
            network,
            ranks,
        }
    }

    fn run(mut self) -> Run {
        for rank in 0..self.ranks.len() {
            self.wake(rank, Thread::Engine);
            self.wake(rank, Thread::Monitor);
        }
        let result = world::run(&mut self);
        let is_unfinished = result.is_err() || (self.world.has_more() && !self.is_over());
        let ended = |(index, rank): (usize, &Rank)| Ended {
            outcome: rank.process.outcome.borrow().clone(),
            aborted: rank.aborted,
            left: rank.left,
            survives: !rank.killed && !self.world.is_stopped(index),
            launched: self.launched[index],
        };
        Run {
            ranks: self.ranks.iter().enumerate().map(ended).collect(),
            struck: self.struck,
            unfinished: is_unfinished.then(|| self.world.now()),
            trace: self.world.trace.take(),
            scenario: self.scenario,
        }
    }

    /// Schedules a turn of a thread, after a short random delay.
    fn wake(&mut self, rank: usize, thread: Thread) {
        let delay = match self.world.random.below(16) {
            0 => self.world.random.between(0, WAKE_MAX),
            _ => self.world.random.between(0, 50 * MICROSECOND),
        };
        self.world.after(delay, Next::Turn(rank, thread));
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
        let (now, clock) = (self.world.now(), self.world.clock.clone());
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
        let alarm = 2 * rank + thread as usize;
        self.world
            .set_alarm(alarm, moment, Next::Turn(rank, thread));
    }

    /// Wakes the rank that waits for this event.
    fn tell(&mut self, event: Event) {
        let (Event::Arrival(id) | Event::Capacity(id)) = event;
        let (from, to) = id.ends(self.ranks.len());
        let (rank, peer, direction) = match event {
            Event::Arrival(_) => (to, from, Direction::Receive),
            Event::Capacity(_) => (from, to, Direction::Send),
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

    /// Handles the consequences of the last event: calls of threads, events of the network, and
    /// faults.
    fn follow_up(&mut self) {
        let events = self.network.lock().take_events();
        for (moment, event) in events {
            self.world.at(moment, Next::Pipe(event));
        }
        for index in 0..self.ranks.len() {
            let process = &self.ranks[index].process;
            let take = |flag: &AtomicBool| flag.swap(false, Ordering::Relaxed);
            let (engine, monitor) = (take(&process.engine_called), take(&process.monitor_called));
            if engine {
                process.say(|| format!("is told: {:?}", process.aborted()));
                self.ranks[index].aborted = Some(self.world.now());
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
            self.world.after(after, Next::Strike(fault));
        }
    }

    fn strike(&mut self, number: usize) {
        let scenario = Rc::clone(&self.scenario);
        let (now, fault) = (self.world.now(), &scenario.faults[number]);
        self.struck[number] = Some(now);
        self.world.say(|| format!("strikes: {fault:?}"));
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
                self.world.stop(index, *lasts);
            }
            Fault::Exits { .. } => {
                drop(network);
                rank.killed = true;
                rank.engine = None;
                rank.process.requests.request(MonitorRequest::Close);
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

impl Subject for Group {
    type Event = Next;
    const EVENTS_MAX: u64 = 3_000_000;

    fn world(&mut self) -> &mut World<Next> {
        &mut self.world
    }

    /// A limit longer than anything that the rules allow.
    fn limit(&self) -> Moment {
        let lasting = self.scenario.faults.iter().map(Fault::lasts);
        let lasting: Moment = lasting.filter(|&lasts| lasts < NEVER).sum();
        let noticed = nanoseconds(self.scenario.limits.timeout.max(Timing::USUAL.silence));
        let collectives = self.scenario.collectives.len() as Moment;
        self.scenario.computing_max() + lasting + noticed + (40 + collectives) * SECOND
    }

    fn happen(&mut self, next: Next) -> Result<(), String> {
        match next {
            Next::Turn(rank, Thread::Engine) => self.go_on_with_engine(rank),
            Next::Turn(rank, Thread::Monitor) => self.go_on_with_monitor(rank),
            Next::Pipe(event) => self.tell(event),
            Next::Strike(fault) => self.strike(fault),
        }
        self.follow_up();
        if !self.suspected {
            self.suspected = self.ranks.iter().any(|rank| rank.process.suspects.get());
            for (launched, rank) in self.launched.iter_mut().zip(&self.ranks) {
                *launched = rank.process.launched.get();
            }
        }
        Ok(())
    }

    fn is_over(&self) -> bool {
        self.ranks.iter().all(Rank::is_over)
    }
}

impl Rank {
    /// Returns whether the rank has ended and left.
    fn is_over(&self) -> bool {
        self.engine.is_none() && self.monitor.is_none()
    }
}
