//! Histories of an elastic job: its processes agree on the members of each next group, over a
//! faulty network.
//!
//! The code under test is `consensus` of the protocol crate. The scenario decides the processes and
//! the faults, the job performs them, and the check has the invariants.

use crate::world::every::{Every, History, Without};

mod check;
mod job;
mod record;
mod scenario;

/// Situations that must occur among many histories; otherwise the agreement is not tested.
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

/// Each transition between two states of a process is an example, too.
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
