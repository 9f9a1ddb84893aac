//! The sequencer, in the first server: it restores all servers, orders updates, and tells workers to go on.

use std::cmp::Ordering;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use super::identity::{Incarnation, PushId, Term, Terms, Version};
use super::keepers::Keepers;
use super::log::{Entry, IN_FLIGHT_MAX};
use super::message::{Ask, Order, Reply, Report, Request};
use super::optimizer::Hyper;
use super::queue::{Counts, Pending, Queue};
use super::restoring::{Origin, Plan, Status};
use super::rules::{Rules, Timing};
use super::snapshot::Snapshot;

enum Phase {
    /// Asks the keepers what they have.
    Preparing {
        round: u64,
        answers: BTreeMap<usize, Status>,
    },
    /// Has them go on from there.
    Installing {
        plan: Plan,
        /// By shard, the snapshot for those that lack it, once it is here.
        fetched: BTreeMap<usize, Option<Arc<Snapshot>>>,
        installed: BTreeMap<usize, Version>,
        applied: Vec<PushId>,
    },
    Leading(Box<Leader>),
}

struct Leader {
    since: Instant,
    terms: Terms,
    origin: Origin,
    /// Whether a worker has come that was a member of an earlier term.
    has_survivors: bool,
    /// Whether workers may compute: all were there, or nobody waits for the others any more.
    has_begun: bool,
    queue: Queue,
    /// Entries that not all keepers have applied; the last leads to the queue's version.
    log: VecDeque<Entry>,
    /// By keeper, what it has applied, and of what it has a snapshot.
    progress: Vec<(Version, Version)>,
    /// Members, when something was heard of them, and under which number they came.
    heard: BTreeMap<u32, (Instant, u64)>,
    /// Incarnations of this term.
    incarnations: u32,
    keepers: Keepers,
}

/// For how many times `again` a synchronous update waits for workers after servers were restored.
const GATHERING: u32 = 4;

/// What there is to send.
#[derive(Debug)]
pub enum Output {
    /// To a keeper.
    Keeper(usize, Order),
    /// To a worker.
    Worker(u32, Reply),
}

/// The process that decides for all servers.
pub struct Sequencer {
    rules: Rules,
    timing: Timing,
    keepers: Keepers,
    /// Of which questions get their numbers, so that no answer is to one of an earlier process.
    random: u64,
    phase: Phase,
    /// When unanswered orders are said again.
    again: Instant,
    restored: u64,
    /// A term of which workers have heard, and servers that all have lost their memory have not.
    heard_of: Term,
    out: Vec<Output>,
}

impl Sequencer {
    /// One that has just started; `random` is a number that no other has.
    #[must_use]
    pub fn new(rules: Rules, timing: Timing, keepers: Keepers, random: u64, now: Instant) -> Self {
        let mut sequencer = Self {
            rules,
            timing,
            keepers,
            random,
            phase: Phase::Preparing {
                round: 0,
                answers: BTreeMap::new(),
            },
            again: now,
            restored: 0,
            heard_of: 0,
            out: Vec::new(),
        };
        sequencer.prepare();
        sequencer
    }

    /// What became of gradients in this term, how many wait, and the version.
    #[must_use]
    pub fn counts(&self) -> Option<(Counts, usize, Version)> {
        match &self.phase {
            Phase::Leading(leader) => {
                let queue = &leader.queue;
                Some((queue.counts(), queue.len(), queue.version()))
            }
            _ => None,
        }
    }

    /// With what version the current term began; 0 before the first.
    #[must_use]
    pub fn start(&self) -> Version {
        match &self.phase {
            Phase::Leading(leader) => leader.terms.start(),
            _ => 0,
        }
    }

    /// Where the weights of the current term come from, if there is one.
    #[must_use]
    pub fn origin(&self) -> Option<Origin> {
        match &self.phase {
            Phase::Leading(leader) => Some(leader.origin),
            _ => None,
        }
    }

