//! What goes wrong.

use std::collections::BTreeSet;

use super::{Event, Job, State};
use crate::membership::scenario::{Fault, Harm};
use crate::world::time::NEVER;

impl Job {
    pub(super) fn strike(
        &mut self,
        index: usize,
        fault: &Fault,
        host: usize,
    ) -> Result<(), String> {
        let now = self.world.clock.now();
        if !matches!(self.hosts[host].state, State::Lives) {
            return Ok(());
        }
        self.struck[index] = Some(host);
        self.world
            .trace
            .say(|| format!("host {host}: {:?}", fault.harm));
        let lasts = fault.harm.lasts();
        if lasts < NEVER {
            self.calm = self.calm.max(now + lasts);
        }
        self.observe(fault, host);
        match &fault.harm {
            Harm::Kill => self.end(host),
            Harm::Replace(after) => {
                self.end(host);
                self.world.after(*after, Event::Start(host));
            }
            Harm::Vanish => {
                self.hosts[host].state = State::Vanished;
            }
            Harm::Stop(lasts) => {
                self.hosts[host].state = State::StoppedUntil(now + lasts);
                self.world.stop(host, *lasts);
                self.world.after(*lasts, Event::Resume(host));
            }
            Harm::Leave => {
                let calls = self.hosts[host].member.as_mut().expect("it lives").leave();
                self.note_phase(host);
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
}
