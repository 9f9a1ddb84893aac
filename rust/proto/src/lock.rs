//! Locks that stay usable after a panic of the thread that held them. The protected value is whole,
//! because every change under a lock of ours is one assignment or one call of a collection.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Locks `mutex`.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes the value out of `mutex`, and frees the lock. So the caller can wait for a thread, or drop
/// a value that waits for one, while others use the lock.
pub fn take<T>(mutex: &Mutex<Option<T>>) -> Option<T> {
    lock(mutex).take()
}

/// Waits for a change of the guarded value.
pub fn wait<'a, T>(changed: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    changed.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// Waits as long as `condition` holds, at most for `limit`.
pub fn wait_while<'a, T>(
    changed: &Condvar,
    guard: MutexGuard<'a, T>,
    limit: Duration,
    condition: impl FnMut(&mut T) -> bool,
) -> MutexGuard<'a, T> {
    let waited = changed.wait_timeout_while(guard, limit, condition);
    waited.unwrap_or_else(PoisonError::into_inner).0
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Locks its mutex when it is dropped, as a thread may do before it ends.
    struct Locks(Arc<Mutex<Option<Self>>>);

    impl Drop for Locks {
        fn drop(&mut self) {
            assert!(self.0.try_lock().is_ok());
        }
    }

    #[test]
    fn what_was_taken_is_dropped_without_the_lock() {
        let mutex = Arc::new(Mutex::new(None));
        *lock(&mutex) = Some(Locks(Arc::clone(&mutex)));
        drop(take(&mutex));
        assert!(lock(&mutex).is_none());
    }
}
