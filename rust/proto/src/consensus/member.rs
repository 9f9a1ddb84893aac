//! The state of one process, and its next action.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use super::message::{AcceptedView, Envelope, MemberRequest, Step};
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

/// Bound on joiners, and on addresses to ask, that a process remembers.
const KNOWN_MAX: usize = 4096;
/// Bound on doublings of a pause: of a joiner that is passed over, and of a quarantine.
const DOUBLINGS_MAX: u32 = 5;

/// One process of an elastic job.
pub struct Member {
    me: Peer,
    timing: Timing,
    /// Numbers of members that a group may have.
    workers: RangeInclusive<usize>,
    /// `None` until it has accepted a roster.
    view: Option<AcceptedView>,
    /// True once it has been in a connected group.
    has_belonged: bool,
    promised: Ballot,
    dead: BTreeSet<Id>,
    joiners: BTreeMap<Id, Peer>,
    /// Joiners that new rosters have left out: how often, and until when the group does not stop
    /// for them.
    passed_over: BTreeMap<Id, (u32, Instant)>,
    /// Addresses to which it could not connect: how often, and until when the quarantine lasts.
    unreached: BTreeMap<String, (u32, Instant)>,
    /// The roster whose members have all reached the end of the training, as a member has reported.
    finished: Option<Ballot>,
    contacts: BTreeMap<Id, Contact>,
    phase: MemberPhase,
}

enum MemberPhase {
    Joining(Joining),
    Together(Together),
    Reforming(Box<Reforming>),
    /// It has left or failed.
    Over,
}

impl Member {
    /// A process in the first group of a job, before it connects. All members listen already, so a
    /// member whose address refuses is dead.
    #[must_use]
    pub fn founding(
        me: Peer,
        roster: Roster,
        timing: Timing,
        workers: RangeInclusive<usize>,
    ) -> Self {
        let together = Together::new(BTreeSet::new());
        let mut member = Self::new(me, timing, workers, MemberPhase::Together(together));
        member.promised = roster.ballot;
        member.view = Some(AcceptedView {
            roster,
            is_established: false,
        });
        member
    }

