//! The state of one process, and what it does next.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use super::message::{AcceptedView, Envelope, Request, Step};
use super::quorum::{Ballot, Id, Peer, Roster};
use super::timing::Timing;
use crate::error::{Error, NotAgreed};
use contact::Contact;
use joining::Joining;
use reforming::Reforming;
use together::Together;

mod contact;
mod conversation;
mod joining;
mod proposal;
mod reforming;
mod together;

/// Joiners, and addresses to ask, that a process keeps in mind, at most.
const KNOWN_MAX: usize = 4096;
/// How often the time doubles for which a joiner is passed over, or for which two are quarantined.
const DOUBLINGS_MAX: u32 = 5;

/// One process of an elastic job.
pub struct Member {
    me: Peer,
    timing: Timing,
    /// How many members a group may have.
    workers: RangeInclusive<usize>,
    /// Nothing until it has accepted a roster.
    view: Option<AcceptedView>,
    /// Whether it has ever been in a connected group.
    has_belonged: bool,
    promised: Ballot,
    dead: BTreeSet<Id>,
    joiners: BTreeMap<Id, Peer>,
    /// Joiners that new rosters have left out: how often, and until when nobody stops for them.
    passed_over: BTreeMap<Id, (u32, Instant)>,
    /// Addresses to which it could not connect: how often, and until when that counts.
    unreached: BTreeMap<String, (u32, Instant)>,
    /// The roster of which another member has said that all have come to the end of the training.
    finished: Option<Ballot>,
    contacts: BTreeMap<Id, Contact>,
    phase: Phase,
}

enum Phase {
    Joining(Joining),
    Together(Together),
    Reforming(Box<Reforming>),
    /// It has left or failed.
    Over,
}

impl Member {
    /// A process in the first group of a job, which is about to connect. All of its members listen by
    /// now: one whose address refuses is dead.
    #[must_use]
    pub fn founding(
        me: Peer,
        roster: Roster,
        timing: Timing,
        workers: RangeInclusive<usize>,
    ) -> Self {
        let together = Together::new(BTreeSet::new());
        let mut member = Self::new(me, timing, workers, Phase::Together(together));
        member.promised = roster.ballot;
        member.view = Some(AcceptedView {
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
            turned_away: BTreeMap::new(),
            noted: now,
            is_known: false,
            refused: BTreeSet::new(),
        };
        Self::new(me, timing, workers, Phase::Joining(joining))
    }

    fn new(me: Peer, timing: Timing, workers: RangeInclusive<usize>, phase: Phase) -> Self {
        Self {
            me,
            timing,
            workers,
            view: None,
            has_belonged: false,
            promised: Ballot::NONE,
            dead: BTreeSet::new(),
            joiners: BTreeMap::new(),
            passed_over: BTreeMap::new(),
            unreached: BTreeMap::new(),
            finished: None,
            contacts: BTreeMap::new(),
            phase,
        }
    }

    /// The same process as a joiner, once it has been excluded.
    #[must_use]
    pub fn rejoining(self, id: Id, now: Instant) -> Self {
        let mut addresses = BTreeSet::new();
        let views = match &self.phase {
            Phase::Reforming(reforming) => reforming.elsewhere.values().collect(),
            _ => Vec::new(),
        };
        for AcceptedView { roster, .. } in views.into_iter().chain(&self.view) {
            let peers = roster.members.iter().chain(roster.previous_members());
            addresses.extend(peers.map(|peer| peer.address.clone()));
        }
        let address = self.me.address;
        let me = Peer { id, address };
        let mut member = Self::joining(me, addresses, self.timing, self.workers, now);
        if let Phase::Joining(joining) = &mut member.phase {
            joining.is_known = true;
        }
        member
    }

    /// This process.
    #[must_use]
    pub const fn me(&self) -> &Peer {
        &self.me
    }

    /// The roster that it accepted last, and what it knows of it.
    #[must_use]
    pub const fn view(&self) -> Option<&AcceptedView> {
        self.view.as_ref()
    }

    /// The state that it is in, as docs/elastic.md draws it.
    #[must_use]
    pub const fn phase(&self) -> &'static str {
        match self.phase {
            Phase::Joining(_) => "Joining",
            Phase::Together(_) => "Together",
            Phase::Reforming(_) => "Reforming",
            Phase::Over => "Over",
        }
    }

    /// Whether others want to re-form, or a member is dead: the group is to be left, also while it
    /// connects: its owner calls `reform`.
    #[must_use]
    pub const fn must_reconfigure(&self) -> bool {
        matches!(&self.phase, Phase::Together(together) if together.reconfigured_by.is_some())
    }

    /// Who wants to re-form or is dead, and how this process knows.
    #[must_use]
    pub fn reconfigured_by(&self) -> Option<String> {
        let (Phase::Together(together), Some(view)) = (&self.phase, &self.view) else {
            return None;
        };
        let (peer, why) = together.reconfigured_by.as_ref()?;
        Some(match view.roster.position(peer.id) {
            Some(rank) => format!("rank {rank} at {} {why}", peer.address),
            None => format!("the process at {} {why}", peer.address),
        })
    }

