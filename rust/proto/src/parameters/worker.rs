//! One worker: what it has pushed and must keep, and what it asks next.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::time::Instant;

use super::identity::{Incarnation, Point, PushId, Term, Terms, Version};
use super::keepers::Keepers;
use super::message::{Ask, Reply, Request};
use super::optimizer::Hyper;
use super::rules::Timing;
use super::shard::{Payload, Weights};

/// A gradient that may have to be said again.
struct Push {
    number: u64,
    /// The oldest weights with which it was computed, and their versions by server.
    base: Point,
    bases: Vec<Version>,
    /// By shard.
    payloads: Vec<Arc<Payload>>,
    hyper: Hyper,
}

/// The weights of one server, and which they are.
pub type Pulled = (Point, Vec<Weights>);

enum Phase {
    Joining {
        nonce: u64,
    },
    /// It waits for leave to go on after this push, which it has submitted unless it is 0.
    Waiting {
        number: u64,
    },
    /// By keeper, whether this push is there.
    Staging {
        number: u64,
        staged: Vec<bool>,
    },
    Pulling {
        at_least: Version,
        pulled: Vec<Option<Pulled>>,
    },
    /// The program computes.
    Computing,
}

/// What the program has to do.
#[derive(Debug)]
pub enum Event {
    /// Push the initial weights.
    WantsInitial,
    /// Compute with these weights, by server, and push.
    Weights(Vec<Pulled>),
}

/// What a worker does.
pub struct Worker {
    me: u32,
    keepers: Keepers,
    timing: Timing,
    random: u64,
    terms: Terms,
    incarnation: Option<Incarnation>,
    phase: Phase,
    /// Of the last push.
    number: u64,
    /// Of the last push that all servers have been told of in this term.
    submitted: u64,
    /// Of the last pull; no other process of this worker has the same.
    round: u64,
    /// Pushes that may have to be said again, in order.
    unsettled: VecDeque<Push>,
    /// Of the pushes of this incarnation, how many were dropped in this term, as the sequencer says.
    dropped: u64,
    /// How many were dropped before.
    dropped_before: u64,
    /// With which weights the program computes, by server.
    base: Option<Vec<Point>>,
    /// When unanswered requests are said again.
    again: Instant,
    event: Option<Event>,
}

impl Worker {
    /// One that has just started; `random` is a number that no other has.
    #[must_use]
    pub const fn new(me: u32, servers: usize, timing: Timing, random: u64, now: Instant) -> Self {
        // Server 0 says how often shards are replicated.
        let replicas = 0;
        Self {
            me,
            keepers: Keepers { servers, replicas },
            timing,
            random,
            terms: Terms::NONE,
            incarnation: None,
            phase: Phase::Joining { nonce: random },
            number: 0,
            submitted: 0,
            round: random,
            unsettled: VecDeque::new(),
            dropped: 0,
            dropped_before: 0,
            base: None,
            again: now,
            event: None,
        }
    }

    /// What the program has to do now, told once.
    pub const fn event(&mut self) -> Option<Event> {
        self.event.take()
    }

    /// When `step` has something to do, if nothing is heard before.
    #[must_use]
    pub const fn wake(&self) -> Instant {
        self.again
    }

    /// What is unanswered is said at once: a connection to a server is new, or there is a push.
    pub const fn say_again(&mut self, now: Instant) {
        self.again = now;
    }

    /// Whether there is something that the program was not told yet.
    #[must_use]
    pub const fn has_event(&self) -> bool {
        self.event.is_some()
    }

    /// Whether all that was pushed has been submitted, and the sequencer has said to go on since.
    #[must_use]
    pub const fn has_gone_on(&self) -> bool {
        matches!(self.phase, Phase::Pulling { .. } | Phase::Computing)
    }

    /// The term of the servers, as far as it knows.
    #[must_use]
    pub fn term(&self) -> Term {
        self.terms.term()
    }

    /// What tells the sequencer that it is to be counted out.
    #[must_use]
    pub fn leave(&self) -> Request {
        Request {
            term: self.terms.term(),
            worker: self.me,
            ask: Ask::Leave(self.incarnation.unwrap_or_default()),
        }
    }

    /// How many gradients it keeps.
    #[must_use]
    pub fn unsettled(&self) -> usize {
        self.unsettled.len()
    }

    /// How many gradients are in no update, and will be in none, as far as it knows.
    #[must_use]
    pub const fn dropped(&self) -> u64 {
        self.dropped_before + self.dropped
    }

