//! Runs collectives one after the other, in the order in which they were launched.
//!
//! A blocking call on an idle engine drives its collective on the calling thread, which saves
//! waking another one (about 50 microseconds). Everything else is queued for the progress thread.
//! Whoever drives holds the `driving` flag, so there is one driver at a time and order is kept.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::abort::AbortSwitch;
use crate::collective::{Call, Request};
use crate::error::{Error, Result};
use crate::executor::{Execution, Progress, Scratch};
use crate::link::Transport;
use crate::schedule::choice::Policy;
use crate::schedule::topology::Topology;
use crate::trace::flight_recorder::{FlightRecorder, State};
use crate::trace::stats::{Measured, Stats};
use crate::wire::handshake::GENERATION;
use crate::work::{INTERRUPT_INTERVAL, Interrupt, WaitOutcome, Work};

mod patience;
mod queue;
pub(crate) mod standstill;
mod steps;
mod suspicion;

pub use patience::Patience;
use queue::{Launched, Prepared, Queue};
use standstill::{Limits, Standstill};
pub use suspicion::{Stall, Supervisor, Suspicion};

/// How often a spinning caller looks at its links before it looks at the clock.
const LOOKS_PER_CLOCK: u32 = 8;

/// What an engine is built from.
pub struct Parts {
    /// This process's index.
    pub rank: usize,
    /// How collectives are performed, and among which ranks.
    pub policy: Policy,
    /// The links.
    pub transport: Box<dyn Transport>,
    /// Judge of suspicions.
    pub supervisor: Arc<dyn Supervisor>,
    /// The group's abort switch on this rank.
    pub abort: Arc<AbortSwitch>,
    /// Memory of the last calls.
    pub recorder: Arc<FlightRecorder>,
    /// How long a collective may stand still.
    pub stall_timeout: Duration,
    /// After how long a standstill is worth a first warning.
    pub stall_warning: Duration,
    /// How a blocked caller waits.
    pub patience: Patience,
}

/// Runs collectives in launch order.
pub struct Engine {
    shared: Arc<Shared>,
    progress: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    rank: usize,
    topology: Arc<Topology>,
    limits: Limits,
    patience: Patience,
    supervisor: Arc<dyn Supervisor>,
    abort: Arc<AbortSwitch>,
    recorder: Arc<FlightRecorder>,
    queue: Mutex<Queue>,
    changed: Condvar,
    /// None once the engine is closed: with it go sockets, mappings, descriptors and memory,
    /// however long somebody keeps the engine.
    driver: Mutex<Option<Driver>>,
}

/// What only the current driver touches.
struct Driver {
    transport: Box<dyn Transport>,
    scratch: Scratch,
    /// Memory of elements that travel in another type than their own.
    narrowed: Vec<u64>,
}

impl Engine {
    /// An idle engine, with its progress thread.
    #[must_use]
    pub fn new(parts: Parts) -> Self {
        parts.abort.wake_with(parts.transport.waker());
        let shared = Arc::new(Shared {
            rank: parts.rank,
            topology: Arc::clone(&parts.policy.topology),
            limits: Limits {
                timeout: parts.stall_timeout,
                stall_warning: parts.stall_warning,
            },
            patience: parts.patience,
            supervisor: parts.supervisor,
            abort: parts.abort,
            recorder: parts.recorder,
            queue: Mutex::new(Queue::new(parts.policy)),
            changed: Condvar::new(),
            driver: Mutex::new(Some(Driver {
                transport: parts.transport,
                scratch: Scratch::new(),
                narrowed: Vec::new(),
            })),
        });
        let progress = std::thread::Builder::new()
            .name("gradring-engine".into())
            .spawn({
                let shared = Arc::clone(&shared);
                move || shared.make_progress()
            })
            .expect("the system has room for one more thread");
        Self {
            shared,
            progress: Mutex::new(Some(progress)),
        }
    }

