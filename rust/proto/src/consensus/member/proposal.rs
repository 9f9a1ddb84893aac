//! One proposal: the processes to ask, and the verdict on their replies.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::{Contact, Member, Reforming};
use crate::consensus::message::AcceptedView;
use crate::consensus::quorum::{Ballot, Id, Peer, Roster, Standing};
use crate::error::NotAgreed;

/// A proposer's ballot and the promises for it.
pub(super) struct Proposal {
    pub(super) ballot: Ballot,
    pub(super) begun: Instant,
    /// The roster whose members it asks.
    pub(super) base: AcceptedView,
    /// Rosters of the processes that have promised; `None` for a process without one.
    pub(super) promises: BTreeMap<Id, Option<AcceptedView>>,
}

/// Verdict on a proposal.
pub(super) enum Verdict {
    Wait,
    Decided(Roster),
    Excluded,
    Failed(NotAgreed),
}

/// Members of the base, by their replies.
struct Members {
    /// Living members that have promised.
    here: BTreeSet<Id>,
    /// Members that may still promise.
    pending: BTreeSet<Id>,
    /// Members that have replied lately, with or without a promise.
    answering: BTreeSet<Id>,
}

impl Proposal {
    /// Knowledge of the base among the processes that have promised.
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
    /// Processes to ask for promises: members, joiners, and members of older rosters, even if they
    /// may be dead.
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
        // A joiner has no training to lose, so it gets no error; and the dead do not come back.
        if !self.has_belonged && others.all(|peer| self.dead.contains(&peer.id)) {
            return Verdict::Excluded;
        }
        // This process may have followed another one until now, so the others get time to reply to
        // it.
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

    /// Returns whether joiners may still promise. A silent joiner is quarantined for a while.
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

    /// The next members: survivors, and joiners up to the largest group. If two processes could not
    /// connect lately, the later one is left out if the others are a quorum.
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

/// Orders members as a ring. Joiners take the ranks of lost members, so survivors keep their ranks
/// if as many join as were lost. Further joiners come last, and remaining gaps close.
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::MemberPhase;
    use super::super::tests::peer;
    use super::*;
    use crate::consensus::timing::Timing;

    const SECOND: Duration = Duration::from_secs(1);

    fn id(number: u8) -> Id {
        peer(number).id
    }

    fn view(round: u64, members: &[u8], is_established: bool) -> AcceptedView {
        let members = members.iter().map(|&number| peer(number));
        let mut roster = Roster::founding(members.collect());
        roster.ballot.round = round;
        AcceptedView {
            roster,
            is_established,
        }
    }

    /// Member 1 of a roster of round 2 with three others, at the start of its proposal.
    fn proposing(now: Instant) -> (Member, Proposal, Box<Reforming>) {
        let base = view(2, &[1, 2, 3, 4], false);
        let roster = base.roster.clone();
        let mut member = Member::founding(peer(1), roster, Timing::default(), 1..=8);
        member.connected();
        member.reform(&[], now);
        let phase = std::mem::replace(&mut member.phase, MemberPhase::Over);
        let MemberPhase::Reforming(reforming) = phase else {
            panic!("it re-forms");
        };
        let ballot = Ballot {
            round: 3,
            proposer: id(1),
        };
        let proposal = Proposal {
            ballot,
            begun: now,
            base,
            promises: BTreeMap::new(),
        };
        (member, proposal, reforming)
    }

    #[test]
    fn what_is_known_of_the_base_follows_from_where_those_are_that_have_promised() {
        use Standing::{Established, Open, Refuted};
        let (_, mut proposal, _) = proposing(Instant::now());
        let at = |round, is_established| Some(view(round, &[1, 2], is_established));
        let ballot = |round| view(round, &[1], false).roster.ballot;
        let here = BTreeSet::from([id(1), id(2)]);
        for (is_established, own, promise, standing) in [
            (true, 2, None, Established),
            (false, 2, None, Open),
            (false, 2, Some((2, at(2, true))), Established),
            (false, 2, Some((2, at(2, false))), Open),
            (false, 2, Some((2, at(1, true))), Refuted),
            (false, 2, Some((2, None)), Refuted),
            // A process that is not here may have promised and died.
            (false, 2, Some((3, at(1, false))), Open),
            (false, 2, Some((3, None)), Open),
            (false, 1, None, Refuted),
        ] {
            proposal.base.is_established = is_established;
            let promise = promise.map(|(number, view)| (id(number), view));
            proposal.promises = promise.into_iter().collect();
            let promises = &proposal.promises;
            let found = proposal.standing(&here, ballot(own));
            assert_eq!(found, standing, "{is_established} {own} {promises:?}");
        }
    }

