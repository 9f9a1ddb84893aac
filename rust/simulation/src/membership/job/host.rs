//! A host and its process.

use std::collections::BTreeSet;

use crate::world::time::Moment;
use gradring_proto::consensus::member::Member;
use gradring_proto::consensus::quorum::{Ballot, Id};
use gradring_proto::error::Error;

/// State of a host and of its process.
pub(in super::super) struct Host {
    pub(in super::super) member: Option<Member>,
    /// State of the member at the last poll.
    pub(in super::super) phase: Option<&'static str>,
    pub(in super::super) state: State,
    pub(in super::super) group: Group,
    /// Time at which the process last resumed after a stop.
    pub(in super::super) resumed: Moment,
    /// Time since which a member of its group has been silent.
    pub(in super::super) silence: Option<Moment>,
    /// End of a slow period, and the extra time of each step.
    pub(in super::super) slow: (Moment, Moment),
    /// Number of the last step that is in this process's state.
    pub(in super::super) version: usize,
}

#[derive(Debug, Clone, PartialEq)]
pub(in super::super) enum State {
    NotStarted,
    Lives,
    StoppedUntil(Moment),
    Vanished,
    /// The process has ended, and its address refuses connections.
    Ended(Option<Error>),
}

/// Relation of a process to its group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) enum Group {
    None,
    Connecting {
        ballot: Ballot,
        since: Moment,
        /// In rank 0, the members that have connected to all others.
        ready: BTreeSet<Id>,
    },
    Running(Ballot),
}

impl Host {
    /// Roster of the group to which the process connects or belongs.
    pub(in super::super) const fn at(&self) -> Option<Ballot> {
        match self.group {
            Group::None => None,
            Group::Connecting { ballot, .. } | Group::Running(ballot) => Some(ballot),
        }
    }
}
