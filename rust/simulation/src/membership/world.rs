//! The world of one history: hosts, a network, a queue of events, and what comes of them.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use super::check::Record;
use super::scenario::{Kind, Scenario, Trigger, timing};
use crate::random::Random;
use crate::time::{Clock, MILLISECOND, Moment, SECOND};
use crate::trace::Trace;
use event::Event;
use gradring_core::consensus::member::Member;
use gradring_core::consensus::quorum::{Id, Peer, Roster};
use gradring_core::consensus::timing::Timing;
pub(super) use host::{Group, Host, State};

mod connecting;
mod event;
mod fault;
mod group;
mod host;
mod network;
mod process;

/// A group makes a step in this interval, and looks how its members are.
const STEP: Moment = 400 * MILLISECOND;
/// A member that is silent for so long has failed for the group.
const PEER_TIMEOUT: Moment = 3 * SECOND;
/// All is well again so long after the last fault.
pub(super) const SETTLED_AFTER: Moment = 150 * SECOND;
/// Bound on what one event makes a process do at once.
const STEPS_MAX: usize = 200;
const EVENTS_MAX: u64 = 300_000;

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
                phase: None,
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
                    if member.must_reconfigure() || self.record.last() != Some(*ballot) {
                        return false;
                    }
                    if member.view().is_some_and(|view| {
                        view.roster
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

    pub(super) fn id(&self, host: usize) -> Option<Id> {
        let host = &self.hosts[host];
        let lives = !matches!(host.state, State::Ended(_) | State::NotStarted);
        lives.then_some(host.member.as_ref()?.me().id)
    }

    /// Whether a process has ended or given its id up.
    pub(super) fn is_dead(&self, peer: &Peer) -> bool {
        self.id(number(&peer.address)) != Some(peer.id)
    }
}
