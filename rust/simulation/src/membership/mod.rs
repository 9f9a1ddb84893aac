//! Histories of an elastic job: its processes agree on the members of each next group, over a
//! network and among faults that chance is responsible for.
//!
//! What runs is the core's `agreement`. The scenario says who is there and what goes wrong, the job
//! lets it happen, and the check says what must be true.

use std::collections::BTreeSet;

mod check;
mod job;
mod scenario;

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
    let (job, result) = job::run(seed, false);
    result?;
    Ok(Outcome {
        ending: job.ending(),
        examples: job.record.examples().collect(),
        moves: job.record.moves,
    })
}

/// A history line by line, and how it ended.
pub(crate) fn replay(seed: u64) -> (Vec<String>, Result<&'static str, String>) {
    let (job, result) = job::run(seed, true);
    let mut lines = vec![format!("{:?}", job.scenario)];
    lines.extend(job.world.trace.take());
    (lines, result.map(|()| job.ending()))
}
