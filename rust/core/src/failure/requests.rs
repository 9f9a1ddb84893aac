//! Requests of other threads to the monitor.

use std::sync::{Arc, Mutex};

use crate::drive::Suspicion;
use gradring_net::abort::{AbortSwitch, Waker};
use gradring_proto::error::Error;
use gradring_proto::lock::lock;

/// Requests that the monitor has not taken yet, and the switch that it raises.
pub struct Requests {
    requests: Mutex<Vec<MonitorRequest>>,
    /// Ends the monitor's sleep; `None` once the monitor has ended.
    wake: Mutex<Option<Waker>>,
    /// The group's abort switch on this rank.
    pub abort: Arc<AbortSwitch>,
}

/// A request of another thread to the monitor.
pub enum MonitorRequest {
    /// Find the cause of a suspicion of the engine.
    Investigate(Suspicion),
    /// Send all ranks the cause of the group's failure.
    Spread(Error),
    /// Send all ranks the status of this rank.
    Gossip,
    /// Add a line to the log of rank 0.
    LogLine(String),
    /// Say goodbye.
    Close,
}

impl Requests {
    /// Makes an empty queue; `wake` ends the monitor's sleep.
    pub fn new(abort: Arc<AbortSwitch>, wake: Waker) -> Self {
        Self {
            requests: Mutex::default(),
            wake: Mutex::new(Some(wake)),
            abort,
        }
    }

    /// Adds a request, unless the monitor has ended.
    pub fn request(&self, request: MonitorRequest) {
        if let Some(wake) = &*lock(&self.wake) {
            lock(&self.requests).push(request);
            wake();
        }
    }

    pub(crate) fn take(&self) -> Vec<MonitorRequest> {
        std::mem::take(&mut *lock(&self.requests))
    }

    /// Drops the waker of a monitor that has ended.
    pub(crate) fn shut(&self) {
        drop(lock(&self.wake).take());
    }

    /// Ends the group for all ranks, unless it has ended before.
    pub fn abort(&self, cause: Error) {
        let (wake, mut requests) = (lock(&self.wake), lock(&self.requests));
        // A thread that sees the switch raised may close at once; the locks keep its request behind
        // this one.
        if self.abort.raise(cause.clone())
            && let Some(wake) = &*wake
        {
            requests.push(MonitorRequest::Spread(cause));
            wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_close_that_follows_an_abort_at_once_stands_behind_it() {
        let requests = Arc::new(Requests::new(Arc::default(), Box::new(|| ())));
        let (raised, was_raised) = mpsc::channel();
        let (closed, was_closed) = mpsc::channel();
        let was_closed = Mutex::new(was_closed);
        // Gives the close time to overtake; it must still come after the abort.
        requests.abort.wake_with(Box::new(move || {
            raised.send(()).unwrap();
            let _ = lock(&was_closed).recv_timeout(Duration::from_millis(100));
        }));
        let closer = std::thread::spawn({
            let requests = Arc::clone(&requests);
            move || {
                was_raised.recv().unwrap();
                requests.request(MonitorRequest::Close);
                let _ = closed.send(());
            }
        });
        requests.abort(Error::aborted("enough"));
        closer.join().unwrap();
        assert!(matches!(
            requests.take()[..],
            [MonitorRequest::Spread(_), MonitorRequest::Close]
        ));
    }
}
