//! The sequencer of the first server: it restores all servers, orders updates, and paces the
//! workers.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use super::identity::{Incarnation, PushId, Term, Terms, Version};
use super::keepers::Keepers;
use super::log::{Entry, IN_FLIGHT_MAX};
use super::message::{Ask, Order, Reply, Report, WorkerRequest};
use super::optimizer::Hyper;
use super::queue::{Counts, Pending, Queue, Waits};
use super::restoring::{Origin, Plan, Status};
use super::rules::{Rules, Timing};
use super::snapshot::Snapshot;

enum TermPhase {
    /// Collects the status of each keeper.
    Preparing {
        round: u64,
        answers: BTreeMap<usize, Status>,
    },
    /// Brings all keepers to the plan's start.
    Installing {
        plan: Plan,
        /// Snapshot of each shard that some keeper lacks, once a donor has sent it.
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
    /// True if a worker of an earlier term has joined this term.
    has_survivors: bool,
    /// True if workers may compute: all have joined once, or the wait for the others is over.
    has_begun: bool,
    queue: Queue,
    /// Entries that not all keepers have applied; the last leads to the queue's version.
    log: VecDeque<Entry>,
    /// Applied version and version of the last snapshot, by keeper.
    progress: Vec<(Version, Version)>,
    /// Time of each member's last request, and the nonce with which it joined.
    members: BTreeMap<u32, (Instant, u64)>,
    /// Number of incarnations given out in this term.
    incarnations: u32,
    keepers: Keepers,
}

/// Time, in units of [`Timing::again`], for which a restored synchronous job waits for all workers
/// before it makes an update.
const GATHERING: u32 = 4;

/// A message to send.
#[derive(Debug)]
pub enum Output {
    /// An order to a keeper.
    Keeper(usize, Order),
    /// A reply to a worker.
    Worker(u32, Reply),
}

/// The process that decides for all servers.
pub struct Sequencer {
    rules: Rules,
    timing: Timing,
    keepers: Keepers,
    /// State of a generator of round numbers. It starts at random, so that no report to an earlier
    /// sequencer process fits a round of this one.
    random: u64,
    phase: TermPhase,
    /// Time at which unanswered orders are sent again.
    again: Instant,
    restored: u64,
    /// A later term that a worker has named. The next term must exceed it, also if all servers have
    /// lost their disks.
    known_term: Term,
    /// Time of each worker's last push.
    pushed: BTreeMap<u32, Instant>,
    out: Vec<Output>,
}

impl Sequencer {
    /// A sequencer that starts with a new term; `random` must differ from that of every other
    /// process.
    #[must_use]
    pub fn new(rules: Rules, timing: Timing, keepers: Keepers, random: u64, now: Instant) -> Self {
        let mut sequencer = Self {
            rules,
            timing,
            keepers,
            random,
            phase: TermPhase::Preparing {
                round: 0,
                answers: BTreeMap::new(),
            },
            again: now,
            restored: 0,
            known_term: 0,
            pushed: BTreeMap::new(),
            out: Vec::new(),
        };
        sequencer.prepare();
        sequencer
    }

    /// Fates of this term's gradients, the length of the queue, and the version. `None` between
    /// terms.
    #[must_use]
    pub fn counts(&self) -> Option<(Counts, usize, Version)> {
        match &self.phase {
            TermPhase::Leading(leader) => {
                let queue = &leader.queue;
                Some((queue.counts(), queue.len(), queue.version()))
            }
            _ => None,
        }
    }

    /// Workers that wait, and those for which they wait; nobody between terms, and while servers are
    /// slow.
    #[must_use]
    pub fn waits(&self) -> Waits {
        let TermPhase::Leading(leader) = &self.phase else {
            return Waits::default();
        };
        if !leader.has_begun {
            let waiting: BTreeSet<_> = leader.queue.members().map(|(it, _)| it).collect();
            let workers = 0..self.rules.workers;
            let awaited = workers.filter(|it| !waiting.contains(it)).collect();
            return Waits { waiting, awaited };
        }
        if leader.may_append(self.timing.snapshot_every) {
            return leader.queue.waits();
        }
        Waits::default()
    }

    /// Time of each worker's last push, of those that have pushed.
    #[must_use]
    pub const fn pushed(&self) -> &BTreeMap<u32, Instant> {
        &self.pushed
    }

    /// Lets the workers that wait go on without these, until each of these pushes again.
    pub fn go_on_without(&mut self, workers: &BTreeSet<u32>, now: Instant) {
        if let TermPhase::Leading(leader) = &mut self.phase {
            leader.has_begun = true;
            leader.queue.go_on_without(workers);
            self.order(now);
        }
    }

    /// The version with which the current term began; 0 between terms.
    #[must_use]
    pub fn start(&self) -> Version {
        match &self.phase {
            TermPhase::Leading(leader) => leader.terms.start(),
            _ => 0,
        }
    }

