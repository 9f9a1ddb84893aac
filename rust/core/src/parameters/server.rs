//! One server: what is staged, the log as far as it is applied, the weights, and their snapshots.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::identity::{Incarnation, Point, PushId, Term, Terms, Version};
use super::log::{Entry, History};
use super::message::{Ask, Order, Reply, Report, Request};
use super::shard::{Payload, Push, Shard, Weights};

/// Weights of earlier pulls that are kept for each worker, to correct its late gradients.
const LENT_MAX: usize = 2;

/// Everything about a server at one point, as its disk has it.
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    /// Which.
    pub point: Point,
    /// The log up to there.
    pub history: History,
    /// By worker, its last push in the log.
    pub applied: BTreeMap<u32, (Incarnation, u64)>,
    /// Nothing before the first entry.
    pub shard: Option<Shard>,
}

/// Where a server keeps what a restart must not take from it.
pub trait Disk {
    /// The last that was begun.
    fn terms(&self) -> Terms;
    /// Snapshots that are there as a whole.
    fn points(&self) -> Vec<Point>;
    /// One of them; one that cannot be read is none of them any more.
    fn load(&mut self, point: Point) -> Option<Snapshot>;
    /// Remembers terms before it returns, and removes snapshots that are not in their past.
    fn begin(&mut self, terms: &Terms);
    /// Begins to write, after what was begun before; the owner calls `saved` when all of it is there.
    fn save(&mut self, snapshot: Snapshot);
    /// Removes snapshots before this version.
    fn forget_before(&mut self, version: Version);
}

struct Staged {
    base: Version,
    payload: Arc<Payload>,
}

/// A server in a term.
struct State {
    terms: Terms,
    at: Snapshot,
    saved: Version,
    staged: BTreeMap<PushId, Staged>,
    /// By worker: which pull waits for which version.
    pulls: BTreeMap<u32, (u64, Version)>,
    /// By worker: weights of its last pulls.
    lent: BTreeMap<u32, VecDeque<(Version, Vec<Weights>)>>,
    /// By worker: the last push that needs not be kept.
    over: BTreeMap<u32, (Incarnation, u64)>,
}

/// One server.
pub struct Server<D> {
    disk: D,
    snapshot_every: Version,
    /// Whether late gradients are corrected.
    lends: bool,
    state: Option<State>,
}

impl<D: Disk> Server<D> {
    /// One that has just started.
    #[must_use]
    pub const fn new(disk: D, snapshot_every: Version, lends: bool) -> Self {
        Self {
            disk,
            snapshot_every,
            lends,
            state: None,
        }
    }

    /// Its disk.
    pub const fn disk(&mut self) -> &mut D {
        &mut self.disk
    }

    /// Where it is, if it is in a term.
    #[must_use]
    pub fn at(&self) -> Option<&Snapshot> {
        self.state.as_ref().map(|state| &state.at)
    }

    /// In which term, if it is in one.
    #[must_use]
    pub fn term(&self) -> Option<Term> {
        self.state.as_ref().map(|state| state.terms.term())
    }

    /// How many gradients are staged.
    #[must_use]
    pub fn staged(&self) -> usize {
        self.state.as_ref().map_or(0, |state| state.staged.len())
    }

    /// A snapshot is on the disk.
    pub fn saved(&mut self, point: Point) {
        if let Some(state) = &mut self.state
            && state.terms.contains(point)
        {
            state.saved = state.saved.max(point.version);
        }
    }

