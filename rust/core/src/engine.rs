//! The engine runs collectives one after the other, in launch order.
//!
//! A blocking call on an idle engine drives its collective on the calling thread, which saves the
//! wake-up of another one (about 50 microseconds). Everything else is queued for the progress
//! thread, or for a waiting thread that comes before the progress thread has woken. The driving
//! thread takes the driver from the queue, so only one thread drives at a time and the order is
//! kept. No lock is held while the program's signal handlers and finalizers run, so they may close
//! the communicator. They must not launch a collective in the middle of another one.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::drive::{Launched, Limits, Memory};
use crate::observe::flight_recorder::{FlightRecorder, State};
use crate::observe::stats::Stats;
use crate::work::{WaitOutcome, Work};
use gradring_net::abort::AbortSwitch;
use gradring_net::caller::Interrupt;
use gradring_net::host::host_name;
use gradring_net::link::forks::Process;
use gradring_net::link::{Heap, Transport};
use gradring_proto::buffer::Buffer;
use gradring_proto::collective::{Call, Request};
use gradring_proto::error::{Abort, Disorder, Error, Result, Text, shortened};
use gradring_proto::lock::{self, lock};
use gradring_proto::schedule::choice::{MAPPED_ABOVE_BYTES, Policy};
use gradring_proto::schedule::topology::Topology;

mod cores;
mod driver;
mod queue;
mod spin_policy;
mod steps;

pub use crate::drive::{Stall, Supervisor, Suspicion};
use cores::Cores;
use driver::{Driver, On};
use queue::{Asked, Queue};
pub use spin_policy::SpinPolicy;

/// Components of an engine.
pub struct Parts {
    /// Index of this process.
    pub rank: usize,
    /// How collectives are performed, and among which ranks.
    pub policy: Policy,
    /// The links.
    pub transport: Box<dyn Transport>,
    /// Finds the causes behind suspicions.
    pub supervisor: Arc<dyn Supervisor + Send + Sync>,
    /// The group's abort switch on this rank.
    pub abort: Arc<AbortSwitch>,
    /// Flight recorder of the last collectives.
    pub recorder: Arc<FlightRecorder>,
    /// Longest stall of a collective.
    pub stall_timeout: Duration,
    /// Duration of a stall at the first warning.
    pub stall_warning: Duration,
    /// How a blocked caller waits.
    pub spin_policy: SpinPolicy,
}

/// Runs collectives in launch order.
pub struct Engine {
    shared: Arc<EngineState>,
    progress: Mutex<Option<JoinHandle<()>>>,
}

struct EngineState {
    rank: usize,
    topology: Arc<Topology>,
    limits: Limits,
    spin_policy: SpinPolicy,
    /// The heap of this rank, if there is one.
    heap: Weak<Heap>,
    supervisor: Arc<dyn Supervisor + Send + Sync>,
    abort: Arc<AbortSwitch>,
    recorder: Arc<FlightRecorder>,
    queue: Mutex<Queue>,
    changed: Condvar,
    /// The process that owns the threads and links; a fork has neither.
    process: Process,
}

impl Engine {
    /// Makes an idle engine with its progress thread.
    ///
    /// # Errors
    /// `Exhausted` when the system has no thread left.
    pub fn new(mut parts: Parts) -> Result<Self> {
        parts.abort.wake_with(parts.transport.waker());
        let heap = parts.transport.slots().and_then(|slots| slots.heap());
        let heap = heap.map_or_else(Weak::new, Arc::downgrade);
        let driver = Box::new(Driver {
            transport: parts.transport,
            memory: Memory::default(),
            cores: Cores::new(parts.rank, parts.policy.topology.world_size()),
        });
        let shared = Arc::new(EngineState {
            rank: parts.rank,
            topology: Arc::clone(&parts.policy.topology),
            limits: Limits {
                timeout: parts.stall_timeout,
                stall_warning: parts.stall_warning,
            },
            spin_policy: parts.spin_policy,
            heap,
            supervisor: parts.supervisor,
            abort: parts.abort,
            recorder: parts.recorder,
            queue: Mutex::new(Queue::new(parts.policy, driver)),
            changed: Condvar::new(),
            process: Process::this(),
        });
        let progress = thread::Builder::new()
            .name("gradring-engine".into())
            .spawn({
                let shared = Arc::clone(&shared);
                move || shared.make_progress()
            })
            .map_err(|error| shared.blame_self(Error::no_thread(&error)))?;
        Ok(Self {
            shared,
            progress: Mutex::new(Some(progress)),
        })
    }

    /// Runs a collective to its end.
    ///
    /// # Errors
    /// The first cause of failure in the group; `Aborted` when `interrupt` asked to give up;
    /// `Misuse` inside another blocking call of this engine on the same thread.
    pub fn run(&self, request: Request, interrupt: Interrupt<'_>) -> Result<()> {
        let (call, buffer) = request.into_parts();
        self.run_over(Asked::New(call), buffer, interrupt)
    }

