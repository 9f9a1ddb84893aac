//! Checks of each history: the invariants, and counts of the situations that histories must reach.

use std::collections::{BTreeMap, BTreeSet};

use super::job::{Group, Job, State};
use super::scenario::{Fault, Harm};
use crate::world::faults::Trigger;
use crate::world::time::{Moment, NEVER, SECOND};
use gradring_proto::consensus::quorum::{Ballot, Roster};
use gradring_proto::error::{Error, ErrorKind, NotAgreed};

/// A group without a step for this long after the last fault is stuck.
const STUCK_AFTER: Moment = 20 * SECOND;

/// A process that could reach a group for this long has received its instructions.
const REACHED_FOR: Moment = 15 * SECOND;

impl Job {
    /// Checks that at no time two rosters have all their members in running groups.
    pub(super) fn only_one_is_alive(&self) -> Result<(), String> {
        let running = self.hosts.iter().enumerate();
        let running = running.filter_map(|(number, host)| match host.group {
            Group::Running(ballot) => Some((ballot, self.id(number)?)),
            _ => None,
        });
        let mut groups = BTreeMap::<Ballot, usize>::new();
        for (ballot, _) in running {
            *groups.entry(ballot).or_default() += 1;
        }
        let whole = groups.iter().filter(|(ballot, there)| {
            let rosters = self
                .hosts
                .iter()
                .filter_map(|host| host.member.as_ref()?.view());
            let mut rosters = rosters.map(|view| &view.roster);
            rosters.any(|roster| roster.ballot == **ballot && roster.members.len() == **there)
        });
        let whole: Vec<_> = whole.map(|(ballot, _)| ballot).collect();
        if whole.len() > 1 {
            return Err(format!("two rings are alive: {whole:?}"));
        }
        Ok(())
    }

    /// Records a step that all members of a roster have made together.
    pub(super) fn progress(&mut self, roster: &Roster, hosts: &[usize]) -> Result<(), String> {
        let now = self.world.now();
        if self.record.last() != Some(roster.ballot) {
            self.first_progress(roster, hosts)?;
        }
        self.record.steps += 1;
        self.record.last_step = now;
        for &host in hosts {
            self.hosts[host].version = self.record.steps;
        }
        Ok(())
    }

    fn first_progress(&mut self, roster: &Roster, hosts: &[usize]) -> Result<(), String> {
        let ballot = roster.ballot;
        let has_dead = |older: &Roster| older.members.iter().any(|peer| self.is_dead(peer));
        for older in &self.record.progressed {
            if older.ballot == ballot {
                return Err(format!(
                    "{ballot:?} goes on after {:?} did",
                    self.record.last()
                ));
            }
            if older.ballot.round >= ballot.round && !has_dead(older) {
                return Err(format!(
                    "{ballot:?} goes on after {:?}, whose members live",
                    older.ballot
                ));
            }
        }
        let newest = hosts.iter().map(|&host| self.hosts[host].version).max();
        let forgets = newest < Some(self.record.steps);
        let last = self.record.progressed.last();
        if forgets && last.is_some_and(|last| !has_dead(last)) {
            return Err(format!(
                "{ballot:?} has forgotten the steps of a group whose members live"
            ));
        }
        let took_ranks = match last {
            Some(last) => self.record.keep_their_ranks(last, roster)?,
            None => false,
        };
        let (before, after) = (
            last.map_or(0, |last| last.members.len()),
            roster.members.len(),
        );
        let backwards = last.is_some_and(|last| last.ballot.round >= ballot.round);
        self.world.say(|| format!("{ballot:?} makes steps"));
        self.record.progressed.push(roster.clone());
        let seen = [
            (
                forgets,
                "went on from an older state, the newest being dead",
            ),
            (backwards, "a generation was not above that of the dead"),
            (took_ranks, "joiners took the ranks of others"),
            (before > 0 && after > before, "grew"),
            (after < before, "shrank"),
            (before > 0 && after == before, "went on with as many"),
            (
                roster.previous_members().next().is_some(),
                "went on without silent members",
            ),
        ];
        for (_, what) in seen.into_iter().filter(|(is, _)| *is) {
            self.record.count(what);
        }
        Ok(())
    }

    /// Checks that no process stops as a minority beside a group that it has long been able to
    /// reach.
    pub(super) fn had_to_fail(&self, host: usize, error: &Error) -> Result<(), String> {
        let ErrorKind::Membership(NotAgreed::Minority { .. }) = &error.kind else {
            return Ok(());
        };
        let now = self.world.now();
        let lately = now.saturating_sub(REACHED_FOR);
        let is_alone = self.hosts[host].resumed > lately || self.world.was_cut_since(host, lately);
        if !is_alone && self.record.last_step + 2 * SECOND > now {
            return Err(format!(
                "host {host} stops beside a group that it can reach: {error}"
            ));
        }
        Ok(())
    }

