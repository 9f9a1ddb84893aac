//! Whole groups: the executor, the stall and the monitor of every rank, over links that chance and
//! faults are hard on.
//!
//! A seed is a group, its collectives, and what goes wrong (`scenario`, `faults`). `check` says what
//! must be true of each run: no rank waits for ever, no rank takes a wrong sum for a right one, and the
//! ranks that fail have one cause, which names a rank that a fault did hit. `facts` is a table of
//! single faults, each with its error and its time.

use std::panic::{AssertUnwindSafe, catch_unwind};

use gradring_core::error::message_of;

mod check;
mod facts;
mod faults;
mod group;
mod links;
mod process;
mod scenario;
mod values;

pub(crate) use facts::contradictions;

/// Which fault struck, and what it led to.
///
/// # Errors
/// What should never have happened.
pub(crate) fn outcome(seed: u64) -> Result<(&'static str, String), String> {
    let run = catch_unwind(AssertUnwindSafe(|| group::run(seed, false)))
        .map_err(|panic| format!("a panic: {}", message_of(&*panic)))?;
    let faults = run.scenario.faults.iter().zip(&run.struck);
    let mut struck = faults.filter_map(|(fault, struck)| struck.map(|_| fault.name()));
    let name = match (struck.next(), struck.next()) {
        (None, _) => "none",
        (Some(name), None) => name,
        (Some(_), Some(_)) => "two of these",
    };
    Ok((name, run.verify()?))
}

/// Shows what happens in a run, line by line.
///
/// # Panics
/// When something happens that never should.
pub(crate) fn replay(seed: u64) {
    let run = group::run(seed, true);
    println!("seed {seed}: {}", run.scenario.summary());
    for line in &run.trace {
        println!("{line}");
    }
    match run.verify() {
        Ok(outcome) => println!("seed {seed}: {outcome}, {} events", run.events),
        Err(problem) => panic!("seed {seed}: {problem}"),
    }
}

/// What happens in a run, line by line, and how many events that takes.
pub(crate) fn trace(seed: u64) -> (Vec<String>, u64) {
    let run = group::run(seed, true);
    (run.trace, run.events)
}
