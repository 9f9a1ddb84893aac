//! The world of one history: hosts, a network, a queue of events, and what comes of them.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use super::super::random::Random;
use super::super::time::{Clock, MILLISECOND, Moment, NEVER, SECOND, nanoseconds};
use super::super::trace::Trace;
use super::check::Record;
use super::scenario::{Fault, Harm, Kind, Scenario, Trigger, timing};
use gradring_core::agreement::member::Member;
use gradring_core::agreement::message::{Envelope, Outcome, Reply, Request, Step};
use gradring_core::agreement::quorum::{Ballot, Id, Peer, Roster};
use gradring_core::agreement::timing::Timing;
use gradring_core::error::Error;

/// A group makes a step in this interval, and looks how its members are.
const STEP: Moment = 400 * MILLISECOND;
/// A member that is silent for so long has failed for the group.
const PEER_TIMEOUT: Moment = 3 * SECOND;
/// All is well again so long after the last fault.
pub(super) const SETTLED_AFTER: Moment = 150 * SECOND;
/// Bound on what one event makes a process do at once.
const STEPS_MAX: usize = 200;
const EVENTS_MAX: u64 = 300_000;

/// What runs on a host.
pub(super) struct Host {
    pub(super) member: Option<Member>,
    pub(super) state: State,
    pub(super) group: Group,
    /// When it went on last after a stop.
    pub(super) resumed: Moment,
    /// Numbers its alarms, so that old ones are known.
    alarm: u64,
    /// Since when it hears nothing of a member of its group.
    silence: Option<Moment>,
    /// Its steps take longer until then, by so much.
    slow: (Moment, Moment),
    /// Position in the record of the last step that its state has in it.
    pub(super) version: usize,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum State {
    NotStarted,
    Lives,
    StoppedUntil(Moment),
    Vanished,
    /// Its address refuses.
    Ended(Option<Error>),
}

/// What a process has of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Group {
    None,
    Connecting {
        ballot: Ballot,
        since: Moment,
        /// For rank 0: who has connected with all.
        ready: BTreeSet<Id>,
    },
    Running(Ballot),
}

#[derive(Debug, Clone)]
enum Event {
    Start(usize),
    Alarm(usize, u64),
    Request {
        from: usize,
        to: usize,
        ticket: u64,
        envelope: Envelope,
    },
    Outcome {
        host: usize,
        ticket: u64,
        address: String,
        to: Option<Id>,
        outcome: Outcome,
    },
    /// A member connects with the others.
    Connect(usize, Ballot),
    Ready {
        to: usize,
        ballot: Ballot,
        id: Id,
    },
    Complete {
        to: usize,
        ballot: Ballot,
    },
    /// It has come back from its step, or stops to let others in.
    Return(usize, Ballot),
    Tick,
    Strike(usize),
    /// A stopped process goes on.
    Resume(usize),
}

impl Event {
    /// The host on which it happens.
    const fn host(&self) -> Option<usize> {
        match self {
            Self::Alarm(host, _) | Self::Connect(host, _) | Self::Return(host, _) => Some(*host),
            Self::Request { to, .. } | Self::Ready { to, .. } | Self::Complete { to, .. } => {
                Some(*to)
            }
            Self::Outcome { host, .. } => Some(*host),
            Self::Start(_) | Self::Tick | Self::Strike(_) | Self::Resume(_) => None,
        }
    }
}

pub(super) struct World {
    pub(super) scenario: Rc<Scenario>,
    pub(super) hosts: Vec<Host>,
    pub(super) record: Record,
    pub(super) clock: Clock,
    pub(super) trace: Trace,
    /// By fault: whom it hit, if it struck.
    pub(super) struck: Vec<Option<usize>>,
    /// When the last fault will be over, of those that ever are.
    pub(super) calm: Moment,
    pub(super) events: u64,
    random: Random,
    timing: Timing,
    queue: BTreeMap<(Moment, u64), Event>,
    added: u64,
    tickets: BTreeSet<u64>,
    /// Interruptions from one host to another.
    pub(super) cuts: Vec<(usize, usize, Moment)>,
    /// The last division into parts, until when, and the parts in which somebody has proposed since.
    divided: Option<(Vec<usize>, Moment, BTreeSet<usize>)>,
    sent: BTreeMap<Kind, u64>,
    answered: BTreeMap<Kind, u64>,
}

