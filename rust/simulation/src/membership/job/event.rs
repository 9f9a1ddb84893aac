//! Events of a job.

use super::{Group, Job, STEP, State};
use crate::world::Happens;
use gradring_proto::consensus::message::{Envelope, Outcome};
use gradring_proto::consensus::quorum::{Ballot, Id};

#[derive(Debug, Clone)]
pub(in super::super) enum Event {
    Start(usize),
    Alarm(usize),
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
    /// A member connects to the others.
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
    /// A member has finished its step, or stops to admit others.
    Return(usize, Ballot),
    Tick,
    Strike(usize, usize),
    /// A stopped process runs again.
    Resume(usize),
}

impl Happens for Event {
    fn process(&self) -> Option<usize> {
        match self {
            Self::Alarm(host) | Self::Connect(host, _) | Self::Return(host, _) => Some(*host),
            Self::Request { to, .. } | Self::Ready { to, .. } | Self::Complete { to, .. } => {
                Some(*to)
            }
            Self::Outcome { host, .. } => Some(*host),
            Self::Start(_) | Self::Tick | Self::Strike(..) | Self::Resume(_) => None,
        }
    }
}

impl Job {
    pub(super) fn perform(&mut self, event: Event) -> Result<(), String> {
        let now = self.world.now();
        let instant = self.world.instant();
        match event {
            Event::Start(host) => self.start(host),
            Event::Alarm(host) => return self.drive(host),
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
                    let had_to_reconfigure = member.must_reconfigure();
                    member.on_outcome(&address, to, &outcome, instant);
                    if !had_to_reconfigure && member.must_reconfigure() {
                        self.come_back(host);
                    }
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
            Event::Strike(index, host) => return self.strike(index, host),
            Event::Tick => {
                self.world.at(now + STEP, Event::Tick);
                return self.tick();
            }
        }
        Ok(())
    }
}
