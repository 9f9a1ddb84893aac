//! The works between a Start and its Wait, found by the handle that travels through the graph.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use gradring_core::communicator::Communicator;
use gradring_core::error::Error;
use gradring_core::work::{WaitOutcome, Work};

use crate::interrupts;
use crate::status::{Code, Failure};

/// Most works that may be between Start and Wait.
///
/// A step that fails between the two never waits, and its works stay here, each a few hundred
/// bytes: an ended work holds no tensor. Steps have tens of buckets; a program that has thousands
/// in flight has lost the oldest of them.
const CAPACITY: usize = 16_384;

static TABLE: Mutex<Table<InFlight>> = Mutex::new(Table::new(CAPACITY));

/// A collective that a Start has started.
pub(crate) struct InFlight {
    work: Work,
    /// Where it runs.
    communicator: Weak<Communicator>,
}

impl InFlight {
    pub(crate) fn new(work: Work, communicator: &Arc<Communicator>) -> Self {
        Self {
            work,
            communicator: Arc::downgrade(communicator),
        }
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

/// Keeps `started` until [`take`] asks for it.
pub(crate) fn put(started: InFlight) -> Result<i64, Failure> {
    lock().put(started, |started| started.work.done())
}

/// What was started with `handle`, once.
pub(crate) fn take(handle: i64) -> Result<InFlight, Failure> {
    lock().take(handle)
}

fn lock() -> std::sync::MutexGuard<'static, Table<InFlight>> {
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Handles grow and are never reused, so the first entry is the oldest.
struct Table<T> {
    capacity: usize,
    next: i64,
    entries: BTreeMap<i64, T>,
}

impl<T> Table<T> {
    const fn new(capacity: usize) -> Self {
        Self {
            capacity,
            next: 1,
            entries: BTreeMap::new(),
        }
    }

    fn put(&mut self, entry: T, ended: impl Fn(&T) -> bool) -> Result<i64, Failure> {
        if self.entries.len() >= self.capacity {
            let oldest = self
                .entries
                .iter()
                .find(|(_, entry)| ended(entry))
                .map(|(handle, _)| *handle);
            match oldest {
                Some(handle) => self.entries.remove(&handle),
                None => {
                    return Err(Failure::new(
                        Code::Aborted,
                        format!(
                            "{} collectives are under way in this process and none has ended; \
                             wait for some of them before starting more",
                            self.entries.len()
                        ),
                    ));
                }
            };
        }
        let handle = self.next;
        self.next += 1;
        self.entries.insert(handle, entry);
        Ok(handle)
    }

    fn take(&mut self, handle: i64) -> Result<T, Failure> {
        self.entries.remove(&handle).ok_or_else(|| {
            Failure::new(
                Code::Aborted,
                format!(
                    "no collective of handle {handle} is under way; each Start is waited for \
                     once, within the step that issued it"
                ),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_taken_once() {
        let mut table = Table::new(4);
        let handle = table.put("work", |_| false);
        assert_eq!(handle.and_then(|handle| table.take(handle)), Ok("work"));
        assert!(table.take(1).is_err());
    }

    #[test]
    fn a_full_table_forgets_the_oldest_entry_that_has_ended() {
        let mut table = Table::new(3);
        for entry in ["pending", "ended", "ended too"] {
            assert!(table.put(entry, |_| false).is_ok());
        }
        assert_eq!(table.put("new", |entry| entry.starts_with("ended")), Ok(4));
        assert!(table.take(2).is_err());
        assert_eq!(table.take(1), Ok("pending"));
        assert_eq!(table.take(3), Ok("ended too"));
    }

    #[test]
    fn a_table_full_of_pending_entries_refuses_more() {
        let mut table = Table::new(1);
        assert!(table.put((), |()| false).is_ok());
        assert!(table.put((), |()| false).is_err());
    }
}
