//! Requests that other threads leave for the monitor.

use std::sync::{Arc, Mutex};

use crate::drive::Suspicion;
use gradring_net::abort::{AbortSwitch, Waker};
use gradring_proto::error::Error;
use gradring_proto::lock::lock;

/// The requests that the monitor has not seen yet, and the switch that it raises.
pub struct Requests {
    requests: Mutex<Vec<Request>>,
    /// Ends the monitor's sleep; None when the monitor has ended.
    wake: Mutex<Option<Waker>>,
    /// The group's switch on this rank.
    pub abort: Arc<AbortSwitch>,
}

/// What other threads want of the monitor.
pub enum Request {
    /// To find the cause of what the engine has noticed.
    Investigate(Suspicion),
    /// To tell everybody that the group has failed.
    Spread(Error),
    /// To tell everybody how this rank is doing.
    Gossip,
    /// To add a line to the log of rank 0.
    LogLine(String),
    /// To say goodbye.
    Close,
}

impl Requests {
    /// No requests yet; `wake` ends the monitor's sleep.
    pub fn new(abort: Arc<AbortSwitch>, wake: Waker) -> Self {
        Self {
            requests: Mutex::default(),
            wake: Mutex::new(Some(wake)),
            abort,
        }
    }

    /// Leaves a request, unless the monitor that would take it has ended.
    pub fn request(&self, request: Request) {
        if let Some(wake) = &*lock(&self.wake) {
            lock(&self.requests).push(request);
            wake();
        }
    }

    pub(crate) fn take(&self) -> Vec<Request> {
        std::mem::take(&mut *lock(&self.requests))
    }

    /// The monitor has ended: lets go of what would wake it.
    pub(crate) fn shut(&self) {
        drop(lock(&self.wake).take());
    }

    /// Ends the group for all, unless it has ended before.
    pub fn abort(&self, cause: Error) {
        let (wake, mut requests) = (lock(&self.wake), lock(&self.requests));
        // Who is told may close at once: that request has to come behind this one.
        if self.abort.raise(cause.clone())
            && let Some(wake) = &*wake
        {
            requests.push(Request::Spread(cause));
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
        // Gives the close time to overtake: it comes after the abort all the same.
        requests.abort.wake_with(Box::new(move || {
            raised.send(()).unwrap();
            let _ = lock(&was_closed).recv_timeout(Duration::from_millis(100));
        }));
        let closer = std::thread::spawn({
            let requests = Arc::clone(&requests);
            move || {
                was_raised.recv().unwrap();
                requests.request(Request::Close);
                let _ = closed.send(());
            }
        });
        requests.abort(Error::aborted("enough"));
        closer.join().unwrap();
        assert!(matches!(
            requests.take()[..],
            [Request::Spread(_), Request::Close]
        ));
    }
}
