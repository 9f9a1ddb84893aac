//! One worker: the pushes that it must keep, and its next requests.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::time::Instant;

use super::changes::{ChangedRows, Kept, KeptWeights};
use super::identity::{Incarnation, Point, PushId, Term, Terms, Version};
use super::keepers::Keepers;
use super::message::{Ask, Piece, Reply, WorkerRequest};
use super::optimizer::Hyper;
use super::rules::Timing;
use super::shard::{Payload, Weights};

/// A gradient that may have to be sent again.
struct Push {
    number: u64,
    /// Oldest weights with which it was computed; `bases` has the point of each server.
    base: Point,
    bases: Vec<Point>,
    /// Payloads by piece and by shard; `None` for a piece that the program has not computed yet.
    pieces: Vec<Option<Vec<Arc<Payload>>>>,
    /// `None` while the program computes pieces.
    hyper: Option<Hyper>,
}

/// Weights of one server, with their point.
pub type Pulled = (Point, Vec<Weights>);

enum WorkerPhase {
    Joining {
        nonce: u64,
    },
    /// Waits for [`Reply::Go`] after this push, which is submitted; 0 before the first.
    Waiting {
        number: u64,
    },
    /// Stages this push; `staged` shows by keeper and by piece whether it has confirmed.
    Staging {
        number: u64,
        staged: Vec<Vec<bool>>,
    },
    Pulling {
        at_least: Version,
        pulled: Vec<Option<Pulled>>,
    },
    /// The program computes.
    Computing,
}

/// A request to the program.
#[derive(Debug)]
pub enum Event {
    /// Asks for the initial weights.
    WantsInitial,
    /// Asks for a gradient, computed with these weights, by server.
    Weights(Vec<Pulled>),
}

/// State of one worker.
pub struct Worker {
    me: u32,
    keepers: Keepers,
    timing: Timing,
    random: u64,
    terms: Terms,
    incarnation: Option<Incarnation>,
    phase: WorkerPhase,
    /// Number of the last push.
    number: u64,
    /// Number of the last push that needs no more staging in this term: all keepers have it, or it
    /// is settled.
    submitted: u64,
    /// Number of the last pull. It starts at random, so no other process of this worker uses the
    /// same.
    round: u64,
    /// Pushes that may have to be sent again, in order.
    unsettled: VecDeque<Push>,
    /// Pushes of this incarnation that were dropped in this term, by the sequencer's count.
    dropped: u64,
    /// Pushes that were dropped before.
    dropped_before: u64,
    /// Points of the weights with which the program computes, by server; `None` if a push would not
    /// count.
    base: Option<Vec<Point>>,
    /// Weights of the last pulls, by server, for parts whose next pull may bring only rows.
    kept: Vec<KeptWeights>,
    /// Rows that the weights of the event have changed since those that the program took last, by
    /// server and part; empty if any weight may have changed.
    changed: Vec<Vec<ChangedRows>>,
    /// True if the program does not have the weights of the last event.
    has_missed: bool,
    /// Time at which unanswered requests are sent again.
    again: Instant,
    event: Option<Event>,
}

impl Worker {
    /// A worker that has just started; `random` must differ from that of every other process.
    #[must_use]
    pub const fn new(me: u32, servers: usize, timing: Timing, random: u64, now: Instant) -> Self {
        // Server 0 reports the number of replicas.
        let replicas = 0;
        Self {
            me,
            keepers: Keepers { servers, replicas },
            timing,
            random,
            terms: Terms::NONE,
            incarnation: None,
            phase: WorkerPhase::Joining { nonce: random },
            number: 0,
            submitted: 0,
            round: random,
            unsettled: VecDeque::new(),
            dropped: 0,
            dropped_before: 0,
            base: None,
            kept: Vec::new(),
            changed: Vec::new(),
            has_missed: true,
            again: now,
            event: None,
        }
    }

    /// Takes the request to the program, if there is a new one.
    pub const fn event(&mut self) -> Option<Event> {
        self.event.take()
    }

    /// Takes the rows that have changed since the weights of the event before, by server and part;
    /// empty if any weight may have changed. Call it when the event is taken.
    pub fn changed(&mut self) -> Vec<Vec<ChangedRows>> {
        mem::take(&mut self.changed)
    }

