//! The abort switch of a communicator: raised once, with the first cause; it ends every wait.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use gradring_proto::error::{Error, Subgroup};
use gradring_proto::lock::{self, lock};

/// Poison for one communicator. The first cause wins.
#[derive(Default)]
pub struct AbortSwitch {
    raised: AtomicBool,
    cause: Mutex<Option<Error>>,
    changed: Condvar,
    wakers: Mutex<Vec<Waker>>,
    /// The part of the world that the group consists of, for its cause; `None` for the whole world.
    part: Option<Arc<Subgroup>>,
}

/// Ends the wait of a thread that watches the switch.
pub type Waker = Box<dyn Fn() + Send + Sync>;

impl AbortSwitch {
    /// Creates the switch of a group. `part` is set for a group of some ranks of another.
    #[must_use]
    pub fn of(part: Option<Arc<Subgroup>>) -> Self {
        Self {
            part,
            ..Self::default()
        }
    }

    /// Registers `waker`, which is called when the switch is raised.
    pub fn wake_with(&self, waker: Waker) {
        lock(&self.wakers).push(waker);
    }

    /// Drops all wakers, once the threads that they wake have ended their waits.
    pub fn forget_wakers(&self) {
        lock(&self.wakers).clear();
    }

    /// Raises the switch. Returns `false` if it had been raised before; then `cause` is dropped.
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

    /// Returns the cause if the switch was raised; otherwise it costs one atomic load.
    #[must_use]
    #[inline]
    pub fn cause(&self) -> Option<Error> {
        if !self.raised.load(Ordering::Acquire) {
            return None;
        }
        lock(&self.cause).clone()
    }

    /// Waits at most `timeout` for the switch to be raised, and returns the cause if it was.
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