    /// Whether workers outlived the servers of the term before: those that are away may have left.
    #[must_use]
    pub fn has_survivors(&self) -> bool {
        matches!(&self.phase, Phase::Leading(leader) if leader.has_survivors)
    }

    /// By staleness in versions, of how many gradients of this term updates were made.
    #[must_use]
    pub fn staleness(&self) -> BTreeMap<u64, u64> {
        match &self.phase {
            Phase::Leading(leader) => leader.queue.staleness().clone(),
            _ => BTreeMap::new(),
        }
    }

    /// The members of the term.
    #[must_use]
    pub fn members(&self) -> Vec<(u32, Incarnation)> {
        match &self.phase {
            Phase::Leading(leader) => leader.queue.members().collect(),
            _ => Vec::new(),
        }
    }

    /// How often servers were restored since the process started.
    #[must_use]
    pub const fn restored(&self) -> u64 {
        self.restored
    }

    /// When `step` has something to do, if nothing is heard before.
    #[must_use]
    pub const fn wake(&self) -> Instant {
        self.again
    }

    fn prepare(&mut self) {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        self.phase = Phase::Preparing {
            round: self.random,
            answers: BTreeMap::new(),
        };
        self.say_again();
    }

    /// What there is to do by now.
    pub fn step(&mut self, now: Instant) -> Vec<Output> {
        if let Phase::Leading(leader) = &mut self.phase {
            let silent: Vec<_> = leader
                .heard
                .iter()
                .filter(|(_, (heard, _))| now.duration_since(*heard) >= self.timing.silence)
                .map(|(worker, _)| *worker)
                .collect();
            for worker in silent {
                leader.remove(worker);
            }
        }
        self.order(now);
        if now >= self.again {
            self.say_again();
            self.again = now + self.timing.again;
        }
        std::mem::take(&mut self.out)
    }

    fn say_again(&mut self) {
        for keeper in 0..self.keepers.count() {
            let order = match &self.phase {
                Phase::Preparing { round, answers } => {
                    let round = *round;
                    (!answers.contains_key(&keeper)).then_some(Order::Prepare { round })
                }
                Phase::Installing {
                    plan,
                    fetched,
                    installed,
                    ..
                } => installing(self.keepers, plan, fetched, installed, keeper),
                Phase::Leading(leader) => Some(leader.append(keeper)),
            };
            self.out
                .extend(order.map(|order| Output::Keeper(keeper, order)));
        }
    }

    /// A keeper answers.
    pub fn receive(&mut self, keeper: usize, report: Report, now: Instant) {
        match report {
            Report::Status {
                round,
                terms,
                points,
                at,
                entries,
            } => {
                let status = Status {
                    terms,
                    points: points.into_iter().collect(),
                    at,
                    entries,
                };
                self.status(keeper, round, status);
            }
            Report::FetchedState { round, state } => self.fetched_state(keeper, round, state),
            Report::Installed {
                term,
                applied,
                saved,
            } => self.installed(keeper, term, applied, saved, now),
            Report::Applied {
                term,
                version,
                saved,
            } => self.applied(keeper, term, version, saved, now),
            Report::Lost(term) => self.lost(term),
        }
    }

    /// When all keepers have said what they have, it is clear where they go on.
    fn status(&mut self, keeper: usize, asked: u64, status: Status) {
        let Phase::Preparing { round, answers } = &mut self.phase else {
            return;
        };
        if asked != *round {
            return;
        }
        answers.insert(keeper, status);
        if answers.len() == self.keepers.count() {
            let plan = Plan::of(self.keepers, *round, answers, self.heard_of);
            let missing = plan.missing(self.keepers).into_iter();
            self.phase = Phase::Installing {
                fetched: missing.map(|shard| (shard, None)).collect(),
                plan,
                installed: BTreeMap::new(),
                applied: Vec::new(),
            };
            self.say_again();
        }
    }