    /// Origin of the current term's weights.
    #[must_use]
    pub fn origin(&self) -> Option<Origin> {
        match &self.phase {
            TermPhase::Leading(leader) => Some(leader.origin),
            _ => None,
        }
    }

    /// Returns whether workers outlived the servers of the term before. In that case absent workers
    /// may be gone for good.
    #[must_use]
    pub fn has_survivors(&self) -> bool {
        matches!(&self.phase, TermPhase::Leading(leader) if leader.has_survivors)
    }

    /// Histogram of applied gradients in this term by their staleness in versions.
    #[must_use]
    pub fn staleness(&self) -> BTreeMap<u64, u64> {
        match &self.phase {
            TermPhase::Leading(leader) => leader.queue.staleness().clone(),
            _ => BTreeMap::new(),
        }
    }

    /// Members of the term, ordered by worker.
    #[must_use]
    pub fn members(&self) -> Vec<(u32, Incarnation)> {
        match &self.phase {
            TermPhase::Leading(leader) => leader.queue.members().collect(),
            _ => Vec::new(),
        }
    }

    /// How often servers were restored since this process started.
    #[must_use]
    pub const fn restored(&self) -> u64 {
        self.restored
    }

    /// Time of the next [`Self::step`] if no message arrives before.
    #[must_use]
    pub const fn wake(&self) -> Instant {
        self.again
    }

    fn prepare(&mut self) {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        self.phase = TermPhase::Preparing {
            round: self.random,
            answers: BTreeMap::new(),
        };
        self.say_again();
    }

    /// Drops silent workers, and returns all messages that are due by now.
    pub fn step(&mut self, now: Instant) -> Vec<Output> {
        if let TermPhase::Leading(leader) = &mut self.phase {
            let silent: Vec<_> = leader
                .members
                .iter()
                .filter(|(_, (received_at, _))| {
                    now.duration_since(*received_at) >= self.timing.silence
                })
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
                TermPhase::Preparing { round, answers } => {
                    let round = *round;
                    (!answers.contains_key(&keeper)).then_some(Order::Prepare { round })
                }
                TermPhase::Installing {
                    plan,
                    fetched,
                    installed,
                    ..
                } => installing(self.keepers, plan, fetched, installed, keeper),
                TermPhase::Leading(leader) => Some(leader.append(keeper)),
            };
            self.out
                .extend(order.map(|order| Output::Keeper(keeper, order)));
        }
    }

    /// Handles the report of a keeper.
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

    /// Makes the plan once every keeper has sent its status.
    fn status(&mut self, keeper: usize, asked: u64, status: Status) {
        let TermPhase::Preparing { round, answers } = &mut self.phase else {
            return;
        };
        if asked != *round {
            return;
        }
        answers.insert(keeper, status);
        if answers.len() == self.keepers.count() {
            let plan = Plan::of(self.keepers, *round, answers, self.known_term);
            let missing = plan.missing(self.keepers).into_iter();
            self.phase = TermPhase::Installing {
                fetched: missing.map(|shard| (shard, None)).collect(),
                plan,
                installed: BTreeMap::new(),
                applied: Vec::new(),
            };
            self.say_again();
        }
    }

