//! What must be true of every history, and how often histories come to what they are for.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use super::super::time::{Moment, SECOND};
use super::scenario::{Fault, Harm, Trigger};
use super::world::{Group, State, World};
use gradring_core::consensus::message::Reply;
use gradring_core::consensus::quorum::{Ballot, Id, Peer, Roster};
use gradring_core::error::{Error, ErrorKind, NotAgreed};

/// A group without a step for so long, when all is well again, is stuck.
const STUCK_AFTER: Moment = 20 * SECOND;

/// Who can reach a group for so long has been told what to do.
const REACHED_FOR: Moment = 15 * SECOND;

/// If one that has accepted a roster dies, and nothing else goes wrong, the others are at the next one
/// by then. To wait until they have connected in vain takes longer.
const MADE_GOOD_WITHIN: Moment = 3 * SECOND;

/// What happened so far, as far as something must be true of it.
#[derive(Default)]
pub(super) struct Record {
    /// Groups that made steps, in the order of their first ones.
    progressed: Vec<Roster>,
    /// Steps of all groups.
    steps: usize,
    last_step: Moment,
    /// By roster: its members, and those that have accepted it.
    accepted: BTreeMap<Ballot, (usize, BTreeSet<Id>)>,
    /// Who dies after it has accepted a roster, and nothing else goes wrong: when, and which.
    death: Option<(Moment, Ballot)>,
    minorities: u64,
    /// From which state of a process to which.
    pub(super) moves: BTreeSet<(&'static str, &'static str)>,
    counts: BTreeMap<&'static str, u64>,
}

impl Record {
    pub(super) fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    /// What this history is an example of.
    pub(super) fn examples(&self) -> impl Iterator<Item = &'static str> {
        self.counts.keys().copied()
    }

    /// The group that made the last step.
    pub(super) fn last(&self) -> Option<Ballot> {
        self.progressed.last().map(|roster| roster.ballot)
    }

    pub(super) fn accepted(&mut self, roster: &Roster, by: Id, now: Moment) -> Result<(), String> {
        let accepted = self.accepted.entry(roster.ballot).or_default();
        accepted.0 = roster.members.len();
        accepted.1.insert(by);
        let is_whole = accepted.0 == accepted.1.len();
        let Some((died, _)) = self
            .death
            .take_if(|(_, at)| is_whole && roster.ballot > *at)
        else {
            return Ok(());
        };
        let after = now - died;
        self.count(match after.div_ceil(SECOND) {
            0 | 1 => "a death after acceptance, made good within 1 s",
            2 => "a death after acceptance, made good within 2 s",
            _ => "a death after acceptance, made good later",
        });
        if after > MADE_GOOD_WITHIN {
            let seconds = after as f64 / SECOND as f64;
            return Err(format!("a death is made good after {seconds:.1} s only"));
        }
        Ok(())
    }

    pub(super) fn gave_up_connecting(&mut self, ballot: Ballot) {
        let (members, by) = &self.accepted[&ballot];
        let is_half = by.len() < *members;
        self.count("a group did not connect");
        if is_half {
            self.count("a roster was half installed");
        }
    }

    /// Members of both rosters keep their order. They keep their ranks too, if one follows on the other
    /// and as many have joined as were lost. Whether somebody did join at the rank of another.
    fn keep_their_ranks(&self, last: &Roster, next: &Roster) -> Result<bool, String> {
        let mut stay = next.members.iter().filter_map(|it| last.position(it.id));
        if !stay.clone().is_sorted() {
            return Err(format!("{:?} has another order", next.ballot));
        }
        let between = (Bound::Excluded(last.ballot), Bound::Excluded(next.ballot));
        let follows = last.ballot < next.ballot
            && stay.next().is_some()
            && self.accepted.range(between).next().is_none();
        if !follows || next.members.len() < last.members.len() {
            return Ok(false);
        }
        let mut kept = last.members.iter().zip(&next.members);
        let has_moved = |(before, after): (&Peer, &Peer)| before != after && next.has(before.id);
        if kept.clone().any(has_moved) {
            return Err(format!("{:?} has other ranks", next.ballot));
        }
        Ok(kept.any(|(before, after)| before != after))
    }

    pub(super) fn replied(&mut self, reply: &Reply) {
        match reply {
            Reply::Busy => self.count("a member was busy"),
            Reply::Behind(_) => self.count("two proposals met"),
            Reply::OtherProcess => self.count("another process answered"),
            _ => {}
        }
    }

    pub(super) fn failed(&mut self, error: &Error) {
        match &error.kind {
            ErrorKind::Membership(NotAgreed::Minority { .. }) => {
                self.minorities += 1;
                self.count("a minority stopped");
            }
            ErrorKind::Membership(NotAgreed::TooFewWorkers { .. }) => {
                self.count("too few workers were left");
            }
            _ => self.count("a joiner found nobody"),
        }
    }
}

