//! One proposal: whom to ask, and what to make of the answers.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::{Contact, Member, Reforming};
use crate::consensus::message::AcceptedView;
use crate::consensus::quorum::{Ballot, Id, Peer, Roster, Standing};
use crate::error::NotAgreed;

/// What a proposer has heard for its ballot.
pub(super) struct Proposal {
    pub(super) ballot: Ballot,
    pub(super) begun: Instant,
    /// The roster whose members it asks.
    pub(super) base: AcceptedView,
    /// By process that has promised: where it is, if anywhere.
    pub(super) promises: BTreeMap<Id, Option<AcceptedView>>,
}

/// What is to become of it.
pub(super) enum Verdict {
    Wait,
    Decided(Roster),
    Excluded,
    Failed(NotAgreed),
}

/// The members of the base.
struct Members {
    /// Have promised and live.
    here: BTreeSet<Id>,
    /// May still promise.
    pending: BTreeSet<Id>,
    /// Have answered lately, with a promise or not.
    answering: BTreeSet<Id>,
}

impl Proposal {
    /// What those who have promised know of the base.
    fn standing(&self, here: &BTreeSet<Id>, own: Ballot) -> Standing {
        let at = self.base.roster.ballot;
        let mut views = self.promises.values().flatten();
        let knows = |view: &AcceptedView| view.roster.ballot == at && view.is_established;
        if self.base.is_established || views.any(knows) {
            return Standing::Established;
        }
        let is_below = |(id, view): (&Id, &Option<AcceptedView>)| {
            let ballot = view.as_ref().map(|view| view.roster.ballot);
            here.contains(id) && ballot.is_none_or(|ballot| ballot < at)
        };
        if own < at || self.promises.iter().any(is_below) {
            Standing::Refuted
        } else {
            Standing::Open
        }
    }
}

impl Member {
    /// Whom to ask for promises: members, joiners, and those of older rosters, who may be dead.
    pub(super) fn to_ask(&self, proposal: &Proposal) -> Vec<Peer> {
        let base = &proposal.base.roster;
        let peers = base.members.iter().chain(self.joiners.values());
        let mut asked = BTreeSet::from([self.me.id]);
        let others = peers.chain(base.previous_members());
        let others = others.filter(|peer| !self.dead.contains(&peer.id) && asked.insert(peer.id));
        others.cloned().collect()
    }

    pub(super) fn judge(
        &mut self,
        proposal: &Proposal,
        reforming: &mut Reforming,
        own: Ballot,
        now: Instant,
    ) -> Verdict {
        let base = &proposal.base.roster;
        let members = self.members(proposal, reforming, now);
        let standing = proposal.standing(&members.here, own);
        let may = |some: &BTreeSet<Id>| base.may_be_succeeded_by(some, standing, &self.dead);
        if may(&members.answering) {
            reforming.lacking = now;
        }
        if !may(&members.here) {
            let possible = &members.here | &members.pending;
            return if may(&possible) {
                Verdict::Wait
            } else {
                self.without_quorum(proposal, reforming, &members, standing, now)
            };
        }
        if !members.pending.is_empty() || self.awaits_joiners(proposal, reforming, now) {
            return Verdict::Wait;
        }
        let chosen = self.choose(proposal, reforming, &members.here, standing, now);
        if chosen.len() >= *self.workers.start() {
            return Verdict::Decided(base.successor(proposal.ballot, chosen, standing, &self.dead));
        }
        if now < reforming.since + self.timing.workers {
            return Verdict::Wait;
        }
        Verdict::Failed(NotAgreed::TooFewWorkers {
            here: chosen.len(),
            least: *self.workers.start(),
            within: self.timing.workers,
        })
    }

    fn members(&self, proposal: &Proposal, reforming: &Reforming, now: Instant) -> Members {
        let mut members = Members {
            here: BTreeSet::from([self.me.id]),
            pending: BTreeSet::new(),
            answering: BTreeSet::from([self.me.id]),
        };
        let others = proposal.base.roster.members.iter().map(|member| member.id);
        for id in others.filter(|&id| id != self.me.id && !self.dead.contains(&id)) {
            let contact = self.contacts.get(&id);
            let timing = &self.timing;
            let gone = contact.is_some_and(|it| it.is_given_up(timing, timing.grace, now));
            if proposal.promises.contains_key(&id) {
                members.here.insert(id);
                members.answering.insert(id);
            } else if !reforming.elsewhere.contains_key(&id) && !gone {
                members.pending.insert(id);
                if contact.is_some_and(Contact::is_busy) {
                    members.answering.insert(id);
                }
            }
        }
        members
    }

