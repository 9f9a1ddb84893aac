//! The state of one process: what it answers, and what it does next.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use super::message::{Envelope, News, Outcome, Reply, Request, Standpoint, Step};
use super::quorum::{Ballot, Id, Peer, Roster};
use super::timing::Timing;
use crate::error::{Error, NotAgreed};
use proposal::{Proposal, Verdict};

mod proposal;

/// Joiners, and addresses to ask, that a process keeps in mind, at most.
const KNOWN_MAX: usize = 4096;

/// One process of an elastic job.
pub struct Member {
    pub(super) me: Peer,
    pub(super) timing: Timing,
    /// How many members a group may have.
    pub(super) workers: RangeInclusive<usize>,
    /// Nothing until it has accepted a roster.
    standpoint: Option<Standpoint>,
    /// Whether it has ever been in a connected group.
    pub(super) has_belonged: bool,
    promised: Ballot,
    pub(super) dead: BTreeSet<Id>,
    pub(super) joiners: BTreeMap<Id, Peer>,
    /// Addresses to which it could not connect, and until when that counts.
    unreached: BTreeMap<String, Instant>,
    pub(super) contacts: BTreeMap<Id, Contact>,
    phase: Phase,
}

enum Phase {
    Joining(Joining),
    Together(Together),
    Reforming(Box<Reforming>),
    /// It has left or failed.
    Over,
}

/// Outside, and would be in.
struct Joining {
    /// By address: when to ask there again; nothing while it is asked.
    asked: BTreeMap<String, Option<Instant>>,
    /// When a member answered last.
    noted: Instant,
}

/// Its group connects or runs.
struct Together {
    is_connected: bool,
    /// Others want to re-form.
    is_called: bool,
    /// Its owner has yet to be told to connect.
    is_new: bool,
    /// Members that have not accepted the roster for all that this process, its proposer, knows.
    missing: BTreeSet<Id>,
}

/// There is no group.
pub(super) struct Reforming {
    pub(super) since: Instant,
    /// Since when those that answer have been no quorum.
    pub(super) lacking: Instant,
    /// Proposals that came to nothing because of a higher one.
    attempts: u32,
    /// When it looked last: a process that was stopped meanwhile has heard nobody for no fault of theirs.
    looked: Instant,
    /// The highest round of which it has heard.
    round: u64,
    /// When to propose, if nobody else does.
    propose_at: Instant,
    proposal: Option<Proposal>,
    /// A higher roster with this process in it, of which it has heard.
    higher: Option<Standpoint>,
    /// Where others are that are at a roster without this process.
    pub(super) elsewhere: BTreeMap<Id, Standpoint>,
    /// Pairs of addresses that could not connect.
    pub(super) apart: BTreeSet<(String, String)>,
}

/// How a process answers requests.
#[derive(Default)]
pub(super) struct Contact {
    is_asked: bool,
    due: Option<Instant>,
    /// Since when it has been asked in vain.
    unanswered: Option<Instant>,
    /// Since when it has been busy.
    busy: Option<Instant>,
}

impl Contact {
    /// Whether there is no use in waiting for it longer.
    pub(super) fn is_given_up(&self, timing: &Timing, silence: Duration, now: Instant) -> bool {
        let over = |since: Option<Instant>, limit| since.is_some_and(|since| now >= since + limit);
        over(self.unanswered, silence) || over(self.busy, timing.busy)
    }

    pub(super) const fn is_busy(&self) -> bool {
        self.busy.is_some()
    }
}

impl Member {
    /// A process in the first group of a job, which is about to connect.
    #[must_use]
    pub fn founding(
        me: Peer,
        roster: Roster,
        timing: Timing,
        workers: RangeInclusive<usize>,
    ) -> Self {
        let together = Together {
            is_connected: false,
            is_called: false,
            is_new: true,
            missing: BTreeSet::new(),
        };
        let mut member = Self::new(me, timing, workers, Phase::Together(together));
        member.promised = roster.ballot;
        member.standpoint = Some(Standpoint {
            roster,
            is_established: false,
        });
        member
    }

    /// A process that would be in the job of which a member listens at one of these addresses.
    #[must_use]
    pub fn joining(
        me: Peer,
        addresses: impl IntoIterator<Item = String>,
        timing: Timing,
        workers: RangeInclusive<usize>,
        now: Instant,
    ) -> Self {
        let others = addresses
            .into_iter()
            .filter(|address| *address != me.address);
        let joining = Joining {
            asked: others.take(KNOWN_MAX).map(|it| (it, Some(now))).collect(),
            noted: now,
        };
        Self::new(me, timing, workers, Phase::Joining(joining))
    }

