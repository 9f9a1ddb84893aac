//! A host, and what runs on it.

use std::collections::BTreeSet;

use crate::world::time::Moment;
use gradring_proto::consensus::member::Member;
use gradring_proto::consensus::quorum::{Ballot, Id};
use gradring_proto::error::Error;

/// What runs on a host.
pub(in super::super) struct Host {
    pub(in super::super) member: Option<Member>,
    /// The state of its member when that was looked at last.
    pub(in super::super) phase: Option<&'static str>,
    pub(in super::super) state: State,
    pub(in super::super) group: Group,
    /// When it went on last after a stop.
    pub(in super::super) resumed: Moment,
    /// Since when it hears nothing of a member of its group.
    pub(in super::super) silence: Option<Moment>,
    /// Its steps take longer until then, by so much.
    pub(in super::super) slow: (Moment, Moment),
    /// Position in the record of the last step that its state has in it.
    pub(in super::super) version: usize,
}

#[derive(Debug, Clone, PartialEq)]
pub(in super::super) enum State {
    NotStarted,
    Lives,
    StoppedUntil(Moment),
    Vanished,
    /// Its address refuses.
    Ended(Option<Error>),
}

/// What a process has of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) enum Group {
    None,
    Connecting {
        ballot: Ballot,
        since: Moment,
        /// For rank 0: who has connected with all.
        ready: BTreeSet<Id>,
    },
    Running(Ballot),
}

impl Host {
    /// The roster in whose group it is or wants to be.
    pub(in super::super) const fn at(&self) -> Option<Ballot> {
        match self.group {
            Group::None => None,
            Group::Connecting { ballot, .. } | Group::Running(ballot) => Some(ballot),
        }
    }
}