    #[test]
    fn those_that_went_on_without_a_process_exclude_it_if_their_group_is_newer_or_surer() {
        use Standing::{Established, Open};
        let now = Instant::now();
        let (mut member, proposal, mut reforming) = proposing(now);
        let (others, with_it) = (&[2, 9][..], &[1, 9][..]);
        for (number, (round, members, is_established), standing, excludes) in [
            (2, (3, others, false), Established, true),
            (2, (1, others, false), Established, false),
            (9, (3, others, false), Established, false),
            (9, (3, others, true), Established, true),
            (9, (1, others, true), Established, false),
            (9, (1, others, true), Open, true),
            (9, (1, others, false), Open, false),
            (2, (3, with_it, true), Established, false),
        ] {
            let theirs = view(round, members, is_established);
            reforming.elsewhere = BTreeMap::from([(id(number), theirs)]);
            for dead in [false, true] {
                member.dead = dead.then_some(id(number)).into_iter().collect();
                let here = member.members(&proposal, &reforming, now);
                let verdict = member.without_quorum(&proposal, &reforming, &here, standing, now);
                let is = matches!(verdict, Verdict::Excluded);
                assert_eq!(is, excludes && !dead, "{number} {round} {is_established}");
            }
        }
    }

    #[test]
    fn without_a_quorum_a_process_waits_for_its_limits_unless_it_has_nothing_and_nobody_lives() {
        let begin = Instant::now() + 100 * SECOND;
        let (mut member, mut proposal, mut reforming) = proposing(begin);
        let verdict = |member: &Member, proposal: &Proposal, reforming: &Reforming, now| {
            let here = member.members(proposal, reforming, now);
            match member.without_quorum(proposal, reforming, &here, Standing::Open, now) {
                Verdict::Wait => "waits",
                Verdict::Excluded => "is excluded",
                Verdict::Failed(NotAgreed::Minority { .. }) => "fails",
                Verdict::Failed(_) | Verdict::Decided(_) => "something else",
            }
        };
        for (belongs, living, becomes) in [
            (true, true, "waits"),
            (true, false, "waits"),
            (false, true, "waits"),
            (false, false, "is excluded"),
        ] {
            member.has_belonged = belongs;
            let dead = [2, 3, 4].map(id).into_iter().filter(|_| !living);
            member.dead = dead.collect();
            assert_eq!(verdict(&member, &proposal, &reforming, begin), becomes);
        }
        member.dead.clear();
        // Seconds until the proposal began, until a quorum was last there, and until the wait ends.
        for (begun, lacking, limit) in [(0, 0, 60), (55, 0, 65), (0, 30, 90)] {
            proposal.begun = begin + begun * SECOND;
            reforming.lacking = begin + lacking * SECOND;
            let limit = begin + limit * SECOND;
            for (belongs, becomes) in [(true, "fails"), (false, "is excluded")] {
                member.has_belonged = belongs;
                let before = limit - Duration::from_millis(1);
                assert_eq!(verdict(&member, &proposal, &reforming, before), "waits");
                assert_eq!(verdict(&member, &proposal, &reforming, limit), becomes);
            }
        }
    }

    #[test]
    fn nothing_is_decided_while_those_that_may_still_promise_would_be_a_quorum() {
        let now = Instant::now();
        let (mut member, proposal, mut reforming) = proposing(now);
        let own = proposal.base.roster.ballot;
        for (gone, waits) in [(&[4][..], true), (&[3, 4], true), (&[2, 3, 4], false)] {
            let elsewhere = |&number: &u8| (id(number), view(3, &[4], true));
            reforming.elsewhere = gone.iter().map(elsewhere).collect();
            let dead = gone.len().saturating_sub(1);
            member.dead = gone[..dead].iter().map(|&it| id(it)).collect();
            let verdict = member.judge(&proposal, &mut reforming, own, now);
            assert_eq!(matches!(verdict, Verdict::Wait), waits, "{gone:?}");
        }
    }

    #[test]
    fn members_joiners_and_older_members_that_live_are_asked_once() {
        let (mut member, mut proposal, _) = proposing(Instant::now());
        let older = view(1, &[1, 2, 6, 7], true).roster;
        let Roster {
            ballot, members, ..
        } = proposal.base.roster;
        let none = BTreeSet::new();
        proposal.base.roster = older.successor(ballot, members, Standing::Established, &none);
        member.joiners = [2, 5].map(|it| (id(it), peer(it))).into();
        member.dead = BTreeSet::from([id(3), id(7)]);
        let asked = member.to_ask(&proposal).into_iter();
        let asked: Vec<_> = asked.map(|peer| peer.id.0[0]).collect();
        assert_eq!(asked, [2, 4, 5, 6]);
    }
}