    /// Processes that want to join, and for which the group should stop. One that the last roster has
    /// left out, such as one that could not connect with a member, would only be left out again.
    pub fn joiners(&self, now: Instant) -> impl Iterator<Item = &Peer> {
        let is_due = move |(id, _): &(&Id, &Peer)| {
            let passed_over = self.passed_over.get(id);
            passed_over.is_none_or(|(_, until)| *until <= now)
        };
        self.joiners.iter().filter(is_due).map(|(_, peer)| peer)
    }

    /// These joiners are not in the roster that is being accepted.
    fn pass_over_joiners(&mut self, now: Instant) {
        let joiners = &self.joiners;
        self.passed_over
            .retain(|id, (_, until)| *until > now || joiners.contains_key(id));
        for id in self.joiners.keys() {
            let (times, until) = self.passed_over.entry(*id).or_insert((0, now));
            *until = now + self.timing.remind * (1 << *times);
            *times = (*times + 1).min(DOUBLINGS_MAX);
        }
    }

    /// Addresses to which this process could not connect lately.
    fn unreached(&self, now: Instant) -> impl Iterator<Item = &String> {
        let addresses = self.unreached.keys();
        addresses.filter(move |address| self.is_quarantined(address, now))
    }

    /// All members of its roster are connected, and have the state of the training.
    pub fn connected(&mut self) {
        if let (Phase::Together(together), Some(view)) = (&mut self.phase, &mut self.view) {
            together.is_connected = true;
            view.is_established = true;
            self.has_belonged = true;
            for member in &view.roster.members {
                self.unreached.remove(&member.address);
            }
        }
    }

    /// The group has failed, or could not connect with some, or has stopped to let others in.
    pub fn reform(&mut self, unreached: &[Id], now: Instant) {
        let (Phase::Together(together), Some(view)) = (&self.phase, &self.view) else {
            return;
        };
        let has_found_death = together.has_found_death;
        let members = &view.roster.members;
        let unreached = members
            .iter()
            .filter(|member| unreached.contains(&member.id));
        let unreached: Vec<_> = unreached.map(|member| member.address.clone()).collect();
        for address in unreached {
            self.quarantine(address, now);
        }
        self.contacts.clear();
        let propose_at = if has_found_death {
            now
        } else {
            now + self.turn()
        };
        self.phase = Phase::Reforming(Box::new(Reforming {
            since: now,
            lacking: now,
            attempts: 0,
            looked: now,
            round: 0,
            propose_at,
            proposal: None,
            follows: None,
            higher: None,
            elsewhere: BTreeMap::new(),
            quarantined: BTreeSet::new(),
        }));
    }

    /// This process has left for good: what to tell the others, once.
    pub fn leave(&mut self) -> Vec<(String, Envelope)> {
        self.end_with(|_| Request::Leave)
    }

    /// All members of its roster have come to the end of the training: what to tell those who may not
    /// know, because the group has failed since.
    pub fn finish(&mut self) -> Vec<(String, Envelope)> {
        self.end_with(Request::Finish)
    }

    fn end_with(&mut self, farewell: impl Fn(Ballot) -> Request) -> Vec<(String, Envelope)> {
        self.phase = Phase::Over;
        let Some(AcceptedView { roster, .. }) = &self.view else {
            return Vec::new();
        };
        let others = roster.members.iter().filter(|it| it.id != self.me.id);
        others
            .map(|other| self.envelope(other, farewell(roster.ballot)))
            .collect()
    }

    /// Somebody who knows for certain says that a process is dead, and how.
    fn mark_dead(&mut self, id: Id, how: &'static str) {
        if id != self.me.id {
            self.dead.insert(id);
            self.reconfigure_without(id, how);
        }
        self.joiners.remove(&id);
    }

    /// Without this process its roster is no group any more.
    fn reconfigure_without(&mut self, id: Id, why: &'static str) {
        if let (Phase::Together(together), Some(view)) = (&mut self.phase, &self.view) {
            let member = view.roster.members.iter().find(|it| it.id == id);
            let call = member.map(|member| (member.clone(), why));
            together.reconfigured_by = together.reconfigured_by.take().or(call);
        }
    }

    /// It has tried to connect to an address in vain.
    fn quarantine(&mut self, address: String, now: Instant) {
        let longest = self.timing.quarantine * (1 << DOUBLINGS_MAX);
        self.unreached
            .retain(|_, (_, until)| *until + longest > now);
        let (times, until) = self.unreached.entry(address).or_insert((0, now));
        *until = now + self.timing.quarantine * (1 << *times);
        *times = (*times + 1).min(DOUBLINGS_MAX);
    }

    fn is_quarantined(&self, address: &str, now: Instant) -> bool {
        self.unreached
            .get(address)
            .is_some_and(|&(_, until)| until > now)
    }

    /// How long to let those before it in the ring propose.
    fn turn(&self) -> Duration {
        let roster = self.view.as_ref().map(|view| &view.roster);
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

    /// What to do next.
    pub fn step(&mut self, now: Instant) -> Step {
        match &self.phase {
            Phase::Over => Step::Wait(None),
            Phase::Joining(_) => self.step_joining(now),
            Phase::Together(_) => self.step_together(now),
            Phase::Reforming(_) => self.step_reforming(now),
        }
    }

    fn fail(&mut self, fact: NotAgreed) -> Step {
        self.phase = Phase::Over;
        Step::Failed(Error::from(fact))
    }
}

#[cfg(test)]
mod tests;
