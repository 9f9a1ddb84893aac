//! One rank: its program and engine as one thread, its monitor as another.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use super::links::SimulatedLinks;
use super::scenario::Scenario;
use super::values::Values;
use crate::world::random::Random;
use crate::world::time::{Clock, Moment, nanoseconds};
use crate::world::trace::Trace;
use gradring_core::drive::{
    Context, Drive, Launched, Memory, Prepared, Stall, Step, Supervisor, Suspicion,
};
use gradring_core::failure::requests::{MonitorRequest, Requests};
use gradring_core::observe::flight_recorder::{FlightRecorder, State};
use gradring_core::observe::journal::Journal;
use gradring_net::abort::AbortSwitch;
use gradring_net::link::Interest;
use gradring_proto::collective::Call;
use gradring_proto::error::Error;

/// Most polls of an engine without progress at one moment.
const ROUNDS_MAX: u32 = 1000;

/// Most steps of one collective: one step for each byte would be fewer.
const STEPS_MAX: u32 = 2_000_000;

/// Result of a rank's program.
#[derive(Debug, Clone)]
pub(super) enum Outcome {
    Done,
    Failed(Error),
    /// A violation of an invariant.
    Wrong(String),
}

/// State of a rank's program and its engine alone.
struct Program {
    scenario: Rc<Scenario>,
    links: SimulatedLinks,
    random: Random,
    memory: Memory,
}

/// State that the threads of one rank and the world share.
pub(super) struct Process {
    pub(super) rank: usize,
    pub(super) clock: Clock,
    pub(super) requests: Arc<Requests>,
    pub(super) journal: Arc<Journal>,
    pub(super) trace: Rc<Trace>,
    /// Set when the monitor has to run.
    pub(super) monitor_called: Arc<AtomicBool>,
    /// Set when the group's abort switch has been raised on this rank.
    pub(super) engine_called: Arc<AtomicBool>,
    /// Time at which the engine's thread wakes in any case.
    pub(super) alarm: Cell<Moment>,
    /// Events that end the thread's sleep earlier.
    pub(super) interests: RefCell<Vec<Interest>>,
    /// Position of the collective for which the program computes, counted from 0. The number of
    /// collectives once the program has done all.
    pub(super) reached: Cell<Option<usize>>,
    /// Number of collectives that the program has launched.
    pub(super) launched: Cell<usize>,
    /// True if the engine has suspected any rank.
    pub(super) suspects: Cell<bool>,
    /// Time of the last progress in the current collective, or of its start.
    moved_at: Cell<Moment>,
    /// A stall that the engine reported although there was progress.
    untrue: Cell<Option<&'static str>>,
    pub(super) outcome: RefCell<Option<(Moment, Outcome)>>,
}

impl Process {
    pub(super) fn new(rank: usize, hosts: Vec<String>, clock: Clock, trace: Rc<Trace>) -> Self {
        let (monitor_called, engine_called) = (Arc::<AtomicBool>::default(), Arc::default());
        let abort = Arc::new(AbortSwitch::default());
        abort.wake_with(call(&engine_called));
        let recorder = Arc::new(FlightRecorder::default());
        Self {
            rank,
            clock,
            requests: Arc::new(Requests::new(abort, call(&monitor_called))),
            journal: Arc::new(Journal::new(rank, hosts, recorder)),
            trace,
            monitor_called,
            engine_called,
            alarm: Cell::new(0),
            interests: RefCell::default(),
            reached: Cell::default(),
            launched: Cell::default(),
            suspects: Cell::default(),
            moved_at: Cell::default(),
            untrue: Cell::default(),
            outcome: RefCell::default(),
        }
    }

    pub(super) fn aborted(&self) -> Option<Error> {
        self.requests.abort.cause()
    }

    /// The program of this rank calls `abort`.
    pub(super) fn program_aborts(&self) {
        let cause = Error::aborted("it wants to");
        let host = self.journal.hosts[self.rank].clone();
        self.requests.abort(cause.blaming(self.rank, host));
    }

