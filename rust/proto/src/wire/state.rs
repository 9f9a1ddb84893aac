//! The state of a rank, sent as the answer to an inquiry from outside of the group.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::handshake::GroupId;

/// State of one rank, by its own account.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Its rank.
    pub rank: usize,
    /// Number of ranks of the job.
    pub world_size: usize,
    /// Name of its host.
    pub host: String,
    /// Its process id on the host.
    pub process_id: u32,
    /// Version of its gradring.
    pub version: String,
    /// Phase of its group.
    pub phase: Phase,
}

/// Phase of a rank's group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    /// The group has not formed yet.
    Forming {
        /// The ranks that have not joined; only rank 0 knows them.
        missing: Vec<usize>,
        /// Generation of the group that forms; 0 for the first group of these processes, which need
        /// not belong to a running job.
        generation: u32,
    },
    /// The group has formed.
    Formed {
        /// Identity of the group.
        group: GroupId,
        /// Listening address and host of each rank.
        members: Vec<(String, String)>,
        /// The collective in which the rank is.
        entered: Option<Collective>,
        /// An exchange with one other rank that holds the collective up, if there is one.
        beside: Option<Box<Collective>>,
        /// Peers for which it waits in either of these.
        awaited: Vec<usize>,
        /// The collective that ended last; its age is the time since then.
        ended: Option<Collective>,
        /// Cause of the group's failure, if it has failed.
        failed: Option<String>,
    },
    /// A process of an elastic job without a group.
    Between {
        /// True if it waits to join; otherwise it agrees with others on the next group.
        is_outside: bool,
    },
}

/// A collective, with its age.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Collective {
    /// Its ordinal.
    pub sequence: u64,
    /// Description of the call for people.
    pub call: String,
    /// Time since it was entered, or since it ended.
    pub age: Duration,
}
