//! The plan for servers after one was lost: where they go on together, and which need a snapshot.

use std::collections::{BTreeMap, BTreeSet};

use super::identity::{Point, Term, Terms};
use super::keepers::Keepers;
use super::log::Entry;
use super::message::Start;

/// What a keeper has said about itself.
#[derive(Debug, Clone)]
pub(super) struct Status {
    pub(super) terms: Terms,
    /// Its snapshots.
    pub(super) points: BTreeSet<Point>,
    /// What it has in memory.
    pub(super) at: Option<Point>,
    /// The last entries that led there.
    pub(super) entries: Vec<Entry>,
}

/// Where the weights of a term come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// No server had any: a worker gives the initial ones.
    Initial,
    /// The memory of servers.
    Memory,
    /// The snapshots of all servers.
    Snapshots,
    /// A worker gives initial ones, because the servers had no version in common.
    NothingInCommon,
}

/// How all come to the same point.
pub(super) struct Plan {
    pub(super) start: Start,
    pub(super) origin: Origin,
    /// Keepers that cannot come to it by themselves.
    pub(super) lacking: BTreeSet<usize>,
}

impl Plan {
    /// Goes on from the last version that anybody has, if of each shard there is a copy that has it, or
    /// has all the gradients that it lacks. Otherwise from the last snapshot that all servers have.
    /// The new term is later than all that servers know, and than `heard_of`.
    pub(super) fn of(
        keepers: Keepers,
        round: u64,
        answers: &BTreeMap<usize, Status>,
        heard_of: Term,
    ) -> Self {
        let known = answers.values().map(|status| &status.terms);
        let last = known.max_by_key(|terms| terms.term()).cloned();
        let last = last.unwrap_or(Terms::NONE);
        let is_past = |status: &Status| status.at.filter(|at| last.contains(*at));
        let there = answers.values().filter_map(|it| Some((is_past(it)?, it)));
        let most = there.max_by_key(|(at, status)| (at.version, status.entries.len()));
        let (mut point, mut entries) = (Point::default(), Vec::new());
        let mut whole = BTreeSet::new();
        if let Some((at, status)) = most {
            (point, entries) = (at, status.entries.clone());
            let reaches = |status: &Status| {
                let lacks = |at: Point| point.version.saturating_sub(at.version);
                is_past(status).is_some_and(|at| lacks(at) <= entries.len() as u64)
            };
            let all = answers.iter().filter(|(_, it)| reaches(it));
            whole = all.map(|(keeper, _)| *keeper).collect();
        }
        let shards: BTreeSet<_> = whole.iter().map(|it| keepers.shard(*it)).collect();
        let mut origin = Origin::Memory;
        if shards.len() < keepers.servers {
            origin = Origin::Snapshots;
            // Only the first copies have snapshots.
            whole = (0..keepers.servers).collect();
            let firsts: Vec<_> = answers.range(..keepers.servers).map(|(_, it)| it).collect();
            let common = firsts.iter().flat_map(|it| &it.points).filter(|point| {
                let mut all = firsts.iter();
                last.contains(**point) && all.all(|status| status.points.contains(point))
            });
            let common = common.copied().max_by_key(|point| point.version);
            (point, entries) = (common.unwrap_or_default(), Vec::new());
        }
        if point.version == 0 {
            let mut known = answers
                .values()
                .flat_map(|it| it.points.iter().chain(&it.at));
            origin = match known.any(|point| point.version > 0) {
                true => Origin::NothingInCommon,
                false => Origin::Initial,
            };
        }
        let term = last.term().max(heard_of).saturating_add(1);
        let lacks = |keeper: &usize| point.version > 0 && !whole.contains(keeper);
        Self {
            lacking: (0..keepers.count()).filter(lacks).collect(),
            origin,
            start: Start {
                round,
                terms: last.followed_by(term, point.version),
                point,
                entries,
            },
        }
    }

    /// Who gives a shard to those that lack it.
    pub(super) fn donor(&self, keepers: Keepers, shard: usize) -> Option<usize> {
        let mut all = (0..keepers.count()).filter(|it| keepers.shard(*it) == shard);
        all.find(|keeper| !self.lacking.contains(keeper))
    }

    /// Shards that somebody lacks.
    pub(super) fn missing(&self, keepers: Keepers) -> BTreeSet<usize> {
        let shards = self.lacking.iter().map(|it| keepers.shard(*it));
        shards.collect()
    }
}
