//! Where other threads leave requests for the monitor.

use std::sync::{Arc, Mutex};

use crate::abort::{AbortSwitch, Waker};
use crate::drive::Suspicion;
use crate::error::Error;
use crate::lock::lock;

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