    /// Runs a collective to its end.
    ///
    /// # Errors
    /// The first cause of failure in the group; `Aborted` when `interrupt` asked to give up.
    pub fn run(&self, request: Request, interrupt: Interrupt<'_>) -> Result<()> {
        let shared = &*self.shared;
        let mut queue = lock(&shared.queue);
        let started = Instant::now();
        let at_once = !queue.driving && queue.waiting.is_empty();
        let launched = shared.launch(&mut queue, request, started, at_once)?;
        if !at_once {
            let work = shared.enqueue(queue, launched);
            return match work.wait(None, interrupt) {
                WaitOutcome::Ended(result) => result,
                WaitOutcome::Interrupted | WaitOutcome::TimedOut(_) => {
                    shared.supervisor.abort(shared.interrupted());
                    // The buffer is the caller's again only when the driver has let go of it.
                    work.wait_forever()
                }
            };
        }
        queue.driving = true;
        drop(queue);
        let result = shared.drive_guarded(launched, started, Some(shared.patience), interrupt);
        shared.stop_driving();
        result
    }

    /// Queues a collective behind all others launched before.
    ///
    /// # Errors
    /// When the communicator is aborted or closed already.
    pub fn start(&self, request: Request) -> Result<Work> {
        let mut queue = lock(&self.shared.queue);
        let launched = self
            .shared
            .launch(&mut queue, request, Instant::now(), false)?;
        Ok(self.shared.enqueue(queue, launched))
    }

    /// Fails every pending and later work of every rank, because this rank was interrupted.
    pub fn interrupt(&self) {
        self.shared.supervisor.abort(self.shared.interrupted());
    }

    /// How many collectives were launched so far.
    #[must_use]
    pub fn launched(&self) -> u64 {
        lock(&self.shared.queue).launched
    }

    /// The program begins a step; see [`Communicator::begin_step`].
    ///
    /// [`Communicator::begin_step`]: crate::communicator::Communicator::begin_step
    pub fn begin_step(&self, leaves_alike: bool) {
        let mut queue = lock(&self.shared.queue);
        let launched = queue.launched;
        queue.steps.begin(launched, leaves_alike);
    }

    /// The program has ended its step, or left it early by what `left` says; returns its number,
    /// and how many collectives it launched.
    pub fn end_step(&self, left: Option<String>) -> (u64, u64) {
        let mut queue = lock(&self.shared.queue);
        let launched = queue.launched;
        let (step, launched) = queue.steps.end(launched, left.is_some());
        if let Some(left) = left {
            self.shared.recorder.left_step(step, left);
        }
        (step, launched)
    }

    /// What is launched next belongs to this execution of a graph.
    pub fn execute(&self, execution: i64) {
        lock(&self.shared.queue).steps.execute(execution);
    }

    /// Whether the program says that all ranks leave the current step alike.
    #[must_use]
    pub fn leaves_alike(&self) -> bool {
        lock(&self.shared.queue).steps.leaves_alike()
    }

    /// How collectives are performed.
    #[must_use]
    pub fn policy(&self) -> Policy {
        lock(&self.shared.queue).policy.clone()
    }

    /// Changes how collectives launched from now on are performed; on all ranks alike, with
    /// nothing under way.
    pub fn set_policy(&self, policy: Policy) {
        lock(&self.shared.queue).set_policy(policy);
    }

    /// Forgets what was done, and gives the next collective this ordinal; on all ranks alike, with
    /// nothing under way.
    pub fn count_from(&self, sequence: u64) {
        lock(&self.shared.queue).launched = sequence - 1;
        self.shared.recorder.forget();
    }

