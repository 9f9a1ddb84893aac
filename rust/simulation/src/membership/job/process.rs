//! A process, which carries out the steps of its member.

use std::collections::BTreeSet;

use super::{Event, Group, Job, STEPS_MAX, State};
use crate::world::time::MILLISECOND;
use gradring_proto::consensus::member::Member;
use gradring_proto::consensus::message::Step;
use gradring_proto::consensus::quorum::{Id, Peer};

impl Job {
    pub(super) fn new_peer(&mut self, host: usize) -> Peer {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&self.world.random.next().to_be_bytes());
        id[8..].copy_from_slice(&self.world.random.next().to_be_bytes());
        Peer {
            id: Id(id),
            address: host.to_string(),
        }
    }

    pub(super) fn start(&mut self, host: usize) {
        let me = self.new_peer(host);
        let mut addresses: BTreeSet<String> = (0..self.scenario.founders)
            .map(|it| it.to_string())
            .collect();
        // A joiner may know only a few addresses, perhaps of dead processes.
        while addresses.len() > 2 && self.world.random.once_in(2) {
            addresses.pop_first();
        }
        let (timing, workers) = (self.timing.clone(), self.scenario.workers.clone());
        self.world
            .say(|| format!("host {host} starts as {:?}", me.id));
        let member = Member::joining(me, addresses, timing, workers, self.world.instant());
        let it = &mut self.hosts[host];
        it.member = Some(member);
        it.phase = None;
        it.state = State::Lives;
        it.group = Group::None;
        it.version = 0;
        let now = self.world.now();
        self.world.set_alarm(host, now, Event::Alarm(host));
    }

    /// Carries out all steps that the member of a host wants.
    pub(super) fn drive(&mut self, host: usize) -> Result<(), String> {
        for _ in 0..STEPS_MAX {
            if self.hosts[host].state != State::Lives {
                return Ok(());
            }
            let instant = self.world.instant();
            self.note_phase(host);
            let member = self.hosts[host].member.as_mut().expect("it lives");
            let step = member.step(instant);
            self.note_phase(host);
            let member = self.hosts[host].member.as_mut().expect("it lives");
            match step {
                Step::Send(address, envelope) => self.send(host, &address, envelope)?,
                Step::Connect(roster) => {
                    let me = member.me().id;
                    self.record.accepted(&roster, me, self.world.now())?;
                    self.world.say(|| {
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
                        since: self.world.now(),
                        ready: BTreeSet::new(),
                    };
                    let delay = self.world.delay();
                    self.world.after(delay, Event::Connect(host, roster.ballot));
                }
                Step::Excluded => {
                    self.record.count("gave its id up to join anew");
                    let id = self.new_peer(host).id;
                    self.world
                        .say(|| format!("host {host} is excluded, and now {id:?}"));
                    let member = self.hosts[host].member.take().expect("it lives");
                    self.hosts[host].member = Some(member.rejoining(id, instant));
                    self.hosts[host].group = Group::None;
                    self.hosts[host].version = 0;
                }
                // No scenario reaches the end of its training.
                Step::Finished => return Err(format!("host {host} has finished")),
                Step::Failed(error) => {
                    self.world.say(|| format!("host {host}: {error}"));
                    self.record.failed(&error);
                    self.had_to_fail(host, &error)?;
                    self.hosts[host].state = State::Ended(Some(error));
                    self.hosts[host].group = Group::None;
                }
                Step::Wait(until) => {
                    self.world.clear_alarm(host);
                    if let Some(until) = until {
                        let at = self.world.clock.moment(until);
                        self.world.set_alarm(host, at, Event::Alarm(host));
                    }
                    return Ok(());
                }
            }
        }
        Err(format!("host {host} never waits"))
    }

    /// Records a change of the member's state.
    pub(super) fn note_phase(&mut self, host: usize) {
        let host = &mut self.hosts[host];
        let now = host.member.as_ref().map(Member::phase);
        let before = std::mem::replace(&mut host.phase, now);
        if let (Some(before), Some(now)) = (before, now)
            && before != now
        {
            self.record.moves.insert((before, now));
        }
    }

    /// A process leaves its group as soon as its step is over.
    pub(super) fn come_back(&mut self, host: usize) {
        let Some(ballot) = self.hosts[host].at() else {
            return;
        };
        let (until, by) = self.hosts[host].slow;
        let slow = if self.world.now() < until {
            by
        } else {
            300 * MILLISECOND
        };
        let delay = self.world.random.between(0, slow);
        self.world.after(delay, Event::Return(host, ballot));
    }

    pub(super) fn reform(&mut self, host: usize, unreached: &[Id]) -> Result<(), String> {
        let instant = self.world.instant();
        if let Group::Connecting { ballot, .. } = &self.hosts[host].group {
            self.record.gave_up_connecting(*ballot);
        }
        self.world.say(|| format!("host {host} re-forms"));
        self.hosts[host].group = Group::None;
        self.hosts[host].silence = None;
        let member = self.hosts[host].member.as_mut().expect("it lives");
        member.reform(unreached, instant);
        self.drive(host)
    }

    pub(super) fn end(&mut self, host: usize) {
        self.hosts[host].state = State::Ended(None);
        self.hosts[host].group = Group::None;
    }
}
