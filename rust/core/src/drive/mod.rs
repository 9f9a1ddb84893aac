//! One collective from its first byte to its end, as a function of link events and time.
//!
//! A [`Drive`] decides which bytes move, and when a stall deserves a warning or a suspicion. It
//! also decides how long to wait for the cause of a suspicion, and whether a collective has ended
//! although the group has failed. It has no thread, never sleeps and owns no clock. The engine adds
//! spinning, sleeping and signals; the simulation of `rust/simulation` adds a virtual clock. Both
//! call `step` until it returns `Blocked`, then `poll` with the time, and then wait for at most the
//! duration that it returns.

use std::time::{Duration, Instant};

use crate::executor::{Execution, Part, Progress};
use gradring_net::abort::AbortSwitch;
use gradring_net::caller::INTERRUPT_INTERVAL;
use gradring_net::link::{Interest, Transport};
pub use gradring_proto::error::Suspicion;
use gradring_proto::error::{Breach, Error};
use gradring_proto::schedule::topology::Topology;

mod launched;
mod memory;
mod stall_detector;
mod suspicion;
mod waits;

pub use launched::{Launched, MAPPED, Prepared, algorithm_name};
pub use memory::{Memory, Operand};
pub use stall_detector::Limits;
use stall_detector::StallDetector;
pub use suspicion::{Stall, Supervisor};
pub use waits::{WaitRecord, Waiting};

/// How long the supervisor may take to find the cause of a suspicion.
const INVESTIGATION_LIMIT: Duration = Duration::from_secs(5);

/// Settings and services that all collectives of one rank share.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// The rank.
    pub rank: usize,
    /// All ranks and their hosts.
    pub topology: &'a Topology,
    /// How long a collective may stall.
    pub limits: Limits,
    /// Raised when the group has failed.
    pub abort: &'a AbortSwitch,
    /// Finds causes that this rank cannot find alone.
    pub supervisor: &'a dyn Supervisor,
    /// Record of the ranks for which this rank waits.
    pub waits: &'a WaitRecord,
}

/// Outcome of one step.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "there is one failure, at the end"
)]
pub enum Step {
    /// Something moved; more may move at once.
    Moved,
    /// Nothing can move until an interest is ready, the switch is raised, or the time that `poll`
    /// returns has passed.
    Blocked,
    /// The collective has ended on this rank.
    Done,
    /// The group has failed.
    Failed(Error),
}

/// Measurements of one collective.
#[derive(Debug, Clone, Copy)]
pub struct Measured {
    /// Algorithm used.
    pub algorithm: &'static str,
    /// Bytes of payload that this rank sent.
    pub bytes_sent: u64,
    /// Start of the collective on this rank.
    pub started: Instant,
    /// Time at which the last of its senders had entered, with that sender's rank; `None` if it
    /// receives from no rank.
    pub everyone_entered: Option<(Instant, usize)>,
    /// End of the collective on this rank.
    pub ended: Instant,
}

/// One collective under way.
pub struct Drive<'a> {
    context: Context<'a>,
    launched: &'a Launched,
    execution: Execution<'a>,
    stall: StallDetector<'a>,
    started: Instant,
    /// Set by a move; cleared when the clock is next read.
    moved: bool,
    /// Time at which the last peer had entered; stays `None` if the collective ends in one step.
    entered_at: Option<Instant>,
    investigation: Option<Investigation>,
}

/// A suspicion under investigation by the supervisor.
struct Investigation {
    suspicion: Suspicion,
    /// Deadline for the cause; `None` until the clock is next read.
    until: Option<Instant>,
}

impl<'a> Drive<'a> {
    /// Prepares a collective whose turn has come.
    ///
    /// # Errors
    /// `Exhausted` when there is no memory for it.
    #[inline]
    pub fn new(
        context: Context<'a>,
        launched: &'a Launched,
        operand: &'a mut Operand<'_>,
        started: Instant,
    ) -> Result<Self, Error> {
        let Prepared {
            call,
            algorithm,
            in_slots,
            ..
        } = &launched.prepared;
        let (buffer, scratch) = operand.parts();
        let part = Part {
            call,
            algorithm: *algorithm,
            in_slots: *in_slots,
            rank: context.rank,
            topology: context.topology,
            header: launched.header,
        };
        let execution = Execution::new(buffer, part, scratch)?;
        Ok(Self {
            context,
            launched,
            execution,
            stall: StallDetector::new(&context, launched, started),
            started,
            moved: false,
            entered_at: None,
            investigation: None,
        })
    }

