//! A member whose group connects or runs.

use std::collections::BTreeSet;
use std::time::Instant;

use super::{Member, MemberPhase};
use crate::consensus::message::{AcceptedView, MemberRequest, Reply, Step};
use crate::consensus::quorum::{Ballot, Id, Peer, Roster};

/// State of a member whose group connects or runs.
pub(super) struct Together {
    pub(super) is_connected: bool,
    /// The process that wants to re-form or is dead, and the evidence.
    pub(super) reconfigured_by: Option<(Peer, &'static str)>,
    /// True if this process has found the death itself, and so proposes without waiting for its
    /// turn.
    pub(super) has_found_death: bool,
    /// True until the owner has been asked to connect.
    pub(super) is_new: bool,
    /// Members that have not confirmed the roster; kept by its proposer.
    pub(super) missing: BTreeSet<Id>,
}

impl Together {
    /// State after a roster has been accepted.
    pub(super) const fn new(missing: BTreeSet<Id>) -> Self {
        Self {
            is_connected: false,
            reconfigured_by: None,
            has_found_death: false,
            is_new: true,
            missing,
        }
    }
}

impl Member {
    /// Accepts a roster, if its ballot is the highest that this process has promised.
    pub(super) fn accept(&mut self, roster: &Roster, missing: BTreeSet<Id>, now: Instant) -> Reply {
        let at = self.view.as_ref().map(|view| view.roster.ballot);
        if self.promised != roster.ballot || !roster.has(self.me.id) {
            return Reply::Behind(self.promised);
        }
        if at == Some(roster.ballot) {
            return Reply::Accepted(roster.ballot);
        }
        self.joiners.retain(|&id, _| !roster.has(id));
        self.pass_over_joiners(now);
        // Living joiners repeat their requests. Perhaps only the proposer knew that one of them is
        // dead.
        self.joiners.clear();
        self.dead
            .retain(|&id| roster.previous_members().any(|previous| previous.id == id));
        self.contacts.clear();
        self.view = Some(AcceptedView {
            roster: roster.clone(),
            is_established: false,
        });
        self.phase = MemberPhase::Together(Together::new(missing));
        Reply::Accepted(roster.ballot)
    }

    pub(super) fn answer_watch(&self, ballot: Ballot) -> Reply {
        let at = self.view.as_ref().map(|it| it.roster.ballot);
        if at == Some(ballot) && self.promised == ballot {
            Reply::Accepted(ballot)
        } else {
            Reply::Behind(self.promised)
        }
    }

    pub(super) fn step_together(&mut self, now: Instant) -> Step {
        let (MemberPhase::Together(together), Some(view)) = (&mut self.phase, &self.view) else {
            unreachable!("asked while it is at a roster only");
        };
        let roster = &view.roster;
        if std::mem::take(&mut together.is_new) {
            return Step::Connect(roster.clone());
        }
        let missing = roster.members.iter();
        let missing = missing.filter(|member| together.missing.contains(&member.id));
        let missing: Vec<_> = missing.cloned().collect();
        let next = roster.after(self.me.id);
        let is_watched = |next: &&Peer| !together.is_connected && !missing.contains(next);
        let watched: Vec<_> = next.filter(is_watched).cloned().into_iter().collect();
        if missing.is_empty() && watched.is_empty() {
            return Step::Wait(None);
        }
        let install = MemberRequest::Install(roster.clone());
        let watch = MemberRequest::Watch(roster.ballot);
        match self.ask(&missing, &install, now) {
            Step::Wait(_) => self.ask(&watched, &watch, now),
            send => send,
        }
    }
}
