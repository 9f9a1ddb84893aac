//! Collectives between Start and Wait, found by the handle that travels through the graph.
//!
//! The memory belongs to the entry here, not to the graph: a Wait returns what its entry holds,
//! whatever tensors it is handed. An entry lives until its Wait takes it, or else as long as its
//! handle: a step that fails in between drops its tensors, and the entry goes with the handle.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};

use gradring_core::communicator::Communicator;
use gradring_core::work::{WaitOutcome, Work};
use gradring_proto::collective::Request;
use gradring_proto::error::Error;
use gradring_proto::lock::lock;

use crate::api::Api;
use crate::executions::{Execution, Executions};
use crate::interrupts;
use crate::status::{Code, Failure};
use crate::tensor::Tensor;

static TABLE: Mutex<Table<InFlight>> = Mutex::new(Table::new());
static EXECUTIONS: Mutex<Executions> = Mutex::new(Executions::new());

/// A collective that a Start has started.
pub(crate) struct InFlight {
    work: Work,
    /// Where it runs.
    communicator: Weak<Communicator>,
    /// What it works on; the engine has the other reference.
    tensors: Arc<[Tensor]>,
}

impl InFlight {
    /// What the collective works on: to be read when it has ended.
    pub(crate) fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Waits for its end; Ctrl-C ends it, on all ranks.
    pub(crate) fn wait(&self, number: i64) -> Result<(), Error> {
        let result = self.wait_for_work();
        lock(&EXECUTIONS).ended(number);
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
                // The memory is TensorFlow's again only when the engine has let go of it.
                self.work.wait_forever()
            }
        }
    }
}

/// What executes an op.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Python itself.
    Eager,
    /// A `tf.function`.
    Function,
    /// A loop over a dataset in a `tf.function`: an execution for each element, inside that of the
    /// function.
    Dataset,
}

/// Starts `request`, over `tensors`, for an op in this execution of a graph; keeps the work until
/// [`take`] asks for it or the handle that is returned is gone.
///
/// To the communicator, executions are steps. One of a function that comes between the parts of
/// another ends the group.
pub(crate) fn start(
    api: &'static Api,
    communicator: &Arc<Communicator>,
    (origin, execution): (Origin, i64),
    request: Request,
    tensors: Arc<[Tensor]>,
) -> Result<Tensor, Failure> {
    let name = request.name.shown.clone();
    let number = execution;
    let execution = Execution {
        communicator: communicator.id,
        generation: communicator.generation,
        number,
    };
    // From here on no other thread comes in between.
    let mut executions = lock(&EXECUTIONS);
    // In a world of one there is no other order.
    let looked_at = origin == Origin::Function
        && communicator.world_size() > 1
        && !communicator.engine.collective_exit();
    if looked_at && let Err(problem) = executions.enter(execution, &name) {
        communicator.abort(&problem);
    }
    if origin != Origin::Eager {
        communicator.engine.execute(number);
    }
    let number = lock(&TABLE).put(InFlight {
        work: communicator.engine.start(request)?,
        communicator: Arc::downgrade(communicator),
        tensors,
    });
    if looked_at {
        executions.started(number, execution, &name);
    }
    drop(executions);
    Tensor::scalar(api, Number(number))
}

/// What was started with the handle of this number, once.
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

/// The number in a handle.
#[repr(transparent)]
pub(crate) struct Number(pub(crate) i64);

impl Drop for Number {
    fn drop(&mut self) {
        // In two statements, so that the entry is dropped after the lock.
        let forgotten = lock(&TABLE).take(self.0);
        drop(forgotten);
    }
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