    /// A worker asks; nothing if the answer comes later, or not.
    pub fn answer(&mut self, request: &Request) -> Option<Reply> {
        let state = self.state.as_mut()?;
        let term = state.terms.term();
        if request.term != term {
            let is_old = request.term < term;
            return is_old.then(|| Reply::OtherTerm(state.terms.clone()));
        }
        match &request.ask {
            Ask::Stage { id, base, payload } => {
                if !state.is_over(id) {
                    if !state.accepts(*base, payload) {
                        return None;
                    }
                    let (base, payload) = (*base, payload.clone());
                    state.staged.entry(*id).or_insert(Staged { base, payload });
                }
                Some(Reply::Staged(term, *id))
            }
            Ask::Pull { round, at_least } => {
                state.pulls.insert(request.worker, (*round, *at_least));
                state.weights_for(request.worker, self.lends)
            }
            Ask::Join { .. } | Ask::Submit { .. } | Ask::Alive(_) | Ask::Leave(_) => None,
        }
    }

    /// The sequencer says what to do: an answer for it, and weights that workers have waited for.
    pub fn obey(&mut self, order: Order) -> (Option<Report>, Vec<(u32, Reply)>) {
        match order {
            Order::Look { question } => {
                let mut points = self.disk.points();
                points.push(Point::default());
                let terms = self.disk.terms();
                (
                    Some(Report::Status {
                        question,
                        terms,
                        points,
                    }),
                    vec![],
                )
            }
            Order::Install { terms, point } => (self.install(terms, point), vec![]),
            Order::Append {
                term,
                after,
                entries,
                over,
                stable,
            } => {
                let current = self.state.as_ref().map(|state| state.terms.term());
                match current {
                    Some(current) if current > term => (None, vec![]),
                    Some(current) if current == term => {
                        let Some(replies) = self.append(after, entries, &over, stable) else {
                            self.state = None;
                            return (Some(Report::Lost(term)), vec![]);
                        };
                        let state = self.state.as_ref().expect("it has just appended");
                        let (version, saved) = (state.at.point.version, state.saved);
                        (
                            Some(Report::Applied {
                                term,
                                version,
                                saved,
                            }),
                            replies,
                        )
                    }
                    _ => (Some(Report::Lost(term)), vec![]),
                }
            }
        }
    }

    fn install(&mut self, terms: Terms, point: Point) -> Option<Report> {
        let term = terms.term();
        if let Some(state) = &self.state
            && state.terms.term() == term
        {
            return (state.at.point == point).then(|| state.installed());
        }
        // It may have been in this term and forgotten what it did there.
        if self.disk.terms().term() >= term {
            return (self.disk.terms().term() == term).then_some(Report::Lost(term));
        }
        let at = if point.version == 0 {
            Snapshot::empty()
        } else {
            match self.disk.load(point) {
                Some(snapshot) => snapshot,
                None => return Some(Report::Lost(term)),
            }
        };
        self.disk.begin(&terms);
        let state = State {
            saved: point.version,
            at,
            terms,
            staged: BTreeMap::new(),
            pulls: BTreeMap::new(),
            lent: BTreeMap::new(),
            over: BTreeMap::new(),
        };
        Some(self.state.insert(state).installed())
    }

    /// Applies what is new of these entries. Nothing if a gradient of theirs is not there.
    fn append(
        &mut self,
        after: Version,
        entries: Vec<Entry>,
        over: &[PushId],
        stable: Version,
    ) -> Option<Vec<(u32, Reply)>> {
        let state = self.state.as_mut()?;
        let known = state.at.point.version;
        if after > known {
            return Some(vec![]);
        }
        for entry in entries.iter().skip((known - after) as usize) {
            state.apply(entry)?;
            let version = state.at.point.version;
            if version == 1 || version.is_multiple_of(self.snapshot_every) {
                self.disk.save(state.at.clone());
            }
        }
        // Everything that these entries need has been used.
        for id in over {
            let last = state.over.entry(id.worker).or_default();
            *last = (*last).max((id.incarnation, id.number));
        }
        let mut staged = std::mem::take(&mut state.staged);
        staged.retain(|id, _| !state.is_over(id));
        state.staged = staged;
        // The one before is kept, too: a disk may damage what was written.
        let kept = stable.saturating_sub(self.snapshot_every);
        self.disk.forget_before(kept);
        let lends = self.lends;
        let waiting: Vec<_> = state.pulls.keys().copied().collect();
        let replies = waiting.into_iter().filter_map(|worker| {
            state
                .weights_for(worker, lends)
                .map(|reply| (worker, reply))
        });
        Some(replies.collect())
    }
}

