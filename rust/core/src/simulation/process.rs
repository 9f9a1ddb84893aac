//! One rank: its program and its engine as one thread, its monitor as another.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use super::ends::SimulatedLinks;
use super::random::Random;
use super::scenario::Scenario;
use super::time::{Clock, MILLISECOND, Moment, SECOND, nanoseconds};
use super::trace::Trace;
use super::values::Values;
use crate::abort::AbortSwitch;
use crate::collective::Call;
use crate::engine::Suspicion;
use crate::engine::stall_detector::StallDetector;
use crate::error::Error;
use crate::executor::{Execution, Progress, Scratch};
use crate::failure::INVESTIGATION_LIMIT;
use crate::failure::requests::{Request, Requests};
use crate::link::Interest;
use crate::observe::flight_recorder::{FlightRecorder, State};
use crate::observe::journal::Journal;
use crate::schedule::Algorithm;
use crate::wire::contract::Contract;
use crate::wire::handshake::GENERATION;

/// How often an engine may look in vain at what is ready, at one moment.
const ROUNDS_MAX: u32 = 1000;

/// How often something may move in one collective: once for each byte would be less.
const STEPS_MAX: u32 = 2_000_000;

/// What a rank's program ended with.
#[derive(Debug, Clone)]
pub(super) enum Outcome {
    Done,
    Failed(Error),
    /// What no program may ever see.
    Wrong(String),
}

/// What only a rank's program and its engine touch.
struct Program {
    scenario: Rc<Scenario>,
    links: SimulatedLinks,
    random: Random,
    scratch: Scratch,
}