    /// A process that wants to join a job. A member of the job listens at one of these addresses.
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
        Self::new(me, timing, workers, MemberPhase::Joining(joining))
    }

    fn new(me: Peer, timing: Timing, workers: RangeInclusive<usize>, phase: MemberPhase) -> Self {
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

    /// The same process as a joiner with a new id, after it has been excluded.
    #[must_use]
    pub fn rejoining(self, id: Id, now: Instant) -> Self {
        let mut addresses = BTreeSet::new();
        let views = match &self.phase {
            MemberPhase::Reforming(reforming) => reforming.elsewhere.values().collect(),
            _ => Vec::new(),
        };
        for AcceptedView { roster, .. } in views.into_iter().chain(&self.view) {
            let peers = roster.members.iter().chain(roster.previous_members());
            addresses.extend(peers.map(|peer| peer.address.clone()));
        }
        let address = self.me.address;
        let me = Peer { id, address };
        let mut member = Self::joining(me, addresses, self.timing, self.workers, now);
        if let MemberPhase::Joining(joining) = &mut member.phase {
            joining.is_known = true;
        }
        member
    }

    /// This process.
    #[must_use]
    pub const fn me(&self) -> &Peer {
        &self.me
    }

    /// The roster that it accepted last, and its knowledge of that roster.
    #[must_use]
    pub const fn view(&self) -> Option<&AcceptedView> {
        self.view.as_ref()
    }

    /// Name of the state, as in the drawing of docs/elastic.md.
    #[must_use]
    pub const fn phase(&self) -> &'static str {
        match self.phase {
            MemberPhase::Joining(_) => "Joining",
            MemberPhase::Together(_) => "Together",
            MemberPhase::Reforming(_) => "Reforming",
            MemberPhase::Over => "Over",
        }
    }

    /// Returns whether the group must be left, also while it connects, because others re-form or a
    /// member is dead. The owner then calls [`Self::reform`].
    #[must_use]
    pub const fn must_reconfigure(&self) -> bool {
        matches!(&self.phase, MemberPhase::Together(together) if together.reconfigured_by.is_some())
    }

    /// The process that re-forms or is dead, and the evidence, as text for errors.
    #[must_use]
    pub fn reconfigured_by(&self) -> Option<String> {
        let (MemberPhase::Together(together), Some(view)) = (&self.phase, &self.view) else {
            return None;
        };
        let (peer, why) = together.reconfigured_by.as_ref()?;
        Some(match view.roster.position(peer.id) {
            Some(rank) => format!("rank {rank} at {} {why}", peer.address),
            None => format!("the process at {} {why}", peer.address),
        })
    }

    /// Joiners for which the group should stop. A joiner that the last roster has left out waits,
    /// because the next roster would probably leave it out again.
    pub fn joiners(&self, now: Instant) -> impl Iterator<Item = &Peer> {
        let is_due = move |(id, _): &(&Id, &Peer)| {
            let passed_over = self.passed_over.get(id);
            passed_over.is_none_or(|(_, until)| *until <= now)
        };
        self.joiners.iter().filter(is_due).map(|(_, peer)| peer)
    }

    /// Counts how often rosters have left each joiner out, and doubles its pause.
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

    /// Records that all members of the roster are connected, and have the state of the training.
    pub fn connected(&mut self) {
        if let (MemberPhase::Together(together), Some(view)) = (&mut self.phase, &mut self.view) {
            together.is_connected = true;
            view.is_established = true;
            self.has_belonged = true;
            for member in &view.roster.members {
                self.unreached.remove(&member.address);
            }
        }
    }

    /// Leaves a group that has failed, could not connect to `unreached`, or has stopped for
    /// joiners.
    pub fn reform(&mut self, unreached: &[Id], now: Instant) {
        let (MemberPhase::Together(together), Some(view)) = (&self.phase, &self.view) else {
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
        self.phase = MemberPhase::Reforming(Box::new(Reforming {
            since: now,
            lacking: now,
            attempts: 0,
            polled_at: now,
            round: 0,
            propose_at,
            proposal: None,
            follows: None,
            higher: None,
            elsewhere: BTreeMap::new(),
            quarantined: BTreeSet::new(),
        }));
    }

    /// Leaves the job for good. Returns messages for the other members, to be sent once.
    pub fn leave(&mut self) -> Vec<(String, Envelope)> {
        self.end_with(|_| MemberRequest::Leave)
    }

    /// Ends the job after all members have reached the end of the training. Returns messages for
    /// members that may not know, because the group has failed since.
    pub fn finish(&mut self) -> Vec<(String, Envelope)> {
        self.end_with(MemberRequest::Finish)
    }

    fn end_with(&mut self, farewell: impl Fn(Ballot) -> MemberRequest) -> Vec<(String, Envelope)> {
        self.phase = MemberPhase::Over;
        let Some(AcceptedView { roster, .. }) = &self.view else {
            return Vec::new();
        };
        let others = roster.members.iter().filter(|it| it.id != self.me.id);
        others
            .map(|other| self.envelope(other, farewell(roster.ballot)))
            .collect()
    }

    /// Records a proved death, with the evidence.
    fn mark_dead(&mut self, id: Id, how: &'static str) {
        if id != self.me.id {
            self.dead.insert(id);
            self.reconfigure_without(id, how);
        }
        self.joiners.remove(&id);
    }

    /// Marks the group for a new roster if this process is one of its members.
    fn reconfigure_without(&mut self, id: Id, why: &'static str) {
        if let (MemberPhase::Together(together), Some(view)) = (&mut self.phase, &self.view) {
            let member = view.roster.members.iter().find(|it| it.id == id);
            let call = member.map(|member| (member.clone(), why));
            together.reconfigured_by = together.reconfigured_by.take().or(call);
        }
    }

    /// Records a failed connection to an address.
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

    /// Time for which this process lets those before it in the ring propose.
    fn turn(&self) -> Duration {
        let roster = self.view.as_ref().map(|view| &view.roster);
        let position = roster.and_then(|roster| roster.position(self.me.id));
        self.timing.stagger * u32::try_from(position.unwrap_or(0)).unwrap_or(u32::MAX)
    }

    fn envelope(&self, to: &Peer, request: MemberRequest) -> (String, Envelope) {
        let envelope = Envelope {
            from: self.me.clone(),
            to: Some(to.id),
            request,
        };
        (to.address.clone(), envelope)
    }

    /// Returns the next action.
    pub fn step(&mut self, now: Instant) -> Step {
        match &self.phase {
            MemberPhase::Over => Step::Wait(None),
            MemberPhase::Joining(_) => self.step_joining(now),
            MemberPhase::Together(_) => self.step_together(now),
            MemberPhase::Reforming(_) => self.step_reforming(now),
        }
    }

    fn fail(&mut self, fact: NotAgreed) -> Step {
        self.phase = MemberPhase::Over;
        Step::Failed(Error::from(fact))
    }
}

#[cfg(test)]
mod tests;
