//! Record of a history, as far as invariants refer to it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use crate::world::time::{Moment, SECOND};
use gradring_proto::consensus::message::Reply;
use gradring_proto::consensus::quorum::{Ballot, Id, Peer, Roster};
use gradring_proto::error::{Error, ErrorKind, NotAgreed};

/// Limit of the time in which the others have the next roster, if the only fault is the death of a
/// process that has just accepted one. Shorter than the time limit of connecting.
const MADE_GOOD_WITHIN: Moment = 3 * SECOND;

/// Events so far, as far as invariants refer to them.
#[derive(Default)]
pub(super) struct Record {
    /// Groups that made steps, in the order of their first step.
    pub(super) progressed: Vec<Roster>,
    /// Number of steps of all groups.
    pub(super) steps: usize,
    pub(super) last_step: Moment,
    /// Number of members of each roster, and the members that have accepted it.
    accepted: BTreeMap<Ballot, (usize, BTreeSet<Id>)>,
    /// Time and roster of a death after acceptance, if the scenario is about one.
    pub(super) death: Option<(Moment, Ballot)>,
    pub(super) minorities: u64,
    /// Transitions between states of a process.
    pub(super) moves: BTreeSet<(&'static str, &'static str)>,
    counts: BTreeMap<&'static str, u64>,
}

impl Record {
    pub(super) fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    /// Situations for which this history is an example.
    pub(super) fn examples(&self) -> impl Iterator<Item = &'static str> {
        self.counts.keys().copied()
    }

    /// Roster of the group that made the last step.
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

    /// Checks that members of both rosters keep their order. If one roster follows the other and
    /// enough processes joined for those that were lost, members keep their ranks, too. Returns
    /// whether a new process has the rank of a lost one.
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
