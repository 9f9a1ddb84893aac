//! The watch: one sleeping thread per communicator that notices what goes wrong in the group.
//!
//! It owns a control connection to each neighbour on the ring. Over these go a heartbeat per
//! second, questions and testimonies (see `inquest`), and aborts, which every rank passes on, so
//! they reach all ranks around either side of a lost one.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::abort::AbortSwitch;
use crate::engine::{Stall, Supervisor, Suspicion, message_of};
use crate::error::{Error, shortened};
use crate::link::connection::Connection;
use crate::link::forks;
use crate::link::poll::WakeUp;
use crate::trace::journal::Journal;

pub(crate) mod desk;
pub(crate) mod judge;
mod neighbour;
pub(crate) mod watch;

use desk::{Desk, Requested};
use judge::LINK_GRACE;
use watch::Watch;

/// Bound on `investigate`.
pub(crate) const JUDGEMENT_LIMIT: Duration = Duration::from_secs(5);

/// The watch of one communicator.
pub(crate) struct Liveness {
    desk: Arc<Desk>,
    rank: usize,
    hosts: Vec<String>,
    on_warning: fn(String),
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Liveness {
    /// Starts watching over `neighbours`, given as (rank, control connection).
    pub(crate) fn start(
        journal: Arc<Journal>,
        neighbours: Vec<(usize, Connection)>,
        abort: Arc<AbortSwitch>,
        on_warning: fn(String),
    ) -> std::io::Result<Self> {
        let wake_up = Arc::new(WakeUp::new()?);
        let desk = Arc::new(Desk::new(Arc::clone(&abort), {
            let wake_up = Arc::clone(&wake_up);
            Box::new(move || wake_up.wake())
        }));
        let neighbours = neighbours
            .into_iter()
            .map(|(rank, mut stream)| {
                stream.be_nonblocking()?;
                stream.tcp().set_nodelay(true)?;
                forks::note(stream.tcp());
                Ok((rank, stream))
            })
            .collect::<std::io::Result<_>>()?;
        let (now, to_watch) = (Instant::now(), Arc::clone(&desk));
        let watch = Watch::new(Arc::clone(&journal), to_watch, neighbours, now, on_warning);
        let thread = std::thread::Builder::new()
            .name("gradring-watch".into())
            .spawn(move || guarded(&abort, || watch.run(&wake_up)))?;
        Ok(Self {
            desk,
            rank: journal.rank,
            hosts: journal.hosts.clone(),
            on_warning,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Ends the group for all on account of `error`, unless what made this rank fail turns out to
    /// be another's failure; returns the cause.
    pub(crate) fn first_cause(&self, error: Error) -> Error {
        let earlier = self.desk.abort.wait(LINK_GRACE);
        earlier.unwrap_or_else(|| {
            self.abort(error.clone());
            self.desk.abort.cause().unwrap_or(error)
        })
    }

    /// Tells everybody how this rank is doing, now.
    pub(crate) fn pulse(&self) {
        self.desk.request(Requested::Pulse);
    }

    /// Shows people a warning, here and on rank 0.
    pub(crate) fn remark(&self, text: String) {
        (self.on_warning)(text.clone());
        if self.rank != 0 {
            self.desk.request(Requested::Remark(text));
        }
    }

    /// Says goodbye and ends the watch.
    pub(crate) fn close(&self) {
        self.desk.request(Requested::Close);
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(thread) = thread {
            // A watch that panicked has nothing left to say.
            let _ = thread.join();
        }
        self.desk.shut();
    }
}

impl Supervisor for Liveness {
    fn investigate(&self, suspicion: Suspicion) -> Error {
        let fallback = format!("the group could not find the cause of: {suspicion:?}");
        self.desk.request(Requested::Investigate(suspicion));
        self.desk.abort.wait(JUDGEMENT_LIMIT).unwrap_or_else(|| {
            let cause = Error::protocol(fallback);
            self.abort(cause.clone());
            cause
        })
    }

    fn abort(&self, cause: Error) {
        self.desk.abort(cause);
    }

    fn warn(&self, stall: &Stall<'_>) {
        let late: Vec<String> = stall
            .awaited
            .iter()
            .map(|&rank| format!("rank {rank} on {}", self.hosts[rank]))
            .collect();
        let problem = if stall.entered {
            "entered, but sending nothing (waiting for another rank, perhaps)"
        } else {
            "not entered"
        };
        let call = shortened(&stall.call.to_string());
        (self.on_warning)(format!(
            "rank {} has waited {:.1} s in {call} (collective #{}) for {}: {problem}; look at what \
             it is doing; after {:.0} s this fails",
            self.rank,
            stall.idle.as_secs_f64(),
            stall.sequence,
            late.join(", "),
            stall.timeout.as_secs_f64(),
        ));
    }
}

impl Drop for Liveness {
    fn drop(&mut self) {
        self.close();
    }
}

/// Runs the watch; if it panics, this rank's works fail, and the others see its connections end.
fn guarded(abort: &AbortSwitch, run: impl FnOnce()) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(run)) {
        let what = message_of(&*panic);
        let problem = format!("the watch over the group failed: {what}; please report this");
        abort.raise(Error::protocol(problem));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_the_watch_fails_the_works() {
        let abort = AbortSwitch::default();
        guarded(&abort, || panic!("a defect of the watch"));
        let cause = abort.cause().unwrap();
        assert!(
            cause.to_string().contains("a defect of the watch"),
            "{cause}"
        );
    }
}
