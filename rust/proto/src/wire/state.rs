//! The state of a rank, as it answers a question from outside.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::handshake::GroupId;

/// The state of one rank, as it sees itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Its rank.
    pub rank: usize,
    /// Number of ranks of the job.
    pub world_size: usize,
    /// Name of its host.
    pub host: String,
    /// Its process id there.
    pub process_id: u32,
    /// Version of its gradring.
    pub version: String,
    /// How far it is.
    pub phase: Phase,
}

/// How far a rank is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    /// The group has not formed yet.
    Forming {
        /// The ranks that have not joined; only rank 0 knows them.
        missing: Vec<usize>,
        /// Zero if it is the first group of its members, who may be none of a job that runs.
        generation: u32,
    },
    /// The group has formed.
    Formed {
        /// What tells the group from others.
        group: GroupId,
        /// Listener's address and host of each rank.
        members: Vec<(String, String)>,
        /// The collective this rank is in.
        entered: Option<Collective>,
        /// What it does with one other rank alone, if that keeps it.
        beside: Option<Box<Collective>>,
        /// The peers from which it waits for something in the one or the other.
        awaited: Vec<usize>,
        /// The collective that ended last; its age is the time since then.
        ended: Option<Collective>,
        /// Why the group has failed, if it has.
        failed: Option<String>,
    },
    /// A process of an elastic job has no group.
    Between {
        /// It waits to join; otherwise it agrees with others on the next group.
        is_outside: bool,
    },
}

/// A collective, with its age.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Collective {
    /// Its ordinal.
    pub sequence: u64,
    /// The call, for people.
    pub call: String,
    /// Time since it was entered, or since it ended.
    pub age: Duration,
}