    /// Moves everything that can move without waiting. Reads the clock at most once in a
    /// collective.
    #[inline]
    pub fn step(&mut self, transport: &mut dyn Transport, clock: impl FnOnce() -> Instant) -> Step {
        if self.investigation.is_some() {
            return self.answer(transport);
        }
        if let Some(cause) = self.context.abort.cause() {
            return match self.execution.ends_all_the_same(transport) {
                true => Step::Done,
                false => self.failed(cause, transport),
            };
        }
        match self.execution.advance(transport) {
            Ok(Progress::Done) => Step::Done,
            Ok(Progress::Moved) => {
                self.moved = true;
                if self.entered_at.is_none() && self.execution.last_to_enter().is_some() {
                    self.entered_at = Some(clock());
                }
                Step::Moved
            }
            Ok(Progress::Blocked) => Step::Blocked,
            Err(fault) => {
                self.investigate(self.stall.suspicion(fault, &self.execution));
                self.answer(transport)
            }
        }
    }

    /// Returns how long nothing has moved by `now`.
    #[inline]
    pub fn idle(&mut self, now: Instant) -> Duration {
        if std::mem::take(&mut self.moved) {
            self.stall.moved(now);
        }
        self.stall.idle(now)
    }

    /// Does everything due by `now` while nothing can move. Returns the longest wait before the
    /// next step.
    pub fn poll(&mut self, now: Instant, transport: &mut dyn Transport) -> Duration {
        let idle = self.idle(now);
        if let Some(Investigation { suspicion, until }) = &mut self.investigation {
            let until = *until.get_or_insert(now + INVESTIGATION_LIMIT);
            if now >= until {
                let suspicion = suspicion.clone();
                let cause = Breach::NoCause { suspicion };
                self.context.supervisor.abort(cause.into());
            }
            return until.saturating_duration_since(now).min(INTERRUPT_INTERVAL);
        }
        let elsewhere = self.execution.look_elsewhere(transport);
        let elsewhere = elsewhere.map_err(|fault| self.stall.suspicion(fault, &self.execution));
        let (stall, supervisor) = (&mut self.stall, self.context.supervisor);
        match elsewhere.and_then(|()| stall.poll(&self.execution, idle, supervisor)) {
            Ok(limit) => limit,
            Err(suspicion) => {
                self.investigate(suspicion);
                Duration::ZERO
            }
        }
    }

    /// Pipes to wait for after `Step::Blocked`, besides the abort switch.
    #[must_use]
    pub fn interests(&self) -> &[Interest] {
        match self.investigation {
            None => self.execution.interests(),
            Some(_) => &[],
        }
    }

    /// Measurements of a collective that ended at `ended`.
    #[inline]
    #[must_use]
    pub fn measured(&self, ended: Instant) -> Measured {
        let entered = |peer| (self.entered_at.unwrap_or(ended), peer);
        Measured {
            algorithm: self.launched.prepared.algorithm_name(),
            bytes_sent: self.execution.bytes_sent(),
            started: self.started,
            everyone_entered: self.execution.last_to_enter().map(entered),
            ended,
        }
    }

    /// Fails with the supervisor's cause, once there is one.
    fn answer(&self, transport: &mut dyn Transport) -> Step {
        let cause = self.context.abort.cause();
        cause.map_or(Step::Blocked, |cause| self.failed(cause, transport))
    }

    /// Fails. The buffer may change afterwards.
    fn failed(&self, cause: Error, transport: &mut dyn Transport) -> Step {
        self.execution.abandon(transport);
        Step::Failed(cause)
    }

    /// Reports a suspicion; afterwards only the supervisor's cause counts.
    fn investigate(&mut self, suspicion: Suspicion) {
        self.investigation = Some(Investigation {
            suspicion: suspicion.clone(),
            until: None,
        });
        self.context.supervisor.investigate(suspicion);
    }
}

#[cfg(test)]
mod tests;