/// Runs what `seed` says, until all is settled or should be.
pub(super) fn run(seed: u64, traced: bool) -> (World, Result<(), String>) {
    let mut random = Random::new(seed);
    let scenario = Rc::new(Scenario::new(&mut random));
    let mut world = World::new(scenario, random, traced);
    let result = world.run();
    (world, result)
}

const fn kind(request: &Request) -> Option<Kind> {
    match request {
        Request::Gather { .. } => Some(Kind::Gather),
        Request::Install(_) => Some(Kind::Install),
        Request::Join => Some(Kind::Join),
        Request::Leave => None,
    }
}

fn number(address: &str) -> usize {
    address.parse().expect("addresses are numbers")
}

impl World {
    fn new(scenario: Rc<Scenario>, mut random: Random, traced: bool) -> Self {
        let clock = Clock::new();
        let hosts = scenario.hosts();
        let mut world = Self {
            hosts: Vec::new(),
            record: Record::default(),
            trace: Trace::new(clock.clone(), traced),
            struck: vec![None; scenario.faults.len()],
            calm: 0,
            events: 0,
            timing: timing(),
            queue: BTreeMap::new(),
            added: 0,
            tickets: BTreeSet::new(),
            cuts: Vec::new(),
            divided: None,
            sent: BTreeMap::new(),
            answered: BTreeMap::new(),
            random: random.fork(),
            scenario,
            clock,
        };
        for _ in 0..hosts {
            world.hosts.push(Host {
                member: None,
                state: State::NotStarted,
                group: Group::None,
                resumed: 0,
                alarm: 0,
                silence: None,
                slow: (0, 0),
                version: 0,
            });
        }
        let founders: Vec<_> = (0..world.scenario.founders)
            .map(|host| world.new_peer(host))
            .collect();
        let roster = Roster::founding(founders.clone());
        for (host, me) in founders.into_iter().enumerate() {
            let workers = world.scenario.workers.clone();
            world.hosts[host].member = Some(Member::founding(
                me,
                roster.clone(),
                world.timing.clone(),
                workers,
            ));
            world.hosts[host].state = State::Lives;
            world.arrange(0, Event::Alarm(host, 0));
        }
        let scenario = Rc::clone(&world.scenario);
        for (index, at) in scenario.joiners.iter().enumerate() {
            world.calm = world.calm.max(*at);
            world.arrange(*at, Event::Start(scenario.founders + index));
        }
        for (index, fault) in scenario.faults.iter().enumerate() {
            if let Trigger::At(at) = fault.trigger {
                world.calm = world.calm.max(at);
                world.arrange(at, Event::Strike(index));
            }
        }
        world.arrange(STEP, Event::Tick);
        world
    }