    fn without_quorum(
        &self,
        proposal: &Proposal,
        reforming: &Reforming,
        members: &Members,
        standing: Standing,
        now: Instant,
    ) -> Verdict {
        let base = &proposal.base.roster;
        let excludes = |(id, view): (&Id, &AcceptedView)| {
            let others = &view.roster;
            let is_newer = others.ballot > base.ballot;
            let moved_on = base.has(*id) && is_newer;
            let is_surer = standing != Standing::Established || is_newer;
            !self.dead.contains(id)
                && !others.has(self.me.id)
                && (moved_on || view.is_established && is_surer)
        };
        if reforming.elsewhere.iter().any(excludes) {
            return Verdict::Excluded;
        }
        let others = base.members.iter().chain(base.previous_members());
        let mut others = others.filter(|peer| peer.id != self.me.id);
        // A joiner has nothing that is worth an error, and the dead do not come back.
        if !self.has_belonged && others.all(|peer| self.dead.contains(&peer.id)) {
            return Verdict::Excluded;
        }
        // Others have had time to answer this process itself, which may have followed another until now.
        let asked = proposal.begun + self.timing.grace;
        if now < asked.max(reforming.lacking + self.timing.minority) {
            return Verdict::Wait;
        }
        if !self.has_belonged {
            return Verdict::Excluded;
        }
        let lives = |peer: &&Peer| !self.dead.contains(&peer.id);
        let missing = base
            .members
            .iter()
            .chain(base.previous_members())
            .filter(lives);
        let missing = missing.filter(|peer| !members.here.contains(&peer.id));
        let mut missing: Vec<_> = missing.map(|peer| peer.address.as_str().into()).collect();
        missing.dedup();
        Verdict::Failed(NotAgreed::Minority {
            here: members.here.len(),
            missing,
            generation: base.generation(),
            within: self.timing.minority,
        })
    }

    /// Whether joiners may still promise. One that is silent is not asked again for a while.
    fn awaits_joiners(&mut self, proposal: &Proposal, reforming: &Reforming, now: Instant) -> bool {
        let (contacts, timing) = (&self.contacts, &self.timing);
        let is_settled = |id: &Id| {
            proposal.promises.contains_key(id)
                || reforming.elsewhere.contains_key(id)
                || proposal.base.roster.has(*id)
        };
        let is_gone = |id: &Id| {
            let contact = contacts.get(id);
            contact.is_some_and(|it| it.is_given_up(timing, timing.joiner, now))
        };
        let (gone, joiners): (BTreeMap<_, _>, BTreeMap<_, _>) = std::mem::take(&mut self.joiners)
            .into_iter()
            .partition(|(id, _)| !is_settled(id) && is_gone(id));
        self.joiners = joiners;
        for joiner in gone.into_values() {
            self.quarantine(joiner.address, now);
        }
        let is_awaited = |(id, joiner): (&Id, &Peer)| {
            !is_settled(id) && !self.is_quarantined(&joiner.address, now)
        };
        self.joiners.iter().any(is_awaited)
    }

    /// The next members: survivors, and joiners as far as there is room. Of two that could not connect
    /// lately, the later is left out if the others are a quorum.
    fn choose(
        &self,
        proposal: &Proposal,
        reforming: &Reforming,
        here: &BTreeSet<Id>,
        standing: Standing,
        now: Instant,
    ) -> Vec<Peer> {
        let base = &proposal.base.roster;
        let survivors = base.members.iter().filter(|peer| here.contains(&peer.id));
        let is_free = |peer: &&Peer| {
            let promise = proposal.promises.get(&peer.id);
            matches!(promise, Some(None)) && !base.has(peer.id)
        };
        let joiners = self.joiners.values().filter(is_free);
        let most = *self.workers.end();
        let all: Vec<Peer> = survivors.chain(joiners).take(most).cloned().collect();
        let cannot = |one: &Peer, other: &Peer| {
            let pair = |a: &Peer, b: &Peer| {
                let is_own = a.id == self.me.id && self.is_quarantined(&b.address, now);
                is_own
                    || reforming
                        .quarantined
                        .contains(&(a.address.clone(), b.address.clone()))
            };
            pair(one, other) || pair(other, one)
        };
        let mut chosen = vec![self.me.clone()];
        for peer in all.iter().filter(|peer| peer.id != self.me.id) {
            if !chosen.iter().any(|other| cannot(peer, other)) {
                chosen.push(peer.clone());
            }
        }
        let ids: BTreeSet<Id> = chosen.iter().map(|peer| peer.id).collect();
        let survivors = &ids & here;
        if ids.len() < *self.workers.start()
            || !base.may_be_succeeded_by(&survivors, standing, &self.dead)
        {
            return in_order(base, all);
        }
        let chosen = all.into_iter().filter(|peer| ids.contains(&peer.id));
        in_order(base, chosen)
    }
}

/// The ring of these: joiners take the ranks of those that are gone, so that survivors keep their
/// ranks if as many join as were lost. Further joiners come last, and gaps that are left close.
fn in_order(base: &Roster, chosen: impl IntoIterator<Item = Peer>) -> Vec<Peer> {
    let is_survivor = |peer: &Peer| base.has(peer.id);
    let (survivors, joiners): (Vec<_>, Vec<_>) = chosen.into_iter().partition(is_survivor);
    let mut joiners = joiners.into_iter();
    let before = base.members.iter();
    let next = before.map(|old| survivors.iter().find(|it| it.id == old.id).cloned());
    let next = next.filter_map(|survivor| survivor.or_else(|| joiners.next()));
    let mut ring: Vec<_> = next.collect();
    ring.extend(joiners);
    ring
}
