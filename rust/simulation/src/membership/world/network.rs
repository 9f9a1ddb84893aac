//! The network between hosts, and what is sent over it.

use std::rc::Rc;

use super::{Event, State, World, number};
use crate::membership::scenario::{Kind, Trigger};
use crate::time::{Moment, SECOND, nanoseconds};
use gradring_core::consensus::message::{Envelope, Outcome, Reply, Request};

impl World {
    pub(super) fn send(
        &mut self,
        from: usize,
        address: &str,
        envelope: Envelope,
    ) -> Result<(), String> {
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

    pub(super) fn deliver(
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
        let called = member.must_reconfigure();
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

    pub(super) fn delay(&mut self) -> Moment {
        let [_, _, slow] = self.scenario.one_in;
        let most = self.scenario.delay_max;
        if self.random.once_in(slow) {
            self.random.between(most, 3 * SECOND)
        } else {
            self.random.between(100_000, most)
        }
    }

    /// Whether a message gets through, as far as can be told when it is sent.
    pub(super) fn passes(&mut self, from: usize, to: usize) -> bool {
        !self.is_cut(from, to) && !self.random.once_in(self.scenario.one_in[0])
    }

    pub(super) fn is_cut(&self, from: usize, to: usize) -> bool {
        let now = self.clock.now();
        let is = |cut: &(usize, usize, Moment)| cut.0 == from && cut.1 == to && now < cut.2;
        self.cuts.iter().any(is)
    }

    pub(super) fn sent(&mut self, kind: Kind, by: usize) -> Result<(), String> {
        let count = self.sent.entry(kind).or_default();
        *count += 1;
        let count = *count;
        self.trigger(by, |trigger| {
            matches!(trigger, Trigger::Sent { kind: its, number } if its == kind && number == count)
        })
    }

    pub(super) fn answered(&mut self, kind: Kind, by: usize) -> Result<(), String> {
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
}

const fn kind(request: &Request) -> Option<Kind> {
    match request {
        Request::Gather { .. } => Some(Kind::Gather),
        Request::Install(_) => Some(Kind::Install),
        Request::Watch(_) => Some(Kind::Watch),
        Request::Join => Some(Kind::Join),
        Request::Leave | Request::Finish(_) => None,
    }
}

fn shown(request: &Request) -> String {
    match request {
        Request::Gather { ballot, base, .. } => {
            format!("gather {ballot:?} from {:?}", base.roster.ballot)
        }
        Request::Install(roster) => format!("install {:?}", roster.ballot),
        Request::Watch(ballot) => format!("watch {ballot:?}"),
        Request::Join => "join".into(),
        Request::Leave => "leave".into(),
        Request::Finish(ballot) => format!("finish {ballot:?}"),
    }
}

fn answer_shown(reply: &Reply) -> String {
    match reply {
        Reply::Promise { ballot, view, .. } => {
            let at = view.as_ref().map(|view| view.roster.ballot);
            format!("promises {ballot:?}, at {at:?}")
        }
        Reply::Elsewhere(view) => format!("is at {:?}", view.roster.ballot),
        Reply::Noted(_) => "noted".into(),
        other => format!("{other:?}"),
    }
}
