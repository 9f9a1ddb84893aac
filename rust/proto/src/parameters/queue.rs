//! The queue of gradients. It applies the [`Rules`]: which gradients become the next update, and
//! which workers may compute.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};

use super::identity::{Incarnation, PushId, Version};
use super::log::{Contribution, Entry};
use super::optimizer::Hyper;
use super::rules::{Overflow, Rules};

/// A gradient that is staged on all servers.
#[derive(Debug, Clone)]
pub struct Pending {
    /// Identity of the gradient.
    pub id: PushId,
    /// Version of the weights with which it was computed; 0 for initial weights.
    pub base: Version,
    /// Learning rate and weight decay of the step.
    pub hyper: Hyper,
}

/// A worker that takes part.
#[derive(Debug, Clone)]
struct QueueMember {
    incarnation: Incarnation,
    /// Number of the last push that it has submitted.
    latest: u64,
    /// Its pushes that were applied or dropped. A new member starts with the slowest member's
    /// number.
    settled: u64,
    /// True if it has been allowed to compute since its last submission.
    computes: bool,
    /// True if nobody waits for it until its next submission.
    is_away: bool,
}

/// Settled pushes of a worker: those that were applied or dropped.
#[derive(Debug, Clone, Copy)]
struct Acknowledged {
    incarnation: Incarnation,
    /// Number of the last settled push; `u64::MAX` once the incarnation has ended.
    number: u64,
    /// Settled pushes that are in no update.
    dropped: u64,
}

/// Fates of gradients, without initial weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Counts {
    /// Applied in an update.
    pub applied: u64,
    /// Dropped because they were late.
    pub late: u64,
    /// Dropped because the queue was full.
    pub overflowed: u64,
    /// Held outside of the full queue for a while; their final fate is counted, too.
    pub held: u64,
    /// Initial weights that came after those of another push.
    pub superfluous: u64,
    /// Dropped because their worker was lost.
    pub lost: u64,
}

impl Counts {
    /// Adds the gradients of another queue.
    pub const fn add(&mut self, other: Self) {
        self.applied += other.applied;
        self.late += other.late;
        self.overflowed += other.overflowed;
        self.held += other.held;
        self.superfluous += other.superfluous;
        self.lost += other.lost;
    }
}

/// Fate of a push.
#[derive(Clone, Copy)]
enum Fate {
    Applied,
    Late,
    Overflowed,
}

/// Workers that the rule holds back until others have pushed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Waits {
    /// Workers that cannot go on.
    pub waiting: BTreeSet<u32>,
    /// Workers whose gradients are missing.
    pub awaited: BTreeSet<u32>,
}

/// Members, and gradients that wait for an update.
#[derive(Debug)]
pub struct Queue {
    rules: Rules,
    version: Version,
    members: BTreeMap<u32, QueueMember>,
    pending: VecDeque<Pending>,
    /// Gradients outside of the full queue, at most one of each worker.
    waiting: VecDeque<Pending>,
    /// Settled pushes of each worker's last incarnation.
    acknowledged: BTreeMap<u32, Acknowledged>,
    counts: Counts,
    staleness: BTreeMap<u64, u64>,
}

/// Largest staleness in the histogram; gradients that are staler count there, too.
const STALENESS_MAX: u64 = 63;

impl Queue {
    /// An empty queue at `version` without members; `applied` has each worker's last push in the
    /// log.
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

    /// Version after all entries that were cut.
    #[must_use]
    pub const fn version(&self) -> Version {
        self.version
    }

    /// Fates of gradients so far.
    #[must_use]
    pub const fn counts(&self) -> Counts {
        self.counts
    }

    /// Histogram of applied gradients by staleness in versions.
    #[must_use]
    pub const fn staleness(&self) -> &BTreeMap<u64, u64> {
        &self.staleness
    }