    pub(super) fn say(&self, what: impl FnOnce() -> String) {
        self.trace.say(|| format!("rank {}: {}", self.rank, what()));
    }

    /// Sleeps until the alarm or an earlier event.
    async fn doze(&self, until: Moment) {
        self.alarm.set(until);
        let mut slept = false;
        poll_fn(|_| match std::mem::replace(&mut slept, true) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        })
        .await;
        self.interests.borrow_mut().clear();
    }

    async fn sleep(&self, until: Moment) {
        while self.clock.now() < until {
            self.doze(until).await;
        }
    }

    /// Runs the program from its first collective to its end.
    pub(super) async fn run(
        self: Rc<Self>,
        scenario: Rc<Scenario>,
        links: SimulatedLinks,
        random: Random,
    ) {
        let mut program = Program {
            scenario: Rc::clone(&scenario),
            links,
            random,
            memory: Memory::default(),
        };
        let outcome = self.collectives(&mut program).await;
        let Program {
            links, mut random, ..
        } = program;
        self.say(|| match &outcome {
            Outcome::Failed(error) => format!("failed: {error}"),
            other => format!("ended: {other:?}"),
        });
        *self.outcome.borrow_mut() = Some((self.clock.now(), outcome));
        let lingers = scenario.lingers(self.rank, &mut random);
        self.sleep(self.clock.now() + lingers).await;
        self.say(|| "closes".into());
        drop(links);
        self.requests.request(MonitorRequest::Close);
    }

    async fn collectives(&self, program: &mut Program) -> Outcome {
        let scenario = Rc::clone(&program.scenario);
        let mut number = 0;
        while number < scenario.collectives.len() {
            self.reached.set(Some(number));
            self.sleep(self.clock.now() + scenario.computing(self.rank, number))
                .await;
            let together = scenario.collectives[number + 1..].iter();
            let numbers = number..number + 1 + together.take_while(|next| next.together).count();
            let mut launched = Vec::new();
            for number in numbers.clone() {
                let Some(call) = scenario.call_of(self.rank, number) else {
                    self.reached.set(Some(number));
                    break;
                };
                if let Some(cause) = self.aborted() {
                    return Outcome::Failed(cause);
                }
                let policy = &scenario.collectives[number].policy;
                let prepared = Prepared::new(Arc::new(call), self.rank, policy)
                    .expect("a scenario's calls make sense");
                let (call, sequence) = (Arc::clone(&prepared.call), number as u64 + 1);
                self.journal.recorder.launched(
                    (sequence, 0),
                    call,
                    prepared.algorithm,
                    self.clock.instant(),
                    false,
                );
                self.launched.set(number + 1);
                launched.push((number, prepared.launch(0, sequence, 0)));
            }
            let left = launched.len() < numbers.len();
            for (number, launched) in launched {
                self.reached.set(self.reached.get().max(Some(number)));
                if let Err(outcome) = self.perform(program, number, &launched).await {
                    return outcome;
                }
            }
            if left {
                return Outcome::Done;
            }
            number = numbers.end;
        }
        self.reached.set(Some(number));
        Outcome::Done
    }

    /// Performs one collective as an engine does.
    async fn perform(
        &self,
        program: &mut Program,
        number: usize,
        launched: &Launched,
    ) -> Result<(), Outcome> {
        let Program {
            scenario,
            links,
            random,
            memory,
        } = program;
        let (prepared, sequence) = (&launched.prepared, launched.sequence);
        let values = Values {
            call: &prepared.call,
            world_size: scenario.world_size(),
            sequence,
            narrow: prepared.wire_dtype.is_some(),
        };
        let buffer = values.buffer(self.rank, random);
        for (peer, byte) in scenario.changed_headers(self.rank, number) {
            links.garble(peer, byte);
        }
        let (recorder, started) = (&*self.journal.recorder, self.clock.instant());
        self.say(|| {
            let algorithm = prepared.algorithm.name();
            format!("starts #{sequence} {} by {algorithm}", prepared.call)
        });
        recorder.started(sequence, started);
        self.moved_at.set(self.clock.now());
        let context = Context {
            rank: self.rank,
            topology: &scenario.topology,
            limits: scenario.limits,
            abort: &self.requests.abort,
            supervisor: self,
            waits: &recorder.waits,
        };
        let mut operand = memory
            .operand(buffer, launched)
            .expect("a simulation has memory");
        let mut drive =
            Drive::new(context, launched, &mut operand, started).expect("a simulation has memory");
        let driven = self.drive(&mut drive, links).await;
        drop(drive);
        let owed = |call: &Call| *call == scenario.owed(self.rank, number);
        match &driven {
            Ok(()) => links.note_end(),
            Err(Outcome::Failed(_))
                if !self.suspects.get()
                    && owed(&prepared.call)
                    && links.everything_has_arrived(number) =>
            {
                return Err(Outcome::Wrong(
                    "it fails in a collective of which everything has arrived".into(),
                ));
            }
            Err(_) => {}
        }
        let state = match driven {
            Ok(()) => State::Done,
            Err(_) => State::Failed,
        };
        recorder.over(sequence, state, started);
        driven?;
        match values.check(self.rank, operand.finish()) {
            Some(problem) => Err(Outcome::Wrong(problem)),
            None => Ok(()),
        }
    }

    /// The engine's loop around [`Drive`], in virtual time.
    async fn drive(
        &self,
        drive: &mut Drive<'_>,
        links: &mut SimulatedLinks,
    ) -> Result<(), Outcome> {
        let wrong = |problem: &str| Err(Outcome::Wrong(problem.into()));
        let mut in_vain = false;
        let (mut rounds, mut steps) = (0, 0);
        loop {
            let step = drive.step(links, || self.clock.instant());
            if in_vain && matches!(step, Step::Done | Step::Moved) {
                return wrong("something moved for which the executor did not wait");
            }
            match step {
                Step::Done => return Ok(()),
                Step::Failed(cause) => return Err(Outcome::Failed(cause)),
                Step::Moved if steps == STEPS_MAX => return wrong("the executor moves for ever"),
                Step::Moved => {
                    steps += 1;
                    self.moved_at.set(self.clock.now());
                    continue;
                }
                Step::Blocked => {}
            }
            let limit = drive.poll(self.clock.instant(), links);
            if let Some(problem) = self.untrue.get() {
                return wrong(problem);
            }
            let ready = |links: &SimulatedLinks| {
                let mut interests = drive.interests().iter();
                interests.any(|&interest| links.is_ready(interest))
            };
            if limit.is_zero() || ready(links) {
                rounds += 1;
                if rounds > ROUNDS_MAX {
                    return wrong("the engine spins");
                }
                continue;
            }
            rounds = 0;
            self.interests
                .borrow_mut()
                .extend_from_slice(drive.interests());
            self.doze(self.clock.now() + nanoseconds(limit)).await;
            in_vain = !ready(links);
        }
    }
}

impl Process {
    /// A stall may be reported only if nothing has moved since the start of its idle time.
    fn check_stall(&self, idle: Duration) {
        if idle != Duration::from_nanos(self.clock.now() - self.moved_at.get()) {
            self.untrue
                .set(Some("it calls a stall what has moved meanwhile"));
        }
    }
}

impl Supervisor for Process {
    fn investigate(&self, suspicion: Suspicion) {
        self.say(|| format!("suspects {suspicion:?}"));
        if let Suspicion::Stalled { idle, .. } = suspicion {
            self.check_stall(idle);
        }
        self.suspects.set(true);
        self.requests
            .request(MonitorRequest::Investigate(suspicion));
    }

    fn abort(&self, cause: Error) {
        self.requests.abort(cause);
    }

    fn warn(&self, stall: &Stall<'_>) {
        self.say(|| format!("warns that it waits for {:?}", stall.awaited));
        self.check_stall(stall.idle);
    }
}

fn call(flag: &Arc<AtomicBool>) -> Box<dyn Fn() + Send + Sync> {
    let flag = Arc::clone(flag);
    Box::new(move || flag.store(true, Ordering::Relaxed))
}
