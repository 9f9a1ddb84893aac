//! Connections among the members of a roster.

use super::{Event, Group, Job, State, number};
use crate::membership::scenario::Kind;
use crate::world::faults::Hits;
use crate::world::time::{MILLISECOND, nanoseconds};
use gradring_proto::consensus::quorum::{Ballot, Id};

impl Job {
    pub(super) fn connect(&mut self, host: usize, ballot: Ballot) -> Result<(), String> {
        let Group::Connecting {
            ballot: at, since, ..
        } = self.hosts[host].group
        else {
            return Ok(());
        };
        if at != ballot {
            return Ok(());
        }
        let now = self.world.now();
        let roster = self.roster(host);
        let (mut missing, mut gone) = (Vec::new(), false);
        for peer in &roster.members {
            let other = number(&peer.address);
            let is_there = self.id(other) == Some(peer.id)
                && self.hosts[other].state == State::Lives
                && !self.world.is_cut(host, other)
                && !self.world.is_cut(other, host);
            gone |= self.scenario.sees_deaths
                && self.is_dead(peer)
                && !self.world.is_cut(host, other)
                && !self.world.is_cut(other, host);
            if !is_there {
                missing.push(peer.id);
            } else if self.hosts[other].at() != Some(ballot) {
                // The peer has not accepted yet, or has given up.
                missing.push(Id([0; 16]));
            }
        }
        if gone || now > since + nanoseconds(self.timing.connect) {
            return self.reform(host, &missing);
        }
        if missing.is_empty() {
            // The process copies the newest state of any member before it reports that it is ready.
            let members = roster.members.iter().map(|peer| number(&peer.address));
            let newest = members.map(|other| self.hosts[other].version).max();
            self.hosts[host].version = newest.unwrap_or(0);
            let first = number(&roster.members[0].address);
            let id = self.id(host).expect("it lives");
            let ready = Event::Ready {
                to: first,
                ballot,
                id,
            };
            self.world.send(host, first, ready);
            self.count(Kind::Ready, Hits::Sender, host)?;
        }
        self.world
            .after(300 * MILLISECOND, Event::Connect(host, ballot));
        Ok(())
    }

    /// Rank 0 announces the group when all members are ready.
    pub(super) fn complete(&mut self, host: usize, ballot: Ballot) -> Result<(), String> {
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
            self.world.send(host, to, Event::Complete { to, ballot });
            self.count(Kind::Complete, Hits::Sender, host)?;
            if self.hosts[host].state != State::Lives {
                return Ok(());
            }
        }
        self.become_connected(host, ballot)
    }

    pub(super) fn become_connected(&mut self, host: usize, ballot: Ballot) -> Result<(), String> {
        let it = &mut self.hosts[host];
        it.group = Group::Running(ballot);
        it.member.as_mut().expect("it lives").connected();
        self.world.say(|| format!("host {host} runs in {ballot:?}"));
        self.only_one_is_alive()
    }
}