    /// Number of gradients in the queue.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pending.len()
    }

    /// Returns whether the queue is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Returns whether the queue has no capacity left.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.pending.len() >= self.capacity()
    }

    /// Members that wait, and members that hold them up; both empty before there are weights, and
    /// unless the rule bounds the staleness.
    #[must_use]
    pub fn waits(&self) -> Waits {
        let mut waits = Waits::default();
        let Some(staleness) = self.rules.staleness.filter(|_| self.version > 0) else {
            return waits;
        };
        let waits_for_others = |worker, member: &QueueMember| {
            if staleness == 0 {
                self.pending.iter().any(|it| it.id.worker == worker)
            } else {
                !member.computes && !self.may_go(worker)
            }
        };
        let present = self.present();
        let (waiting, others): (Vec<_>, Vec<_>) =
            present.partition(|(worker, member)| waits_for_others(**worker, member));
        let number = |(worker, _): (&u32, _)| *worker;
        waits.waiting = waiting.into_iter().map(number).collect();
        // Fewer gradients than make an update can hold up the slowest members themselves.
        let is_slowest = |member: &QueueMember| self.slowest() == Some(member.settled);
        let any_slowest = others.iter().any(|(_, member)| is_slowest(member));
        let holds_up = |member| staleness == 0 || !any_slowest || is_slowest(member);
        let others = others.into_iter().filter(|(_, member)| holds_up(member));
        waits.awaited = others.map(number).collect();
        waits
    }

    /// Lets nobody wait for these members until each of them pushes again.
    pub fn go_on_without(&mut self, workers: &BTreeSet<u32>) {
        for (worker, member) in &mut self.members {
            member.is_away |= workers.contains(worker);
        }
    }

    /// Members for which others wait.
    fn present(&self) -> impl Iterator<Item = (&u32, &QueueMember)> {
        self.members.iter().filter(|(_, member)| !member.is_away)
    }

    /// Smallest number of settled pushes of a member for which others wait.
    fn slowest(&self) -> Option<u64> {
        self.present().map(|(_, member)| member.settled).min()
    }

    /// Members and their incarnations, ordered by worker.
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

    /// Number of a member's last push; 0 for a worker that is no member.
    #[must_use]
    pub fn latest(&self, worker: u32) -> u64 {
        self.members.get(&worker).map_or(0, |member| member.latest)
    }

    /// For each worker, its last settled push; all pushes before it are settled, too.
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

    /// Pushes of a worker's last incarnation that are in no update and never will be.
    #[must_use]
    pub fn dropped(&self, worker: u32) -> u64 {
        self.acknowledged
            .get(&worker)
            .map_or(0, |acknowledged| acknowledged.dropped)
    }

    /// Makes a worker a member, and returns the number of its last settled push. Refuses an
    /// incarnation that has ended, or that is older than the worker's last one: its pushes may
    /// still be on their way.
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
        // The worker submits later pushes again.
        self.remove(worker);
        let all = self.members.values().map(|member| member.settled);
        let slowest = self.slowest().or_else(|| all.min());
        let member = QueueMember {
            incarnation,
            latest,
            settled: slowest.unwrap_or(0),
            computes: false,
            is_away: false,
        };
        self.members.insert(worker, member);
        self.acknowledged.insert(worker, acknowledged);
        Some(latest)
    }

    /// Ends a membership, and drops the worker's gradients that are in no entry.
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

    /// Queues a member's next gradient. If the queue is full, [`Overflow`] decides.
    pub fn submit(&mut self, pushed: Pending) {
        let worker = pushed.id.worker;
        let slowest = self.slowest();
        let Some(member) = self.members.get_mut(&worker) else {
            return;
        };
        member.latest = pushed.id.number;
        member.computes = false;
        if std::mem::take(&mut member.is_away) {
            // Others must not wait until it has made up for the updates without it.
            member.settled = member.settled.max(slowest.unwrap_or(0));
        }
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
                    // Queued first, because `settle` looks for the worker's first pending gradient.
                    self.pending.push_back(pushed);
                    if let Some(oldest) = self.pending.pop_front() {
                        self.settle(&oldest, Fate::Overflowed);
                    }
                }
            }
        }
    }

    /// Bound on the queue. Synchronous updates need no bound: each takes one gradient of each
    /// worker.
    fn capacity(&self) -> usize {
        if self.rules.is_synchronous() {
            usize::MAX
        } else {
            self.rules.queue_max()
        }
    }

    /// Records that a push was applied or dropped.
    fn settle(&mut self, pushed: &Pending, fate: Fate) {
        // Initial weights are not a step.
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

    /// Cuts the next update, if it is due.
    pub fn cut(&mut self) -> Option<Entry> {
        self.admit();
        let count = self.due()?;
        let mut taken: Vec<_> = self.pending.drain(..count).collect();
        // The order of the sum must not depend on the order of arrival.
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

    /// Drops late gradients, and moves held ones into the queue while it has capacity.
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

    /// Number of queued gradients in the next update; `None` if it is not due.
    fn due(&self) -> Option<usize> {
        let there = self.pending.len();
        if there == 0 {
            return None;
        }
        if self.version == 0 {
            return Some(1);
        }
        let nobody_computes = || {
            let mut members = self.present();
            members.all(|(&worker, member)| !member.computes && !self.may_go(worker))
        };
        let (count, is_due) = if self.rules.is_synchronous() {
            let on_time = self.pending.iter().filter(|it| it.base == self.version);
            let needed = self.rules.needed(self.present().count());
            (there, on_time.count() >= needed)
        } else {
            (
                self.rules.aggregate.min(there),
                there >= self.rules.aggregate,
            )
        };
        (is_due || nobody_computes()).then_some(count)
    }

    /// Returns whether the rule lets a member pull and compute.
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
        // One that others do not wait for may be slower than all of them.
        let slowest = self.slowest().unwrap_or(member.settled);
        (member.settled + pending).saturating_sub(slowest) <= staleness
    }

    /// Lets a member compute if the rule allows it, and returns the number of its last settled
    /// push.
    pub fn go(&mut self, worker: u32) -> Option<u64> {
        if !self.may_go(worker) {
            return None;
        }
        self.members.get_mut(&worker)?.computes = true;
        self.acknowledged
            .get(&worker)
            .map(|acknowledged| acknowledged.number)
    }

    /// Returns whether a member has been allowed to compute.
    #[must_use]
    pub fn computes(&self, worker: u32) -> bool {
        self.members
            .get(&worker)
            .is_some_and(|member| member.computes)
    }
}

#[cfg(test)]
mod tests;
