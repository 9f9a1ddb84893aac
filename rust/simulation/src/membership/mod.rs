//! Histories of an elastic job: its processes agree on the members of each next group, over a
//! network and among faults that chance is responsible for.
//!
//! What runs is the core's `consensus`. The scenario says who is there and what goes wrong, the job
//! lets it happen, and the check says what must be true.

use crate::world::every::{Every, History, Without};

mod check;
mod job;
mod record;
mod scenario;

/// What histories must be examples of, or they are no test of the agreement.
pub(crate) const EXAMPLES: [&str; 29] = [
    "a death after acceptance, made good within 1 s",
    "a death after acceptance, made good within 2 s",
    "a death between two messages",
    "a group did not connect",
    "a joiner found nobody",
    "a joiner's death",
    "a loss while connecting",
    "a loss while re-forming",
    "a majority was spared",
    "a member was busy",
    "a minority stopped",
    "a roster was half installed",
    "a stop longer than all limits",
    "another process answered",
    "both parts of a divided network tried",
    "divide",
    "gave its id up to join anew",
    "grew",
    "joiners took the ranks of others",
    "leave",
    "mute",
    "replace",
    "shrank",
    "slow",
    "stop",
    "too few workers were left",
    "two losses",
    "two proposals met",
    "went on without silent members",
];

pub(crate) const EVERY: Every = Every {
    variable: "MEMBERS_SEED",
    make,
};

/// Moves from a state of a process to another one are examples, too.
fn make(seed: u64, without: &Without, traced: bool) -> History {
    let (job, result) = job::run(seed, without, traced);
    let moves = job.record.moves.iter();
    let moves = moves.map(|(from, to)| format!("{from} --> {to}"));
    let examples = job.record.examples().chain([job.ending()]);
    let examples = examples.map(str::to_owned).chain(moves).collect();
    let mut lines = vec![format!("{:?}", job.scenario)];
    lines.extend(job.world.trace.take());
    History {
        lines,
        examples,
        result,
    }
}
