//! Driving of collectives, one after the other: on a caller's thread that blocks, or else on the
//! progress thread.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::Instant;

use super::cores::{Cores, SharedCore};
use super::queue::Turn;
use super::spin_policy::Patience;
use super::{EngineState, SpinPolicy, placed};
use crate::drive::{Context, Drive, Launched, Measured, Memory, Step};
use crate::observe::flight_recorder::State;
use gradring_net::caller::{INTERRUPT_INTERVAL, Interrupt};
use gradring_net::link::Transport;
use gradring_proto::buffer::Buffer;
use gradring_proto::error::{Abort, Error, Result, message_of};
use gradring_proto::lock::lock;

/// Polls of the links between two readings of the clock, while a caller spins.
const POLLS_PER_CLOCK: u32 = 8;

/// Largest message in bytes for which a waiting rank hands its core to a peer and back. A larger
/// one keeps the peer busy so long that sleeping costs less.
const SHORT_BYTES: usize = 64 << 10;

/// Links and memory for driving collectives. The driving thread owns them meanwhile.
pub(super) struct Driver {
    pub(super) transport: Box<dyn Transport>,
    pub(super) memory: Memory,
    pub(super) cores: Cores,
}

/// Thread on which a collective is driven.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum On {
    /// The thread of the blocking call that launched the collective.
    Call,
    /// A thread that waits for the collective, or for a later one.
    Wait,
    /// The progress thread.
    Progress,
}

impl EngineState {
    /// Returns the driver to the queue, or drops it if the engine was closed meanwhile.
    pub(super) fn stop_driving(&self, driver: Box<Driver>) {
        if !self.process.is_this() {
            // Threads and links of a fork belong to the parent.
            std::mem::forget(driver);
            return;
        }
        let mut queue = lock(&self.queue);
        (queue.driving, queue.asking) = (false, false);
        queue.unblock();
        let awaited = queue.closed || !queue.waiting.is_empty();
        let closed = match queue.closed {
            true => Some(driver),
            false => {
                queue.driver = Some(driver);
                None
            }
        };
        drop(queue);
        drop(closed);
        if awaited {
            self.changed.notify_all();
        }
    }

    /// Runs the progress thread.
    pub(super) fn make_progress(&self) {
        loop {
            let mut queue = lock(&self.queue);
            let turn = loop {
                if queue.closed {
                    return;
                }
                if let Some(turn) = queue.next(u64::MAX) {
                    break turn;
                }
                queue = self.wait(queue);
            };
            drop(queue);
            self.drive_queued(turn, On::Progress, &mut || false);
        }
    }

    /// Drives the queue up to the collective `last`, unless another thread drives.
    pub(super) fn drive_up_to(&self, last: u64, interrupt: Interrupt<'_>) {
        loop {
            // A statement of its own releases the lock before the collective is driven.
            let turn = lock(&self.queue).next(last);
            let Some(turn) = turn else { return };
            self.drive_queued(turn, On::Wait, interrupt);
        }
    }

    fn drive_queued(&self, turn: Turn, on: On, interrupt: Interrupt<'_>) {
        let (mut driver, (launched, buffer, work)) = turn;
        let started = Instant::now();
        self.recorder.started(launched.sequence, started);
        let result = self.drive_guarded(&mut driver, &launched, buffer, started, on, interrupt);
        work.end(result);
        self.stop_driving(driver);
    }

    /// Spin policy on this thread. A blocked caller spins at first. The progress thread sleeps at
    /// once, because the program computes on the core, unless the program waits.
    fn spin_policy_on(&self, on: On) -> SpinPolicy {
        match on {
            On::Progress if !self.recorder.is_awaited() => SpinPolicy::default(),
            On::Call | On::Wait | On::Progress => self.spin_policy,
        }
    }

    /// Lets the program act: it may run handlers, or even close this engine. Returns `true` if it
    /// interrupts the collective.
    fn ask(&self, sequence: u64, interrupt: Interrupt<'_>) -> bool {
        let asking = |asking| {
            let mut queue = lock(&self.queue);
            queue.asking = asking;
            if queue.closed {
                self.changed.notify_all();
            }
        };
        asking(true);
        self.recorder.locate(sequence, interrupt);
        let interrupted = interrupt.interrupts();
        if self.process.is_this() {
            asking(false);
        }
        interrupted
    }

