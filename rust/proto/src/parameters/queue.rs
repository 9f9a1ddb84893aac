//! The queue of gradients: which become the next update, and which worker may go on, by all [`Rules`].

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use super::identity::{Incarnation, PushId, Version};
use super::log::{Contribution, Entry};
use super::optimizer::Hyper;
use super::rules::{Overflow, Rules};

/// A gradient that is staged on all servers.
#[derive(Debug, Clone)]
pub struct Pending {
    /// Which.
    pub id: PushId,
    /// The version of the weights with which it was computed.
    pub base: Version,
    /// What goes with it.
    pub hyper: Hyper,
}

/// A worker that counts.
#[derive(Debug, Clone)]
struct Member {
    incarnation: Incarnation,
    /// The last push that it has submitted.
    latest: u64,
    /// How many of its pushes were applied or dropped, and at least as many as the slowest had when it
    /// came.
    settled: u64,
    /// Whether it was told to go on since it last submitted something.
    computes: bool,
}

/// Which of a worker's pushes are applied or dropped.
#[derive(Debug, Clone, Copy)]
struct Acknowledged {
    incarnation: Incarnation,
    /// The last of them.
    number: u64,
    /// How many of them are in no update.
    dropped: u64,
}

/// What became of gradients. Initial weights are none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Counts {
    /// Part of an update.
    pub applied: u64,
    /// Too late.
    pub late: u64,
    /// Did not fit into the queue.
    pub overflowed: u64,
    /// Did not fit into it, and waited for room; what became of them then is counted, too.
    pub held: u64,
    /// Initial weights, where others had brought some already.
    pub superfluous: u64,
    /// Its worker was lost.
    pub lost: u64,
}

/// What became of a push.
#[derive(Clone, Copy)]
enum Fate {
    Applied,
    Late,
    Overflowed,
}

/// Members, and gradients that wait.
#[derive(Debug)]
pub struct Queue {
    rules: Rules,
    version: Version,
    members: BTreeMap<u32, Member>,
    pending: VecDeque<Pending>,
    /// Those for which there was no room, at most one of each worker.
    waiting: VecDeque<Pending>,
    /// By worker, of the pushes of its last incarnation.
    acknowledged: BTreeMap<u32, Acknowledged>,
    counts: Counts,
    staleness: BTreeMap<u64, u64>,
}

/// What is staler counts as this stale where gradients are counted by their staleness.
const STALENESS_MAX: u64 = 63;

impl Queue {
    /// At this version, whose log ends each worker's pushes with these, and with nobody.
    #[must_use]
    pub fn new(rules: Rules, version: Version, applied: &[PushId]) -> Self {
        let acknowledged = |id: &PushId| {
            let (incarnation, number, dropped) = (id.incarnation, id.number, 0);
            let acknowledged = Acknowledged {
                incarnation,
                number,
                dropped,
            };
            (id.worker, acknowledged)
        };
        Self {
            rules,
            version,
            members: BTreeMap::new(),
            pending: VecDeque::new(),
            waiting: VecDeque::new(),
            acknowledged: applied.iter().map(acknowledged).collect(),
            counts: Counts::default(),
            staleness: BTreeMap::new(),
        }
    }

    /// The version after all entries that were cut.
    #[must_use]
    pub const fn version(&self) -> Version {
        self.version
    }

    /// What became of gradients so far.
    #[must_use]
    pub const fn counts(&self) -> Counts {
        self.counts
    }

    /// By staleness in versions, of how many gradients updates were made.
    #[must_use]
    pub const fn staleness(&self) -> &BTreeMap<u64, u64> {
        &self.staleness
    }

