//! The first server's other part: it restores all servers, orders updates, and tells workers to go on.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Instant;

use super::identity::{Incarnation, Point, PushId, Term, Terms, Version};
use super::log::Entry;
use super::message::{Ask, Order, Reply, Report, Request};
use super::queue::{Counts, Pending, Queue};
use super::rules::{Rules, Timing};

/// Updates that not all servers have applied, at most. Gradients wait in the queue instead.
const IN_FLIGHT_MAX: u64 = 4;

/// What a server has said about itself.
#[derive(Debug, Clone)]
struct Status {
    terms: Terms,
    points: BTreeSet<Point>,
}

enum Phase {
    /// What have the servers?
    Looking {
        question: u64,
        answers: BTreeMap<usize, Status>,
    },
    /// They take it up again there.
    Installing {
        terms: Terms,
        point: Point,
        installed: BTreeSet<usize>,
        applied: Vec<PushId>,
    },
    Open(Box<Open>),
}

struct Open {
    since: Instant,
    terms: Terms,
    queue: Queue,
    /// Entries that not all servers have applied; the last leads to the queue's version.
    log: VecDeque<Entry>,
    /// By server, what it has applied, and of what it has a snapshot.
    servers: Vec<(Version, Version)>,
    /// Members, when something was heard of them, and under which number they came.
    heard: BTreeMap<u32, (Instant, u64)>,
    /// Incarnations of this term.
    incarnations: u32,
}

/// What there is to send.
#[derive(Debug)]
pub enum Output {
    /// To a server.
    Server(usize, Order),
    /// To a worker.
    Worker(u32, Reply),
}

/// The process that decides for all servers.
pub struct Sequencer {
    rules: Rules,
    timing: Timing,
    servers: usize,
    /// Of which questions get their numbers, so that no answer is to one of an earlier process.
    random: u64,
    phase: Phase,
    /// When unanswered orders are said again.
    again: Instant,
    restored: u64,
    out: Vec<Output>,
}

impl Sequencer {
    /// One that has just started; `random` is a number that no other has.
    #[must_use]
    pub fn new(rules: Rules, timing: Timing, servers: usize, random: u64, now: Instant) -> Self {
        let mut sequencer = Self {
            rules,
            timing,
            servers,
            random,
            phase: Phase::Looking {
                question: 0,
                answers: BTreeMap::new(),
            },
            again: now,
            restored: 0,
            out: Vec::new(),
        };
        sequencer.look();
        sequencer
    }

    /// What became of gradients in this term, how many wait, and the version.
    #[must_use]
    pub fn counts(&self) -> Option<(Counts, usize, Version)> {
        match &self.phase {
            Phase::Open(open) => {
                let queue = &open.queue;
                Some((queue.counts(), queue.len(), queue.version()))
            }
            _ => None,
        }
    }

    /// With what version the current term began; 0 before the first.
    #[must_use]
    pub fn start(&self) -> Version {
        match &self.phase {
            Phase::Open(open) => open.terms.start(),
            _ => 0,
        }
    }

    /// By staleness in versions, of how many gradients of this term updates were made.
    #[must_use]
    pub fn staleness(&self) -> BTreeMap<u64, u64> {
        match &self.phase {
            Phase::Open(open) => open.queue.staleness().clone(),
            _ => BTreeMap::new(),
        }
    }

