//! A member whose group connects or runs.

use std::collections::BTreeSet;
use std::time::Instant;

use super::{Member, Phase};
use crate::agreement::message::{Reply, Request, Standpoint, Step};
use crate::agreement::quorum::{Id, Roster};

/// Its group connects or runs.
pub(super) struct Together {
    pub(super) is_connected: bool,
    /// Others want to re-form.
    pub(super) is_called: bool,
    /// Its owner has yet to be told to connect.
    pub(super) is_new: bool,
    /// Members that have not accepted the roster for all that this process, its proposer, knows.
    pub(super) missing: BTreeSet<Id>,
}

impl Member {
    /// Moves to a roster for whose ballot this process has promised nothing higher.
    pub(super) fn accept(&mut self, roster: &Roster, missing: BTreeSet<Id>) -> Reply {
        let at = self
            .standpoint
            .as_ref()
            .map(|standpoint| standpoint.roster.ballot);
        if at == Some(roster.ballot) {
            return Reply::Accepted(roster.ballot);
        }
        if self.promised != roster.ballot || !roster.has(self.me.id) {
            return Reply::Behind(self.promised);
        }
        self.joiners.retain(|&id, _| !roster.has(id));
        self.dead
            .retain(|&id| roster.elders().any(|elder| elder.id == id));
        self.contacts.clear();
        self.standpoint = Some(Standpoint {
            roster: roster.clone(),
            is_established: false,
        });
        self.phase = Phase::Together(Together {
            is_connected: false,
            is_called: false,
            is_new: true,
            missing,
        });
        Reply::Accepted(roster.ballot)
    }

    pub(super) fn step_together(&mut self, now: Instant) -> Step {
        let (Phase::Together(together), Some(standpoint)) = (&mut self.phase, &self.standpoint)
        else {
            unreachable!("asked while it is at a roster only");
        };
        let roster = &standpoint.roster;
        if std::mem::take(&mut together.is_new) {
            return Step::Connect(roster.clone());
        }
        let missing = roster.members.iter();
        let missing = missing.filter(|member| together.missing.contains(&member.id));
        let missing: Vec<_> = missing.cloned().collect();
        if missing.is_empty() {
            return Step::Wait(None);
        }
        let request = Request::Install(roster.clone());
        self.ask(&missing, &request, now)
    }
}
