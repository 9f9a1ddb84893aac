//! Stall detector, a function of time: notes a stall first, then warns people, and finally suspects
//! a rank.

use std::time::{Duration, Instant};

use super::{Context, Launched, Stall, Supervisor, Suspicion, WaitRecord, Waiting};
use crate::executor::{Execution, Fault};
use gradring_net::caller::INTERRUPT_INTERVAL;
use gradring_proto::error::{Garbled, Text};
use gradring_proto::wire::signature;

/// Duration of a stall in one collective, and the reactions so far.
pub(super) struct StallDetector<'a> {
    launched: &'a Launched,
    limits: Limits,
    waits: &'a WaitRecord,
    moved_at: Instant,
    noted: bool,
    /// Duration of a stall at which the next warning is due.
    next_warning: Duration,
}

/// Limits on the stall of a collective.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Duration of a stall at which a rank is suspected.
    pub timeout: Duration,
    /// Duration of a stall at the first warning. Each further warning comes after twice as long.
    pub stall_warning: Duration,
}

impl<'a> StallDetector<'a> {
    #[inline]
    pub(super) fn new(context: &Context<'a>, launched: &'a Launched, started: Instant) -> Self {
        Self {
            launched,
            limits: context.limits,
            waits: context.waits,
            moved_at: started,
            noted: false,
            next_warning: first_warning(context.limits),
        }
    }

    /// Records a move.
    #[inline]
    pub(super) fn moved(&mut self, now: Instant) {
        self.moved_at = now;
        self.waits.note_move();
        self.next_warning = first_warning(self.limits);
        self.forget();
    }

    /// Withdraws the note that this rank waits.
    #[inline]
    fn forget(&mut self) {
        if std::mem::take(&mut self.noted) {
            self.waits.note(None);
        }
    }

    /// How long nothing has moved.
    #[inline]
    pub(super) fn idle(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.moved_at)
    }

    /// Does everything due after a stall of this length. Returns the longest wait before the next
    /// poll.
    ///
    /// # Errors
    /// The suspicion, once a stall has reached the timeout.
    pub(super) fn poll(
        &mut self,
        execution: &Execution<'_>,
        idle: Duration,
        supervisor: &dyn Supervisor,
    ) -> Result<Duration, Suspicion> {
        let (timeout, sequence) = (self.limits.timeout, self.launched.sequence);
        // A warning comes even if no poll fell between it and the timeout.
        if idle >= self.next_warning && self.next_warning < timeout {
            while self.next_warning <= idle {
                self.next_warning *= 2;
            }
            let (awaited, entered) = execution.late();
            supervisor.warn(&Stall {
                awaited,
                entered,
                call: &self.launched.prepared.call,
                sequence,
                idle,
                timeout,
            });
        }
        // A rank may still be in an earlier collective that moves.
        let elsewhere = (self.waits.earlier_moved())
            .map(|at| (self.moved_at + idle).saturating_duration_since(at));
        let stalled = elsewhere.map_or(idle, |elsewhere| elsewhere.min(idle));
        if stalled >= timeout {
            return Err(Suspicion::Stalled {
                awaited: execution.awaited(),
                sequence,
                idle,
            });
        }
        if idle >= INTERRUPT_INTERVAL {
            self.noted = true;
            self.waits.note(Some(Waiting {
                awaited: execution.awaited(),
                since: self.moved_at,
            }));
        }
        Ok(INTERRUPT_INTERVAL.min(timeout - stalled))
    }

    /// Converts a fault into a suspicion.
    pub(super) fn suspicion(&self, fault: Fault, execution: &Execution<'_>) -> Suspicion {
        let sequence = self.launched.sequence;
        match fault {
            Fault::Link { peer, broken } if broken.corrupted() => Suspicion::Corrupted {
                peer,
                broken,
                call: Text::of(&self.launched.prepared.call),
                sequence,
            },
            Fault::Link { peer, broken } => Suspicion::LinkBroken { peer, broken },
            Fault::OutsideHeap { peer } => Suspicion::Garbled {
                peer,
                how: Garbled::OutsideHeap,
            },
            Fault::Header { peer, received, .. } if !signature::is_header(&received) => {
                let how = Garbled::NotAHeader;
                Suspicion::Garbled { peer, how }
            }
            Fault::Header {
                peer,
                received,
                text,
            } => match signature::endpoints(&received) {
                way if way == (peer, execution.rank()) => {
                    let own = &self.launched.header;
                    Suspicion::HeadersDiffer {
                        peer,
                        sequence,
                        theirs: signature::description(&text, &received, own).into(),
                        own: signature::description(execution.text(), own, &received).into(),
                    }
                }
                (from, to) => {
                    let rank = execution.rank();
                    let how = Garbled::OtherWay { rank, from, to };
                    Suspicion::Garbled { peer, how }
                }
            },
        }
    }
}

impl Drop for StallDetector<'_> {
    fn drop(&mut self) {
        self.forget();
    }
}

/// At least 1 ms, because doubling zero never ends.
fn first_warning(limits: Limits) -> Duration {
    limits.stall_warning.max(Duration::from_millis(1))
}