    /// Whether a push would count: the weights that it was told to compute with are still those of the
    /// servers' past.
    #[must_use]
    pub const fn computes(&self) -> bool {
        self.base.is_some()
    }

    /// What the next push would be called; nothing if it would not count.
    #[must_use]
    pub fn next_id(&self) -> Option<PushId> {
        let incarnation = self.incarnation.filter(|_| self.base.is_some())?;
        Some(PushId {
            worker: self.me,
            incarnation,
            number: self.number + 1,
        })
    }

    /// What the program has computed, by server: its identity, unless servers were restored meanwhile, to
    /// before the weights that it was computed with; then new ones are pulled already.
    pub fn push(&mut self, payloads: Vec<Arc<Payload>>, hyper: Hyper) -> Option<PushId> {
        let (bases, incarnation) = (self.base.take()?, self.incarnation?);
        self.number += 1;
        let number = self.number;
        let oldest = bases.iter().min_by_key(|point| point.version);
        self.unsettled.push_back(Push {
            number,
            base: oldest.copied().unwrap_or_default(),
            bases: bases.iter().map(|point| point.version).collect(),
            payloads,
            hyper,
        });
        if matches!(self.phase, Phase::Computing) {
            self.go_on();
        }
        Some(PushId {
            worker: self.me,
            incarnation,
            number,
        })
    }

    /// Who keeps what, as far as it knows.
    #[must_use]
    pub const fn keepers(&self) -> Keepers {
        self.keepers
    }

    /// To be sent, by keeper; what is not a gradient goes to those with the index of their server.
    pub fn step(&mut self, now: Instant) -> Vec<(usize, Request)> {
        if now < self.again {
            return Vec::new();
        }
        self.again = now + self.timing.again;
        let mut asks = Vec::new();
        match &self.phase {
            Phase::Joining { nonce } => asks.push((0, self.join(*nonce))),
            Phase::Waiting { number } => {
                let pushed = self.unsettled.iter().find(|it| it.number == *number);
                match pushed {
                    Some(push) => asks.push((0, self.submit(push))),
                    None => asks.push((0, self.join(self.random))),
                }
            }
            Phase::Staging { number, staged } => {
                let push = self.unsettled.iter().find(|it| it.number == *number);
                let missing = (0..self.keepers.count()).filter(|&keeper| !staged[keeper]);
                asks.extend(missing.filter_map(|keeper| {
                    let (push, shard) = (push?, self.keepers.shard(keeper));
                    let ask = Ask::Stage {
                        id: self.id(push.number),
                        base: push.bases[shard],
                        payload: push.payloads[shard].clone(),
                    };
                    Some((keeper, ask))
                }));
            }
            Phase::Pulling { at_least, pulled } => {
                let all = 0..self.keepers.servers;
                let missing = all.filter(|&server| pulled[server].is_none());
                asks.extend(missing.map(|server| {
                    let (round, at_least) = (self.round, *at_least);
                    (server, Ask::Pull { round, at_least })
                }));
            }
            Phase::Computing => {}
        }
        // The sequencer hears of it in any case.
        if let Some(incarnation) = self.incarnation
            && !matches!(self.phase, Phase::Joining { .. } | Phase::Waiting { .. })
        {
            asks.push((0, Ask::Alive(incarnation)));
        }
        let (term, worker) = (self.terms.term(), self.me);
        let request = |(server, ask)| (server, Request { term, worker, ask });
        asks.into_iter().map(request).collect()
    }

    fn id(&self, number: u64) -> PushId {
        PushId {
            worker: self.me,
            incarnation: self.incarnation.unwrap_or_default(),
            number,
        }
    }

    fn join(&self, nonce: u64) -> Ask {
        let claim = self.incarnation;
        Ask::Join { nonce, claim }
    }

    fn submit(&self, push: &Push) -> Ask {
        Ask::Submit {
            id: self.id(push.number),
            base: push.base.version,
            hyper: push.hyper,
        }
    }