    fn new_peer(&mut self, host: usize) -> Peer {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&self.random.next().to_be_bytes());
        id[8..].copy_from_slice(&self.random.next().to_be_bytes());
        Peer {
            id: Id(id),
            address: host.to_string(),
        }
    }

    fn arrange(&mut self, at: Moment, event: Event) {
        self.added += 1;
        self.queue.insert((at, self.added), event);
    }

    fn after(&mut self, delay: Moment, event: Event) {
        self.arrange(self.clock.now() + delay, event);
    }

    fn run(&mut self) -> Result<(), String> {
        while let Some(((at, _), event)) = self.queue.pop_first() {
            if at > self.calm + SETTLED_AFTER {
                break;
            }
            self.events += 1;
            if self.events > EVENTS_MAX {
                return Err("it never ends".into());
            }
            self.clock.advance_to(at.max(self.clock.now()));
            if let Some(host) = event.host() {
                match self.hosts[host].state {
                    // What waits in its sockets comes when it goes on.
                    State::StoppedUntil(until) if until > at => {
                        let later = until + self.random.below(1_000_000) as u64;
                        self.arrange(later, event);
                        continue;
                    }
                    State::Vanished | State::NotStarted | State::Ended(_) => continue,
                    _ => {}
                }
            }
            let is_tick = matches!(event, Event::Tick);
            self.happen(event)?;
            if is_tick && at > self.calm && self.is_settled() {
                break;
            }
        }
        self.verify()
    }

    /// Whether nothing more is to come: all that live are one group with room for nobody.
    fn is_settled(&self) -> bool {
        let mut ballots = BTreeSet::new();
        for (number, host) in self.hosts.iter().enumerate() {
            match (&host.state, &host.group) {
                (State::Lives, Group::Running(ballot)) => {
                    ballots.insert(*ballot);
                    let member = host.member.as_ref().expect("it runs");
                    if member.is_called() || self.record.last() != Some(*ballot) {
                        return false;
                    }
                    if member.standpoint().is_some_and(|standpoint| {
                        standpoint
                            .roster
                            .members
                            .iter()
                            .any(|peer| !self.is_with(number, peer, *ballot))
                    }) {
                        return false;
                    }
                }
                (State::Ended(_) | State::Vanished | State::NotStarted, _) => {}
                _ => return false,
            }
        }
        ballots.len() <= 1
    }

    fn is_with(&self, from: usize, peer: &Peer, ballot: Ballot) -> bool {
        let to = number(&peer.address);
        let host = &self.hosts[to];
        host.group == Group::Running(ballot)
            && host.state == State::Lives
            && self.id(to) == Some(peer.id)
            && !self.is_cut(from, to)
            && !self.is_cut(to, from)
    }

    pub(super) fn id(&self, host: usize) -> Option<Id> {
        let host = &self.hosts[host];
        let lives = !matches!(host.state, State::Ended(_) | State::NotStarted);
        lives.then_some(host.member.as_ref()?.me().id)
    }

    /// Whether a process has ended or given its id up.
    pub(super) fn is_dead(&self, peer: &Peer) -> bool {
        self.id(number(&peer.address)) != Some(peer.id)
    }

    fn is_cut(&self, from: usize, to: usize) -> bool {
        let now = self.clock.now();
        let is = |cut: &(usize, usize, Moment)| cut.0 == from && cut.1 == to && now < cut.2;
        self.cuts.iter().any(is)
    }

    fn happen(&mut self, event: Event) -> Result<(), String> {
        let now = self.clock.now();
        let instant = self.clock.instant();
        match event {
            Event::Start(host) => self.start(host),
            Event::Alarm(host, alarm) => {
                if alarm == self.hosts[host].alarm {
                    return self.drive(host);
                }
            }
            Event::Request {
                from,
                to,
                ticket,
                envelope,
            } => return self.deliver(from, to, ticket, envelope),
            Event::Outcome {
                host,
                ticket,
                address,
                to,
                outcome,
            } => {
                let is_first = self.tickets.remove(&ticket);
                if is_first || outcome != Outcome::Silent {
                    let member = self.hosts[host].member.as_mut().expect("it lives");
                    member.heard(&address, to, &outcome, instant);
                    return self.drive(host);
                }
            }
            Event::Connect(host, ballot) => return self.connect(host, ballot),
            Event::Ready { to, ballot, id } => {
                if let Group::Connecting {
                    ballot: at, ready, ..
                } = &mut self.hosts[to].group
                    && *at == ballot
                {
                    ready.insert(id);
                    return self.complete(to, ballot);
                }
            }
            Event::Complete { to, ballot } => {
                if matches!(&self.hosts[to].group, Group::Connecting { ballot: at, .. } if *at == ballot)
                {
                    return self.become_connected(to, ballot);
                }
            }
            Event::Return(host, ballot) => {
                if self.hosts[host].at() == Some(ballot) {
                    return self.reform(host, &[]);
                }
            }
            Event::Resume(host) => {
                if self.hosts[host].state == State::StoppedUntil(now) {
                    self.hosts[host].state = State::Lives;
                    self.hosts[host].resumed = now;
                }
            }
            Event::Strike(index) => {
                let fault = self.scenario.faults[index].clone();
                return self.strike(index, &fault, fault.host);
            }
            Event::Tick => {
                self.arrange(now + STEP, Event::Tick);
                return self.tick();
            }
        }
        Ok(())
    }

    fn start(&mut self, host: usize) {
        let me = self.new_peer(host);
        let mut addresses: BTreeSet<String> = (0..self.scenario.founders)
            .map(|it| it.to_string())
            .collect();
        // One may know few, and those may be dead.
        while addresses.len() > 2 && self.random.once_in(2) {
            addresses.pop_first();
        }
        let (timing, workers) = (self.timing.clone(), self.scenario.workers.clone());
        self.trace
            .say(|| format!("host {host} starts as {:?}", me.id));
        let member = Member::joining(me, addresses, timing, workers, self.clock.instant());
        let host_number = host;
        let host = &mut self.hosts[host];
        host.member = Some(member);
        host.state = State::Lives;
        host.group = Group::None;
        host.version = 0;
        host.alarm += 1;
        let alarm = host.alarm;
        self.after(0, Event::Alarm(host_number, alarm));
    }

    /// Does what a process wants done.
    fn drive(&mut self, host: usize) -> Result<(), String> {
        for _ in 0..STEPS_MAX {
            if self.hosts[host].state != State::Lives {
                return Ok(());
            }
            let instant = self.clock.instant();
            let member = self.hosts[host].member.as_mut().expect("it lives");
            match member.step(instant) {
                Step::Send(address, envelope) => self.send(host, &address, envelope)?,
                Step::Connect(roster) => {
                    let me = member.me().id;
                    self.record.accepted(&roster, me);
                    self.trace.say(|| {
                        let addresses: Vec<_> =
                            roster.members.iter().map(|it| &*it.address).collect();
                        format!(
                            "host {host} accepts {:?} of {}",
                            roster.ballot,
                            addresses.join(" ")
                        )
                    });
                    self.hosts[host].silence = None;
                    self.hosts[host].group = Group::Connecting {
                        ballot: roster.ballot,
                        since: self.clock.now(),
                        ready: BTreeSet::new(),
                    };
                    let delay = self.delay();
                    self.after(delay, Event::Connect(host, roster.ballot));
                }
                Step::Excluded => {
                    self.record.count("gave its id up to join anew");
                    let id = self.new_peer(host).id;
                    self.trace
                        .say(|| format!("host {host} is excluded, and now {id:?}"));
                    let member = self.hosts[host].member.take().expect("it lives");
                    self.hosts[host].member = Some(member.rejoining(id, instant));
                    self.hosts[host].group = Group::None;
                    self.hosts[host].version = 0;
                }
                Step::Failed(error) => {
                    self.trace.say(|| format!("host {host}: {error}"));
                    self.record.failed(&error);
                    self.had_to_fail(host, &error)?;
                    self.hosts[host].state = State::Ended(Some(error));
                    self.hosts[host].group = Group::None;
                }
                Step::Wait(until) => {
                    let host_number = host;
                    let host = &mut self.hosts[host];
                    host.alarm += 1;
                    let alarm = host.alarm;
                    if let Some(until) = until {
                        let at = self.clock.moment(until).max(self.clock.now() + 1);
                        self.arrange(at, Event::Alarm(host_number, alarm));
                    }
                    return Ok(());
                }
            }
        }
        Err(format!("host {host} never waits"))
    }

    fn delay(&mut self) -> Moment {
        let [_, _, slow] = self.scenario.one_in;
        let most = self.scenario.delay_max;
        if self.random.once_in(slow) {
            self.random.between(most, 3 * SECOND)
        } else {
            self.random.between(100_000, most)
        }
    }

    /// Whether a message gets through, as far as can be told when it is sent.
    fn passes(&mut self, from: usize, to: usize) -> bool {
        !self.is_cut(from, to) && !self.random.once_in(self.scenario.one_in[0])
    }

    fn send(&mut self, from: usize, address: &str, envelope: Envelope) -> Result<(), String> {
        let to = number(address);
        self.trace
            .say(|| format!("{from} -> {to}  {}", shown(&envelope.request)));
        let ticket = self.added + 1;
        self.tickets.insert(ticket);
        let outcome = |outcome| Event::Outcome {
            host: from,
            ticket,
            address: address.to_owned(),
            to: envelope.to,
            outcome,
        };
        self.after(nanoseconds(self.timing.request), outcome(Outcome::Silent));
        let what = kind(&envelope.request);
        if self.passes(from, to) {
            let delay = self.delay();
            let refuses = matches!(self.hosts[to].state, State::Ended(_) | State::NotStarted);
            if refuses && !self.is_cut(to, from) {
                self.after(delay, outcome(Outcome::Refused));
            } else if !refuses {
                let request = Event::Request {
                    from,
                    to,
                    ticket,
                    envelope,
                };
                if self.random.once_in(self.scenario.one_in[1]) {
                    let second = delay + self.random.between(0, 5 * SECOND);
                    self.after(second, request.clone());
                }
                self.after(delay, request);
            }
        }
        if what == Some(Kind::Gather) {
            self.note_part(from);
        }
        what.map_or(Ok(()), |kind| self.sent(kind, from))
    }

    /// Counts proposals in more than one part of a divided network that has several hosts.
    fn note_part(&mut self, host: usize) {
        let Some((parts, until, proposed)) = &mut self.divided else {
            return;
        };
        let part = parts[host];
        let size = parts.iter().filter(|it| **it == part).count();
        if size > 1 && self.clock.now() < *until && proposed.insert(part) && proposed.len() == 2 {
            self.record.count("both parts of a divided network tried");
        }
    }

    fn sent(&mut self, kind: Kind, by: usize) -> Result<(), String> {
        let count = self.sent.entry(kind).or_default();
        *count += 1;
        let count = *count;
        self.trigger(by, |trigger| {
            matches!(trigger, Trigger::Sent { kind: its, number } if its == kind && number == count)
        })
    }

    fn answered(&mut self, kind: Kind, by: usize) -> Result<(), String> {
        let count = self.answered.entry(kind).or_default();
        *count += 1;
        let count = *count;
        self.trigger(by, |trigger| {
            matches!(trigger, Trigger::Answered { kind: its, number } if its == kind && number == count)
        })
    }

    fn trigger(&mut self, host: usize, is: impl Fn(Trigger) -> bool) -> Result<(), String> {
        let scenario = Rc::clone(&self.scenario);
        for (index, fault) in scenario.faults.iter().enumerate() {
            if self.struck[index].is_none() && is(fault.trigger) {
                self.strike(index, fault, host)?;
            }
        }
        Ok(())
    }

    fn deliver(
        &mut self,
        from: usize,
        to: usize,
        ticket: u64,
        envelope: Envelope,
    ) -> Result<(), String> {
        if self.is_cut(from, to) {
            return Ok(());
        }
        let instant = self.clock.instant();
        let what = kind(&envelope.request);
        let member = self.hosts[to].member.as_mut().expect("it lives");
        let reply = member.answer(&envelope, instant);
        let called = member.is_called();
        self.record.replied(&reply);
        self.trace
            .say(|| format!("{from} <- {to}  {}", answer_shown(&reply)));
        if called {
            self.come_back(to);
        }
        self.drive(to)?;
        let outcome = Event::Outcome {
            host: from,
            ticket,
            address: to.to_string(),
            to: envelope.to,
            outcome: Outcome::Reply(reply),
        };
        if self.passes(to, from) {
            let delay = self.delay();
            if self.random.once_in(self.scenario.one_in[1]) {
                let second = delay + self.random.between(0, 5 * SECOND);
                self.after(second, outcome.clone());
            }
            self.after(delay, outcome);
        }
        what.map_or(Ok(()), |kind| self.answered(kind, to))
    }

    /// A process leaves its group as soon as its step is over.
    fn come_back(&mut self, host: usize) {
        let Some(ballot) = self.hosts[host].at() else {
            return;
        };
        let (until, by) = self.hosts[host].slow;
        let slow = if self.clock.now() < until {
            by
        } else {
            300 * MILLISECOND
        };
        let delay = self.random.between(0, slow);
        self.after(delay, Event::Return(host, ballot));
    }

    fn reform(&mut self, host: usize, unreached: &[Id]) -> Result<(), String> {
        let instant = self.clock.instant();
        if let Group::Connecting { ballot, .. } = &self.hosts[host].group {
            self.record.gave_up_connecting(*ballot);
        }
        self.trace.say(|| format!("host {host} re-forms"));
        self.hosts[host].group = Group::None;
        self.hosts[host].silence = None;
        let member = self.hosts[host].member.as_mut().expect("it lives");
        member.reform(unreached, instant);
        self.drive(host)
    }

    fn connect(&mut self, host: usize, ballot: Ballot) -> Result<(), String> {
        let Group::Connecting {
            ballot: at, since, ..
        } = self.hosts[host].group
        else {
            return Ok(());
        };
        if at != ballot {
            return Ok(());
        }
        let now = self.clock.now();
        let roster = self.roster(host);
        let (mut missing, mut gone) = (Vec::new(), false);
        for peer in &roster.members {
            let other = number(&peer.address);
            let is_there = self.id(other) == Some(peer.id)
                && self.hosts[other].state == State::Lives
                && !self.is_cut(host, other)
                && !self.is_cut(other, host);
            gone |= self.is_dead(peer) && !self.is_cut(host, other) && !self.is_cut(other, host);
            if !is_there {
                missing.push(peer.id);
            } else if self.hosts[other].at() != Some(ballot) {
                // It has not accepted yet, or has given up.
                missing.push(Id([0; 16]));
            }
        }
        if gone || now > since + nanoseconds(self.timing.connect) {
            return self.reform(host, &missing);
        }
        if missing.is_empty() {
            // It has the newest state there is among them before it says that it is ready.
            let members = roster.members.iter().map(|peer| number(&peer.address));
            let newest = members.map(|other| self.hosts[other].version).max();
            self.hosts[host].version = newest.unwrap_or(0);
            let first = number(&roster.members[0].address);
            let id = self.id(host).expect("it lives");
            if self.passes(host, first) {
                let delay = if first == host { 0 } else { self.delay() };
                self.after(
                    delay,
                    Event::Ready {
                        to: first,
                        ballot,
                        id,
                    },
                );
            }
            self.sent(Kind::Ready, host)?;
        }
        self.after(300 * MILLISECOND, Event::Connect(host, ballot));
        Ok(())
    }

    /// Rank 0 says so when all are ready.
    fn complete(&mut self, host: usize, ballot: Ballot) -> Result<(), String> {
        let Group::Connecting { ready, .. } = &self.hosts[host].group else {
            return Ok(());
        };
        let roster = self.roster(host);
        if roster
            .members
            .iter()
            .any(|member| !ready.contains(&member.id))
        {
            return Ok(());
        }
        for member in roster.members.iter().skip(1) {
            let to = number(&member.address);
            if self.passes(host, to) {
                let delay = self.delay();
                self.after(delay, Event::Complete { to, ballot });
            }
            self.sent(Kind::Complete, host)?;
            if self.hosts[host].state != State::Lives {
                return Ok(());
            }
        }
        self.become_connected(host, ballot)
    }

    fn become_connected(&mut self, host: usize, ballot: Ballot) -> Result<(), String> {
        let it = &mut self.hosts[host];
        it.group = Group::Running(ballot);
        it.member.as_mut().expect("it lives").connected();
        self.trace.say(|| format!("host {host} runs in {ballot:?}"));
        self.only_one_is_alive()
    }

    fn roster(&self, host: usize) -> Roster {
        let member = self.hosts[host].member.as_ref().expect("it lives");
        member
            .standpoint()
            .expect("it has accepted one")
            .roster
            .clone()
    }

    /// Groups make a step, and notice what has become of their members.
    fn tick(&mut self) -> Result<(), String> {
        let running: BTreeMap<Ballot, usize> = (0..self.hosts.len())
            .filter_map(|host| match self.hosts[host].group {
                Group::Running(ballot) if self.hosts[host].state == State::Lives => {
                    Some((ballot, host))
                }
                _ => None,
            })
            .collect();
        for (ballot, host) in running {
            let roster = self.roster(host);
            let hosts: Vec<_> = roster
                .members
                .iter()
                .map(|it| number(&it.address))
                .collect();
            let all = |from: &usize| {
                roster
                    .members
                    .iter()
                    .all(|peer| self.is_with(*from, peer, ballot))
            };
            if hosts.iter().all(all) {
                self.progress(&roster, &hosts)?;
                if self.random.once_in(3) {
                    self.let_others_in(&roster, &hosts);
                }
            }
        }
        for host in 0..self.hosts.len() {
            self.look_around(host)?;
        }
        Ok(())
    }

    /// After a commit, a group that has room and is asked stops in good order.
    fn let_others_in(&mut self, roster: &Roster, hosts: &[usize]) {
        let instant = self.clock.instant();
        let members = || {
            hosts
                .iter()
                .filter_map(|host| self.hosts[*host].member.as_ref())
        };
        let unreached: BTreeSet<_> = members().flat_map(|it| it.unreached(instant)).collect();
        let joiners = members().flat_map(Member::joiners);
        let waits = joiners
            .filter(|it| !unreached.contains(&it.address))
            .count()
            > 0;
        if waits && roster.members.len() < *self.scenario.workers.end() {
            for &host in hosts {
                let delay = self.random.between(0, 200 * MILLISECOND);
                self.after(delay, Event::Return(host, roster.ballot));
            }
        }
    }

    fn look_around(&mut self, host: usize) -> Result<(), String> {
        let Group::Running(ballot) = self.hosts[host].group else {
            return Ok(());
        };
        if self.hosts[host].state != State::Lives {
            return Ok(());
        }
        let now = self.clock.now();
        let (mut silent, mut gone) = (false, false);
        for peer in &self.roster(host).members {
            let other = number(&peer.address);
            if self.is_with(host, peer, ballot) {
                continue;
            }
            let is_heard = !self.is_cut(other, host)
                && !matches!(
                    self.hosts[other].state,
                    State::Vanished | State::StoppedUntil(_)
                );
            // Who still connects may be about to run.
            let connects = self.hosts[other].at() == Some(ballot);
            if is_heard && !connects {
                gone = true
            } else {
                silent = true
            }
        }
        let since = silent.then(|| *self.hosts[host].silence.get_or_insert(now));
        self.hosts[host].silence = since;
        let is_late = since.is_some_and(|since| now >= since + PEER_TIMEOUT);
        if is_late || gone && self.random.once_in(2) {
            self.come_back(host);
        }
        Ok(())
    }

    fn strike(&mut self, index: usize, fault: &Fault, host: usize) -> Result<(), String> {
        let now = self.clock.now();
        if !matches!(self.hosts[host].state, State::Lives) {
            return Ok(());
        }
        self.struck[index] = Some(host);
        self.trace.say(|| format!("host {host}: {:?}", fault.harm));
        let lasts = fault.harm.lasts();
        if lasts < NEVER {
            self.calm = self.calm.max(now + lasts);
        }
        self.observe(fault, host);
        match &fault.harm {
            Harm::Kill => self.end(host),
            Harm::Replace(after) => {
                self.end(host);
                self.after(*after, Event::Start(host));
            }
            Harm::Vanish => {
                self.hosts[host].state = State::Vanished;
            }
            Harm::Stop(lasts) => {
                self.hosts[host].state = State::StoppedUntil(now + lasts);
                self.after(*lasts, Event::Resume(host));
            }
            Harm::Leave => {
                let calls = self.hosts[host].member.as_mut().expect("it lives").leave();
                for (address, envelope) in calls {
                    self.send(host, &address, envelope)?;
                }
                self.end(host);
            }
            Harm::Break => {
                for other in 0..self.hosts.len() {
                    if self.hosts[other].at() == self.hosts[host].at() {
                        self.come_back(other);
                    }
                }
            }
            Harm::Slow(by, lasts) => self.hosts[host].slow = (now + lasts, *by),
            Harm::Divide(parts, lasts) => {
                let until = now.saturating_add(*lasts);
                self.divided = Some((parts.clone(), until, BTreeSet::new()));
                for (from, to) in self.pairs() {
                    if parts[from] != parts[to] {
                        self.cuts.push((from, to, until));
                    }
                }
            }
            Harm::Fray(parts, back) => {
                for (from, to) in self.pairs() {
                    if parts[from] != parts[to] {
                        self.cuts.push((from, to, now + back[from].min(back[to])));
                    }
                }
            }
            Harm::Mute(to, lasts) => {
                let pairs = self.pairs().into_iter();
                let cuts = pairs.filter(|&(from, other)| from == host && to[other]);
                self.cuts
                    .extend(cuts.map(|(from, to)| (from, to, now + lasts)));
            }
        }
        Ok(())
    }

    fn pairs(&self) -> Vec<(usize, usize)> {
        let all = 0..self.hosts.len();
        let pairs = all
            .clone()
            .flat_map(|from| all.clone().map(move |to| (from, to)));
        pairs.filter(|(from, to)| from != to).collect()
    }

    fn end(&mut self, host: usize) {
        self.hosts[host].state = State::Ended(None);
        self.hosts[host].group = Group::None;
    }
}

impl Host {
    /// The roster in whose group it is or wants to be.
    pub(super) const fn at(&self) -> Option<Ballot> {
        match self.group {
            Group::None => None,
            Group::Connecting { ballot, .. } | Group::Running(ballot) => Some(ballot),
        }
    }
}

fn shown(request: &Request) -> String {
    match request {
        Request::Gather { ballot, base, .. } => {
            format!("gather {ballot:?} from {:?}", base.roster.ballot)
        }
        Request::Install(roster) => format!("install {:?}", roster.ballot),
        Request::Join => "join".into(),
        Request::Leave => "leave".into(),
    }
}

fn answer_shown(reply: &Reply) -> String {
    match reply {
        Reply::Promise {
            ballot, standpoint, ..
        } => {
            let at = standpoint
                .as_ref()
                .map(|standpoint| standpoint.roster.ballot);
            format!("promises {ballot:?}, at {at:?}")
        }
        Reply::Elsewhere(standpoint) => format!("is at {:?}", standpoint.roster.ballot),
        Reply::Noted(_) => "noted".into(),
        other => format!("{other:?}"),
    }
}
