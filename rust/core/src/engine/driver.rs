//! Driving one collective after the other: on the caller's thread if it blocks, or else on the
//! progress thread.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::Instant;

use super::cores::{Company, Cores};
use super::queue::Turn;
use super::spin_policy::Patience;
use super::{Shared, SpinPolicy, placed};
use crate::drive::{Context, Drive, Launched, Measured, Memory, Step};
use crate::observe::flight_recorder::State;
use gradring_net::caller::{INTERRUPT_INTERVAL, Interrupt};
use gradring_net::link::Transport;
use gradring_proto::buffer::Buffer;
use gradring_proto::error::{Abort, Error, Result, message_of};
use gradring_proto::lock::lock;

/// How often a spinning caller looks at its links before it looks at the clock.
const LOOKS_PER_CLOCK: u32 = 8;

/// For a message of more bytes a peer on the same core works so long that handing the core to and fro
/// costs more than to sleep.
const SHORT_BYTES: usize = 64 << 10;

/// What it takes to drive a collective: the thread that drives one has it for that time.
pub(super) struct Driver {
    pub(super) transport: Box<dyn Transport>,
    pub(super) memory: Memory,
    pub(super) cores: Cores,
}

/// On whose thread a collective is driven.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum On {
    /// That of the blocking call that launched it.
    Call,
    /// That of a wait for it, or for one launched later.
    Wait,
    /// The progress thread.
    Progress,
}

impl Shared {
    /// Gives the driver back, or ends it if the engine has been closed meanwhile.
    pub(super) fn stop_driving(&self, driver: Box<Driver>) {
        if !self.process.is_this() {
            // Its threads and links are the parent's.
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

    /// The progress thread.
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

    /// Drives what is queued up to the collective `last`, as long as nobody else does.
    pub(super) fn drive_up_to(&self, last: u64, interrupt: Interrupt<'_>) {
        loop {
            // In a statement of its own, so that the lock does not last.
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

    /// Who blocks spins at first. The progress thread sleeps, because the program's computation wants
    /// the core, unless the program waits.
    fn spin_policy_on(&self, on: On) -> SpinPolicy {
        match on {
            On::Progress if !self.recorder.is_awaited() => SpinPolicy::default(),
            On::Call | On::Wait | On::Progress => self.spin_policy,
        }
    }

    /// Lets the program act, which may have something to say or even close this engine; whether it
    /// asks to give up.
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

    /// Returns how it went; nothing in a world of one.
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
        // In a block: dropping the drive by a call would move it, and small messages would notice.
        let measured = {
            let mut drive = Drive::new(context, launched, &mut operand, started)
                .map_err(|error| self.fail(error))?;
            let mut spin_policy = self.spin_policy_on(on);
            let mut asked_at = started;
            let mut looks = 0_u32;
            let mut patience = Patience::default();
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
                looks += 1;
                let spins = !spin_policy.spinning.is_zero();
                if spins && !looks.is_multiple_of(LOOKS_PER_CLOCK) {
                    std::hint::spin_loop();
                    continue;
                }
                let now = Instant::now();
                spin_policy = self.spin_policy_on(on);
                let idle = drive.idle(now);
                patience.waits(idle);
                if idle < patience.yielding(spin_policy) {
                    // Where there are too few cores, all ranks of one get it when this one yields.
                    let company = match spins {
                        true => cores.company(&**transport, drive.interests(), now),
                        false => Company::Other,
                    };
                    match company {
                        Company::Other if idle < spin_policy.spinning => {
                            std::hint::spin_loop();
                            continue;
                        }
                        Company::Staying if !is_short || idle >= spin_policy.spinning => {}
                        Company::Other | Company::Parting | Company::Staying => {
                            thread::yield_now();
                            continue;
                        }
                    }
                }
                let limit = drive.look(now);
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
