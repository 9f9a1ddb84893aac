//! What is between a Start and its Wait, found by the handle that travels through the graph.
//!
//! The memory belongs to the entry here, not to the graph: a Wait returns what its entry holds,
//! whatever tensors it is handed. An entry lives until its Wait takes it, or else as long as its
//! handle: a step that fails in between drops its tensors, and the entry goes with the handle.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use gradring_core::communicator::Communicator;
use gradring_core::error::Error;
use gradring_core::work::{WaitOutcome, Work};

use crate::api::Api;
use crate::interrupts;
use crate::status::{Code, Failure};
use crate::tensor::Tensor;

static TABLE: Mutex<Table<InFlight>> = Mutex::new(Table::new());

/// A collective that a Start has started.
pub(crate) struct InFlight {
    work: Work,
    /// Where it runs.
    communicator: Weak<Communicator>,
    /// What it works on; the engine has the other reference.
    tensors: Arc<[Tensor]>,
}

impl InFlight {
    pub(crate) fn new(
        work: Work,
        communicator: &Arc<Communicator>,
        tensors: Arc<[Tensor]>,
    ) -> Self {
        Self {
            work,
            communicator: Arc::downgrade(communicator),
            tensors,
        }
    }

    /// What the collective works on: to be read when it has ended.
    pub(crate) fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Waits for its end; Ctrl-C ends it, on all ranks.
    pub(crate) fn wait(&self) -> Result<(), Error> {
        match self.work.wait(None, &mut interrupts::outstanding) {
            WaitOutcome::Ended(result) => result,
            WaitOutcome::Interrupted | WaitOutcome::TimedOut(_) => {
                if let Some(communicator) = self.communicator.upgrade() {
                    communicator.interrupt();
                }
                // The memory is TensorFlow's again only when the engine has let go of it.
                self.work.wait_forever()
            }
        }
    }
}

/// Keeps `started` until [`take`] asks for it or the handle that is returned is gone.
pub(crate) fn put(api: &'static Api, started: InFlight) -> Result<Tensor, Failure> {
    let number = lock().put(started);
    Tensor::scalar(api, Number(number))
}

/// What was started with the handle of this number, once.
pub(crate) fn take(number: i64) -> Result<InFlight, Failure> {
    lock().take(number).ok_or_else(|| {
        Failure::new(
            Code::Aborted,
            format!(
                "no collective of handle {number} is under way; each Start is waited for once, \
                 within the step that issued it"
            ),
        )
    })
}

/// The number in a handle.
#[repr(transparent)]
pub(crate) struct Number(pub(crate) i64);

impl Drop for Number {
    fn drop(&mut self) {
        // In two statements, so that the entry is dropped after the lock.
        let forgotten = lock().take(self.0);
        drop(forgotten);
    }
}

fn lock() -> MutexGuard<'static, Table<InFlight>> {
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Numbers grow and are never used again.
struct Table<T> {
    last: i64,
    entries: BTreeMap<i64, T>,
}

impl<T> Table<T> {
    const fn new() -> Self {
        Self {
            last: 0,
            entries: BTreeMap::new(),
        }
    }

    fn put(&mut self, entry: T) -> i64 {
        self.last += 1;
        self.entries.insert(self.last, entry);
        self.last
    }

    fn take(&mut self, number: i64) -> Option<T> {
        self.entries.remove(&number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_taken_once_and_its_number_never_used_again() {
        let mut table = Table::new();
        let first = table.put("first");
        assert_eq!(table.take(first), Some("first"));
        assert_eq!(table.take(first), None);
        assert_ne!(table.put("second"), first);
    }
}
