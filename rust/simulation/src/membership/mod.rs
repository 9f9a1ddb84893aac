//! Histories of an elastic job: its processes agree on the members of each next group, over a
//! network and among faults that chance is responsible for.
//!
//! What runs is the core's `consensus`. The scenario says who is there and what goes wrong, the world
//! lets it happen, and the check says what must be true.

use std::collections::BTreeSet;

mod check;
mod scenario;
mod world;

/// How a history ended, what it was an example of, and from which states of a process to which.
pub(crate) struct Outcome {
    pub(crate) ending: &'static str,
    pub(crate) examples: Vec<&'static str>,
    pub(crate) moves: BTreeSet<(&'static str, &'static str)>,
}

/// Runs a history.
///
/// # Errors
/// What should never have happened.
pub(crate) fn outcome(seed: u64) -> Result<Outcome, String> {
    let (world, result) = world::run(seed, false);
    result?;
    Ok(Outcome {
        ending: world.ending(),
        examples: world.record.examples().collect(),
        moves: world.record.moves,
    })
}

/// A history line by line, and how it ended.
pub(crate) fn replay(seed: u64) -> (Vec<String>, Result<&'static str, String>) {
    let (world, result) = world::run(seed, true);
    let mut lines = vec![format!("{:?}", world.scenario)];
    lines.extend(world.trace.take());
    (lines, result.map(|()| world.ending()))
}