    /// Counts the situations for which a fault makes this history an example.
    pub(super) fn observe(&mut self, fault: &Fault, host: usize) {
        self.record.count(fault.harm.name());
        if let (true, Harm::Kill, Some(at)) = (
            self.scenario.is_death_after_acceptance,
            &fault.harm,
            self.hosts[host].at(),
        ) {
            self.record.death = Some((self.world.now(), at));
        }
        let has_triggered = !matches!(fault.trigger, Trigger::At(_));
        let ends = matches!(fault.harm, Harm::Kill | Harm::Replace(_) | Harm::Vanish);
        let lives = |it: &super::job::Host| it.state == State::Lives;
        let mut living = self.hosts.iter().filter(|it| lives(it));
        let is_outside = |it: &super::job::Host| it.group == Group::None;
        let reforms = living.clone().any(|it| {
            is_outside(it)
                && it
                    .member
                    .as_ref()
                    .is_some_and(|member| member.view().is_some())
        });
        let connects = living.any(|it| matches!(it.group, Group::Connecting { .. }));
        let joins = self.hosts[host]
            .member
            .as_ref()
            .is_some_and(|it| it.view().is_none());
        let losses = self.faults.struck().filter(|(fault, _)| {
            matches!(fault.harm, Harm::Kill | Harm::Replace(_) | Harm::Vanish)
        });
        let several = losses.count() > 1;
        let is_long = fault.harm.lasts() > 40 * SECOND;
        let seen = [
            (ends && reforms, "a loss while re-forming"),
            (ends && connects, "a loss while connecting"),
            (ends && joins, "a joiner's death"),
            (ends && several, "two losses"),
            (ends && has_triggered, "a death between two messages"),
            (
                is_long && matches!(fault.harm, Harm::Stop(_)),
                "a stop longer than all limits",
            ),
        ];
        for (_, what) in seen.into_iter().filter(|(is, _)| *is) {
            self.record.count(what);
        }
    }

    /// Checks the invariants of the end, long after the last fault.
    pub(super) fn verify(&mut self) -> Result<(), String> {
        let now = self.world.now();
        let mut rings = BTreeSet::new();
        let mut waiting = 0;
        for (number, host) in self.hosts.iter().enumerate() {
            if host.state != State::Lives {
                continue;
            }
            let member = host.member.as_ref().expect("it lives");
            match &host.group {
                Group::Running(ballot) => drop(rings.insert(*ballot)),
                Group::Connecting { .. } => return Err(format!("host {number} connects for ever")),
                Group::None if member.view().is_none() => waiting += 1,
                Group::None => return Err(format!("host {number} re-forms for ever")),
            }
        }
        if rings.len() > 1 {
            return Err(format!("some wait in old groups: {rings:?}"));
        }
        if !rings.is_empty() {
            if now > self.record.last_step + STUCK_AFTER {
                return Err("the group makes no steps".into());
            }
            let ring = self.record.progressed.last().expect("it has made steps");
            let has_capacity = ring.members.len() < *self.scenario.workers.end();
            if waiting > 0 && has_capacity && !self.is_cut_for_good() {
                return Err("a joiner waits though there is room".into());
            }
        } else if waiting > 0 {
            return Err("joiners wait for nobody".into());
        }
        let was_silent = self
            .faults
            .struck()
            .any(|(fault, _)| fault.harm.is_silence());
        if self.record.minorities > 0 && !was_silent {
            return Err("a minority stopped though nobody was silent".into());
        }
        self.the_majority_goes_on(!rings.is_empty())
    }

    fn is_cut_for_good(&self) -> bool {
        let mut struck = self.faults.struck();
        struck.any(|(fault, _)| matches!(fault.harm, Harm::Divide(_, NEVER)))
    }

    /// Checks that unharmed hosts of the first group are in a group at the end, if they are a
    /// majority of all processes that ever were.
    fn the_majority_goes_on(&mut self, is_ring: bool) -> Result<(), String> {
        let mut hit = vec![false; self.hosts.len()];
        for (fault, host) in self.faults.struck() {
            match &fault.harm {
                Harm::Divide(parts, _) | Harm::Fray(parts, _) => {
                    let size = |part| parts.iter().filter(|it| **it == part).count();
                    let largest = (0..3).max_by_key(|part| size(*part));
                    for (other, part) in parts.iter().enumerate() {
                        hit[other] |= Some(*part) != largest;
                    }
                }
                Harm::Break => {}
                _ => hit[host] = true,
            }
        }
        let founders = self.scenario.founders;
        let spared = hit[..founders].iter().filter(|hit| !**hit).count();
        let replaced = self.faults.struck().count();
        let all = self.hosts.len() + replaced;
        if 2 * spared > all && spared >= *self.scenario.workers.start() {
            self.record.count("a majority was spared");
            if !is_ring {
                return Err(format!(
                    "{spared} of {all} processes were spared, and no group is left"
                ));
            }
            for (number, host) in self.hosts[..founders].iter().enumerate() {
                if !hit[number] && matches!(host.state, State::Ended(_)) {
                    return Err(format!("host {number} was spared and has ended"));
                }
            }
        }
        Ok(())
    }

    /// Returns in a few words how the history ended.
    pub(super) fn ending(&self) -> &'static str {
        let lives = |host: &&super::job::Host| host.state == State::Lives;
        let living = self.hosts.iter().filter(lives).count();
        let running =
            |host: &&super::job::Host| matches!(host.group, Group::Running(_)) && lives(host);
        match (self.hosts.iter().filter(running).count(), living) {
            (0, 0) => "all ended",
            (running, living) if running < living => "a group, and joiners that wait",
            _ if self.record.progressed.len() == 1 => "the first group",
            _ => "a later group",
        }
    }
}