    fn new(me: Peer, timing: Timing, workers: RangeInclusive<usize>, phase: Phase) -> Self {
        Self {
            me,
            timing,
            workers,
            standpoint: None,
            has_belonged: false,
            promised: Ballot::NONE,
            dead: BTreeSet::new(),
            joiners: BTreeMap::new(),
            unreached: BTreeMap::new(),
            contacts: BTreeMap::new(),
            phase,
        }
    }

    /// The same process as a joiner, once it has been excluded.
    #[must_use]
    pub fn rejoining(self, id: Id, now: Instant) -> Self {
        let mut addresses = BTreeSet::new();
        let standpoints = match &self.phase {
            Phase::Reforming(reforming) => reforming.elsewhere.values().collect(),
            _ => Vec::new(),
        };
        for Standpoint { roster, .. } in standpoints.into_iter().chain(&self.standpoint) {
            let peers = roster.members.iter().chain(roster.elders());
            addresses.extend(peers.map(|peer| peer.address.clone()));
        }
        let address = self.me.address;
        let me = Peer { id, address };
        Self::joining(me, addresses, self.timing, self.workers, now)
    }

    /// This process.
    #[must_use]
    pub const fn me(&self) -> &Peer {
        &self.me
    }

    /// The roster that it accepted last, and what it knows of it.
    #[must_use]
    pub const fn standpoint(&self) -> Option<&Standpoint> {
        self.standpoint.as_ref()
    }

    /// Whether others want to re-form: the group is to be left, and `reform` called.
    #[must_use]
    pub const fn is_called(&self) -> bool {
        matches!(&self.phase, Phase::Together(together) if together.is_called)
    }

    /// Processes that want to join, and which this one can reach for all it knows.
    pub fn joiners(&self) -> impl Iterator<Item = &Peer> {
        self.joiners.values()
    }

    /// Addresses to which this process could not connect lately.
    pub fn unreached(&self, now: Instant) -> impl Iterator<Item = &String> {
        let lately = move |(_, until): &(&String, &Instant)| **until > now;
        self.unreached
            .iter()
            .filter(lately)
            .map(|(address, _)| address)
    }

    /// All members of its roster are connected, and have the state of the training.
    pub fn connected(&mut self) {
        if let (Phase::Together(together), Some(standpoint)) =
            (&mut self.phase, &mut self.standpoint)
        {
            together.is_connected = true;
            standpoint.is_established = true;
            self.has_belonged = true;
            for member in &standpoint.roster.members {
                self.unreached.remove(&member.address);
            }
        }
    }

    /// The group has failed, or could not connect with some, or has stopped to let others in.
    pub fn reform(&mut self, unreached: &[Id], now: Instant) {
        let (Phase::Together(_), Some(standpoint)) = (&self.phase, &self.standpoint) else {
            return;
        };
        let members = &standpoint.roster.members;
        let unreached = members
            .iter()
            .filter(|member| unreached.contains(&member.id));
        let unreached: Vec<_> = unreached.map(|member| member.address.clone()).collect();
        self.unreached.retain(|_, until| *until > now);
        for address in unreached {
            self.keep_apart(address, now);
        }
        self.contacts.clear();
        self.phase = Phase::Reforming(Box::new(Reforming {
            since: now,
            lacking: now,
            attempts: 0,
            looked: now,
            round: 0,
            propose_at: now + self.turn(),
            proposal: None,
            higher: None,
            elsewhere: BTreeMap::new(),
            apart: BTreeSet::new(),
        }));
    }

    /// This process has left for good: what to tell the others, once.
    pub fn leave(&mut self) -> Vec<(String, Envelope)> {
        self.phase = Phase::Over;
        let roster = self
            .standpoint
            .as_ref()
            .map(|standpoint| &standpoint.roster);
        let others = roster.into_iter().flat_map(|roster| &roster.members);
        let others = others.filter(|other| other.id != self.me.id);
        others
            .map(|other| self.envelope(other, Request::Leave))
            .collect()
    }

    /// Somebody who knows for certain says that a process is dead.
    pub fn bury(&mut self, id: Id) {
        if id != self.me.id {
            self.dead.insert(id);
        }
        self.joiners.remove(&id);
    }

