//! Record of a history, as far as something must be true of it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use crate::world::time::{Moment, SECOND};
use gradring_proto::consensus::message::Reply;
use gradring_proto::consensus::quorum::{Ballot, Id, Peer, Roster};
use gradring_proto::error::{Error, ErrorKind, NotAgreed};

/// If one that has accepted a roster dies, and nothing else goes wrong, the others are at the next one
/// by then. To wait until they have connected in vain takes longer.
const MADE_GOOD_WITHIN: Moment = 3 * SECOND;

/// What happened so far, as far as something must be true of it.
#[derive(Default)]
pub(super) struct Record {
    /// Groups that made steps, in the order of their first ones.
    pub(super) progressed: Vec<Roster>,
    /// Steps of all groups.
    pub(super) steps: usize,
    pub(super) last_step: Moment,
    /// By roster: its members, and those that have accepted it.
    accepted: BTreeMap<Ballot, (usize, BTreeSet<Id>)>,
    /// Who dies after it has accepted a roster, and nothing else goes wrong: when, and which.
    pub(super) death: Option<(Moment, Ballot)>,
    pub(super) minorities: u64,
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
    pub(super) fn keep_their_ranks(&self, last: &Roster, next: &Roster) -> Result<bool, String> {
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