    /// When all shards that some keepers lack are here, those get them.
    fn fetched_state(&mut self, keeper: usize, round: u64, state: Arc<Snapshot>) {
        let Phase::Installing { plan, fetched, .. } = &mut self.phase else {
            return;
        };
        if round != plan.start.round || state.point != plan.start.point {
            return;
        }
        let shard = self.keepers.shard(keeper);
        if let Some(fetched) = fetched.get_mut(&shard) {
            *fetched = Some(state);
        }
        if fetched.values().all(Option::is_some) {
            self.say_again();
        }
    }

    /// When all keepers are in the new term, the sequencer leads it.
    fn installed(
        &mut self,
        keeper: usize,
        term: Term,
        theirs: Vec<PushId>,
        saved: Version,
        now: Instant,
    ) {
        let Phase::Installing {
            plan,
            installed,
            applied,
            ..
        } = &mut self.phase
        else {
            return;
        };
        if term != plan.start.terms.term() {
            return;
        }
        let version = plan.start.point.version;
        let is_first = installed.is_empty();
        installed.insert(keeper, saved.min(version));
        *applied = theirs;
        if installed.len() == self.keepers.count() {
            let saved = installed.values();
            let leader = Leader {
                since: now,
                origin: plan.origin,
                has_survivors: false,
                has_begun: false,
                queue: Queue::new(self.rules.clone(), version, applied),
                log: VecDeque::new(),
                progress: saved.map(|saved| (version, *saved)).collect(),
                heard: BTreeMap::new(),
                incarnations: 0,
                terms: plan.start.terms.clone(),
                keepers: self.keepers,
            };
            // Those who had to wait need not find out by themselves.
            self.out.extend((0..self.rules.workers).map(|worker| {
                let terms = leader.terms.clone();
                Output::Worker(worker, Reply::OtherTerm(terms))
            }));
            self.phase = Phase::Leading(Box::new(leader));
            self.restored += 1;
            self.say_again();
        } else if is_first {
            self.say_again();
        }
    }

    /// What all keepers have applied leaves the log.
    fn applied(
        &mut self,
        keeper: usize,
        term: Term,
        version: Version,
        saved: Version,
        now: Instant,
    ) {
        let Phase::Leading(leader) = &mut self.phase else {
            return;
        };
        if term != leader.terms.term() {
            return;
        }
        // No correct server is ahead of the log.
        let version = version.min(leader.queue.version());
        let known = &mut leader.progress[keeper];
        *known = (known.0.max(version), known.1.max(saved.min(version)));
        let least = leader.progress.iter().map(|(version, _)| *version).min();
        let first = leader.queue.version() - leader.log.len() as u64;
        let done = least.unwrap_or(first).saturating_sub(first);
        leader.log.drain(..done as usize);
        self.order(now);
    }

    /// A keeper cannot go on in the term: all begin another.
    fn lost(&mut self, term: Term) {
        let current = match &self.phase {
            Phase::Preparing { .. } => return,
            Phase::Installing { plan, .. } => plan.start.terms.term(),
            Phase::Leading(leader) => leader.terms.term(),
        };
        if term == current {
            self.prepare();
        }
    }

    /// A worker asks for something that is not any server's to answer.
    pub fn answer(&mut self, request: &Request, now: Instant) {
        let Phase::Leading(leader) = &mut self.phase else {
            return;
        };
        let (worker, term) = (request.worker, leader.terms.term());
        match request.term.cmp(&term) {
            Ordering::Less => {
                let reply = Reply::OtherTerm(leader.terms.clone());
                return self.out.push(Output::Worker(worker, reply));
            }
            Ordering::Equal => {}
            Ordering::Greater => {
                // Workers believe later terms only.
                self.heard_of = request.term;
                return self.prepare();
            }
        }
        let replies = match &request.ask {
            Ask::Join { nonce, claim } => {
                leader.has_survivors |= claim.is_some_and(|Incarnation(since, _)| since < term);
                let joined = leader.join(worker, *nonce, *claim, now);
                joined.map(|joined| (Some(joined), leader.go_again(worker)))
            }
            Ask::Submit { id, base, hyper } => {
                let is_member = leader.check_member(worker, id.incarnation, now);
                is_member.map(|()| (None, leader.submit(worker, *id, *base, *hyper)))
            }
            Ask::Alive(incarnation) => {
                let is_member = leader.check_member(worker, *incarnation, now);
                is_member.map(|()| (None, leader.go_again(worker)))
            }
            Ask::Leave(incarnation) => {
                let is_member = leader.check_member(worker, *incarnation, now);
                is_member.map(|()| (Some(leader.leave(worker, *incarnation)), None))
            }
            Ask::Stage { .. } | Ask::Pull { .. } => return,
        };
        let to_worker = |reply| Output::Worker(worker, reply);
        match replies {
            Ok((first, second)) => {
                self.out
                    .extend(first.into_iter().chain(second).map(to_worker));
                self.order(now);
            }
            Err(not_member) => self.out.push(to_worker(not_member)),
        }
    }