    /// It has tried to connect to an address in vain.
    pub(super) fn keep_apart(&mut self, address: String, now: Instant) {
        self.unreached.insert(address, now + self.timing.apart);
    }

    pub(super) fn is_apart(&self, address: &str, now: Instant) -> bool {
        self.unreached
            .get(address)
            .is_some_and(|&until| until > now)
    }

    /// How long to let those before it in the ring propose.
    fn turn(&self) -> Duration {
        let roster = self
            .standpoint
            .as_ref()
            .map(|standpoint| &standpoint.roster);
        let position = roster.and_then(|roster| roster.position(self.me.id));
        self.timing.stagger * u32::try_from(position.unwrap_or(0)).unwrap_or(u32::MAX)
    }

    fn envelope(&self, to: &Peer, request: Request) -> (String, Envelope) {
        let envelope = Envelope {
            from: self.me.clone(),
            to: Some(to.id),
            request,
        };
        (to.address.clone(), envelope)
    }

    fn news(&self, now: Instant) -> News {
        News {
            dead: self.dead.iter().copied().collect(),
            joiners: self.joiners.values().cloned().collect(),
            unreached: self.unreached(now).cloned().collect(),
        }
    }

    fn learn(&mut self, from: &str, news: &News) {
        for &id in &news.dead {
            self.bury(id);
        }
        for joiner in &news.joiners {
            self.note(joiner);
        }
        if let Phase::Reforming(reforming) = &mut self.phase {
            for address in &news.unreached {
                reforming.apart.insert((from.to_owned(), address.clone()));
            }
        }
    }

    fn note(&mut self, joiner: &Peer) {
        let roster = self
            .standpoint
            .as_ref()
            .map(|standpoint| &standpoint.roster);
        let is_in = roster.is_some_and(|roster| roster.has(joiner.id));
        let is_known = is_in || joiner.id == self.me.id || self.dead.contains(&joiner.id);
        if !is_known && self.joiners.len() < KNOWN_MAX {
            self.joiners.insert(joiner.id, joiner.clone());
        }
    }

    /// The answer to a request.
    pub fn answer(&mut self, envelope: &Envelope, now: Instant) -> Reply {
        let is_meant = envelope.to.is_none_or(|to| to == self.me.id);
        if !is_meant || matches!(self.phase, Phase::Over) {
            return Reply::OtherProcess;
        }
        match &envelope.request {
            Request::Gather { ballot, base, news } => {
                self.learn(&envelope.from.address, news);
                self.answer_gather(&envelope.from, *ballot, base, now)
            }
            Request::Install(roster) => self.accept(roster, BTreeSet::new()),
            Request::Join => {
                self.note(&envelope.from);
                let standpoint = self.standpoint.as_ref();
                Reply::Noted(
                    standpoint
                        .map_or_else(Vec::new, |standpoint| standpoint.roster.members.clone()),
                )
            }
            Request::Leave => {
                self.bury(envelope.from.id);
                let standpoint = self.standpoint.as_ref();
                let was_in =
                    standpoint.is_some_and(|standpoint| standpoint.roster.has(envelope.from.id));
                if let Phase::Together(together) = &mut self.phase {
                    together.is_called |= was_in;
                }
                Reply::Noted(Vec::new())
            }
        }
    }

    fn answer_gather(
        &mut self,
        from: &Peer,
        ballot: Ballot,
        base: &Standpoint,
        now: Instant,
    ) -> Reply {
        let turn = self.turn();
        let theirs = &base.roster;
        if let Some(standpoint) = &self.standpoint {
            let ours = &standpoint.roster;
            let is_ahead = theirs.ballot >= ours.ballot;
            if is_ahead && !theirs.has(self.me.id) || !is_ahead && !ours.has(from.id) {
                if let Phase::Reforming(reforming) = &mut self.phase {
                    reforming.elsewhere.insert(from.id, base.clone());
                }
                return Reply::Elsewhere(standpoint.clone());
            }
            if ballot <= ours.ballot {
                return Reply::Behind(self.promised);
            }
        }
        if ballot < self.promised {
            return Reply::Behind(self.promised);
        }
        match &mut self.phase {
            Phase::Together(together) => {
                together.is_called = true;
                return Reply::Busy;
            }
            Phase::Reforming(reforming) => {
                if reforming
                    .proposal
                    .as_ref()
                    .is_some_and(|own| own.ballot < ballot)
                {
                    reforming.proposal = None;
                }
                reforming.propose_at = now + self.timing.quiet + turn;
            }
            Phase::Joining(joining) => joining.noted = now,
            Phase::Over => {}
        }
        self.promised = ballot;
        Reply::Promise {
            ballot,
            standpoint: self.standpoint.clone(),
            news: self.news(now),
        }
    }