impl Snapshot {
    fn empty() -> Self {
        Self {
            point: Point::default(),
            history: History::default(),
            applied: BTreeMap::new(),
            shard: None,
        }
    }
}

impl State {
    fn installed(&self) -> Report {
        let applied = self.at.applied.iter();
        let applied = applied.map(|(&worker, &(incarnation, number))| PushId {
            worker,
            incarnation,
            number,
        });
        Report::Installed {
            term: self.terms.term(),
            applied: applied.collect(),
        }
    }

    fn is_over(&self, id: &PushId) -> bool {
        let is = |last: Option<&(Incarnation, u64)>| {
            last.is_some_and(|last| (id.incarnation, id.number) <= *last)
        };
        is(self.over.get(&id.worker)) || is(self.at.applied.get(&id.worker))
    }

    /// Whether a payload can be what it says.
    fn accepts(&self, base: Version, payload: &Payload) -> bool {
        match (payload, &self.at.shard) {
            (Payload::Initial { parts, .. }, _) => base == 0 && Shard::is_whole(parts),
            (Payload::Gradients(gradients), Some(shard)) => base > 0 && shard.fits(gradients),
            (Payload::Gradients(_), None) => false,
        }
    }

    /// The weights for a pull, if it may have them.
    fn weights_for(&mut self, worker: u32, lends: bool) -> Option<Reply> {
        let (round, at_least) = *self.pulls.get(&worker)?;
        let shard = self.at.shard.as_ref()?;
        let point = self.at.point;
        if point.version < at_least {
            return None;
        }
        self.pulls.remove(&worker);
        let parts = shard.weights();
        if lends {
            let lent = self.lent.entry(worker).or_default();
            lent.retain(|(version, _)| *version != point.version);
            lent.push_back((point.version, parts.clone()));
            if lent.len() > LENT_MAX {
                lent.pop_front();
            }
        }
        Some(Reply::Weights {
            round,
            point,
            parts,
        })
    }

    /// The next entry of the log; nothing if a gradient of it is not there.
    fn apply(&mut self, entry: &Entry) -> Option<()> {
        let mut staged = Vec::new();
        for contribution in &entry.contributions {
            let id = contribution.id;
            let last = self.at.applied.get(&id.worker);
            if last.is_some_and(|last| (id.incarnation, id.number) <= *last) {
                return None;
            }
            staged.push(self.staged.get(&id)?);
        }
        let point = Point {
            term: self.terms.term(),
            version: self.at.point.version + 1,
        };
        if let Some(shard) = &mut self.at.shard {
            let mut pushed = Vec::new();
            for (contribution, staged) in entry.contributions.iter().zip(&staged) {
                let Payload::Gradients(gradients) = &*staged.payload else {
                    return None;
                };
                let lent = self.lent.get(&contribution.id.worker);
                let then = lent
                    .into_iter()
                    .flatten()
                    .find(|(version, _)| *version == staged.base);
                let then = then.map(|(_, weights)| weights.as_slice());
                pushed.push(Push { gradients, then });
            }
            shard.apply(point.version, entry, &pushed);
        } else {
            let Payload::Initial { optimizer, parts } = &*staged.first()?.payload else {
                return None;
            };
            self.at.shard = Some(Shard::new(*optimizer, parts));
        }
        for contribution in &entry.contributions {
            let id = contribution.id;
            self.staged.remove(&id);
            self.at
                .applied
                .insert(id.worker, (id.incarnation, id.number));
        }
        self.at.history = self.at.history.followed_by(entry);
        self.at.point = point;
        Some(())
    }
}

#[cfg(test)]
mod tests;