    /// Sends the missing shards on, once all of them have arrived.
    fn fetched_state(&mut self, keeper: usize, round: u64, state: Arc<Snapshot>) {
        let TermPhase::Installing { plan, fetched, .. } = &mut self.phase else {
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

    /// Begins to lead the term once all keepers are in it.
    fn installed(
        &mut self,
        keeper: usize,
        term: Term,
        theirs: Vec<PushId>,
        saved: Version,
        now: Instant,
    ) {
        let TermPhase::Installing {
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
                members: BTreeMap::new(),
                incarnations: 0,
                terms: plan.start.terms.clone(),
                keepers: self.keepers,
            };
            // Workers that wait learn of the new term at once.
            self.out.extend((0..self.rules.workers).map(|worker| {
                let terms = leader.terms.clone();
                Output::Worker(worker, Reply::OtherTerm(terms))
            }));
            self.phase = TermPhase::Leading(Box::new(leader));
            self.restored += 1;
            self.say_again();
        } else if is_first {
            self.say_again();
        }
    }

    /// Removes entries that all keepers have applied from the log.
    fn applied(
        &mut self,
        keeper: usize,
        term: Term,
        version: Version,
        saved: Version,
        now: Instant,
    ) {
        let TermPhase::Leading(leader) = &mut self.phase else {
            return;
        };
        if term != leader.terms.term() {
            return;
        }
        // Only a faulty server can be ahead of the log.
        let version = version.min(leader.queue.version());
        let known = &mut leader.progress[keeper];
        *known = (known.0.max(version), known.1.max(saved.min(version)));
        let least = leader.progress.iter().map(|(version, _)| *version).min();
        let first = leader.queue.version() - leader.log.len() as u64;
        let done = least.unwrap_or(first).saturating_sub(first);
        leader.log.drain(..done as usize);
        self.order(now);
    }

    /// A keeper has lost its state of this term, so all servers begin another one.
    fn lost(&mut self, term: Term) {
        let current = match &self.phase {
            TermPhase::Preparing { .. } => return,
            TermPhase::Installing { plan, .. } => plan.start.terms.term(),
            TermPhase::Leading(leader) => leader.terms.term(),
        };
        if term == current {
            self.prepare();
        }
    }

    /// Answers a worker's request, except for `Stage` and `Pull`, which servers answer themselves.
    pub fn answer(&mut self, request: &WorkerRequest, now: Instant) {
        let TermPhase::Leading(leader) = &mut self.phase else {
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
                // Workers accept later terms only, so the next term must exceed this one.
                self.known_term = request.term;
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
                if is_member.is_ok() && id.number > leader.queue.latest(worker) {
                    self.pushed.insert(worker, now);
                }
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
            Ask::Stage { id, .. } => {
                // A worker sends nothing else while a long gradient leaves.
                let _ = leader.check_member(worker, id.incarnation, now);
                return;
            }
            Ask::Pull { .. } => return,
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

    /// Appends due updates to the log, and sends `Go` to the workers that may compute.
    fn order(&mut self, now: Instant) {
        let TermPhase::Leading(leader) = &mut self.phase else {
            return;
        };
        let mut is_new = false;
        let everybody = leader.members.len() >= self.rules.workers as usize;
        // Survivors rejoin at once, and a synchronous update needs the gradients of all of them.
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
        // While the log waits for a server and the queue is full, further gradients would only wait
        // or be dropped.
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

/// The next order that brings a keeper to the plan's start. `None` while the keeper must wait, or
/// has finished.
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
    // Keeper 0 must write the term to its disk before any other process learns of the term.
    if installed.contains_key(&keeper) || (keeper > 0 && !installed.contains_key(&0)) {
        return None;
    }
    Some(match fetched.get(&shard).cloned().flatten() {
        Some(state) if plan.lacking.contains(&keeper) => Order::InstallSnapshot(start, state),
        _ => Order::Install(start),
    })
}

impl Leader {
    /// Makes a worker a member, or confirms its membership.
    fn join(
        &mut self,
        worker: u32,
        nonce: u64,
        claim: Option<Incarnation>,
        now: Instant,
    ) -> Result<Reply, Reply> {
        let term = self.term();
        // Only the latest nonce counts: after an older one, the worker may have been removed and
        // have joined again.
        let is_known = self
            .members
            .get(&worker)
            .is_some_and(|(_, it)| *it == nonce);
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
        self.members.insert(worker, (now, nonce));
        Ok(Reply::Joined {
            term,
            nonce,
            incarnation,
            latest,
            replicas: self.keepers.replicas,
        })
    }

    /// Queues the gradient that a member has staged.
    fn submit(&mut self, worker: u32, id: PushId, base: Version, hyper: Hyper) -> Option<Reply> {
        if id.number <= self.queue.latest(worker) {
            return self.go_again(worker);
        }
        self.queue.submit(Pending { id, base, hyper });
        None
    }

    /// Removes a member at its own request.
    fn leave(&mut self, worker: u32, incarnation: Incarnation) -> Reply {
        self.remove(worker);
        Reply::Left {
            term: self.term(),
            incarnation,
            dropped: self.queue.dropped(worker),
        }
    }

    /// Refuses workers that are no members under this incarnation; notes the time for members.
    fn check_member(
        &mut self,
        worker: u32,
        incarnation: Incarnation,
        now: Instant,
    ) -> Result<(), Reply> {
        if self.queue.incarnation(worker) != Some(incarnation) {
            return Err(Reply::NotMember(self.term(), incarnation));
        }
        if let Some((received_at, _)) = self.members.get_mut(&worker) {
            *received_at = now;
        }
        Ok(())
    }

    /// Repeats a `Go` that may have been lost, with what has been settled since.
    fn go_again(&mut self, worker: u32) -> Option<Reply> {
        let computes = self.queue.computes(worker);
        computes.then(|| self.go(worker)).flatten()
    }

    fn remove(&mut self, worker: u32) {
        self.queue.remove(worker);
        self.members.remove(&worker);
    }

    /// Returns whether the log has capacity. Servers that lag in updates or snapshots hold up the
    /// log, because it keeps the entries that they still need.
    fn may_append(&self, snapshot_every: Version) -> bool {
        let version = self.queue.version();
        let unsaved = version.saturating_sub(self.saved());
        self.log.len() < IN_FLIGHT_MAX && unsaved < snapshot_every.saturating_mul(2)
    }

    /// The version of which all servers have a snapshot; only first copies write snapshots.
    fn saved(&self) -> Version {
        let firsts = &self.progress[..self.keepers.servers];
        firsts.iter().map(|(_, saved)| *saved).min().unwrap_or(0)
    }

    /// The entries that a keeper has not applied yet.
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

    /// Number of the last push that the worker need not keep. If there are copies, the worker keeps
    /// a push until all keepers have applied it, so that the loss of one server cannot undo it.
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