    /// How many gradients wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pending.len()
    }

    /// Whether none waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Whether there is no room for another.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.pending.len() >= self.capacity()
    }

    /// Who counts, in order.
    pub fn members(&self) -> impl Iterator<Item = (u32, Incarnation)> {
        self.members
            .iter()
            .map(|(&worker, member)| (worker, member.incarnation))
    }

    /// The incarnation of a member.
    #[must_use]
    pub fn incarnation(&self, worker: u32) -> Option<Incarnation> {
        self.members.get(&worker).map(|member| member.incarnation)
    }

    /// The last push of a member.
    #[must_use]
    pub fn latest(&self, worker: u32) -> u64 {
        self.members.get(&worker).map_or(0, |member| member.latest)
    }

    /// For each worker, the last push that is applied or dropped, as all before it are.
    #[must_use]
    pub fn acknowledged(&self) -> Vec<PushId> {
        let acknowledged = self.acknowledged.iter();
        acknowledged
            .map(|(&worker, acknowledged)| PushId {
                worker,
                incarnation: acknowledged.incarnation,
                number: acknowledged.number,
            })
            .collect()
    }

    /// How many pushes of a worker's last incarnation are in no update, and will be in none.
    #[must_use]
    pub fn dropped(&self, worker: u32) -> u64 {
        self.acknowledged
            .get(&worker)
            .map_or(0, |acknowledged| acknowledged.dropped)
    }

    /// A worker counts from now on: the last of its pushes that is over. An incarnation that has ended,
    /// or that others have followed, does not come back: what it has pushed may still be on its way.
    pub fn join(&mut self, worker: u32, incarnation: Incarnation) -> Option<u64> {
        let acknowledged = match self.acknowledged.get(&worker) {
            Some(acknowledged) if incarnation < acknowledged.incarnation => return None,
            Some(acknowledged)
                if incarnation == acknowledged.incarnation && acknowledged.number == u64::MAX =>
            {
                return None;
            }
            Some(acknowledged) if incarnation == acknowledged.incarnation => *acknowledged,
            _ => Acknowledged {
                incarnation,
                number: 0,
                dropped: 0,
            },
        };
        let latest = acknowledged.number;
        // What it had submitted beyond, it submits again.
        self.remove(worker);
        let slowest = self.members.values().map(|member| member.settled).min();
        let member = Member {
            incarnation,
            latest,
            settled: slowest.unwrap_or(0),
            computes: false,
        };
        self.members.insert(worker, member);
        self.acknowledged.insert(worker, acknowledged);
        Some(latest)
    }

    /// A worker counts no more, and what it submitted is dropped as far as it is in no entry.
    pub fn remove(&mut self, worker: u32) {
        if let Some(member) = self.members.remove(&worker) {
            let all = self.pending.iter().chain(&self.waiting);
            let lost = all.filter(|it| it.id.worker == worker && it.base > 0);
            let lost = lost.count() as u64;
            self.pending.retain(|it| it.id.worker != worker);
            self.waiting.retain(|it| it.id.worker != worker);
            self.counts.lost += lost;
            let acknowledged = Acknowledged {
                incarnation: member.incarnation,
                number: u64::MAX,
                dropped: self.dropped(worker) + lost,
            };
            self.acknowledged.insert(worker, acknowledged);
        }
    }

    /// A member's next gradient.
    pub fn submit(&mut self, pushed: Pending) {
        let worker = pushed.id.worker;
        let Some(member) = self.members.get_mut(&worker) else {
            return;
        };
        member.latest = pushed.id.number;
        member.computes = false;
        if pushed.base > self.version || (pushed.base == 0) != (self.version == 0) {
            self.settle(&pushed, Fate::Late);
        } else if !self.is_full() {
            self.pending.push_back(pushed);
        } else {
            match self.rules.overflow {
                Overflow::Wait => {
                    self.counts.held += 1;
                    self.waiting.push_back(pushed);
                }
                Overflow::DropNewest => self.settle(&pushed, Fate::Overflowed),
                Overflow::DropOldest => {
                    // It waits before the other is over: the last that is over is the one before it.
                    self.pending.push_back(pushed);
                    if let Some(oldest) = self.pending.pop_front() {
                        self.settle(&oldest, Fate::Overflowed);
                    }
                }
            }
        }
    }

    /// A synchronous update has one of each worker, whatever the bound.
    fn capacity(&self) -> usize {
        if self.rules.is_synchronous() {
            usize::MAX
        } else {
            self.rules.queue_max()
        }
    }

    /// A push is applied or dropped.
    fn settle(&mut self, pushed: &Pending, fate: Fate) {
        // Initial weights are no step.
        let is_step = pushed.base > 0;
        let (counts, is_dropped) = (&mut self.counts, !matches!(fate, Fate::Applied));
        match fate {
            _ if !is_step => counts.superfluous += u64::from(is_dropped),
            Fate::Applied => counts.applied += 1,
            Fate::Late => counts.late += 1,
            Fate::Overflowed => counts.overflowed += 1,
        }
        let first = self.first_pending(pushed.id.worker);
        let worker = &pushed.id.worker;
        let (Some(member), Some(acknowledged)) = (
            self.members.get_mut(worker),
            self.acknowledged.get_mut(worker),
        ) else {
            return;
        };
        member.settled += u64::from(is_step);
        acknowledged.number = first.map_or(member.latest, |first| first - 1);
        acknowledged.dropped += u64::from(is_step && is_dropped);
    }

    fn first_pending(&self, worker: u32) -> Option<u64> {
        let all = self.pending.iter().chain(&self.waiting);
        all.filter(|it| it.id.worker == worker)
            .map(|it| it.id.number)
            .min()
    }

    /// The next update, if there is one to be.
    pub fn cut(&mut self) -> Option<Entry> {
        self.admit();
        let count = self.due()?;
        let mut taken: Vec<_> = self.pending.drain(..count).collect();
        // The order of the sum must not depend on who was first.
        taken.sort_by_key(|it| it.id);
        let (version, rules) = (self.version, &self.rules);
        let contribution = |it: &Pending| {
            let treatment = rules.treatment(version - it.base);
            treatment.map(|treatment| Contribution {
                id: it.id,
                treatment,
            })
        };
        let contributions = taken.iter().filter_map(contribution).collect();
        let scale = self.rules.scale(count);
        let hyper = taken[0].hyper;
        for it in taken.iter().filter(|it| it.base > 0) {
            let staleness = (version - it.base).min(STALENESS_MAX);
            *self.staleness.entry(staleness).or_default() += 1;
        }
        self.version += 1;
        for it in &taken {
            self.settle(it, Fate::Applied);
        }
        self.admit();
        Some(Entry {
            contributions,
            scale,
            hyper,
        })
    }

    /// Drops what is too late, and lets those in that wait for room.
    fn admit(&mut self) {
        loop {
            self.drop_late();
            if self.is_full() {
                return;
            }
            let Some(next) = self.waiting.pop_front() else {
                return;
            };
            self.pending.push_back(next);
        }
    }

    fn drop_late(&mut self) {
        let version = self.version;
        let all = self.pending.drain(..).collect::<Vec<_>>();
        let (kept, dropped): (Vec<_>, Vec<_>) = all.into_iter().partition(|it| {
            let is_superfluous = it.base == 0 && version > 0;
            !is_superfluous && self.rules.treatment(version - it.base).is_some()
        });
        self.pending.extend(kept);
        for it in dropped {
            self.settle(&it, Fate::Late);
        }
    }

    /// How many of those that wait are the next update.
    fn due(&self) -> Option<usize> {
        let there = self.pending.len();
        if there == 0 {
            return None;
        }
        if self.version == 0 {
            return Some(1);
        }
        let nobody_computes = || {
            let mut members = self.members.iter();
            members.all(|(&worker, member)| !member.computes && !self.may_go(worker))
        };
        let (count, is_due) = if self.rules.is_synchronous() {
            let on_time = self.pending.iter().filter(|it| it.base == self.version);
            let needed = self.rules.needed(self.members.len());
            (there, on_time.count() >= needed)
        } else {
            (
                self.rules.aggregate.min(there),
                there >= self.rules.aggregate,
            )
        };
        (is_due || nobody_computes()).then_some(count)
    }

    /// Whether a member may pull and compute, as far as the others are concerned.
    fn may_go(&self, worker: u32) -> bool {
        let Some(member) = self.members.get(&worker) else {
            return false;
        };
        let own = |it: &&Pending| it.id.worker == worker;
        let pending = self.pending.iter().filter(own).count() as u64;
        if self.waiting.iter().any(|it| it.id.worker == worker) {
            return false;
        }
        if self.version == 0 {
            return self.members.keys().next() == Some(&worker) && pending == 0;
        }
        let Some(staleness) = self.rules.staleness.filter(|&staleness| staleness > 0) else {
            return !self.rules.is_synchronous() || pending == 0;
        };
        let slowest = self.members.values().map(|member| member.settled).min();
        member.settled + pending - slowest.unwrap_or(0) <= staleness
    }

    /// Tells a member to go on if it may: the last of its pushes that are over.
    pub fn go(&mut self, worker: u32) -> Option<u64> {
        if !self.may_go(worker) {
            return None;
        }
        self.members.get_mut(&worker)?.computes = true;
        self.acknowledged
            .get(&worker)
            .map(|acknowledged| acknowledged.number)
    }

    /// Whether a member was told to go on.
    #[must_use]
    pub fn computes(&self, worker: u32) -> bool {
        self.members
            .get(&worker)
            .is_some_and(|member| member.computes)
    }
}

#[cfg(test)]
mod tests;
