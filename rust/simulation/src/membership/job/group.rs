//! Groups that make steps, and notice the loss of members.

use std::collections::BTreeMap;

use super::{Event, Group, Job, PEER_TIMEOUT, State, number};
use crate::world::time::MILLISECOND;
use gradring_proto::consensus::quorum::{Ballot, Peer, Roster};

impl Job {
    /// Lets each group make a step, and each member check the others.
    pub(super) fn tick(&mut self) -> Result<(), String> {
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
                if self.world.random.once_in(3) {
                    self.let_others_in(&roster, &hosts);
                }
            }
        }
        for host in 0..self.hosts.len() {
            self.poll_peers(host)?;
        }
        Ok(())
    }

    /// After a commit, a group with a waiting joiner and free places stops in good order.
    fn let_others_in(&mut self, roster: &Roster, hosts: &[usize]) {
        let instant = self.world.instant();
        let members = || {
            hosts
                .iter()
                .filter_map(|host| self.hosts[*host].member.as_ref())
        };
        let waits = members().any(|member| member.joiners(instant).next().is_some());
        if waits && roster.members.len() < *self.scenario.workers.end() {
            for &host in hosts {
                let delay = self.world.random.between(0, 200 * MILLISECOND);
                self.world.after(delay, Event::Return(host, roster.ballot));
            }
        }
    }

    fn poll_peers(&mut self, host: usize) -> Result<(), String> {
        let Group::Running(ballot) = self.hosts[host].group else {
            return Ok(());
        };
        if self.hosts[host].state != State::Lives {
            return Ok(());
        }
        let now = self.world.now();
        let (mut silent, mut gone) = (false, false);
        for peer in &self.roster(host).members {
            let other = number(&peer.address);
            if self.is_with(host, peer, ballot) {
                continue;
            }
            let is_received = !self.world.is_cut(other, host)
                && !matches!(
                    self.hosts[other].state,
                    State::Vanished | State::StoppedUntil(_)
                );
            // A member that is still connecting may be about to run.
            let connects = self.hosts[other].at() == Some(ballot);
            if is_received && !connects {
                gone = true
            } else {
                silent = true
            }
        }
        let since = silent.then(|| *self.hosts[host].silence.get_or_insert(now));
        self.hosts[host].silence = since;
        let is_late = since.is_some_and(|since| now >= since + PEER_TIMEOUT);
        if is_late || gone && self.world.random.once_in(2) {
            self.come_back(host);
        }
        Ok(())
    }

    pub(super) fn is_with(&self, from: usize, peer: &Peer, ballot: Ballot) -> bool {
        let to = number(&peer.address);
        let host = &self.hosts[to];
        host.group == Group::Running(ballot)
            && host.state == State::Lives
            && self.id(to) == Some(peer.id)
            && !self.world.is_cut(from, to)
            && !self.world.is_cut(to, from)
    }

    pub(super) fn roster(&self, host: usize) -> Roster {
        let member = self.hosts[host].member.as_ref().expect("it lives");
        member.view().expect("it has accepted one").roster.clone()
    }
}
