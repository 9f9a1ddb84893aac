//! The plan after a server was lost: the common start of all servers, and the keepers that need a
//! snapshot.

use std::collections::{BTreeMap, BTreeSet};

use super::identity::{Point, Term, Terms};
use super::keepers::Keepers;
use super::log::Entry;
use super::message::Start;

/// State of a keeper, from its [`Report::Status`](super::message::Report::Status).
#[derive(Debug, Clone)]
pub(super) struct Status {
    pub(super) terms: Terms,
    /// Points of its snapshots.
    pub(super) points: BTreeSet<Point>,
    /// Point of its state in memory, if it has one.
    pub(super) at: Option<Point>,
    /// The last entries before that point.
    pub(super) entries: Vec<Entry>,
}

/// Origin of a term's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// No server had weights, so a worker brings the initial ones.
    Initial,
    /// The memory of servers.
    Memory,
    /// The snapshots of all servers.
    Snapshots,
    /// A worker brings the initial weights, because the servers had no version in common.
    NothingInCommon,
}

/// The start of a new term, and the keepers that cannot reach it alone.
pub(super) struct Plan {
    pub(super) start: Start,
    pub(super) origin: Origin,
    /// Keepers that need a snapshot from another keeper.
    pub(super) lacking: BTreeSet<usize>,
}

impl Plan {
    /// Starts from the newest version in any keeper's memory, if each shard has a copy that has
    /// this version or can apply the entries that it lacks. Otherwise starts from the newest
    /// snapshot that all servers have. The new term is greater than every term that a server knows,
    /// and than `known_term`.
    pub(super) fn of(
        keepers: Keepers,
        round: u64,
        answers: &BTreeMap<usize, Status>,
        known_term: Term,
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
        let term = last.term().max(known_term).saturating_add(1);
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

    /// The keeper that sends a shard to those that lack it.
    pub(super) fn donor(&self, keepers: Keepers, shard: usize) -> Option<usize> {
        let mut all = (0..keepers.count()).filter(|it| keepers.shard(*it) == shard);
        all.find(|keeper| !self.lacking.contains(keeper))
    }

    /// Shards that some keeper lacks.
    pub(super) fn missing(&self, keepers: Keepers) -> BTreeSet<usize> {
        let shards = self.lacking.iter().map(|it| keepers.shard(*it));
        shards.collect()
    }
}
