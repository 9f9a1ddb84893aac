//! What becomes of a collective that does not move, as a function of time: first it is noted, then
//! people are warned, at last somebody is suspected.

use std::time::{Duration, Instant};

use super::{Stall, Suspicion};
use crate::collective::Call;
use crate::executor::{Execution, Fault};
use crate::observe::flight_recorder::{FlightRecorder, Waiting};
use crate::wire::contract;
use crate::work::INTERRUPT_INTERVAL;

/// How long nothing has moved in one collective, and what was done about it.
pub(crate) struct StallDetector<'a> {
    call: &'a Call,
    sequence: u64,
    limits: Limits,
    recorder: &'a FlightRecorder,
    moved_at: Instant,
    noted: bool,
    /// How long nothing will have moved when people are warned next.
    next_warning: Duration,
}

/// How long a collective may stand still.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Until somebody is suspected.
    pub timeout: Duration,
    /// Until people are warned first, and then each time that twice as much has gone by.
    pub stall_warning: Duration,
}

impl<'a> StallDetector<'a> {
    pub(crate) fn new(
        call: &'a Call,
        sequence: u64,
        limits: Limits,
        recorder: &'a FlightRecorder,
        started: Instant,
    ) -> Self {
        Self {
            call,
            sequence,
            limits,
            recorder,
            moved_at: started,
            noted: false,
            next_warning: first_warning(limits),
        }
    }

    /// Something has moved.
    pub(crate) fn moved(&mut self, now: Instant) {
        self.moved_at = now;
        self.next_warning = first_warning(self.limits);
        self.end();
    }

    /// Nobody waits any more.
    pub(crate) fn end(&mut self) {
        if std::mem::take(&mut self.noted) {
            self.recorder.note_waiting(None);
        }
    }

    /// How long nothing has moved.
    pub(crate) fn idle(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.moved_at)
    }

    /// Does what is due by now; returns for how long to wait before the next look.
    ///
    /// # Errors
    /// The suspicion, once nothing has moved for as long as the timeout allows.
    pub(crate) fn look(
        &mut self,
        execution: &Execution<'_>,
        now: Instant,
        warn: impl FnOnce(&Stall<'_>),
    ) -> Result<Duration, Suspicion> {
        let timeout = self.limits.timeout;
        let (sequence, idle) = (self.sequence, self.idle(now));
        // Also if there was no look between the two limits.
        if idle >= self.next_warning && self.next_warning < timeout {
            while self.next_warning <= idle {
                self.next_warning *= 2;
            }
            let (awaited, entered) = execution.late();
            warn(&Stall {
                awaited,
                entered,
                call: self.call,
                sequence,
                idle,
                timeout,
            });
        }
        if idle >= timeout {
            return Err(Suspicion::Stalled {
                awaited: execution.awaited(),
                sequence,
                idle,
            });
        }
        if idle >= INTERRUPT_INTERVAL {
            self.noted = true;
            self.recorder.note_waiting(Some(Waiting {
                awaited: execution.awaited(),
                since: self.moved_at,
            }));
        }
        Ok(INTERRUPT_INTERVAL.min(timeout - idle))
    }

    /// What a fault gives reason to suspect.
    pub(crate) fn suspicion(&self, fault: Fault, execution: &Execution<'_>) -> Suspicion {
        let sequence = self.sequence;
        match fault {
            Fault::Link { peer, broken } if broken.corrupted => Suspicion::Corrupted {
                peer,
                reason: broken.reason,
                call: self.call.to_string(),
                sequence,
            },
            Fault::Link { peer, broken } => Suspicion::LinkBroken {
                peer,
                reason: broken.reason,
            },
            Fault::Header { peer, received } if !contract::is_header(&received) => {
                Suspicion::Garbled {
                    peer,
                    problem: "sent bytes that are not a collective's header".into(),
                }
            }
            Fault::Header { peer, received } => match contract::way(&received) {
                way if way == (peer, execution.rank()) => {
                    Suspicion::HeadersDiffer { peer, sequence }
                }
                (from, to) => Suspicion::Garbled {
                    peer,
                    problem: format!(
                        "its connection to rank {} carries what rank {from} sent to rank {to}",
                        execution.rank()
                    ),
                },
            },
        }
    }
}

/// More than nothing, which no number of doublings would raise.
fn first_warning(limits: Limits) -> Duration {
    limits.stall_warning.max(Duration::from_millis(1))
}
