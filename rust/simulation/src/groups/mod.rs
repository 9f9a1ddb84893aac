//! Whole groups: executor, stall detector and monitor of every rank, over links that faults disturb
//! at random.
//!
//! A seed decides the group, its collectives and the faults (`scenario`, `faults`). `check` has the
//! invariants of each run: no rank waits for ever, and no rank accepts a wrong result. All ranks
//! that fail have one cause, which names a rank hit by a fault. `facts` is a table of single
//! faults, each with its error and its time.

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

/// The history is an example of each fault that struck, and of how the run ended.
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
