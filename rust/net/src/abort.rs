//! The switch that ends everything: raised once, with the first cause, and seen by every wait.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use gradring_proto::error::{Error, Part};
use gradring_proto::lock::{self, lock};

/// Poison for one communicator. The first cause wins.
#[derive(Default)]
pub struct AbortSwitch {
    raised: AtomicBool,
    cause: Mutex<Option<Error>>,
    changed: Condvar,
    wakers: Mutex<Vec<Waker>>,
    /// What the group is of the world, for its cause.
    part: Option<Arc<Part>>,
}

/// Ends a wait of somebody who watches the switch.
pub type Waker = Box<dyn Fn() + Send + Sync>;

impl AbortSwitch {
    /// The switch of a group that is this part of the world, if it is not all of it.
    #[must_use]
    pub fn of(part: Option<Arc<Part>>) -> Self {
        Self {
            part,
            ..Self::default()
        }
    }

    /// Has `waker` called when the switch is raised.
    pub fn wake_with(&self, waker: Waker) {
        lock(&self.wakers).push(waker);
    }

    /// Lets go of all wakers, when those whom they wake wait no more.
    pub fn forget_wakers(&self) {
        lock(&self.wakers).clear();
    }

    /// Raises the switch; `false` if it had been raised before, and `cause` was not taken.
    pub fn raise(&self, cause: Error) -> bool {
        let mut slot = lock(&self.cause);
        if slot.is_some() {
            return false;
        }
        *slot = Some(cause.within(self.part.as_ref()));
        self.raised.store(true, Ordering::Release);
        drop(slot);
        self.changed.notify_all();
        for waker in lock(&self.wakers).iter() {
            waker();
        }
        true
    }

    /// Why it was raised, if it was. Cheap while it is not.
    #[must_use]
    #[inline]
    pub fn cause(&self) -> Option<Error> {
        if !self.raised.load(Ordering::Acquire) {
            return None;
        }
        lock(&self.cause).clone()
    }

    /// Waits for the switch to be raised, at most for `timeout`.
    #[must_use]
    pub fn wait(&self, timeout: Duration) -> Option<Error> {
        lock::wait_while(&self.changed, lock(&self.cause), timeout, |cause| {
            cause.is_none()
        })
        .clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_cause_wins() {
        let switch = AbortSwitch::default();
        assert_eq!(switch.cause(), None);
        assert!(switch.raise(Error::aborted("first")));
        assert!(!switch.raise(Error::aborted("second")));
        assert_eq!(switch.cause(), Some(Error::aborted("first")));
        assert_eq!(switch.wait(Duration::ZERO), switch.cause());
    }
}