    /// Time of the next [`Self::step`] if no message arrives before.
    #[must_use]
    pub const fn wake(&self) -> Instant {
        self.again
    }

    /// Makes the next step send unanswered requests, as after a new connection or a push.
    pub const fn say_again(&mut self, now: Instant) {
        self.again = now;
    }

    /// Returns whether there is a request that the program has not taken.
    #[must_use]
    pub const fn has_event(&self) -> bool {
        self.event.is_some()
    }

    /// Returns whether all pushes are submitted, and the sequencer has sent `Go` since.
    #[must_use]
    pub const fn has_gone_on(&self) -> bool {
        matches!(
            self.phase,
            WorkerPhase::Pulling { .. } | WorkerPhase::Computing
        )
    }

    /// The servers' term, as far as the worker knows.
    #[must_use]
    pub fn term(&self) -> Term {
        self.terms.term()
    }

    /// A request to end the membership.
    #[must_use]
    pub fn leave(&self) -> WorkerRequest {
        WorkerRequest {
            term: self.terms.term(),
            worker: self.me,
            ask: Ask::Leave(self.incarnation.unwrap_or_default()),
        }
    }

    /// Returns whether the program computes a gradient of which it has begun to push pieces.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.unsettled
            .back()
            .is_some_and(|push| push.hyper.is_none())
    }

    /// Number of gradients that the worker keeps.
    #[must_use]
    pub fn unsettled(&self) -> usize {
        self.unsettled.len()
    }

    /// Number of gradients that are in no update and never will be, as far as the worker knows.
    #[must_use]
    pub const fn dropped(&self) -> u64 {
        self.dropped_before + self.dropped
    }

    /// Returns whether a push would count: the program's weights are still in the servers' past.
    #[must_use]
    pub const fn computes(&self) -> bool {
        self.base.is_some()
    }

    /// Accepts a whole gradient, by shard, and returns its identity, as `open` does.
    pub fn push(&mut self, payloads: Vec<Arc<Payload>>, hyper: Hyper) -> Option<PushId> {
        let id = self.open(1)?;
        self.put(id, 0, payloads);
        self.close(id, hyper).then_some(id)
    }

    /// Begins a gradient of so many pieces, and returns its identity. Returns `None` if the servers
    /// went back to a version before the weights with which it is computed; the worker pulls new
    /// ones already. A gradient that is still open is abandoned.
    pub fn open(&mut self, pieces: usize) -> Option<PushId> {
        self.abandon();
        let (bases, incarnation) = (self.base.take()?, self.incarnation?);
        self.number += 1;
        let number = self.number;
        let oldest = bases.iter().min_by_key(|point| point.version);
        self.unsettled.push_back(Push {
            number,
            base: oldest.copied().unwrap_or_default(),
            bases,
            pieces: vec![None; pieces],
            hyper: None,
        });
        if matches!(self.phase, WorkerPhase::Computing) {
            self.go_on();
        }
        Some(PushId {
            worker: self.me,
            incarnation,
            number,
        })
    }

    /// Accepts a piece of the open gradient, by shard. Does nothing if this gradient does not count
    /// any more.
    ///
    /// # Panics
    /// If the gradient has no such piece.
    pub fn put(&mut self, id: PushId, piece: usize, payloads: Vec<Arc<Payload>>) {
        if let Some(push) = self.opened(id) {
            push.pieces[piece] = Some(payloads);
        }
    }

    /// Ends the open gradient. Returns `false` if it does not count any more.
    ///
    /// # Panics
    /// If a piece is missing.
    pub fn close(&mut self, id: PushId, hyper: Hyper) -> bool {
        let Some(push) = self.opened(id) else {
            return false;
        };
        let is_whole = push.pieces.iter().all(Option::is_some);
        assert!(is_whole, "a piece of the gradient is missing");
        push.hyper = Some(hyper);
        self.submit_staged();
        true
    }

    /// Forgets the open gradient, if there is one: the program has failed to compute it. Another
    /// one may be computed with the same weights.
    pub fn abandon(&mut self) {
        if !self.is_open() {
            return;
        }
        let Some(push) = self.unsettled.pop_back() else {
            return;
        };
        let is_past = |bases: &Vec<Point>| bases.iter().all(|it| self.terms.contains(*it));
        self.base = Some(push.bases).filter(is_past);
        if matches!(&self.phase, WorkerPhase::Staging { number, .. } if *number == push.number) {
            self.phase = WorkerPhase::Computing;
            if self.base.is_none() {
                self.rejoin();
            }
        }
    }

    fn opened(&mut self, id: PushId) -> Option<&mut Push> {
        let last = self
            .unsettled
            .back_mut()
            .filter(|push| push.hyper.is_none());
        last.filter(|push| Some(id.incarnation) == self.incarnation && push.number == id.number)
    }

    /// Placement of copies, as far as the worker knows.
    #[must_use]
    pub const fn keepers(&self) -> Keepers {
        self.keepers
    }

    /// Requests to send now, by keeper. Those without a gradient go to first copies, whose index is
    /// that of their server.
    pub fn step(&mut self, now: Instant) -> Vec<(usize, WorkerRequest)> {
        if now < self.again {
            return Vec::new();
        }
        self.again = now + self.timing.again;
        let mut asks = Vec::new();
        match &self.phase {
            WorkerPhase::Joining { nonce } => asks.push((0, self.join(*nonce))),
            WorkerPhase::Waiting { number } => {
                let pushed = self.unsettled.iter().find(|it| it.number == *number);
                let submitted = pushed.and_then(|push| self.submit(push));
                asks.push((0, submitted.unwrap_or_else(|| self.join(self.random))));
            }
            WorkerPhase::Staging { number, staged } => {
                let push = self.unsettled.iter().find(|it| it.number == *number);
                if let Some(push) = push {
                    let count = push.pieces.len() as u32;
                    for (keeper, staged) in staged.iter().enumerate() {
                        let shard = self.keepers.shard(keeper);
                        let pieces = (0..).zip(&push.pieces).zip(staged);
                        asks.extend(pieces.filter_map(|((index, payloads), is_staged)| {
                            let payloads = payloads.as_ref().filter(|_| !is_staged)?;
                            let ask = Ask::Stage {
                                id: self.id(push.number),
                                base: push.bases[shard].version,
                                piece: Piece { index, count },
                                payload: payloads[shard].clone(),
                            };
                            Some((keeper, ask))
                        }));
                    }
                }
            }
            WorkerPhase::Pulling { at_least, pulled } => {
                let all = 0..self.keepers.servers;
                let missing = all.filter(|&server| pulled[server].is_none());
                asks.extend(missing.map(|server| {
                    let ask = Ask::Pull {
                        round: self.round,
                        at_least: *at_least,
                        kept: self.kept.get(server).and_then(KeptWeights::kept),
                    };
                    (server, ask)
                }));
            }
            WorkerPhase::Computing => {}
        }
        // The sequencer gets a sign of life in any case.
        if let Some(incarnation) = self.incarnation
            && !matches!(
                self.phase,
                WorkerPhase::Joining { .. } | WorkerPhase::Waiting { .. }
            )
        {
            asks.push((0, Ask::Alive(incarnation)));
        }
        let (term, worker) = (self.terms.term(), self.me);
        let request = |(server, ask)| (server, WorkerRequest { term, worker, ask });
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

    fn submit(&self, push: &Push) -> Option<Ask> {
        Some(Ask::Submit {
            id: self.id(push.number),
            base: push.base.version,
            hyper: push.hyper?,
        })
    }

    /// Handles the reply of a keeper.
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
                // Under another incarnation nothing shows whether they were applied.
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
                if !matches!(self.phase, WorkerPhase::Joining { nonce: ours } if ours == nonce) {
                    return;
                }
                self.incarnation = Some(incarnation);
                self.keepers.replicas = replicas.min(self.keepers.servers - 1);
                self.unsettled.retain(|push| push.number > latest);
                self.submitted = latest;
                self.phase = WorkerPhase::Waiting { number: latest };
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
                // An older reply may arrive later.
                self.dropped = self.dropped.max(dropped);
                if !matches!(self.phase, WorkerPhase::Waiting { number: ours } if ours == number) {
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
            Reply::Staged(theirs, id, piece) if theirs == term && id == self.id(id.number) => {
                // A repeated reply must not make this worker repeat requests.
                let WorkerPhase::Staging { number, staged } = &mut self.phase else {
                    return;
                };
                let pieces = staged.get_mut(keeper).filter(|_| *number == id.number);
                let Some(is_staged) = pieces.and_then(|it| it.get_mut(piece as usize)) else {
                    return;
                };
                *is_staged = true;
                if !self.submit_staged() {
                    return;
                }
            }
            Reply::Weights {
                round,
                point,
                start,
                base,
                parts,
            } => {
                let WorkerPhase::Pulling { pulled, .. } = &mut self.phase else {
                    return;
                };
                // A repeated reply has rows for the weights before the first one.
                if round != self.round || pulled.get(keeper).is_none_or(Option::is_some) {
                    return;
                }
                self.kept
                    .resize_with(self.keepers.servers, KeptWeights::default);
                let version = point.version;
                let taken = self.kept[keeper].take(base, Kept { start, version }, parts);
                let Some(weights) = taken else {
                    // Nothing is kept any more, so the next pull is whole.
                    self.round = self.round.wrapping_add(1);
                    self.again = now;
                    return;
                };
                pulled[keeper] = Some((point, weights));
                if !pulled.iter().all(Option::is_some) {
                    return;
                }
                let pulled: Vec<_> = mem::take(pulled).into_iter().flatten().collect();
                self.base = Some(pulled.iter().map(|(point, _)| *point).collect());
                let changed = self.kept.iter_mut().map(KeptWeights::take_changed);
                let changed: Vec<_> = changed.collect();
                // The program gets no rows of an event that it does not take.
                let is_missed = mem::take(&mut self.has_missed) || self.event.is_some();
                self.changed = if is_missed { Vec::new() } else { changed };
                self.event = Some(Event::Weights(pulled));
                self.phase = WorkerPhase::Computing;
            }
            _ => return,
        }
        self.again = now;
    }

    /// Drops unsettled gradients that `keeps` rejects. Adds up the drops here, because the
    /// sequencer's count starts again at 0.
    fn drop_unless(&mut self, keeps: impl Fn(&Push) -> bool) {
        // The program counts an open one itself.
        let is_step = |push: &Push| push.base.version > 0 && push.hyper.is_some();
        let is_dropped = |push: &&Push| is_step(push) && !keeps(push);
        let dropped = self.unsettled.iter().filter(is_dropped).count() as u64;
        self.dropped_before += mem::take(&mut self.dropped) + dropped;
        self.unsettled.retain(keeps);
    }

    fn rejoin(&mut self) {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        // A request that the program has not taken stays valid while its weights count.
        if self.base.is_none() {
            self.has_missed |= self.event.take().is_some();
        }
        let nonce = self.random;
        self.phase = WorkerPhase::Joining { nonce };
    }

    /// Stages the next push that is not submitted, if there is one.
    fn go_on(&mut self) {
        let mut pushes = self.unsettled.iter();
        if let Some(push) = pushes.find(|push| push.number > self.submitted) {
            let staged = vec![vec![false; push.pieces.len()]; self.keepers.count()];
            let number = push.number;
            self.phase = WorkerPhase::Staging { number, staged };
        }
    }

    /// Submits the push that is being staged, if all keepers have all of it. Returns whether it did.
    fn submit_staged(&mut self) -> bool {
        let WorkerPhase::Staging { number, staged } = &self.phase else {
            return false;
        };
        let number = *number;
        let push = self.unsettled.iter().find(|push| push.number == number);
        let is_closed = push.is_some_and(|push| push.hyper.is_some());
        if !is_closed || !staged.iter().flatten().all(|is| *is) {
            return false;
        }
        self.submitted = number;
        self.phase = WorkerPhase::Waiting { number };
        true
    }

    fn may_go(&mut self, number: u64, version: Version) {
        if self.unsettled.iter().any(|push| push.number > number) {
            self.go_on();
        } else if self.base.is_some() {
            self.phase = WorkerPhase::Computing;
        } else if version == 0 {
            self.base = Some(vec![Point::default(); self.keepers.servers]);
            self.event = Some(Event::WantsInitial);
            self.phase = WorkerPhase::Computing;
        } else {
            self.round = self.round.wrapping_add(1);
            let at_least = version;
            let pulled = vec![None; self.keepers.servers];
            self.phase = WorkerPhase::Pulling { at_least, pulled };
        }
    }
}

#[cfg(test)]
mod tests;