    /// Makes entries of what is due, and tells who may go on.
    fn order(&mut self, now: Instant) {
        let Phase::Leading(leader) = &mut self.phase else {
            return;
        };
        let mut is_new = false;
        let everybody = leader.heard.len() >= self.rules.workers as usize;
        // Survivors come back at once, and have gradients that belong together.
        let is_gathering = !everybody && now < leader.since + GATHERING * self.timing.again;
        while !(is_gathering && self.rules.is_synchronous())
            && leader.may_append(self.timing.snapshot_every)
            && let Some(entry) = leader.queue.cut()
        {
            leader.log.push_back(entry);
            is_new = true;
        }
        leader.has_begun |= everybody
            || now >= leader.since + self.timing.start
            || (leader.has_survivors && leader.queue.version() > 0);
        // What the queue has no room for while the log waits for a server need not be computed.
        let is_stuck = leader.queue.is_full() && !leader.may_append(self.timing.snapshot_every);
        if leader.has_begun && !is_stuck {
            let members: Vec<_> = leader.queue.members().map(|(worker, _)| worker).collect();
            for worker in members {
                if !leader.queue.computes(worker) {
                    let go = leader.go(worker);
                    self.out.extend(go.map(|go| Output::Worker(worker, go)));
                }
            }
        }
        if is_new {
            let keepers = 0..self.keepers.count();
            let orders = keepers.map(|keeper| Output::Keeper(keeper, leader.append(keeper)));
            self.out.extend(orders);
        }
    }
}

/// What a keeper is to do so that all come to the same point.
fn installing(
    keepers: Keepers,
    plan: &Plan,
    fetched: &BTreeMap<usize, Option<Arc<Snapshot>>>,
    installed: &BTreeMap<usize, Version>,
    keeper: usize,
) -> Option<Order> {
    let (shard, start) = (keepers.shard(keeper), plan.start.clone());
    if fetched.values().any(Option::is_none) {
        let is_missing = fetched.get(&shard).is_some_and(Option::is_none);
        let gives = is_missing && plan.donor(keepers, shard) == Some(keeper);
        return gives.then_some(Order::FetchState(start));
    }
    // The term must be on a disk before anybody else hears of it.
    if installed.contains_key(&keeper) || (keeper > 0 && !installed.contains_key(&0)) {
        return None;
    }
    Some(match fetched.get(&shard).cloned().flatten() {
        Some(state) if plan.lacking.contains(&keeper) => Order::InstallSnapshot(start, state),
        _ => Order::Install(start),
    })
}

impl Leader {
    /// A worker wants to be a member.
    fn join(
        &mut self,
        worker: u32,
        nonce: u64,
        claim: Option<Incarnation>,
        now: Instant,
    ) -> Result<Reply, Reply> {
        let term = self.term();
        // It may have been counted out, and in again, since it came under this number.
        let is_known = self.heard.get(&worker).is_some_and(|(_, it)| *it == nonce);
        let is_same = |member: &Incarnation| claim.is_none_or(|claim| claim == *member);
        let member = self
            .queue
            .incarnation(worker)
            .filter(|it| is_known && is_same(it));
        let (incarnation, latest) = if let Some(incarnation) = member {
            (incarnation, self.queue.latest(worker))
        } else {
            let incarnation = claim.unwrap_or_else(|| {
                self.incarnations += 1;
                Incarnation(term, self.incarnations)
            });
            let latest = self.queue.join(worker, incarnation);
            (
                incarnation,
                latest.ok_or(Reply::NotMember(term, incarnation))?,
            )
        };
        self.heard.insert(worker, (now, nonce));
        Ok(Reply::Joined {
            term,
            nonce,
            incarnation,
            latest,
            replicas: self.keepers.replicas,
        })
    }

