//! The failure monitor: one sleeping thread per communicator that notices failures in the group.
//!
//! It owns a control connection to each neighbour on the ring. These carry one heartbeat per
//! second, queries and reports (see `diagnosis`), and aborts. Every rank forwards aborts, so they
//! reach all ranks around either side of a lost one.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::drive::{Stall, Supervisor, Suspicion};
use crate::observe::journal::Journal;
use gradring_net::abort::AbortSwitch;
use gradring_net::config::timing::Timing;
use gradring_net::link::forks;
use gradring_net::link::poll::WakeUp;
use gradring_net::link::tcp::connection::Connection;
use gradring_proto::error::{Error, message_of, shortened};
use gradring_proto::lock;

pub mod detector;
pub(crate) mod diagnosis;
mod neighbour;
pub mod requests;
pub mod thread;

use requests::{MonitorRequest, Requests};
use thread::MonitorThread;

/// The failure monitor of one communicator.
pub(crate) struct Monitor {
    requests: Arc<Requests>,
    rank: usize,
    hosts: Vec<String>,
    link_grace: Duration,
    on_warning: fn(String),
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Monitor {
    /// Starts the monitor over `neighbours`, given as (rank, control connection).
    pub(crate) fn start(
        journal: Arc<Journal>,
        neighbours: Vec<(usize, Connection)>,
        abort: Arc<AbortSwitch>,
        timing: Timing,
        on_warning: fn(String),
    ) -> std::io::Result<Self> {
        let wake_up = Arc::new(WakeUp::new()?);
        let requests = Arc::new(Requests::new(Arc::clone(&abort), {
            let wake_up = Arc::clone(&wake_up);
            Box::new(move || wake_up.wake())
        }));
        let neighbours = neighbours
            .into_iter()
            .map(|(rank, stream)| {
                stream.tcp().set_nodelay(true)?;
                forks::note(stream.tcp());
                Ok((rank, stream))
            })
            .collect::<std::io::Result<_>>()?;
        let to_take = Arc::clone(&requests);
        let thread = MonitorThread::new(
            Arc::clone(&journal),
            to_take,
            neighbours,
            Instant::now(),
            timing,
            on_warning,
        );
        let thread = std::thread::Builder::new()
            .name("gradring-monitor".into())
            .spawn(move || guarded(&abort, || thread.run(&wake_up)))?;
        Ok(Self {
            requests,
            rank: journal.rank,
            hosts: journal.hosts.clone(),
            link_grace: timing.link_grace,
            on_warning,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Ends the group for all ranks because of `error`, unless another rank's failure turns out to
    /// be the reason. Returns the cause.
    pub(crate) fn first_cause(&self, error: Error) -> Error {
        let earlier = self.requests.abort.wait(self.link_grace);
        earlier.unwrap_or_else(|| {
            self.abort(error.clone());
            self.requests.abort.cause().unwrap_or(error)
        })
    }

    /// Sends all ranks the status of this rank, now.
    pub(crate) fn gossip(&self) {
        self.requests.request(MonitorRequest::Gossip);
    }

    /// Shows people a warning, here and on rank 0.
    pub(crate) fn log_line(&self, text: String) {
        (self.on_warning)(text.clone());
        if self.rank != 0 {
            self.requests.request(MonitorRequest::LogLine(text));
        }
    }

    /// Says goodbye and ends the monitor.
    pub(crate) fn close(&self) {
        self.requests.request(MonitorRequest::Close);
        if let Some(thread) = lock::take(&self.thread) {
            // `guarded` has handled a panic of the thread.
            let _ = thread.join();
        }
        self.requests.shut();
    }
}

impl Supervisor for Monitor {
    fn investigate(&self, suspicion: Suspicion) {
        self.requests
            .request(MonitorRequest::Investigate(suspicion));
    }

    fn abort(&self, cause: Error) {
        self.requests.abort(cause);
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

impl Drop for Monitor {
    fn drop(&mut self) {
        self.close();
    }
}

/// Runs the monitor; if it panics, this rank's works fail, and the others see its connections end.
fn guarded(abort: &AbortSwitch, run: impl FnOnce()) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(run)) {
        let what = message_of(&*panic);
        abort.raise(Error::panicked("the failure monitor", what));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_the_monitor_fails_the_works() {
        let abort = AbortSwitch::default();
        guarded(&abort, || panic!("a defect of the monitor"));
        let cause = abort.cause().unwrap();
        assert!(
            cause.to_string().contains("a defect of the monitor"),
            "{cause}"
        );
    }
}
