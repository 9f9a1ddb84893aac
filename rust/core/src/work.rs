//! The handle of an asynchronous collective.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::trace::flight_recorder::FlightRecorder;

/// Called about ten times a second while a call waits; `true` asks it to give up.
pub type Interrupt<'a> = &'a mut dyn FnMut() -> bool;

/// How long a wait may last before its `Interrupt` is asked again.
pub const INTERRUPT_INTERVAL: Duration = Duration::from_millis(100);

/// How a wait on a work ended.
#[derive(Debug, Clone, PartialEq)]
pub enum WaitOutcome {
    /// The collective has ended, well or badly.
    Ended(Result<()>),
    /// The time given to this wait is over; the collective goes on.
    TimedOut,
    /// The caller's `Interrupt` asked to give up; the collective goes on.
    Interrupted,
}

/// A collective under way. Clones are handles of the same collective.
#[derive(Debug, Clone)]
pub struct Work {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    sequence: u64,
    /// Learns when the program waits.
    recorder: Arc<FlightRecorder>,
    outcome: Mutex<Option<Result<()>>>,
    ended: Condvar,
}

impl Work {
    /// The work of a collective that nobody has ended yet.
    #[must_use]
    pub(crate) fn pending(sequence: u64, recorder: Arc<FlightRecorder>) -> Self {
        Self {
            shared: Arc::new(Shared {
                sequence,
                recorder,
                outcome: Mutex::default(),
                ended: Condvar::new(),
            }),
        }
    }

    /// Whether the collective has ended, well or badly.
    #[must_use]
    pub fn done(&self) -> bool {
        self.shared
            .outcome
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_some()
    }

    /// Waits for the end, at most for `timeout`, asking `interrupt` now and then.
    pub fn wait(&self, timeout: Option<Duration>, interrupt: Interrupt<'_>) -> WaitOutcome {
        if self.done() {
            return self.wait_blocking(timeout, interrupt);
        }
        let from = Instant::now();
        self.shared.recorder.wait_begins(from);
        let outcome = self.wait_blocking(timeout, interrupt);
        let (sequence, to) = (self.shared.sequence, Instant::now());
        self.shared.recorder.wait_ends(sequence, from, to);
        outcome
    }

    fn wait_blocking(&self, timeout: Option<Duration>, interrupt: Interrupt<'_>) -> WaitOutcome {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut outcome = self
            .shared
            .outcome
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(result) = &*outcome {
                return WaitOutcome::Ended(result.clone());
            }
            let now = Instant::now();
            let left = deadline.map_or(INTERRUPT_INTERVAL, |d| d.saturating_duration_since(now));
            if left.is_zero() {
                return WaitOutcome::TimedOut;
            }
            let (guard, wait) = self
                .shared
                .ended
                .wait_timeout(outcome, left.min(INTERRUPT_INTERVAL))
                .unwrap_or_else(PoisonError::into_inner);
            outcome = guard;
            if wait.timed_out() && outcome.is_none() {
                drop(outcome);
                if interrupt() {
                    return WaitOutcome::Interrupted;
                }
                outcome = self
                    .shared
                    .outcome
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Waits for the end without limit; the engine's own deadlines bound it.
    ///
    /// # Errors
    /// Whatever ended the collective.
    pub fn wait_forever(&self) -> Result<()> {
        match self.wait(None, &mut || false) {
            WaitOutcome::Ended(result) => result,
            WaitOutcome::TimedOut | WaitOutcome::Interrupted => {
                Err(Error::protocol("an unlimited wait ended without a result"))
            }
        }
    }

    pub(crate) fn end(&self, result: Result<()>) {
        *self
            .shared
            .outcome
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(result);
        self.shared.ended.notify_all();
    }
}