    /// A member has staged a gradient.
    fn submit(&mut self, worker: u32, id: PushId, base: Version, hyper: Hyper) -> Option<Reply> {
        if id.number <= self.queue.latest(worker) {
            return self.go_again(worker);
        }
        self.queue.submit(Pending { id, base, hyper });
        None
    }

    /// A member leaves.
    fn leave(&mut self, worker: u32, incarnation: Incarnation) -> Reply {
        self.remove(worker);
        Reply::Left {
            term: self.term(),
            incarnation,
            dropped: self.queue.dropped(worker),
        }
    }

    /// Whether a worker is a member under this incarnation, of which something was heard now.
    fn check_member(
        &mut self,
        worker: u32,
        incarnation: Incarnation,
        now: Instant,
    ) -> Result<(), Reply> {
        if self.queue.incarnation(worker) != Some(incarnation) {
            return Err(Reply::NotMember(self.term(), incarnation));
        }
        if let Some((heard, _)) = self.heard.get_mut(&worker) {
            *heard = now;
        }
        Ok(())
    }

    /// A member may not have heard that it may go on, or what is settled since.
    fn go_again(&mut self, worker: u32) -> Option<Reply> {
        let computes = self.queue.computes(worker);
        computes.then(|| self.go(worker)).flatten()
    }

    fn remove(&mut self, worker: u32) {
        self.queue.remove(worker);
        self.heard.remove(&worker);
    }

    /// Servers that lag, in their updates or their snapshots, hold the others up: what they have not
    /// done is kept for them.
    fn may_append(&self, snapshot_every: Version) -> bool {
        let version = self.queue.version();
        let unsaved = version.saturating_sub(self.saved());
        self.log.len() < IN_FLIGHT_MAX && unsaved < snapshot_every.saturating_mul(2)
    }

    /// Of what all servers have a snapshot; only first copies have any.
    fn saved(&self) -> Version {
        let firsts = &self.progress[..self.keepers.servers];
        firsts.iter().map(|(_, saved)| *saved).min().unwrap_or(0)
    }

    /// What a keeper has not applied yet.
    fn append(&self, keeper: usize) -> Order {
        let version = self.queue.version();
        let after = self.progress[keeper].0;
        let count = (version - after) as usize;
        Order::Append {
            term: self.term(),
            after,
            entries: self
                .log
                .iter()
                .skip(self.log.len() - count)
                .cloned()
                .collect(),
            acknowledged: self.queue.acknowledged(),
            stable: self.saved(),
        }
    }

    fn term(&self) -> Term {
        self.terms.term()
    }

    /// The last of a worker's pushes that it needs not keep: with copies, no loss of one server can
    /// take it back.
    fn settled(&self, worker: u32, acknowledged: u64) -> u64 {
        let entries = self.log.iter().filter(|_| self.keepers.replicas > 0);
        let contributions = entries.flat_map(|entry| &entry.contributions);
        let own = contributions.filter(|it| it.id.worker == worker);
        let first = own.map(|it| it.id.number).min();
        first.map_or(acknowledged, |first| acknowledged.min(first - 1))
    }

    fn go(&mut self, worker: u32) -> Option<Reply> {
        let incarnation = self.queue.incarnation(worker)?;
        let acknowledged = self.queue.go(worker)?;
        Some(Reply::Go {
            term: self.term(),
            incarnation,
            number: self.queue.latest(worker),
            settled: self.settled(worker, acknowledged),
            dropped: self.queue.dropped(worker),
            version: self.queue.version(),
        })
    }
}

#[cfg(test)]
mod tests;
