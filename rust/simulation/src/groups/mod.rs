//! Whole groups: the executor, the stall and the monitor of every rank, over links that chance and
//! faults are hard on.
//!
//! A seed is a group, its collectives, and what goes wrong (`scenario`, `faults`). `check` says what
//! must be true of each run: no rank waits for ever, no rank takes a wrong sum for a right one, and the
//! ranks that fail have one cause, which names a rank that a fault did hit. `facts` is a table of
//! single faults, each with its error and its time.

use crate::world::every::{Every, History, Without};
use crate::world::random::Random;
use scenario::Scenario;

mod check;
mod facts;
mod faults;
mod group;
mod links;
mod process;
mod scenario;
mod values;

pub(crate) use facts::contradictions;

pub(crate) const EVERY: Every = Every {
    variable: "SEED",
    make,
};

/// It is an example of the fault that struck, and of what that led to.
fn make(seed: u64, without: &Without, traced: bool) -> History {
    let mut random = Random::new(seed);
    let mut scenario = Scenario::new(&mut random);
    without.apply(&mut scenario.faults);
    let run = group::run(scenario, random, traced);
    let faults = run.scenario.faults.iter().zip(&run.struck);
    let mut struck = faults.filter_map(|(fault, struck)| struck.map(|_| fault.name()));
    let name = match (struck.next(), struck.next()) {
        (None, _) => "none",
        (Some(name), None) => name,
        (Some(_), Some(_)) => "two of these",
    };
    let ending = run.verify();
    let example = ending.iter().map(|ending| format!("{name}: {ending}"));
    let mut lines = vec![run.scenario.summary()];
    lines.extend(run.trace.iter().cloned());
    History {
        lines,
        examples: example.collect(),
        result: ending.map(drop),
    }
}
