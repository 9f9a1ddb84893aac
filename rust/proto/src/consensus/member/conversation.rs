//! A member's replies to requests, and its reactions to the replies of others.

use std::collections::BTreeSet;
use std::time::Instant;

use super::{KNOWN_MAX, Member, MemberPhase};
use crate::consensus::message::{AcceptedView, Envelope, MemberRequest, News, Outcome, Reply};
use crate::consensus::quorum::{Ballot, Id, Peer};

impl Member {
    /// Replies to a request.
    pub fn answer(&mut self, envelope: &Envelope, now: Instant) -> Reply {
        let is_meant = envelope.to.is_none_or(|to| to == self.me.id);
        if !is_meant || matches!(self.phase, MemberPhase::Over) {
            return Reply::OtherProcess;
        }
        match &envelope.request {
            MemberRequest::Gather { ballot, base, news } => {
                self.learn(&envelope.from.address, news);
                self.answer_gather(&envelope.from, *ballot, base, now)
            }
            MemberRequest::Install(roster) => self.accept(roster, BTreeSet::new(), now),
            MemberRequest::Watch(ballot) => self.answer_watch(*ballot),
            MemberRequest::Join => {
                self.note(&envelope.from);
                let view = self.view.as_ref();
                Reply::Noted(view.map_or_else(Vec::new, |view| view.roster.members.clone()))
            }
            MemberRequest::Leave => {
                self.mark_dead(envelope.from.id, "has left the job");
                Reply::Noted(Vec::new())
            }
            MemberRequest::Finish(ballot) => {
                self.finished = Some(*ballot);
                Reply::Noted(Vec::new())
            }
        }
    }

    fn answer_gather(
        &mut self,
        from: &Peer,
        ballot: Ballot,
        base: &AcceptedView,
        now: Instant,
    ) -> Reply {
        let turn = self.turn();
        let theirs = &base.roster;
        if let Some(view) = &self.view {
            let ours = &view.roster;
            let is_ahead = theirs.ballot >= ours.ballot;
            if is_ahead && !theirs.has(self.me.id) || !is_ahead && !ours.has(from.id) {
                if let MemberPhase::Reforming(reforming) = &mut self.phase {
                    let before = reforming.elsewhere.insert(from.id, base.clone());
                    let is_new = before.is_none_or(|before| !before.is_established);
                    if is_ahead && base.is_established && is_new {
                        // The others have continued without this process, so it asks them without
                        // waiting for its turn.
                        reforming.propose_at = now;
                    }
                }
                return Reply::Elsewhere(view.clone());
            }
            if ballot <= ours.ballot {
                return Reply::Behind(self.promised);
            }
        }
        if ballot < self.promised {
            return Reply::Behind(self.promised);
        }
        match &mut self.phase {
            MemberPhase::Together(together) => {
                let call = (from.clone(), "forms a new group");
                together.reconfigured_by.get_or_insert(call);
                return Reply::Busy;
            }
            MemberPhase::Reforming(reforming) => {
                if reforming
                    .proposal
                    .as_ref()
                    .is_some_and(|own| own.ballot < ballot)
                {
                    reforming.proposal = None;
                }
                reforming.propose_at = now + self.timing.quiet + turn;
                reforming.follows = Some(from.clone());
                // The proposer has just shown that it lives.
                let contact = self.contacts.entry(from.id).or_default();
                contact.due = Some(now + self.timing.again);
            }
            MemberPhase::Joining(joining) => joining.noted = now,
            MemberPhase::Over => {}
        }
        self.promised = ballot;
        Reply::Promise {
            ballot,
            view: self.view.clone(),
            news: self.news(now),
        }
    }

    /// Handles the outcome of a request to an address; `to` is the process that was meant.
    pub fn on_outcome(&mut self, address: &str, to: Option<Id>, outcome: &Outcome, now: Instant) {
        let Some(id) = to else {
            return self.on_joining_outcome(address, outcome, now);
        };
        let promised = self.promised;
        let contact = self.contacts.entry(id).or_default();
        contact.is_asked = false;
        contact.due = Some(now + self.timing.again);
        let reply = match outcome {
            Outcome::Silent | Outcome::TurnedAway(_) => return,
            Outcome::Refused | Outcome::Reply(Reply::OtherProcess) => return self.lost(id, now),
            Outcome::Reply(reply) => reply,
        };
        contact.unanswered = None;
        if !matches!(reply, Reply::Busy) {
            contact.busy = None;
        }
        match reply {
            Reply::Promise { ballot, view, news } => {
                if *ballot == promised {
                    // Further requests only show that this proposer lives, so they are rare.
                    contact.due = Some(now + self.timing.quiet / 3);
                }
                self.learn(address, news);
                self.on_promise(id, *ballot, view.as_ref(), now);
            }
            Reply::Busy => {
                contact.busy.get_or_insert(now);
            }
            Reply::Behind(higher) if *higher > promised => self.yield_to(id, *higher, now),
            Reply::Elsewhere(view) => {
                if let MemberPhase::Reforming(reforming) = &mut self.phase {
                    reforming.elsewhere.insert(id, view.clone());
                }
            }
            Reply::Accepted(ballot) => {
                let at = self.view.as_ref().map(|view| view.roster.ballot);
                if let (MemberPhase::Together(together), true) =
                    (&mut self.phase, at == Some(*ballot))
                {
                    together.missing.remove(&id);
                }
            }
            Reply::Behind(_) | Reply::Noted(_) | Reply::OtherProcess => {}
        }
    }

    /// A request of this process has proved that another one is dead.
    fn lost(&mut self, id: Id, now: Instant) {
        self.mark_dead(
            id,
            "has ended: its address refuses, or another process answers there",
        );
        let turn = self.turn();
        match &mut self.phase {
            MemberPhase::Together(together) => {
                together.has_found_death |= together.reconfigured_by.is_some()
            }
            MemberPhase::Reforming(reforming) => {
                if reforming.follows.take_if(|it| it.id == id).is_some() {
                    reforming.propose_at = reforming.propose_at.min(now + turn);
                }
            }
            MemberPhase::Joining(_) | MemberPhase::Over => {}
        }
    }

    pub(super) fn news(&self, now: Instant) -> News {
        News {
            dead: self.dead.iter().copied().collect(),
            joiners: self.joiners.values().cloned().collect(),
            unreached: self.unreached(now).cloned().collect(),
        }
    }

    fn learn(&mut self, from: &str, news: &News) {
        for &id in &news.dead {
            self.mark_dead(id, "has ended, as another one has found");
        }
        for joiner in &news.joiners {
            self.note(joiner);
        }
        if let MemberPhase::Reforming(reforming) = &mut self.phase {
            for address in &news.unreached {
                reforming
                    .quarantined
                    .insert((from.to_owned(), address.clone()));
            }
        }
    }

    fn note(&mut self, joiner: &Peer) {
        let roster = self.view.as_ref().map(|view| &view.roster);
        let is_in = roster.is_some_and(|roster| roster.has(joiner.id));
        let is_known = is_in || joiner.id == self.me.id || self.dead.contains(&joiner.id);
        if !is_known && self.joiners.len() < KNOWN_MAX {
            self.joiners.insert(joiner.id, joiner.clone());
        }
    }
}
