//! A member without a group, which proposes the next one or follows a proposer.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::proposal::{Proposal, Verdict};
use super::{Member, MemberPhase};
use crate::consensus::message::{AcceptedView, MemberRequest, Step};
use crate::consensus::quorum::{Ballot, Id, Peer};

/// State of a member without a group.
pub(super) struct Reforming {
    pub(super) since: Instant,
    /// Time since which the processes that answer have not been a quorum.
    pub(super) lacking: Instant,
    /// Own proposals that failed because of a higher one.
    pub(super) attempts: u32,
    /// Time of the last step. If this process was stopped since then, the others' silence proves
    /// nothing.
    pub(super) polled_at: Instant,
    /// The highest round in replies of others.
    pub(super) round: u64,
    /// Time at which to propose, unless another process does.
    pub(super) propose_at: Instant,
    pub(super) proposal: Option<Proposal>,
    /// The proposer of the last promise. If it dies, this process proposes in its turn.
    pub(super) follows: Option<Peer>,
    /// A higher roster with this process, from the reply of another.
    pub(super) higher: Option<AcceptedView>,
    /// Rosters of processes that do not count this process in.
    pub(super) elsewhere: BTreeMap<Id, AcceptedView>,
    /// Pairs of addresses that could not connect.
    pub(super) quarantined: BTreeSet<(String, String)>,
}

impl Member {
    pub(super) fn step_reforming(&mut self, now: Instant) -> Step {
        let view = self.view.as_ref().expect("who re-forms was at a roster");
        let own = view.roster.ballot;
        if self.finished == Some(own) {
            self.phase = MemberPhase::Over;
            return Step::Finished;
        }
        // Moved out, because `judge` needs it beside `self`.
        let phase = std::mem::replace(&mut self.phase, MemberPhase::Over);
        let MemberPhase::Reforming(mut reforming) = phase else {
            unreachable!("asked while it re-forms only");
        };
        if now > reforming.polled_at + self.timing.quiet.max(self.timing.request) {
            reforming.lacking = now;
            self.contacts.clear();
        }
        reforming.polled_at = now;
        let proposal = match reforming.proposal.take() {
            Some(proposal) => proposal,
            None if now < reforming.propose_at => {
                let until = reforming.propose_at;
                let watched: Vec<_> = reforming.follows.iter().cloned().collect();
                self.phase = MemberPhase::Reforming(reforming);
                let watch = MemberRequest::Watch(self.promised);
                return match self.ask(&watched, &watch, now) {
                    Step::Wait(Some(next)) if !watched.is_empty() => {
                        Step::Wait(Some(next.min(until)))
                    }
                    Step::Wait(_) => Step::Wait(Some(until)),
                    send => send,
                };
            }
            None => {
                reforming.follows = None;
                let higher = reforming.higher.as_ref();
                let higher = higher.filter(|higher| higher.roster.ballot > own);
                let base = higher.unwrap_or(view).clone();
                let round = self.promised.round.max(base.roster.ballot.round);
                self.promised = Ballot {
                    round: round.max(reforming.round).saturating_add(1),
                    proposer: self.me.id,
                };
                Proposal {
                    ballot: self.promised,
                    begun: now,
                    base,
                    promises: BTreeMap::new(),
                }
            }
        };
        let verdict = self.judge(&proposal, &mut reforming, own, now);
        let asked = self.to_ask(&proposal);
        let request = MemberRequest::Gather {
            ballot: proposal.ballot,
            base: proposal.base.clone(),
            news: self.news(now),
        };
        reforming.proposal = Some(proposal);
        self.phase = MemberPhase::Reforming(reforming);
        match verdict {
            Verdict::Wait => self.ask(&asked, &request, now),
            Verdict::Decided(roster) => {
                let others = roster.members.iter().map(|member| member.id);
                let missing = others.filter(|&id| id != self.me.id).collect();
                self.accept(&roster, missing, now);
                self.step(now)
            }
            Verdict::Excluded => Step::Excluded,
            Verdict::Failed(fact) => self.fail(fact),
        }
    }

    /// Yields to a higher ballot that another process has promised.
    pub(super) fn yield_to(&mut self, by: Id, higher: Ballot, now: Instant) {
        let (turn, stagger) = (self.turn(), self.timing.stagger);
        match &mut self.phase {
            MemberPhase::Reforming(reforming) => {
                reforming.attempts += 1;
                reforming.proposal = None;
                let pause =
                    stagger * (1 << reforming.attempts.min(4)) + turn * reforming.attempts.min(4);
                reforming.propose_at = now + pause;
                reforming.round = reforming.round.max(higher.round);
                reforming.higher = None;
                reforming.follows = None;
            }
            MemberPhase::Together(_) => self.reconfigure_without(by, "takes part in another group"),
            MemberPhase::Joining(_) | MemberPhase::Over => {}
        }
    }

    pub(super) fn on_promise(
        &mut self,
        id: Id,
        ballot: Ballot,
        view: Option<&AcceptedView>,
        now: Instant,
    ) {
        let me = self.me.id;
        let MemberPhase::Reforming(reforming) = &mut self.phase else {
            return;
        };
        let Some(proposal) = &mut reforming.proposal else {
            return;
        };
        if proposal.ballot != ballot {
            return;
        }
        let base = &proposal.base.roster;
        match view {
            Some(view) if view.roster.ballot > base.ballot => {
                if view.roster.has(me) && base.has(id) {
                    // The higher roster is the base, but this proposal has not asked its members.
                    reforming.higher = Some(view.clone());
                    reforming.proposal = None;
                    reforming.propose_at = now;
                } else {
                    reforming.elsewhere.insert(id, view.clone());
                }
            }
            _ => {
                reforming.elsewhere.remove(&id);
                proposal.promises.insert(id, view.cloned());
            }
        }
    }
}