    /// A keeper has answered.
    pub fn receive(&mut self, keeper: usize, reply: Reply, now: Instant) {
        let term = self.terms.term();
        match reply {
            Reply::OtherTerm(terms) if terms.term() > term => {
                self.drop_unless(|push| terms.contains(push.base));
                let is_past = |bases: &Vec<Point>| bases.iter().all(|it| terms.contains(*it));
                self.base = self.base.take().filter(is_past);
                self.terms = terms;
                self.rejoin();
            }
            Reply::NotMember(theirs, incarnation)
                if theirs == term && Some(incarnation) == self.incarnation =>
            {
                // Whether they have been applied cannot be told under another incarnation.
                self.drop_unless(|_| false);
                self.base = None;
                self.incarnation = None;
                self.number = 0;
                self.rejoin();
            }
            Reply::Joined {
                term: theirs,
                nonce,
                incarnation,
                latest,
                replicas,
            } if theirs == term => {
                if !matches!(self.phase, Phase::Joining { nonce: ours } if ours == nonce) {
                    return;
                }
                self.incarnation = Some(incarnation);
                self.keepers.replicas = replicas.min(self.keepers.servers - 1);
                self.unsettled.retain(|push| push.number > latest);
                self.submitted = latest;
                self.phase = Phase::Waiting { number: latest };
                self.go_on();
            }
            Reply::Go {
                term: theirs,
                incarnation,
                number,
                version,
                settled,
                dropped,
            } if theirs == term && Some(incarnation) == self.incarnation => {
                self.unsettled.retain(|push| push.number > settled);
                // An older one may come later.
                self.dropped = self.dropped.max(dropped);
                if !matches!(self.phase, Phase::Waiting { number: ours } if ours == number) {
                    return;
                }
                self.may_go(number, version);
            }
            Reply::Left {
                term: theirs,
                incarnation,
                dropped,
            } if theirs == term && Some(incarnation) == self.incarnation => {
                self.unsettled.clear();
                self.dropped = dropped;
            }
            Reply::Staged(theirs, id) if theirs == term && id == self.id(id.number) => {
                // What comes again must not make this worker say more again.
                let Phase::Staging { number, staged } = &mut self.phase else {
                    return;
                };
                if *number != id.number || keeper >= staged.len() {
                    return;
                }
                staged[keeper] = true;
                if !staged.iter().all(|is| *is) {
                    return;
                }
                self.submitted = id.number;
                self.phase = Phase::Waiting { number: id.number };
            }
            Reply::Weights {
                round,
                point,
                parts,
            } => {
                let Phase::Pulling { pulled, .. } = &mut self.phase else {
                    return;
                };
                if round != self.round || keeper >= pulled.len() {
                    return;
                }
                pulled[keeper] = Some((point, parts));
                if !pulled.iter().all(Option::is_some) {
                    return;
                }
                let pulled: Vec<_> = mem::take(pulled).into_iter().flatten().collect();
                self.base = Some(pulled.iter().map(|(point, _)| *point).collect());
                self.event = Some(Event::Weights(pulled));
                self.phase = Phase::Computing;
            }
            _ => return,
        }
        self.again = now;
    }

    /// Keeps some of the unsettled gradients; the sequencer counts anew.
    fn drop_unless(&mut self, keeps: impl Fn(&Push) -> bool) {
        let is_dropped = |push: &&Push| push.base.version > 0 && !keeps(push);
        let dropped = self.unsettled.iter().filter(is_dropped).count() as u64;
        self.dropped_before += mem::take(&mut self.dropped) + dropped;
        self.unsettled.retain(keeps);
    }

    fn rejoin(&mut self) {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        // What the program was told to do, and has not heard yet, may still count.
        if self.base.is_none() {
            self.event = None;
        }
        let nonce = self.random;
        self.phase = Phase::Joining { nonce };
    }

    /// Stages the next push.
    fn go_on(&mut self) {
        let mut numbers = self.unsettled.iter().map(|push| push.number);
        if let Some(number) = numbers.find(|number| *number > self.submitted) {
            let staged = vec![false; self.keepers.count()];
            self.phase = Phase::Staging { number, staged };
        }
    }

    fn may_go(&mut self, number: u64, version: Version) {
        if self.unsettled.iter().any(|push| push.number > number) {
            self.go_on();
        } else if self.base.is_some() {
            self.phase = Phase::Computing;
        } else if version == 0 {
            self.base = Some(vec![Point::default(); self.keepers.servers]);
            self.event = Some(Event::WantsInitial);
            self.phase = Phase::Computing;
        } else {
            self.round = self.round.wrapping_add(1);
            let at_least = version;
            let pulled = vec![None; self.keepers.servers];
            self.phase = Phase::Pulling { at_least, pulled };
        }
    }
}

#[cfg(test)]
mod tests;
