//! Network between hosts, and its messages.

use super::{Event, Job, State, number};
use crate::membership::scenario::Kind;
use crate::world::faults::Hits;
use crate::world::time::nanoseconds;
use gradring_proto::consensus::message::{Envelope, MemberRequest, Outcome, Reply};

impl Job {
    pub(super) fn send(
        &mut self,
        from: usize,
        address: &str,
        envelope: Envelope,
    ) -> Result<(), String> {
        let to = number(address);
        self.world
            .say(|| format!("{from} -> {to}  {}", shown(&envelope.request)));
        self.asked += 1;
        let ticket = self.asked;
        self.tickets.insert(ticket);
        let outcome = |outcome| Event::Outcome {
            host: from,
            ticket,
            address: address.to_owned(),
            to: envelope.to,
            outcome,
        };
        self.world
            .after(nanoseconds(self.timing.request), outcome(Outcome::Silent));
        let what = kind(&envelope.request);
        match self.hosts[to].state {
            State::Ended(_) | State::NotStarted => {
                if self.world.passes(from, to) && !self.world.is_cut(to, from) {
                    let delay = self.world.delay();
                    self.world.after(delay, outcome(Outcome::Refused));
                }
            }
            _ => {
                let request = Event::Request {
                    from,
                    to,
                    ticket,
                    envelope,
                };
                self.world.send(from, to, request);
            }
        }
        if what == Some(Kind::Gather) {
            self.note_part(from);
        }
        what.map_or(Ok(()), |kind| self.count(kind, Hits::Sender, from))
    }

    pub(super) fn deliver(
        &mut self,
        from: usize,
        to: usize,
        ticket: u64,
        envelope: Envelope,
    ) -> Result<(), String> {
        let instant = self.world.instant();
        let what = kind(&envelope.request);
        let member = self.hosts[to].member.as_mut().expect("it lives");
        let reply = member.answer(&envelope, instant);
        let must_reconfigure = member.must_reconfigure();
        self.record.replied(&reply);
        self.world
            .say(|| format!("{from} <- {to}  {}", answer_shown(&reply)));
        if must_reconfigure {
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
        self.world.send(to, from, outcome);
        what.map_or(Ok(()), |kind| self.count(kind, Hits::Answerer, to))
    }

    /// Counts histories in which at least two parts of a divided network, each of several hosts,
    /// propose.
    fn note_part(&mut self, host: usize) {
        let Some((parts, until, proposed)) = &mut self.divided else {
            return;
        };
        let part = parts[host];
        let size = parts.iter().filter(|it| **it == part).count();
        if size > 1 && self.world.now() < *until && proposed.insert(part) && proposed.len() == 2 {
            self.record.count("both parts of a divided network tried");
        }
    }
}

const fn kind(request: &MemberRequest) -> Option<Kind> {
    match request {
        MemberRequest::Gather { .. } => Some(Kind::Gather),
        MemberRequest::Install(_) => Some(Kind::Install),
        MemberRequest::Watch(_) => Some(Kind::Watch),
        MemberRequest::Join => Some(Kind::Join),
        MemberRequest::Leave | MemberRequest::Finish(_) => None,
    }
}

fn shown(request: &MemberRequest) -> String {
    match request {
        MemberRequest::Gather { ballot, base, .. } => {
            format!("gather {ballot:?} from {:?}", base.roster.ballot)
        }
        MemberRequest::Install(roster) => format!("install {:?}", roster.ballot),
        MemberRequest::Watch(ballot) => format!("watch {ballot:?}"),
        MemberRequest::Join => "join".into(),
        MemberRequest::Leave => "leave".into(),
        MemberRequest::Finish(ballot) => format!("finish {ballot:?}"),
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
