//! Where other threads leave requests for the watch.

use std::sync::{Arc, Mutex, PoisonError};

use crate::abort::{AbortSwitch, Waker};
use crate::engine::Suspicion;
use crate::error::Error;

/// The requests that the watch has not seen yet, and the switch that it raises.
pub(crate) struct Desk {
    requests: Mutex<Vec<Requested>>,
    wake: Waker,
    pub(crate) abort: Arc<AbortSwitch>,
}

/// What other threads want of the watch.
pub(crate) enum Requested {
    /// To find the cause of what the engine has noticed.
    Investigate(Suspicion),
    /// To tell everybody that the group has failed.
    Spread(Error),
    /// To tell everybody how this rank is doing.
    Pulse,
    /// To say goodbye.
    Close,
}

impl Desk {
    /// An empty desk; `wake` ends the watch's sleep.
    pub(crate) fn new(abort: Arc<AbortSwitch>, wake: Waker) -> Self {
        Self {
            requests: Mutex::default(),
            wake,
            abort,
        }
    }

    pub(crate) fn request(&self, requested: Requested) {
        self.requests
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(requested);
        (self.wake)();
    }

    pub(crate) fn take(&self) -> Vec<Requested> {
        std::mem::take(&mut *self.requests.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Ends the group for all, unless it has ended before.
    pub(crate) fn abort(&self, cause: Error) {
        if self.abort.raise(cause.clone()) {
            self.request(Requested::Spread(cause));
        }
    }
}