    /// Moves to a roster for whose ballot this process has promised nothing higher.
    fn accept(&mut self, roster: &Roster, missing: BTreeSet<Id>) -> Reply {
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

    /// What became of a request to an address, where this process was meant.
    pub fn heard(&mut self, address: &str, to: Option<Id>, outcome: &Outcome, now: Instant) {
        let Some(id) = to else {
            return self.heard_of_joining(address, outcome, now);
        };
        let promised = self.promised;
        let contact = self.contacts.entry(id).or_default();
        contact.is_asked = false;
        contact.due = Some(now + self.timing.again);
        let reply = match outcome {
            Outcome::Silent => return,
            Outcome::Refused | Outcome::Reply(Reply::OtherProcess) => return self.lost(id),
            Outcome::Reply(reply) => reply,
        };
        contact.unanswered = None;
        if !matches!(reply, Reply::Busy) {
            contact.busy = None;
        }
        match reply {
            Reply::Promise {
                ballot,
                standpoint,
                news,
            } => {
                if *ballot == promised {
                    // It is asked again only so that it knows that this process lives.
                    contact.due = Some(now + self.timing.quiet / 3);
                }
                self.learn(address, news);
                self.heard_promise(id, *ballot, standpoint.as_ref(), now);
            }
            Reply::Busy => {
                contact.busy.get_or_insert(now);
            }
            Reply::Behind(higher) if *higher > promised => self.give_way(*higher, now),
            Reply::Elsewhere(standpoint) => {
                if let Phase::Reforming(reforming) = &mut self.phase {
                    reforming.elsewhere.insert(id, standpoint.clone());
                }
            }
            Reply::Accepted(ballot) => {
                let at = self
                    .standpoint
                    .as_ref()
                    .map(|standpoint| standpoint.roster.ballot);
                if let (Phase::Together(together), true) = (&mut self.phase, at == Some(*ballot)) {
                    together.missing.remove(&id);
                }
            }
            Reply::Behind(_) | Reply::Noted(_) | Reply::OtherProcess => {}
        }
    }

    /// A process is proved dead.
    fn lost(&mut self, id: Id) {
        self.bury(id);
        if let Phase::Together(together) = &mut self.phase {
            together.is_called |= together.missing.contains(&id);
        }
    }

    /// Somebody has promised more to another proposer.
    fn give_way(&mut self, higher: Ballot, now: Instant) {
        let (turn, stagger) = (self.turn(), self.timing.stagger);
        match &mut self.phase {
            Phase::Reforming(reforming) => {
                reforming.attempts += 1;
                reforming.proposal = None;
                let pause =
                    stagger * (1 << reforming.attempts.min(4)) + turn * reforming.attempts.min(4);
                reforming.propose_at = now + pause;
                reforming.round = reforming.round.max(higher.round);
                reforming.higher = None;
            }
            Phase::Together(together) => together.is_called |= !together.missing.is_empty(),
            Phase::Joining(_) | Phase::Over => {}
        }
    }

    fn heard_promise(
        &mut self,
        id: Id,
        ballot: Ballot,
        standpoint: Option<&Standpoint>,
        now: Instant,
    ) {
        let me = self.me.id;
        let Phase::Reforming(reforming) = &mut self.phase else {
            return;
        };
        let Some(proposal) = &mut reforming.proposal else {
            return;
        };
        if proposal.ballot != ballot {
            return;
        }
        let base = &proposal.base.roster;
        match standpoint {
            Some(standpoint) if standpoint.roster.ballot > base.ballot => {
                if standpoint.roster.has(me) && base.has(id) {
                    // That one is the base, for whose members this proposal was not made.
                    reforming.higher = Some(standpoint.clone());
                    reforming.proposal = None;
                    reforming.propose_at = now;
                } else {
                    reforming.elsewhere.insert(id, standpoint.clone());
                }
            }
            _ => {
                reforming.elsewhere.remove(&id);
                proposal.promises.insert(id, standpoint.cloned());
            }
        }
    }

    fn heard_of_joining(&mut self, address: &str, outcome: &Outcome, now: Instant) {
        let Phase::Joining(joining) = &mut self.phase else {
            return;
        };
        let again = now + self.timing.remind;
        joining.asked.insert(address.to_owned(), Some(again));
        if let Outcome::Reply(Reply::Noted(members)) = outcome
            && !members.is_empty()
        {
            joining.noted = now;
            for member in members.iter().filter(|member| member.id != self.me.id) {
                if joining.asked.len() < KNOWN_MAX {
                    let asked = joining.asked.entry(member.address.clone());
                    asked.or_insert(Some(now));
                }
            }
        }
    }

    /// What to do next.
    pub fn step(&mut self, now: Instant) -> Step {
        match &mut self.phase {
            Phase::Over => Step::Wait(None),
            Phase::Joining(_) => self.step_joining(now),
            Phase::Reforming(_) => self.step_reforming(now),
            Phase::Together(together) => {
                let roster = &self
                    .standpoint
                    .as_ref()
                    .expect("it has accepted one")
                    .roster;
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
    }

    fn step_joining(&mut self, now: Instant) -> Step {
        let Phase::Joining(joining) = &mut self.phase else {
            unreachable!("asked while it joins only");
        };
        let limit = joining.noted + self.timing.join;
        if now >= limit {
            let asked = joining.asked.keys().map(|it| (**it).into()).collect();
            return self.fail(NotAgreed::NobodyToJoin {
                asked,
                within: self.timing.join,
            });
        }
        for (address, due) in &mut joining.asked {
            if due.is_some_and(|due| due <= now) {
                *due = None;
                let envelope = Envelope {
                    from: self.me.clone(),
                    to: None,
                    request: Request::Join,
                };
                return Step::Send(address.clone(), envelope);
            }
        }
        let next = joining.asked.values().flatten().copied().min();
        Step::Wait(Some(next.map_or(limit, |next| next.min(limit))))
    }

    fn step_reforming(&mut self, now: Instant) -> Step {
        let standpoint = self
            .standpoint
            .as_ref()
            .expect("who re-forms was at a roster");
        let own = standpoint.roster.ballot;
        // It is taken out while it is judged.
        let phase = std::mem::replace(&mut self.phase, Phase::Over);
        let Phase::Reforming(mut reforming) = phase else {
            unreachable!("asked while it re-forms only");
        };
        if now > reforming.looked + self.timing.quiet.max(self.timing.request) {
            reforming.lacking = now;
            self.contacts.clear();
        }
        reforming.looked = now;
        let proposal = match reforming.proposal.take() {
            Some(proposal) => proposal,
            None if now < reforming.propose_at => {
                let until = reforming.propose_at;
                self.phase = Phase::Reforming(reforming);
                return Step::Wait(Some(until));
            }
            None => {
                let higher = reforming.higher.as_ref();
                let higher = higher.filter(|higher| higher.roster.ballot > own);
                let base = higher.unwrap_or(standpoint).clone();
                let round = self.promised.round.max(base.roster.ballot.round);
                self.promised = Ballot {
                    round: round.max(reforming.round) + 1,
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
        let request = Request::Gather {
            ballot: proposal.ballot,
            base: proposal.base.clone(),
            news: self.news(now),
        };
        reforming.proposal = Some(proposal);
        self.phase = Phase::Reforming(reforming);
        match verdict {
            Verdict::Wait => self.ask(&asked, &request, now),
            Verdict::Decided(roster) => {
                let others = roster.members.iter().map(|member| member.id);
                let missing = others.filter(|&id| id != self.me.id).collect();
                self.accept(&roster, missing);
                self.step(now)
            }
            Verdict::Excluded => Step::Excluded,
            Verdict::Failed(fact) => self.fail(fact),
        }
    }

    /// The next of these requests that is due, or how long to wait.
    fn ask(&mut self, peers: &[Peer], request: &Request, now: Instant) -> Step {
        let mut next = None;
        for peer in peers {
            let contact = self.contacts.entry(peer.id).or_default();
            if contact.is_asked {
                continue;
            }
            match contact.due {
                Some(due) if due > now => next = Some(next.map_or(due, |next| due.min(next))),
                _ => {
                    contact.is_asked = true;
                    contact.unanswered.get_or_insert(now);
                    let (address, envelope) = self.envelope(peer, request.clone());
                    return Step::Send(address, envelope);
                }
            }
        }
        let look = now + self.timing.again;
        Step::Wait(Some(next.map_or(look, |next| next.min(look))))
    }

    fn fail(&mut self, fact: NotAgreed) -> Step {
        self.phase = Phase::Over;
        Step::Failed(Error::from(fact))
    }
}

#[cfg(test)]
mod tests;
