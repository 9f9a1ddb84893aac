//! Job of one history: its hosts, its network, and its reactions to events.

use std::collections::BTreeSet;
use std::rc::Rc;

use super::record::Record;
use super::scenario::{Harm, Kind, Scenario, timing};
use crate::world::every::Without;
use crate::world::faults::Faults;
use crate::world::random::Random;
use crate::world::time::{MILLISECOND, Moment, SECOND};
use crate::world::{self, Happens as _, Subject, World};
use event::Event;
use gradring_proto::consensus::member::Member;
use gradring_proto::consensus::quorum::{Id, Peer, Roster};
use gradring_proto::consensus::timing::Timing;
pub(super) use host::{Group, Host, State};

mod connecting;
mod event;
mod fault;
mod group;
mod host;
mod network;
mod process;

/// Interval in which a group makes a step and checks its members.
const STEP: Moment = 400 * MILLISECOND;
/// Silence after which a group counts a member as failed.
const PEER_TIMEOUT: Moment = 3 * SECOND;
/// Time after the last fault when all must be well again.
pub(super) const SETTLED_AFTER: Moment = 150 * SECOND;
/// Limit of the actions of one process after one event.
const STEPS_MAX: usize = 200;

pub(super) struct Job {
    pub(super) scenario: Rc<Scenario>,
    pub(super) hosts: Vec<Host>,
    pub(super) record: Record,
    pub(super) world: World<Event>,
    pub(super) faults: Faults<Kind, usize, Harm>,
    /// Time at which the last temporary fault is over.
    pub(super) calm: Moment,
    /// True once no further change can follow.
    settled: bool,
    timing: Timing,
    /// Number of requests sent, and tickets of those without an outcome.
    asked: u64,
    tickets: BTreeSet<u64>,
    /// Last division of the network: the part of each host, its end, and the parts in which a host
    /// has proposed since.
    divided: Option<(Vec<usize>, Moment, BTreeSet<usize>)>,
}

/// Runs the history of `seed`, until it is settled or reaches its limit.
pub(super) fn run(seed: u64, without: &Without, traced: bool) -> (Job, Result<(), String>) {
    let mut random = Random::new(seed);
    let mut scenario = Scenario::new(&mut random);
    without.apply(&mut scenario.faults);
    let mut job = Job::new(Rc::new(scenario), random.fork(), traced);
    let result = world::run(&mut job).and_then(|()| job.verify());
    (job, result)
}

fn number(address: &str) -> usize {
    address.parse().expect("addresses are numbers")
}

impl Job {
    fn new(scenario: Rc<Scenario>, random: Random, traced: bool) -> Self {
        let hosts = scenario.hosts();
        let mut job = Self {
            hosts: Vec::new(),
            record: Record::default(),
            world: World::new(hosts, scenario.weather, random, traced),
            faults: Faults::new(scenario.faults.clone()),
            calm: 0,
            settled: false,
            timing: timing(),
            asked: 0,
            tickets: BTreeSet::new(),
            divided: None,
            scenario,
        };
        for _ in 0..hosts {
            job.hosts.push(Host {
                member: None,
                phase: None,
                state: State::NotStarted,
                group: Group::None,
                resumed: 0,
                silence: None,
                slow: (0, 0),
                version: 0,
            });
        }
        let founders: Vec<_> = (0..job.scenario.founders)
            .map(|host| job.new_peer(host))
            .collect();
        let roster = Roster::founding(founders.clone());
        for (host, me) in founders.into_iter().enumerate() {
            let workers = job.scenario.workers.clone();
            job.hosts[host].member = Some(Member::founding(
                me,
                roster.clone(),
                job.timing.clone(),
                workers,
            ));
            job.hosts[host].state = State::Lives;
            job.world.set_alarm(host, 0, Event::Alarm(host));
        }
        let scenario = Rc::clone(&job.scenario);
        for (index, at) in scenario.joiners.iter().enumerate() {
            job.calm = job.calm.max(*at);
            job.world.at(*at, Event::Start(scenario.founders + index));
        }
        for (index, at, host) in job.faults.timed() {
            job.calm = job.calm.max(at);
            job.world.at(at, Event::Strike(index, host));
        }
        job.world.at(STEP, Event::Tick);
        job
    }

    /// Returns whether the history is settled: all live processes are in one group that admits no
    /// more.
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

    /// Returns whether a process has ended or has given up its id.
    pub(super) fn is_dead(&self, peer: &Peer) -> bool {
        self.id(number(&peer.address)) != Some(peer.id)
    }
}

impl Subject for Job {
    type Event = Event;
    const EVENTS_MAX: u64 = 300_000;

    fn world(&mut self) -> &mut World<Event> {
        &mut self.world
    }

    fn limit(&self) -> Moment {
        self.calm + SETTLED_AFTER
    }

    fn happen(&mut self, event: Event) -> Result<(), String> {
        let state = event.process().map(|host| &self.hosts[host].state);
        if let Some(State::Vanished | State::NotStarted | State::Ended(_)) = state {
            return Ok(());
        }
        let is_tick = matches!(event, Event::Tick);
        self.perform(event)?;
        self.settled = is_tick && self.world.now() > self.calm && self.is_settled();
        Ok(())
    }

    fn is_over(&self) -> bool {
        self.settled
    }
}
