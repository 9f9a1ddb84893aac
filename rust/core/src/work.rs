//! The handle of an asynchronous collective.

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::observe::flight_recorder::FlightRecorder;
use gradring_net::caller::{INTERRUPT_INTERVAL, Interrupt};
use gradring_net::link::forks::Process;
use gradring_proto::error::{Abort, Breach, Error, Late, Result, shortened};
use gradring_proto::lock::{self, lock};

/// Result of a wait for a work.
#[derive(Debug, Clone, PartialEq)]
pub enum WaitOutcome {
    /// The collective has ended, well or badly.
    Ended(Result<()>),
    /// The time limit of this wait has passed; the collective continues.
    TimedOut(Error),
    /// The caller's `Interrupt` ended the wait; the collective continues.
    Interrupted,
}

/// A collective under way. Clones are handles of the same collective.
#[derive(Debug, Clone)]
pub struct Work {
    shared: Arc<WorkState>,
}

#[derive(Debug)]
struct WorkState {
    sequence: u64,
    /// Records when the program waits. `None` once no thread can wait: a work that the program
    /// keeps must not keep all entries of the recorder.
    recorder: Mutex<Option<Arc<FlightRecorder>>>,
    outcome: Mutex<Option<Result<()>>>,
    ended: Condvar,
}

impl Work {
    /// The work of a collective that has not ended yet.
    #[must_use]
    pub(crate) fn pending(sequence: u64, recorder: Arc<FlightRecorder>) -> Self {
        Self {
            shared: Arc::new(WorkState {
                sequence,
                recorder: Mutex::new(Some(recorder)),
                outcome: Mutex::default(),
                ended: Condvar::new(),
            }),
        }
    }

    /// Returns `true` once the collective has ended, with or without success.
    #[must_use]
    pub fn done(&self) -> bool {
        lock(&self.shared.outcome).is_some()
    }

    /// Waits for the end, at most for `timeout`, and calls `interrupt` now and then.
    pub fn wait(&self, timeout: Option<Duration>, interrupt: Interrupt<'_>) -> WaitOutcome {
        self.wait_driving(timeout, interrupt, |_, _| ())
    }

    /// Calls `drive` with the ordinal, which may end the collective, and then waits for the end.
    pub(crate) fn wait_driving(
        &self,
        timeout: Option<Duration>,
        interrupt: Interrupt<'_>,
        drive: impl FnOnce(u64, Interrupt<'_>),
    ) -> WaitOutcome {
        let Some(recorder) = lock(&self.shared.recorder).clone() else {
            return self.wait_blocking(None, timeout, interrupt);
        };
        let from = Instant::now();
        recorder.wait_begins(from);
        let process = Process::this();
        drive(self.shared.sequence, &mut *interrupt);
        let mut outcome = self.wait_blocking(Some(&*recorder), timeout, interrupt);
        if !process.is_this() {
            return outcome;
        }
        recorder.wait_ends(self.shared.sequence, from, Instant::now());
        if let WaitOutcome::TimedOut(error) = &mut outcome {
            self.name_collective(error, &recorder);
        }
        outcome
    }

    /// Adds the collective to an error, if the recorder still has its entry.
    fn name_collective(&self, error: &mut Error, recorder: &FlightRecorder) {
        let entry = recorder.find(self.shared.sequence);
        error.sequence = Some(self.shared.sequence);
        error.elapsed = entry.as_ref().map(|entry| entry.launched.elapsed());
        error.collective = entry.map(|entry| shortened(&entry.call.to_string()));
    }

    fn wait_blocking(
        &self,
        recorder: Option<&FlightRecorder>,
        timeout: Option<Duration>,
        interrupt: Interrupt<'_>,
    ) -> WaitOutcome {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let process = Process::this();
        let mut outcome = lock(&self.shared.outcome);
        loop {
            if let Some(result) = &*outcome {
                return WaitOutcome::Ended(result.clone());
            }
            let now = Instant::now();
            let left = deadline.map_or(INTERRUPT_INTERVAL, |d| d.saturating_duration_since(now));
            if left.is_zero() {
                let limit = timeout.unwrap_or_default();
                return WaitOutcome::TimedOut(Late::ThisWait { limit }.into());
            }
            let limit = left.min(INTERRUPT_INTERVAL);
            let under_way = |outcome: &mut Option<Result<()>>| outcome.is_none();
            outcome = lock::wait_while(&self.shared.ended, outcome, limit, under_way);
            if outcome.is_none() {
                drop(outcome);
                if let Some(recorder) = recorder {
                    recorder.locate(self.shared.sequence, interrupt);
                }
                let interrupted = interrupt.interrupts();
                if !process.is_this() {
                    return WaitOutcome::Ended(Err(Abort::ForkedInside.into()));
                }
                if interrupted {
                    return WaitOutcome::Interrupted;
                }
                outcome = lock(&self.shared.outcome);
            }
        }
    }

    /// Waits for the end without limit; the engine's own deadlines bound it.
    ///
    /// # Errors
    /// The error that ended the collective.
    pub fn wait_forever(&self) -> Result<()> {
        match self.wait(None, &mut || false) {
            WaitOutcome::Ended(result) => result,
            WaitOutcome::TimedOut(_) | WaitOutcome::Interrupted => Err(Breach::NoResult.into()),
        }
    }

    pub(crate) fn end(&self, result: Result<()>) {
        *lock(&self.shared.outcome) = Some(result);
        drop(lock(&self.shared.recorder).take());
        self.shared.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gradring_proto::collective::Request;
    use gradring_proto::schedule::Algorithm;

    #[test]
    fn a_work_that_has_ended_keeps_its_result_and_no_records() {
        let recorder = Arc::new(FlightRecorder::default());
        let work = Work::pending(1, Arc::clone(&recorder));
        assert_eq!(Arc::strong_count(&recorder), 2);
        work.end(Ok(()));
        assert_eq!(Arc::strong_count(&recorder), 1);
        assert_eq!(work.wait_forever(), Ok(()));
    }

    #[test]
    fn a_wait_that_is_over_names_its_collective_and_nobody() {
        let recorder = Arc::new(FlightRecorder::default());
        let (call, _) = Request::barrier().into_parts();
        recorder.launched(
            (7, 0),
            Arc::new(call),
            Algorithm::Ring,
            Instant::now(),
            false,
        );
        let work = Work::pending(7, recorder);
        let outcome = work.wait(Some(Duration::ZERO), &mut || false);
        let WaitOutcome::TimedOut(error) = outcome else {
            panic!("{outcome:?}");
        };
        assert!(error.blamed.is_none() && error.elapsed.is_some());
        let text = error.to_string();
        assert!(text.starts_with("barrier (collective #7): has not ended within the 0 s"));
        assert!(text.contains("goes on"), "{text}");
    }
}