    /// Drives a collective; a panic fails the group's works, never the process.
    pub(super) fn drive_guarded(
        &self,
        driver: &mut Driver,
        launched: &Launched,
        buffer: Buffer,
        started: Instant,
        on: On,
        interrupt: Interrupt<'_>,
    ) -> Result<()> {
        let (call, sequence) = (&launched.prepared.call, launched.sequence);
        let result = catch_unwind(AssertUnwindSafe(|| {
            self.drive(driver, launched, buffer, started, on, interrupt)
        }))
        .unwrap_or_else(|panic| {
            let what = message_of(&*panic);
            Err(self.fail(Error::panicked("the engine", what)))
        });
        match result {
            Ok(Some(measured)) => {
                self.recorder
                    .ended(sequence, call, &measured, on == On::Call);
                Ok(())
            }
            Ok(None) => {
                self.recorder.over(sequence, State::Done, started);
                Ok(())
            }
            Err(error) => {
                self.recorder.over(sequence, State::Failed, started);
                Err(placed(error, call, sequence, started))
            }
        }
    }

    /// Drives a collective and returns its measurements; `None` in a group of one rank.
    fn drive(
        &self,
        driver: &mut Driver,
        launched: &Launched,
        buffer: Buffer,
        started: Instant,
        on: On,
        interrupt: Interrupt<'_>,
    ) -> Result<Option<Measured>> {
        let call = &launched.prepared.call;
        if self.topology.world_size() == 1 {
            return self.abort.cause().map_or(Ok(None), Err);
        }
        let Driver {
            transport,
            memory,
            cores,
        } = driver;
        let context = Context {
            rank: self.rank,
            topology: &self.topology,
            limits: self.limits,
            abort: &self.abort,
            supervisor: &*self.supervisor,
            waits: &self.recorder.waits,
        };
        let mut operand = memory
            .operand(buffer, launched)
            .map_err(|error| self.fail(error))?;
        // A block ends the drive in place. Passing it to `drop` would move it, which slows small
        // messages down.
        let measured = {
            let mut drive = Drive::new(context, launched, &mut operand, started)
                .map_err(|error| self.fail(error))?;
            let mut spin_policy = self.spin_policy_on(on);
            let mut asked_at = started;
            let mut polls = 0_u32;
            let mut patience = Patience::new(launched.prepared.in_slots || call.is_mapped);
            let is_short = call.bytes() <= SHORT_BYTES;
            loop {
                match drive.step(&mut **transport, Instant::now) {
                    Step::Done => break,
                    Step::Failed(cause) => return Err(cause),
                    Step::Moved => {
                        patience.moved();
                        continue;
                    }
                    Step::Blocked => {}
                }
                polls += 1;
                let spins = !spin_policy.spinning.is_zero();
                if spins && !polls.is_multiple_of(POLLS_PER_CLOCK) {
                    std::hint::spin_loop();
                    continue;
                }
                let now = Instant::now();
                spin_policy = self.spin_policy_on(on);
                let idle = drive.idle(now);
                patience.waits(idle);
                if idle < patience.yielding(spin_policy) {
                    // A rank that does not spin has too few cores: yielding hands this core to all
                    // ranks on it, so no peer is searched.
                    let shared_core = match spins {
                        true => cores.shared_core(&**transport, drive.interests(), now),
                        false => SharedCore::None,
                    };
                    match shared_core {
                        SharedCore::None if idle < spin_policy.spinning => {
                            std::hint::spin_loop();
                            continue;
                        }
                        SharedCore::Staying if !is_short || idle >= spin_policy.spinning => {}
                        SharedCore::None | SharedCore::Moving | SharedCore::Staying => {
                            thread::yield_now();
                            patience.yielded();
                            continue;
                        }
                    }
                }
                let limit = drive.poll(now, &mut **transport);
                transport.wait(drive.interests(), limit);
                patience.waits(drive.idle(Instant::now()));
                if asked_at.elapsed() >= INTERRUPT_INTERVAL {
                    asked_at = Instant::now();
                    let interrupted = self.ask(launched.sequence, interrupt);
                    if !self.process.is_this() {
                        return Err(Abort::ForkedInside.into());
                    }
                    if interrupted {
                        self.supervisor.abort(self.interrupted());
                    }
                }
            }
            drive.measured(Instant::now())
        };
        operand.finish();
        Ok(Some(measured))
    }
}