    /// Entries that not all servers have applied.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        match &self.phase {
            Phase::Open(open) => open.log.len(),
            _ => 0,
        }
    }

    /// The members of the term.
    #[must_use]
    pub fn members(&self) -> Vec<(u32, Incarnation)> {
        match &self.phase {
            Phase::Open(open) => open.queue.members().collect(),
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

    fn look(&mut self) {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        self.phase = Phase::Looking {
            question: self.random,
            answers: BTreeMap::new(),
        };
        self.say_again();
    }

    /// What there is to do by now.
    pub fn step(&mut self, now: Instant) -> Vec<Output> {
        if let Phase::Open(open) = &mut self.phase {
            let silent: Vec<_> = open
                .heard
                .iter()
                .filter(|(_, (heard, _))| now.duration_since(*heard) >= self.timing.silence)
                .map(|(worker, _)| *worker)
                .collect();
            for worker in silent {
                open.remove(worker);
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
        for server in 0..self.servers {
            let order = match &self.phase {
                Phase::Looking { question, answers } => {
                    let question = *question;
                    (!answers.contains_key(&server)).then_some(Order::Look { question })
                }
                // The term must be on a disk before anybody else hears of it.
                Phase::Installing { installed, .. }
                    if installed.contains(&server) || (server > 0 && !installed.contains(&0)) =>
                {
                    None
                }
                Phase::Installing { terms, point, .. } => Some(Order::Install {
                    terms: terms.clone(),
                    point: *point,
                }),
                Phase::Open(open) => Some(open.append(server)),
            };
            self.out
                .extend(order.map(|order| Output::Server(server, order)));
        }
    }

    /// A server answers.
    pub fn heard(&mut self, server: usize, report: Report, now: Instant) {
        match (&mut self.phase, report) {
            (
                Phase::Looking { question, answers },
                Report::Status {
                    question: asked,
                    terms,
                    points,
                },
            ) if asked == *question => {
                let points = points.into_iter().collect();
                answers.insert(server, Status { terms, points });
                if answers.len() == self.servers {
                    self.install();
                }
            }
            (
                Phase::Installing {
                    terms,
                    point,
                    installed,
                    applied,
                },
                Report::Installed {
                    term,
                    applied: theirs,
                },
            ) if term == terms.term() => {
                let is_first = installed.is_empty();
                installed.insert(server);
                *applied = theirs;
                if installed.len() == self.servers {
                    let terms = terms.clone();
                    let open = Open {
                        since: now,
                        queue: Queue::new(self.rules.clone(), point.version, applied),
                        log: VecDeque::new(),
                        servers: vec![(point.version, point.version); self.servers],
                        heard: BTreeMap::new(),
                        incarnations: 0,
                        terms,
                    };
                    self.phase = Phase::Open(Box::new(open));
                    self.restored += 1;
                    self.say_again();
                } else if is_first {
                    self.say_again();
                }
            }
            (Phase::Installing { terms, .. }, Report::Lost(term)) if term == terms.term() => {
                self.look();
            }
            (Phase::Open(open), Report::Lost(term)) if term == open.terms.term() => self.look(),
            (
                Phase::Open(open),
                Report::Applied {
                    term,
                    version,
                    saved,
                },
            ) if term == open.terms.term() => {
                // No correct server is ahead of the log.
                let version = version.min(open.queue.version());
                let known = &mut open.servers[server];
                *known = (known.0.max(version), known.1.max(saved.min(version)));
                let least = open.servers.iter().map(|(version, _)| *version).min();
                let first = open.queue.version() - open.log.len() as u64;
                let done = least.unwrap_or(first).saturating_sub(first);
                open.log.drain(..done as usize);
                self.order(now);
            }
            _ => {}
        }
    }

    /// Goes on from the highest point that all servers have.
    fn install(&mut self) {
        let Phase::Looking { answers, .. } = &self.phase else {
            return;
        };
        let known = answers.values().map(|status| &status.terms);
        let Some(last) = known.max_by_key(|terms| terms.term()) else {
            return;
        };
        let all = answers.values().next().into_iter();
        let points = all.flat_map(|status| &status.points).filter(|point| {
            let mut others = answers.values();
            last.contains(**point) && others.all(|status| status.points.contains(point))
        });
        let point = points
            .copied()
            .max_by_key(|point| point.version)
            .unwrap_or_default();
        self.phase = Phase::Installing {
            terms: last.followed_by(last.term() + 1, point.version),
            point,
            installed: BTreeSet::new(),
            applied: Vec::new(),
        };
        self.say_again();
    }

    /// A worker asks for something that is not any server's to answer.
    pub fn answer(&mut self, request: &Request, now: Instant) {
        let Phase::Open(open) = &mut self.phase else {
            return;
        };
        let (worker, term) = (request.worker, open.terms.term());
        if request.term != term {
            if request.term < term {
                let reply = Reply::OtherTerm(open.terms.clone());
                self.out.push(Output::Worker(worker, reply));
            }
            return;
        }
        let member = open.queue.incarnation(worker);
        let said = match &request.ask {
            Ask::Join { nonce, claim } => {
                // It may have been counted out, and in again, since it came under this number.
                let is_known = open.heard.get(&worker).is_some_and(|(_, it)| it == nonce);
                let is_same = |member: &Incarnation| claim.is_none_or(|claim| claim == *member);
                let joined = if let Some(incarnation) = member.filter(|it| is_known && is_same(it))
                {
                    Ok((incarnation, open.queue.latest(worker)))
                } else {
                    open.join(worker, *claim)
                };
                let (incarnation, latest) = match joined {
                    Ok(joined) => joined,
                    Err(claim) => {
                        let reply = Reply::NotMember(term, claim);
                        return self.out.push(Output::Worker(worker, reply));
                    }
                };
                open.heard.insert(worker, (now, *nonce));
                let joined = Reply::Joined {
                    term,
                    nonce: *nonce,
                    incarnation,
                    latest,
                };
                self.out.push(Output::Worker(worker, joined));
                incarnation
            }
            Ask::Submit { id, .. } => id.incarnation,
            Ask::Alive(incarnation) | Ask::Leave(incarnation) => *incarnation,
            Ask::Stage { .. } | Ask::Pull { .. } => return,
        };
        if open.queue.incarnation(worker) != Some(said) {
            let reply = Reply::NotMember(term, said);
            return self.out.push(Output::Worker(worker, reply));
        }
        if let Some((heard, _)) = open.heard.get_mut(&worker) {
            *heard = now;
        }
        match &request.ask {
            Ask::Submit { id, base, hyper } if id.number > open.queue.latest(worker) => {
                let pending = Pending {
                    id: *id,
                    base: *base,
                    hyper: *hyper,
                };
                open.queue.submit(pending);
            }
            Ask::Leave(_) => open.remove(worker),
            // It may not have heard that it may go on.
            Ask::Submit { .. } | Ask::Join { .. } if open.queue.computes(worker) => {
                let go = open.go(worker);
                self.out.extend(go);
            }
            _ => {}
        }
        self.order(now);
    }

    /// Makes entries of what is due, and tells who may go on.
    fn order(&mut self, now: Instant) {
        let Phase::Open(open) = &mut self.phase else {
            return;
        };
        let mut is_new = false;
        while open.may_append(self.timing.snapshot_every)
            && let Some(entry) = open.queue.cut()
        {
            open.log.push_back(entry);
            is_new = true;
        }
        let everybody = open.heard.len() >= self.rules.workers as usize;
        if open.queue.version() > 0 || everybody || now >= open.since + self.timing.start {
            let members: Vec<_> = open.queue.members().map(|(worker, _)| worker).collect();
            for worker in members {
                if !open.queue.computes(worker) {
                    self.out.extend(open.go(worker));
                }
            }
        }
        if is_new {
            let orders =
                (0..self.servers).map(|server| Output::Server(server, open.append(server)));
            self.out.extend(orders);
        }
    }
}

impl Open {
    /// A worker as a member: under which incarnation, and its last push that is over.
    fn join(
        &mut self,
        worker: u32,
        claim: Option<Incarnation>,
    ) -> Result<(Incarnation, u64), Incarnation> {
        let incarnation = claim.unwrap_or_else(|| {
            self.incarnations += 1;
            Incarnation(self.terms.term(), self.incarnations)
        });
        let latest = self.queue.join(worker, incarnation).ok_or(incarnation)?;
        Ok((incarnation, latest))
    }

    fn remove(&mut self, worker: u32) {
        self.queue.remove(worker);
        self.heard.remove(&worker);
    }

    /// Servers that lag, in their updates or their snapshots, hold the others up: what they have not
    /// done is kept for them.
    fn may_append(&self, snapshot_every: Version) -> bool {
        let (mut applied, mut saved) = (Version::MAX, Version::MAX);
        for &(its, snapshot) in &self.servers {
            (applied, saved) = (applied.min(its), saved.min(snapshot));
        }
        let version = self.queue.version();
        version - applied < IN_FLIGHT_MAX && version < saved + 2 * snapshot_every
    }

    /// What a server has not applied yet.
    fn append(&self, server: usize) -> Order {
        let version = self.queue.version();
        let after = self.servers[server].0;
        let count = (version - after) as usize;
        let stable = self.servers.iter().map(|(_, saved)| *saved).min();
        Order::Append {
            term: self.term(),
            after,
            entries: self
                .log
                .iter()
                .skip(self.log.len() - count)
                .cloned()
                .collect(),
            over: self.queue.over(),
            stable: stable.unwrap_or(0),
        }
    }

    fn term(&self) -> Term {
        self.terms.term()
    }

    fn go(&mut self, worker: u32) -> Option<Output> {
        let incarnation = self.queue.incarnation(worker)?;
        let go = Reply::Go {
            term: self.term(),
            incarnation,
            number: self.queue.latest(worker),
            settled: self.queue.go(worker)?,
            version: self.queue.version(),
        };
        Some(Output::Worker(worker, go))
    }
}