    /// Runs a collective that this engine may have run before, over a buffer with the elements of
    /// the call.
    ///
    /// # Errors
    /// As for `run`.
    pub fn run_again(
        &self,
        call: &Arc<Call>,
        buffer: Buffer,
        interrupt: Interrupt<'_>,
    ) -> Result<()> {
        self.run_over(Asked::Again(call), buffer, interrupt)
    }

    // The buffer outlives the lock: dropping it may run code of the program.
    fn run_over(
        &self,
        mut call: Asked<'_>,
        buffer: Buffer,
        interrupt: Interrupt<'_>,
    ) -> Result<()> {
        let shared = &*self.shared;
        let mut queue = shared.in_order(&call)?;
        shared.look_for_heap(&queue.policy, &mut call, &buffer);
        let started = Instant::now();
        let at_once = queue.is_idle();
        let launched = shared.launch(&mut queue, call, started, at_once)?;
        queue.block();
        let Some(mut driver) = queue.driver.take_if(|_| at_once) else {
            let work = shared.enqueue(queue, launched, buffer);
            let result = match work.wait(None, interrupt) {
                WaitOutcome::Ended(result) => result,
                WaitOutcome::Interrupted | WaitOutcome::TimedOut(_) => {
                    shared.supervisor.abort(shared.interrupted());
                    // The caller may reuse its buffer only after the driver has released it.
                    work.wait_forever()
                }
            };
            if shared.process.is_this() {
                lock(&shared.queue).unblock();
            }
            return result;
        };
        queue.driving = true;
        drop(queue);
        let result =
            shared.drive_guarded(&mut driver, &launched, buffer, started, On::Call, interrupt);
        shared.stop_driving(driver);
        result
    }

    /// Queues a collective behind all that were launched before.
    ///
    /// # Errors
    /// When the communicator is aborted or closed already; `Misuse` inside a blocking call of this
    /// engine on the same thread.
    pub fn start(&self, request: Request) -> Result<Work> {
        let (call, buffer) = request.into_parts();
        self.start_over(Asked::New(call), buffer)
    }

    /// Queues a collective that this engine may have run before, over a buffer with the elements of
    /// the call.
    ///
    /// # Errors
    /// As for `start`.
    pub fn start_again(&self, call: &Arc<Call>, buffer: Buffer) -> Result<Work> {
        self.start_over(Asked::Again(call), buffer)
    }

    fn start_over(&self, mut call: Asked<'_>, buffer: Buffer) -> Result<Work> {
        let mut queue = self.shared.in_order(&call)?;
        self.shared.look_for_heap(&queue.policy, &mut call, &buffer);
        let launched = self
            .shared
            .launch(&mut queue, call, Instant::now(), false)?;
        Ok(self.shared.enqueue(queue, launched, buffer))
    }

    /// Waits for the end of a work. If no thread drives, this one drives the queue up to that work:
    /// waking the progress thread takes longer than a small collective.
    ///
    /// `interrupt` must not run code of the program, which might launch another collective.
    pub fn wait(&self, work: &Work, interrupt: Interrupt<'_>) -> WaitOutcome {
        work.wait_driving(None, interrupt, |sequence, interrupt| {
            self.shared.drive_up_to(sequence, interrupt);
        })
    }

    /// Fails every pending and later work of every rank because this rank cannot continue. Returns
    /// the first cause.
    pub fn fail(&self, error: Error) -> Error {
        self.shared.fail(error)
    }

    /// Fails every pending and later work of every rank, because this rank was interrupted.
    pub fn interrupt(&self) {
        self.shared.supervisor.abort(self.shared.interrupted());
    }