    /// What was done so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.shared.recorder.stats()
    }

    /// Ends the engine: a collective under way and all queued ones fail as aborted.
    pub fn close(&self) {
        let mut queue = lock(&self.shared.queue);
        queue.closed = true;
        let busy = queue.driving || !queue.waiting.is_empty();
        drop(queue);
        if busy {
            let reason = "the communicator was closed while a collective was under way";
            self.shared.abort.raise(Error::aborted(reason));
        }
        self.shared.changed.notify_all();
        if let Some(progress) = lock(&self.progress).take() {
            // The thread's panics were caught where they happened.
            let _ = progress.join();
        }
        // Peers that still wait for this rank learn it from the end of its links.
        drop(lock(&self.shared.driver).take());
        self.shared.abort.forget_wakers();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    /// Gives a request its place in the order; `at_once` if its turn has come with that.
    fn launch(
        &self,
        queue: &mut Queue,
        request: Request,
        at: Instant,
        at_once: bool,
    ) -> Result<Launched> {
        let (call, buffer) = request.into_parts();
        let prepared = queue.prepare(call)?;
        let sequence = queue.launched + 1;
        let cause = self.abort.cause();
        if let Some(cause) = cause.or_else(|| queue.closed.then(closed)) {
            return Err(placed(cause, &prepared.call, sequence, at));
        }
        queue.launched = sequence;
        let step = queue.steps.launch();
        let call = Arc::clone(&prepared.call);
        self.recorder
            .launched((sequence, step), call, prepared.algorithm, at, at_once);
        Ok(Launched {
            header: prepared.contract.header(GENERATION, sequence, step),
            prepared,
            buffer,
            sequence,
        })
    }

    fn enqueue(&self, mut queue: MutexGuard<'_, Queue>, launched: Launched) -> Work {
        let work = Work::pending(launched.sequence, Arc::clone(&self.recorder));
        queue.waiting.push_back((launched, work.clone()));
        drop(queue);
        self.changed.notify_all();
        work
    }

    fn stop_driving(&self) {
        let mut queue = lock(&self.queue);
        queue.driving = false;
        let awaited = queue.closed || !queue.waiting.is_empty();
        drop(queue);
        if awaited {
            self.changed.notify_all();
        }
    }

    /// The progress thread.
    fn make_progress(&self) {
        loop {
            let mut queue = lock(&self.queue);
            let (launched, work) = loop {
                if !queue.driving {
                    if let Some(next) = queue.waiting.pop_front() {
                        queue.driving = true;
                        break next;
                    }
                    if queue.closed {
                        return;
                    }
                }
                queue = self
                    .changed
                    .wait(queue)
                    .unwrap_or_else(PoisonError::into_inner);
            };
            drop(queue);
            let started = Instant::now();
            self.recorder.started(launched.sequence, started);
            let result = self.drive_guarded(launched, started, None, &mut || false);
            work.end(result);
            self.stop_driving();
        }
    }

    /// Drives a collective; a panic fails the group's works, never the process.
    ///
    /// `patience` is for a caller who blocks; the progress thread has none and sleeps, because
    /// the caller's computation wants the core.
    fn drive_guarded(
        &self,
        launched: Launched,
        started: Instant,
        patience: Option<Patience>,
        interrupt: Interrupt<'_>,
    ) -> Result<()> {
        let (call, sequence) = (Arc::clone(&launched.prepared.call), launched.sequence);
        let result = catch_unwind(AssertUnwindSafe(|| {
            self.drive(launched, started, patience.unwrap_or_default(), interrupt)
        }))
        .unwrap_or_else(|panic| {
            let what = message_of(&*panic);
            let cause = Error::protocol(format!("the engine failed: {what}; please report this"));
            self.supervisor.abort(self.blame_self(cause));
            Err(self.abort.cause().unwrap_or_else(|| Error::protocol(what)))
        });
        match result {
            Ok(Some(measured)) => {
                self.recorder
                    .ended(sequence, &call, &measured, patience.is_some());
                Ok(())
            }
            Ok(None) => {
                self.recorder.over(sequence, State::Done, started);
                Ok(())
            }
            Err(error) => {
                self.recorder.over(sequence, State::Failed, started);
                self.recorder.note_waiting(None);
                Err(placed(error, &call, sequence, started))
            }
        }
    }

    /// Returns how it went; nothing in a world of one.
    fn drive(
        &self,
        mut launched: Launched,
        started: Instant,
        patience: Patience,
        interrupt: Interrupt<'_>,
    ) -> Result<Option<Measured>> {
        let world_size = self.topology.world_size();
        if world_size == 1 {
            return self.abort.cause().map_or(Ok(None), Err);
        }
        let mut driver = lock(&self.driver);
        let Some(Driver {
            transport,
            scratch,
            narrowed,
        }) = &mut *driver
        else {
            // Launched before the engine was closed.
            return Err(self.abort.cause().unwrap_or_else(closed));
        };
        let Prepared {
            call,
            algorithm,
            wire_dtype,
            ..
        } = &launched.prepared;
        let mut narrow = wire_dtype.map(|dtype| {
            // SAFETY: the driver stays locked until the collective has ended.
            unsafe { launched.buffer.narrowed(dtype, narrowed) }
        });
        let mut execution = Execution::new(
            narrow.as_mut().unwrap_or(&mut launched.buffer),
            call,
            *algorithm,
            (self.rank, &self.topology),
            launched.header,
            scratch,
        );
        let sequence = launched.sequence;
        let mut standstill = Standstill::new(call, sequence, self.limits, &self.recorder, started);
        // None if everything came at once.
        let mut entered_at = None;
        let mut asked_at = started;
        let mut moved = false;
        let mut looks = 0_u32;
        loop {
            if let Some(cause) = self.abort.cause() {
                if execution.ends_all_the_same(&mut **transport) {
                    break;
                }
                return Err(cause);
            }
            match execution.advance(&mut **transport) {
                Ok(Progress::Done) => break,
                Ok(Progress::Moved) => {
                    moved = true;
                    if entered_at.is_none() && execution.last_to_enter.is_some() {
                        entered_at = Some(Instant::now());
                    }
                    continue;
                }
                Ok(Progress::Blocked) => {
                    looks += 1;
                    if !patience.spinning.is_zero() && !looks.is_multiple_of(LOOKS_PER_CLOCK) {
                        std::hint::spin_loop();
                        continue;
                    }
                }
                Err(fault) => {
                    return Err(self
                        .supervisor
                        .investigate(standstill.suspicion(fault, &execution)));
                }
            }
            let now = Instant::now();
            if std::mem::take(&mut moved) {
                standstill.moved(now);
            }
            let idle = standstill.idle(now);
            if idle < patience.yielding {
                if idle < patience.spinning {
                    std::hint::spin_loop();
                } else {
                    std::thread::yield_now();
                }
                continue;
            }
            let limit = standstill
                .look(&execution, now, |stall| self.supervisor.warn(stall))
                .map_err(|suspicion| self.supervisor.investigate(suspicion))?;
            transport.wait(execution.interests(), limit);
            if asked_at.elapsed() >= INTERRUPT_INTERVAL {
                asked_at = Instant::now();
                self.recorder.locate(sequence, interrupt);
                if interrupt.interrupts() {
                    self.supervisor.abort(self.interrupted());
                }
            }
        }
        standstill.end();
        let (bytes_sent, last_to_enter) = (execution.bytes_sent, execution.last_to_enter);
        let ended = Instant::now();
        if let Some(narrow) = narrow {
            launched.buffer.widen_all_from(&narrow);
        }
        Ok(Some(Measured {
            algorithm: algorithm.name(),
            bytes_sent,
            started,
            everyone_entered: last_to_enter.map(|peer| (entered_at.unwrap_or(ended), peer)),
            ended,
        }))
    }

    fn interrupted(&self) -> Error {
        self.blame_self(Error::aborted(
            "was interrupted (Ctrl-C or a signal handler)",
        ))
    }

    fn blame_self(&self, error: Error) -> Error {
        error.blaming(self.rank, crate::group::host_name())
    }
}

fn closed() -> Error {
    Error::aborted("the communicator is closed")
}

/// What a panic said.
pub(crate) fn message_of(panic: &(dyn Any + std::marker::Send)) -> &str {
    panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("no message")
}

/// The error of a collective begun at `started`; placed in it if the cause did not come with
/// another.
fn placed(mut error: Error, call: &Call, sequence: u64, started: Instant) -> Error {
    error.elapsed.get_or_insert_with(|| started.elapsed());
    if error.collective.is_some() {
        return error;
    }
    error.during(call.to_string(), sequence)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
