//! Faults and their effects on hosts.

use std::collections::BTreeSet;

use super::{Event, Job, State};
use crate::membership::scenario::{Harm, Kind};
use crate::world::faults::Hits;
use crate::world::time::NEVER;

impl Job {
    /// Counts a message, and lets the faults that it triggers strike.
    pub(super) fn count(&mut self, kind: Kind, hits: Hits, host: usize) -> Result<(), String> {
        for index in self.faults.count(kind, hits) {
            self.strike(index, host)?;
        }
        Ok(())
    }

    pub(super) fn strike(&mut self, index: usize, host: usize) -> Result<(), String> {
        let now = self.world.now();
        if !matches!(self.hosts[host].state, State::Lives) {
            return Ok(());
        }
        let Some(fault) = self.faults.strike(index, host) else {
            return Ok(());
        };
        self.world.say(|| format!("host {host}: {:?}", fault.harm));
        let lasts = fault.harm.lasts();
        if lasts < NEVER {
            self.calm = self.calm.max(now + lasts);
        }
        self.observe(&fault, host);
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
                self.world
                    .cut_where(|from, to| (parts[from] != parts[to]).then_some(until));
            }
            Harm::Fray(parts, back) => {
                let until = |from: usize, to: usize| now + back[from].min(back[to]);
                self.world
                    .cut_where(|from, to| (parts[from] != parts[to]).then(|| until(from, to)));
            }
            Harm::Mute(to, lasts) => {
                let until = now + lasts;
                self.world
                    .cut_where(|from, other| (from == host && to[other]).then_some(until));
            }
        }
        Ok(())
    }
}
