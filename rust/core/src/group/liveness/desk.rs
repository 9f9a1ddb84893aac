//! Where other threads leave requests for the watch.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::abort::{AbortSwitch, Waker};
use crate::engine::Suspicion;
use crate::error::Error;

/// The requests that the watch has not seen yet, and the switch that it raises.
pub(crate) struct Desk {
    requests: Mutex<Vec<Requested>>,
    /// Ends the watch's sleep; None when the watch has ended.
    wake: Mutex<Option<Waker>>,
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
    /// To tell everybody something that people should read.
    Remark(String),
    /// To say goodbye.
    Close,
}

impl Desk {
    /// An empty desk; `wake` ends the watch's sleep.
    pub(crate) fn new(abort: Arc<AbortSwitch>, wake: Waker) -> Self {
        Self {
            requests: Mutex::default(),
            wake: Mutex::new(Some(wake)),
            abort,
        }
    }

    /// Leaves a request, unless there is nobody to take it.
    pub(crate) fn request(&self, requested: Requested) {
        if let Some(wake) = &*lock(&self.wake) {
            lock(&self.requests).push(requested);
            wake();
        }
    }

    pub(crate) fn take(&self) -> Vec<Requested> {
        std::mem::take(&mut *lock(&self.requests))
    }

    /// The watch has ended: lets go of what would wake it.
    pub(crate) fn shut(&self) {
        drop(lock(&self.wake).take());
    }

    /// Ends the group for all, unless it has ended before.
    pub(crate) fn abort(&self, cause: Error) {
        if self.abort.raise(cause.clone()) {
            self.request(Requested::Spread(cause));
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
