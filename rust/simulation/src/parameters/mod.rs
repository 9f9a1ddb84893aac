//! Histories of parameter servers: workers push and pull, servers apply and save, over a faulty
//! network.
//!
//! The code under test is `parameters` of the protocol crate. The scenario decides the processes
//! and the faults, the training performs them, and the record has the invariants.

use crate::world::every::{Every, History, Without};

mod disk;
mod record;
mod scenario;
mod training;

/// Situations that must occur among many histories; otherwise the protocol is not tested.
pub(crate) const EXAMPLES: [&str; 25] = [
    "a computation failed after a part of it",
    "a copy was filled from another server",
    "a gradient was not worth pushing",
    "a late gradient counted less",
    "a late gradient was dropped",
    "a lost worker's gradient was dropped",
    "a pull brought rows",
    "a server was killed",
    "a server went on with what it had",
    "a snapshot was restored",
    "a straggler was folded in",
    "a worker kept weights that a server did not know",
    "a worker was killed",
    "all went on together after a crash of all",
    "an update was taken back",
    "crash of all",
    "cut",
    "initial weights came twice",
    "kill",
    "no wait for some workers",
    "nothing was lost with a server",
    "stop",
    "the queue was full",
    "the servers were restored",
    "too many rows had changed since a pull",
];

pub(crate) const EVERY: Every = Every {
    variable: "UPDATES_SEED",
    make,
};

fn make(seed: u64, without: &Without, traced: bool) -> History {
    let (training, result) = training::run(seed, without, traced);
    let examples = training.record.examples().into_iter();
    let mut lines = vec![format!("{:?}", training.scenario)];
    lines.extend(training.world.trace.take());
    History {
        lines,
        examples: examples.map(str::to_owned).collect(),
        result,
    }
}