impl World {
    /// At no time are all members of two rosters in the groups of these.
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

    /// All members of a roster have made a step together.
    pub(super) fn progress(&mut self, roster: &Roster, hosts: &[usize]) -> Result<(), String> {
        let now = self.clock.now();
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
        self.trace.say(|| format!("{ballot:?} makes steps"));
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

    /// Nobody stops as a minority beside a group that it has been able to reach for long.
    pub(super) fn had_to_fail(&self, host: usize, error: &Error) -> Result<(), String> {
        let ErrorKind::Membership(NotAgreed::Minority { .. }) = &error.kind else {
            return Ok(());
        };
        let now = self.clock.now();
        let lately = now.saturating_sub(REACHED_FOR);
        let is_cut = |(from, to, until): &(usize, usize, Moment)| {
            (*from == host || *to == host) && *until > lately
        };
        let is_alone = self.hosts[host].resumed > lately || self.cuts.iter().any(is_cut);
        if !is_alone && self.record.last_step + 2 * SECOND > now {
            return Err(format!(
                "host {host} stops beside a group that it can reach: {error}"
            ));
        }
        Ok(())
    }

    /// Notes what a fault makes this history an example of.
    pub(super) fn observe(&mut self, fault: &Fault, host: usize) {
        self.record.count(fault.harm.name());
        if let (true, Harm::Kill, Some(at)) = (
            self.scenario.is_death_after_acceptance,
            &fault.harm,
            self.hosts[host].at(),
        ) {
            self.record.death = Some((self.clock.now(), at));
        }
        let has_triggered = !matches!(fault.trigger, Trigger::At(_));
        let ends = matches!(fault.harm, Harm::Kill | Harm::Replace(_) | Harm::Vanish);
        let lives = |it: &super::world::Host| it.state == State::Lives;
        let mut living = self.hosts.iter().filter(|it| lives(it));
        let is_outside = |it: &super::world::Host| it.group == Group::None;
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
        let losses = self
            .scenario
            .faults
            .iter()
            .zip(&self.struck)
            .filter(|(fault, struck)| {
                struck.is_some()
                    && matches!(fault.harm, Harm::Kill | Harm::Replace(_) | Harm::Vanish)
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

    /// What must be true at the end, long after the last fault.
    pub(super) fn verify(&mut self) -> Result<(), String> {
        let now = self.clock.now();
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
            let has_room = ring.members.len() < *self.scenario.workers.end();
            if waiting > 0 && has_room && !self.is_cut_for_good() {
                return Err("a joiner waits though there is room".into());
            }
        } else if waiting > 0 {
            return Err("joiners wait for nobody".into());
        }
        let is_silent =
            |(fault, struck): (&Fault, &Option<usize>)| struck.is_some() && fault.harm.is_silence();
        let mut faults = self.scenario.faults.iter().zip(&self.struck);
        if self.record.minorities > 0 && !faults.any(is_silent) {
            return Err("a minority stopped though nobody was silent".into());
        }
        self.the_majority_goes_on(!rings.is_empty())
    }

    fn is_cut_for_good(&self) -> bool {
        let mut struck = self.scenario.faults.iter().zip(&self.struck);
        struck.any(|(fault, struck)| {
            struck.is_some() && matches!(fault.harm, Harm::Divide(_, super::super::time::NEVER))
        })
    }

    /// Hosts of the first group that no fault hit, and that are more than half of all there ever
    /// were, are a group at the end.
    fn the_majority_goes_on(&mut self, is_ring: bool) -> Result<(), String> {
        let mut hit = vec![false; self.hosts.len()];
        for (fault, struck) in self.scenario.faults.iter().zip(&self.struck) {
            let Some(host) = struck else { continue };
            match &fault.harm {
                Harm::Divide(parts, _) | Harm::Fray(parts, _) => {
                    let size = |part| parts.iter().filter(|it| **it == part).count();
                    let largest = (0..3).max_by_key(|part| size(*part));
                    for (other, part) in parts.iter().enumerate() {
                        hit[other] |= Some(*part) != largest;
                    }
                }
                Harm::Break => {}
                _ => hit[*host] = true,
            }
        }
        let founders = self.scenario.founders;
        let spared = hit[..founders].iter().filter(|hit| !**hit).count();
        let replaced = self.struck.iter().flatten().count();
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

    /// How it ended, in a few words.
    pub(super) fn ending(&self) -> &'static str {
        let lives = |host: &&super::world::Host| host.state == State::Lives;
        let living = self.hosts.iter().filter(lives).count();
        let running =
            |host: &&super::world::Host| matches!(host.group, Group::Running(_)) && lives(host);
        match (self.hosts.iter().filter(running).count(), living) {
            (0, 0) => "all ended",
            (running, living) if running < living => "a group, and joiners that wait",
            _ if self.record.progressed.len() == 1 => "the first group",
            _ => "a later group",
        }
    }
}