    /// Returns `true` once `close` was called.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        lock(&self.shared.queue).closed
    }

    /// Number of collectives launched so far.
    #[must_use]
    pub fn launched(&self) -> u64 {
        lock(&self.shared.queue).launched
    }

    /// Begins a step of the program. Collectives until `end_step` share a step number, which ranks
    /// compare. `collective_exit` promises that all ranks leave the step early, or none.
    pub fn begin_step(&self, collective_exit: bool) {
        let mut queue = lock(&self.shared.queue);
        let launched = queue.launched;
        queue.steps.begin(launched, collective_exit);
    }

    /// Ends a step of the program; `left` is the reason if it ends early. Returns the number of the
    /// step, and how many collectives it launched.
    pub fn end_step(&self, left: Option<&str>) -> (u64, u64) {
        let mut queue = lock(&self.shared.queue);
        let launched = queue.launched;
        let (step, launched) = queue.steps.end(launched, left.is_some());
        if let Some(left) = left {
            self.shared.recorder.left_step(step, shortened(left));
        }
        (step, launched)
    }

    /// Assigns later collectives to this execution of a graph, which is a step unless the program
    /// marks its steps.
    pub fn execute(&self, execution: i64) {
        lock(&self.shared.queue).steps.execute(execution);
    }

    /// Returns `true` if the program promised that all ranks leave the current step early, or none.
    #[must_use]
    pub fn collective_exit(&self) -> bool {
        lock(&self.shared.queue).steps.collective_exit()
    }

    /// How collectives are performed.
    #[must_use]
    pub fn policy(&self) -> Policy {
        lock(&self.shared.queue).policy.clone()
    }

    /// Changes how later collectives are performed. All ranks make equal changes, with nothing
    /// under way.
    pub fn set_policy(&self, policy: Policy) {
        lock(&self.shared.queue).set_policy(policy);
    }

    /// Clears the records, and gives the next collective this ordinal. All ranks do so, with
    /// nothing under way.
    pub fn count_from(&self, sequence: u64) {
        lock(&self.shared.queue).launched = sequence - 1;
        self.shared.recorder.forget();
    }

    /// Counters of the collectives so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.shared.recorder.stats()
    }

    /// Ends the engine: a collective under way and all queued ones fail as aborted.
    ///
    /// May be called from anywhere, even from a signal handler of the program inside a blocking
    /// call of this engine. That call then closes the links when it returns.
    pub fn close(&self) {
        let shared = &*self.shared;
        let mut queue = lock(&shared.queue);
        queue.closed = true;
        let never_begun = std::mem::take(&mut queue.waiting);
        let busy = queue.driving || !never_begun.is_empty();
        drop(queue);
        if busy {
            shared.abort.raise(Abort::ClosedUnderWay.into());
        }
        for (launched, buffer, work) in never_begun {
            drop(buffer);
            let (call, sequence) = (&launched.prepared.call, launched.sequence);
            let cause = shared.abort.cause().unwrap_or_else(closed);
            let now = Instant::now();
            shared.recorder.over(sequence, State::Failed, now);
            work.end(Err(placed(cause, call, sequence, now)));
        }
        shared.changed.notify_all();
        if let Some(progress) = lock::take(&self.progress) {
            // The thread's panics were caught where they happened.
            let _ = progress.join();
        }
        let mut queue = lock(&shared.queue);
        while queue.driving && !queue.asking {
            queue = shared.wait(queue);
        }
        let driver = queue.driver.take();
        drop(queue);
        // Peers that still wait for this rank see the end of its links.
        drop(driver);
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.close();
    }
}

impl EngineState {
    /// Locks the queue for a thread that may launch a collective now.
    ///
    /// # Errors
    /// `Misuse` inside a blocking call. If another thread is inside it, nothing orders the two
    /// calls. Other ranks may run them in the opposite order, so the group fails.
    fn in_order(&self, call: &Call) -> Result<MutexGuard<'_, Queue>> {
        let queue = lock(&self.queue);
        let Some((other, own)) = queue.blocking() else {
            return Ok(queue);
        };
        if self.topology.world_size() == 1 || queue.closed || self.abort.cause().is_some() {
            return Ok(queue);
        }
        if own {
            let fact = Disorder::InHandler {
                call: Text::of(call),
                other: Text::of(other),
            };
            return Err(self.blame_self(fact.into()));
        }
        let fact = Disorder::TwoThreads {
            call: Text::of(call),
            other: Text::of(other),
        };
        drop(queue);
        Err(self.fail(fact.into()))
    }

    /// Marks a call that all ranks perform where their buffers are, if this one is in the heap.
    #[inline]
    fn look_for_heap(&self, policy: &Policy, call: &mut Asked<'_>, buffer: &Buffer) {
        if call.bytes() > MAPPED_ABOVE_BYTES
            && policy.maps(call)
            && let Some(heap) = self.heap.upgrade()
            && buffer.lies_in(&heap.addresses())
        {
            call.mark_mapped();
        }
    }

    /// Gives a call its place in the order; `at_once` if it starts immediately.
    fn launch(
        &self,
        queue: &mut Queue,
        call: Asked<'_>,
        at: Instant,
        at_once: bool,
    ) -> Result<Launched> {
        let prepared = queue.prepare(self.rank, call)?;
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
        Ok(prepared.launch(self.recorder.generation, sequence, step))
    }

    fn enqueue(
        &self,
        mut queue: MutexGuard<'_, Queue>,
        launched: Launched,
        buffer: Buffer,
    ) -> Work {
        let work = Work::pending(launched.sequence, Arc::clone(&self.recorder));
        queue.waiting.push_back((launched, buffer, work.clone()));
        drop(queue);
        self.changed.notify_all();
        work
    }

    fn wait<'a>(&self, queue: MutexGuard<'a, Queue>) -> MutexGuard<'a, Queue> {
        lock::wait(&self.changed, queue)
    }

    /// Fails all works of all ranks; returns the first cause.
    fn fail(&self, error: Error) -> Error {
        let error = self.blame_self(error);
        self.supervisor.abort(error.clone());
        self.abort.cause().unwrap_or(error)
    }

    fn interrupted(&self) -> Error {
        self.blame_self(Abort::Interrupted.into())
    }

    fn blame_self(&self, error: Error) -> Error {
        error.blaming(self.supervisor.in_group(self.rank), host_name())
    }
}

fn closed() -> Error {
    Abort::Closed.into()
}

/// Completes the error of a collective begun at `started`. The collective is added unless the cause
/// already names one.
fn placed(mut error: Error, call: &Call, sequence: u64, started: Instant) -> Error {
    error.elapsed.get_or_insert_with(|| started.elapsed());
    if error.collective.is_some() {
        return error;
    }
    error.during(call.to_string(), sequence)
}
