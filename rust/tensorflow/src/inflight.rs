//! Collectives between Start and Wait, by the handle that travels through the graph.
//!
//! The memory belongs to the entry here, not to the graph: a Wait returns the tensors of its entry,
//! whatever tensors it is handed. An entry lives until its Wait takes it, or as long as its handle.
//! If a step fails in between, it drops its tensors, and the entry is dropped with the handle.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};

use gradring_core::communicator::Communicator;
use gradring_core::work::{WaitOutcome, Work};
use gradring_proto::collective::Request;
use gradring_proto::error::Error;
use gradring_proto::lock::lock;

use crate::api::Api;
use crate::equal_gradients::Sample;
use crate::executions::{Execution, Executions};
use crate::interrupts;
use crate::status::{Code, Failure};
use crate::tensor::Tensor;

static TABLE: Mutex<Table<InFlight>> = Mutex::new(Table::new());
static EXECUTIONS: Mutex<Executions> = Mutex::new(Executions::new());

/// A collective that a Start op has launched.
pub(crate) struct InFlight {
    work: Work,
    /// Communicator on which it runs.
    communicator: Weak<Communicator>,
    /// Tensors that it works on; the engine holds another reference.
    tensors: Arc<[Tensor]>,
    /// Elements of this rank's gradients, while equal gradients are searched for.
    sample: Option<Sample>,
}

impl InFlight {
    /// Returns the tensors that the collective works on, which may be read only after its end.
    pub(crate) fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Waits for the end of the collective. Ctrl-C aborts it on all ranks.
    pub(crate) fn wait(&self, number: i64) -> Result<(), Error> {
        let result = self.wait_for_work();
        lock(&EXECUTIONS).ended(number);
        if let (Ok(()), Some(sample)) = (&result, &self.sample)
            && let Some(communicator) = self.communicator.upgrade()
        {
            sample.compare(&communicator, &self.tensors);
        }
        result
    }

    fn wait_for_work(&self) -> Result<(), Error> {
        let Some(communicator) = self.communicator.upgrade() else {
            return self.work.wait_forever();
        };
        let engine = &communicator.engine;
        if interrupts::overdue() {
            engine.interrupt();
        }
        match engine.wait(&self.work, &mut interrupts::outstanding) {
            WaitOutcome::Ended(result) => result,
            WaitOutcome::Interrupted | WaitOutcome::TimedOut(_) => {
                engine.interrupt();
                // The memory must not return to TensorFlow before the engine has dropped it.
                self.work.wait_forever()
            }
        }
    }
}

/// Origin of an op's execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Eager mode.
    Eager,
    /// A `tf.function`.
    Function,
    /// A loop over a dataset in a `tf.function`. Each element is an execution inside that of the
    /// function.
    Dataset,
}

/// Starts `request` over `tensors` for an op in this execution of a graph. The entry is kept until
/// [`take`] removes it or the returned handle is dropped.
///
/// The communicator counts executions as steps. A function that starts a collective in the middle
/// of another function's execution aborts the group.
pub(crate) fn start(
    api: &'static Api,
    communicator: &Arc<Communicator>,
    (origin, execution): (Origin, i64),
    request: Request,
    tensors: Arc<[Tensor]>,
    sample: Option<Sample>,
) -> Result<Tensor, Failure> {
    let name = request.name.shown.clone();
    let number = execution;
    let execution = Execution {
        communicator: communicator.id,
        generation: communicator.generation,
        number,
    };
    // The lock keeps the check, the start and the record together.
    let mut executions = lock(&EXECUTIONS);
    // A single rank has no other rank whose order could differ.
    let is_checked = origin == Origin::Function
        && communicator.world_size() > 1
        && !communicator.engine.collective_exit();
    if is_checked && let Err(problem) = executions.enter(execution, &name) {
        communicator.abort(&problem);
    }
    if origin != Origin::Eager {
        communicator.engine.execute(number);
    }
    let number = lock(&TABLE).put(InFlight {
        work: communicator.engine.start(request)?,
        communicator: Arc::downgrade(communicator),
        tensors,
        sample,
    });
    if is_checked {
        executions.started(number, execution, &name);
    }
    drop(executions);
    Tensor::scalar(api, Number(number))
}

/// Removes and returns the collective with this handle; fails the second time.
pub(crate) fn take(number: i64) -> Result<InFlight, Failure> {
    lock(&TABLE).take(number).ok_or_else(|| {
        Failure::new(
            Code::Aborted,
            format!(
                "no collective of handle {number} is under way; each Start is waited for once, \
                 within the step that issued it"
            ),
        )
    })
}

/// The number in a handle, whose entry is dropped with it.
#[repr(transparent)]
pub(crate) struct Number(pub(crate) i64);

impl Drop for Number {
    fn drop(&mut self) {
        // Two statements, so that the entry is dropped after the lock.
        let forgotten = lock(&TABLE).take(self.0);
        drop(forgotten);
    }
}

/// Entries by number. Numbers grow and are never reused.
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