/// What the threads of one rank and the world share.
pub(super) struct Process {
    pub(super) rank: usize,
    pub(super) clock: Clock,
    pub(super) requests: Arc<Requests>,
    pub(super) journal: Arc<Journal>,
    pub(super) trace: Rc<Trace>,
    /// Set when the monitor has something to do.
    pub(super) monitor_called: Arc<AtomicBool>,
    /// Set when the group's switch has been raised on this rank.
    pub(super) engine_called: Arc<AtomicBool>,
    /// When the engine's thread sleeps no longer, whatever happens.
    pub(super) alarm: Cell<Moment>,
    /// What else ends its sleep.
    pub(super) interests: RefCell<Vec<Interest>>,
    /// The position of the collective that the program computes for, counted from 0.
    pub(super) reached: Cell<Option<usize>>,
    /// How many collectives the program has launched.
    pub(super) launched: Cell<usize>,
    /// Whether the engine has suspected anything.
    pub(super) suspects: Cell<bool>,
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
            outcome: RefCell::default(),
        }
    }

    pub(super) fn aborted(&self) -> Option<Error> {
        self.requests.abort.cause()
    }

    /// This rank's program calls `abort`.
    pub(super) fn abort(&self) {
        let cause = Error::aborted("aborted the communicator: it wants to");
        let host = self.journal.hosts[self.rank].clone();
        self.requests.abort(cause.blaming(self.rank, host));
    }

    pub(super) fn say(&self, what: impl FnOnce() -> String) {
        self.trace.say(|| format!("rank {}: {}", self.rank, what()));
    }

    /// Sleeps until the alarm, or less.
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

    /// What `Monitor::investigate` does, in virtual time.
    async fn investigate(&self, suspicion: Suspicion) -> Error {
        self.say(|| format!("suspects {suspicion:?}"));
        let until = self.clock.now() + nanoseconds(INVESTIGATION_LIMIT);
        self.suspects.set(true);
        self.requests.request(Request::Investigate(suspicion));
        while self.clock.now() < until {
            if let Some(cause) = self.aborted() {
                return cause;
            }
            self.doze(until).await;
        }
        let cause = Error::protocol("the group could not find the cause");
        self.requests.abort(cause.clone());
        cause
    }

    /// What a program does from its first collective to its end.
    pub(super) async fn run(
        self: Rc<Self>,
        scenario: Rc<Scenario>,
        links: SimulatedLinks,
        random: Random,
    ) {
        let mut program = Program {
            scenario,
            links,
            random,
            scratch: Scratch::new(),
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
        let lingers = random.pick(&[0, 20 * MILLISECOND, 3 * SECOND]);
        self.sleep(self.clock.now() + random.between(0, lingers))
            .await;
        self.say(|| "closes".into());
        drop(links);
        self.requests.request(Request::Close);
    }

    async fn collectives(&self, program: &mut Program) -> Outcome {
        let scenario = Rc::clone(&program.scenario);
        let mut number = 0;
        while number < scenario.collectives.len() {
            self.reached.set(Some(number));
            self.sleep(self.clock.now() + scenario.computing(self.rank, number))
                .await;
            let together = scenario.collectives[number + 1..].iter();
            let launched = number..number + 1 + together.take_while(|next| next.together).count();
            let mut calls = Vec::new();
            for number in launched.clone() {
                let Some(call) = scenario.called(self.rank, number) else {
                    self.reached.set(Some(number));
                    break;
                };
                if let Some(cause) = self.aborted() {
                    return Outcome::Failed(cause);
                }
                let call = Arc::new(call);
                let algorithm = scenario.collectives[number].policy.choose(&call);
                let now = self.clock.instant();
                let recorder = &self.journal.recorder;
                recorder.launched(
                    (number as u64 + 1, 0),
                    Arc::clone(&call),
                    algorithm,
                    now,
                    false,
                );
                self.launched.set(number + 1);
                calls.push((number, call, algorithm));
            }
            let left = calls.len() < launched.len();
            for (number, call, algorithm) in calls {
                self.reached.set(self.reached.get().max(Some(number)));
                if let Err(outcome) = self.perform(program, number, &call, algorithm).await {
                    return outcome;
                }
            }
            if left {
                return Outcome::Done;
            }
            number = launched.end;
        }
        Outcome::Done
    }

    /// One collective, as the engine's driver performs it.
    async fn perform(
        &self,
        Program {
            scenario,
            links,
            random,
            scratch,
        }: &mut Program,
        number: usize,
        call: &Call,
        algorithm: Algorithm,
    ) -> Result<(), Outcome> {
        let narrow = scenario.collectives[number].policy.wire_dtype(call);
        let sequence = number as u64 + 1;
        let values = Values {
            call,
            world_size: scenario.world_size(),
            sequence,
            narrow: narrow.is_some(),
        };
        let mut buffer = values.buffer(self.rank, random);
        let mut memory = Vec::new();
        // SAFETY: the memory outlives the copy and is left alone meanwhile.
        let copy = narrow.map(|dtype| unsafe { buffer.narrowed(dtype, &mut memory) });
        let mut copy = copy.transpose().expect("a simulation has memory");
        for (peer, byte) in scenario.changed_headers(self.rank, number) {
            links.garble(peer, byte);
        }
        let (recorder, started) = (&*self.journal.recorder, self.clock.instant());
        self.say(|| format!("starts #{sequence} {call} by {}", algorithm.name()));
        recorder.started(sequence, started);
        let execution = Execution::new(
            copy.as_mut().unwrap_or(&mut buffer),
            call,
            algorithm,
            (self.rank, &scenario.topology),
            Contract::of(call, algorithm).header(GENERATION, sequence, 0),
            scratch,
        )
        .expect("a simulation has memory");
        let stall = StallDetector::new(call, sequence, scenario.limits, recorder, started);
        let driven = self.drive(execution, stall, links).await;
        let state = if driven.is_ok() {
            State::Done
        } else {
            State::Failed
        };
        recorder.over(sequence, state, started);
        driven?;
        if let Some(copy) = copy {
            buffer.widen_all_from(&copy);
        }
        match values.check(self.rank, &buffer) {
            Some(problem) => Err(Outcome::Wrong(problem)),
            None => Ok(()),
        }
    }

    /// The engine's loop, in virtual time.
    async fn drive(
        &self,
        mut execution: Execution<'_>,
        mut stall: StallDetector<'_>,
        links: &mut SimulatedLinks,
    ) -> Result<(), Outcome> {
        let (mut moved, mut in_vain) = (false, false);
        let (mut rounds, mut steps) = (0, 0);
        loop {
            if let Some(cause) = self.aborted() {
                if execution.ends_all_the_same(links) {
                    break;
                }
                return Err(Outcome::Failed(cause));
            }
            match execution.advance(links) {
                Ok(progress @ (Progress::Done | Progress::Moved)) => {
                    if in_vain {
                        let problem = "something moved for which the executor did not wait";
                        return Err(Outcome::Wrong(problem.into()));
                    }
                    if progress == Progress::Done {
                        break;
                    }
                    moved = true;
                    steps += 1;
                    if steps > STEPS_MAX {
                        return Err(Outcome::Wrong("the executor moves for ever".into()));
                    }
                    continue;
                }
                Ok(Progress::Blocked) => {}
                Err(fault) => {
                    let suspicion = stall.suspicion(fault, &execution);
                    return Err(Outcome::Failed(self.investigate(suspicion).await));
                }
            }
            let now = self.clock.instant();
            if std::mem::take(&mut moved) {
                stall.moved(now);
            }
            let looked = stall.look(&execution, now, |stall| {
                let interests = execution.interests();
                self.say(|| format!("warns that it waits for {:?}: {interests:?}", stall.awaited));
            });
            let limit = match looked {
                Ok(limit) => limit,
                Err(suspicion) => return Err(Outcome::Failed(self.investigate(suspicion).await)),
            };
            let interests = execution.interests();
            if interests.iter().any(|&interest| links.is_ready(interest)) {
                rounds += 1;
                if rounds > ROUNDS_MAX {
                    return Err(Outcome::Wrong("the engine spins".into()));
                }
                continue;
            }
            rounds = 0;
            self.interests.borrow_mut().extend_from_slice(interests);
            self.doze(self.clock.now() + nanoseconds(limit)).await;
            let mut interests = execution.interests().iter();
            in_vain = !interests.any(|&interest| links.is_ready(interest));
        }
        stall.end();
        Ok(())
    }
}

fn call(flag: &Arc<AtomicBool>) -> Box<dyn Fn() + Send + Sync> {
    let flag = Arc::clone(flag);
    Box::new(move || flag.store(true, Ordering::Relaxed))
}
