//! One server: staged gradients, the applied part of the log, the weights, and their snapshots.

use std::collections::{BTreeMap, VecDeque};
use std::iter::zip;
use std::sync::Arc;

use super::changes::{Changes, Kept};
use super::identity::{Incarnation, Point, PushId, Term, Terms, Version};
use super::log::{Entry, IN_FLIGHT_MAX};
use super::message::{Ask, Order, Piece, Reply, Report, Start, WorkerRequest};
use super::shard::{Gradient, Payload, Push, Shard, Weights};
use super::snapshot::Snapshot;

/// Pulled versions that are kept for each worker, to correct its late gradients.
const PULLED_VERSIONS_MAX: usize = 2;

/// Storage for what a restart must not lose.
pub trait Disk {
    /// The terms that were begun last.
    fn terms(&self) -> Terms;
    /// Points of complete snapshots.
    fn points(&self) -> Vec<Point>;
    /// Loads a snapshot. If it cannot be read, its point is removed from the list.
    fn load(&mut self, point: Point) -> Option<Snapshot>;
    /// Writes terms before it returns, and removes snapshots that are not in their past.
    fn begin(&mut self, terms: &Terms);
    /// Begins to write a snapshot, after earlier ones. The owner calls `saved` once it is complete.
    fn save(&mut self, snapshot: Snapshot);
    /// Removes snapshots before this version.
    fn forget_before(&mut self, version: Version);
}

/// A gradient of which at least one piece has arrived.
struct Staged {
    base: Version,
    pieces: Vec<Option<Arc<Payload>>>,
}

/// A worker's pull that waits for its version.
struct WaitingPull {
    round: u64,
    at_least: Version,
    kept: Option<Kept>,
}

/// State of a server in a term.
struct State {
    terms: Terms,
    /// Round of the start with which the term began.
    start: u64,
    at: Snapshot,
    /// Version of the last snapshot in this term. In one term, all servers save the same versions.
    saved: Version,
    /// The last applied entries, for servers that have not received them.
    entries: VecDeque<Entry>,
    staged: BTreeMap<PushId, Staged>,
    /// Rows that the last updates of this term changed.
    changes: Changes,
    pulls: BTreeMap<u32, WaitingPull>,
    /// Weights of each worker's last pulls, with their versions.
    pulled_versions: BTreeMap<u32, VecDeque<(Version, Vec<Weights>)>>,
    /// Last push of each worker that need not be kept.
    acknowledged: BTreeMap<u32, (Incarnation, u64)>,
}

/// One server, with its state while it is in a term.
pub struct Server<D> {
    disk: D,
    /// Updates between two snapshots; `None` for further copies of shards, which write none.
    snapshot_every: Option<Version>,
    /// True if pulled weights are kept, to correct late gradients.
    keeps_pulled: bool,
    state: Option<State>,
    /// Round of the status that it has sent. Its state must not change before the start that
    /// follows.
    prepared_round: Option<u64>,
    /// Round of the start with which it began the current term.
    installed_round: Option<u64>,
    /// Snapshot loaded for the current round. Loading takes long, and the sequencer may repeat its
    /// order.
    loaded: Option<Snapshot>,
}

impl<D: Disk> Server<D> {
    /// A server that has just started.
    #[must_use]
    pub const fn new(disk: D, snapshot_every: Option<Version>, keeps_pulled: bool) -> Self {
        Self {
            disk,
            snapshot_every,
            keeps_pulled,
            state: None,
            prepared_round: None,
            installed_round: None,
            loaded: None,
        }
    }

    /// The server's disk.
    pub const fn disk(&mut self) -> &mut D {
        &mut self.disk
    }

    /// State in memory; `None` if the server is in no term.
    #[must_use]
    pub fn at(&self) -> Option<&Snapshot> {
        self.state.as_ref().map(|state| &state.at)
    }

    /// Current term, if the server is in one.
    #[must_use]
    pub fn term(&self) -> Option<Term> {
        self.state.as_ref().map(|state| state.terms.term())
    }

    /// Number of gradients with a staged piece.
    #[must_use]
    pub fn staged(&self) -> usize {
        self.state.as_ref().map_or(0, |state| state.staged.len())
    }

    /// Records that a snapshot is on the disk.
    pub fn saved(&mut self, point: Point) {
        if let Some(state) = &mut self.state
            && state.terms.contains(point)
            && point.version >= state.terms.start()
        {
            state.saved = state.saved.max(point.version);
        }
    }

    /// Answers a worker. Returns `None` if the answer follows later, or never.
    pub fn answer(&mut self, request: &WorkerRequest) -> Option<Reply> {
        let state = self.state.as_mut()?;
        let term = state.terms.term();
        if request.term != term {
            let is_old = request.term < term;
            return is_old.then(|| Reply::OtherTerm(state.terms.clone()));
        }
        match &request.ask {
            Ask::Stage {
                id,
                base,
                piece,
                payload,
            } => {
                if !state.is_over(id) && !state.stage(*id, *base, *piece, payload) {
                    return None;
                }
                Some(Reply::Staged(term, *id, piece.index))
            }
            // Workers pull from first copies.
            Ask::Pull { .. } if self.snapshot_every.is_none() => None,
            Ask::Pull {
                round,
                at_least,
                kept,
            } => {
                let pull = WaitingPull {
                    round: *round,
                    at_least: *at_least,
                    kept: *kept,
                };
                state.pulls.insert(request.worker, pull);
                state.weights_for(request.worker, self.keeps_pulled)
            }
            Ask::Join { .. } | Ask::Submit { .. } | Ask::Alive(_) | Ask::Leave(_) => None,
        }
    }

    /// Follows an order. Returns a report to the sequencer, and weights for workers that have
    /// waited.
    pub fn apply(&mut self, order: Order) -> (Option<Report>, Vec<(u32, Reply)>) {
        match order {
            Order::Prepare { round } if self.installed_round == Some(round) => (None, vec![]),
            Order::Prepare { round } => {
                self.prepared_round = Some(round);
                self.loaded = None;
                let mut points = self.disk.points();
                points.push(Point::default());
                let entries = self.state.iter().flat_map(|state| &state.entries);
                let status = Report::Status {
                    round,
                    terms: self.disk.terms(),
                    points,
                    at: self.at().map(|at| at.point),
                    entries: entries.cloned().collect(),
                };
                (Some(status), vec![])
            }
            Order::Install(start) => (self.install(start, None), vec![]),
            Order::InstallSnapshot(start, state) => (self.install(start, Some(&state)), vec![]),
            Order::FetchState(start) => (Some(self.fetch_state(&start)), vec![]),
            Order::Append {
                term,
                after,
                entries,
                acknowledged,
                stable,
            } => {
                let current = self.state.as_ref().map(|state| state.terms.term());
                match current {
                    Some(current) if current > term => (None, vec![]),
                    Some(current) if current == term && self.prepared_round.is_none() => {
                        let Some(replies) = self.append(after, entries, &acknowledged, stable)
                        else {
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

    fn install(&mut self, start: Start, given: Option<&Snapshot>) -> Option<Report> {
        let (term, point) = (start.terms.term(), start.point);
        if let Some(state) = &self.state
            && state.terms.term() == term
        {
            return (state.at.point == point).then(|| state.installed());
        }
        // After a restart, the server may have been in this term and have forgotten its updates.
        if self.disk.terms().term() >= term {
            return (self.disk.terms().term() == term).then_some(Report::Lost(term));
        }
        let at = match given {
            Some(state) if self.prepared_round == Some(start.round) => Some(state.clone()),
            Some(_) => None,
            None => self.reach(&start),
        };
        let Some(at) = at.filter(|at| at.point == point) else {
            return Some(Report::Lost(term));
        };
        self.installed_round = self.prepared_round.take();
        self.loaded = None;
        self.disk.begin(&start.terms);
        let is_saved = self.disk.points().contains(&point);
        if self.snapshot_every.is_some() && point.version > 0 && !is_saved {
            self.disk.save(at.clone());
        }
        let state = State {
            saved: if is_saved { point.version } else { 0 },
            at,
            terms: start.terms,
            start: start.round,
            entries: start.entries.into(),
            staged: BTreeMap::new(),
            changes: Changes::default(),
            pulls: BTreeMap::new(),
            pulled_versions: BTreeMap::new(),
            acknowledged: BTreeMap::new(),
        };
        Some(self.state.insert(state).installed())
    }

    fn fetch_state(&mut self, start: &Start) -> Report {
        let (round, term) = (start.round, start.terms.term());
        let state = self.reach(start).map(Arc::new);
        state.map_or(Report::Lost(term), |state| Report::FetchedState {
            round,
            state,
        })
    }

    /// The state at the start: from memory, perhaps after some more updates, or from the disk.
    /// `None` if this process has not sent the status of the round, as after a restart.
    fn reach(&mut self, start: &Start) -> Option<Snapshot> {
        if self.prepared_round != Some(start.round) {
            return None;
        }
        if start.point.version == 0 {
            return Some(Snapshot::empty());
        }
        if let Some(state) = &mut self.state
            && start.terms.contains(state.at.point)
            && let Some(missing) = state.missing(start)
        {
            let mut missing = missing.iter();
            let applied = missing.try_for_each(|entry| state.apply_entry(entry, start.point.term));
            if applied.is_some() && state.at.point == start.point {
                return Some(state.at.clone());
            }
            // Otherwise the next status would claim again that the server can reach the start.
            self.state = None;
        }
        let loaded = self.loaded.take().filter(|it| it.point == start.point);
        self.loaded = loaded.or_else(|| self.disk.load(start.point));
        self.loaded.clone()
    }

    /// Applies the entries that are new. Returns `None` if a gradient is missing.
    fn append(
        &mut self,
        after: Version,
        entries: Vec<Entry>,
        acknowledged: &[PushId],
        stable: Version,
    ) -> Option<Vec<(u32, Reply)>> {
        let state = self.state.as_mut()?;
        let known = state.at.point.version;
        if after > known {
            return Some(vec![]);
        }
        for entry in entries.iter().skip((known - after) as usize) {
            state.apply_entry(entry, state.terms.term())?;
            let version = state.at.point.version;
            let every = self.snapshot_every;
            if every.is_some_and(|every| version == 1 || version.is_multiple_of(every)) {
                self.disk.save(state.at.clone());
            }
        }
        // Every gradient that these entries need has been used.
        for id in acknowledged {
            let last = state.acknowledged.entry(id.worker).or_default();
            *last = (*last).max((id.incarnation, id.number));
        }
        let mut staged = std::mem::take(&mut state.staged);
        staged.retain(|id, _| !state.is_over(id));
        state.staged = staged;
        // Keeps one more snapshot, because a disk may damage the newer one.
        let kept = stable.saturating_sub(self.snapshot_every.unwrap_or(0));
        self.disk.forget_before(kept);
        let keeps_pulled = self.keeps_pulled;
        let waiting: Vec<_> = state.pulls.keys().copied().collect();
        let replies = waiting.into_iter().filter_map(|worker| {
            state
                .weights_for(worker, keeps_pulled)
                .map(|reply| (worker, reply))
        });
        Some(replies.collect())
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
            saved: self.saved,
        }
    }

    /// Entries up to the start that are not applied yet; `None` if the start does not have all of
    /// them.
    fn missing<'a>(&self, start: &'a Start) -> Option<&'a [Entry]> {
        let missing = start.point.version.checked_sub(self.at.point.version)?;
        let first = start.entries.len().checked_sub(missing as usize)?;
        Some(&start.entries[first..])
    }

    fn is_over(&self, id: &PushId) -> bool {
        let is = |last: Option<&(Incarnation, u64)>| {
            last.is_some_and(|last| (id.incarnation, id.number) <= *last)
        };
        is(self.acknowledged.get(&id.worker)) || is(self.at.applied.get(&id.worker))
    }

    /// Returns whether a payload fits the shard.
    fn accepts(&self, base: Version, piece: Piece, payload: &Payload) -> bool {
        piece.is_possible()
            && match (payload, &self.at.shard) {
                (Payload::Initial { parts, .. }, _) => {
                    base == 0 && piece == Piece::WHOLE && Shard::is_whole(parts)
                }
                (Payload::Gradients(gradients), Some(shard)) => base > 0 && shard.fits(gradients),
                (Payload::Gradients(_), None) => false,
            }
    }

    /// Keeps a piece; returns `false` if it cannot be of this gradient.
    fn stage(&mut self, id: PushId, base: Version, piece: Piece, payload: &Arc<Payload>) -> bool {
        if !self.accepts(base, piece, payload) {
            return false;
        }
        let count = piece.count as usize;
        // A worker that stages a push has abandoned those before it that lack pieces.
        let is_abandoned = |other: &PushId, staged: &Staged| {
            (other.worker, other.incarnation) == (id.worker, id.incarnation)
                && other.number < id.number
                && staged.pieces.iter().any(Option::is_none)
        };
        self.staged
            .retain(|other, staged| !is_abandoned(other, staged));
        let staged = self.staged.entry(id).or_insert_with(|| Staged {
            base,
            pieces: vec![None; count],
        });
        if staged.base != base || staged.pieces.len() != count {
            return false;
        }
        staged.pieces[piece.index as usize].get_or_insert_with(|| payload.clone());
        true
    }

    /// Replies to a waiting pull, if the weights are new enough.
    fn weights_for(&mut self, worker: u32, keeps_pulled: bool) -> Option<Reply> {
        let at_least = self.pulls.get(&worker)?.at_least;
        let shard = self.at.shard.as_ref()?;
        let (point, start) = (self.at.point, self.start);
        if point.version < at_least {
            return None;
        }
        let pull = self.pulls.remove(&worker)?;
        if keeps_pulled {
            let pulled_versions = self.pulled_versions.entry(worker).or_default();
            pulled_versions.retain(|(version, _)| *version != point.version);
            pulled_versions.push_back((point.version, shard.weights()));
            if pulled_versions.len() > PULLED_VERSIONS_MAX {
                pulled_versions.pop_front();
            }
        }
        let is_known = |kept: &Kept| kept.start == start && kept.version <= point.version;
        let base = pull.kept.filter(is_known);
        let parts = self.changes.pulled(shard, base.map(|base| base.version));
        Some(Reply::Weights {
            round: pull.round,
            point,
            start,
            base,
            parts,
        })
    }

    /// Applies the next entry in `term`. Returns `None` if a gradient is missing, or was applied
    /// before.
    fn apply_entry(&mut self, entry: &Entry, term: Term) -> Option<()> {
        let mut staged = Vec::new();
        for contribution in &entry.contributions {
            let id = contribution.id;
            let last = self.at.applied.get(&id.worker);
            if last.is_some_and(|last| (id.incarnation, id.number) <= *last) {
                return None;
            }
            let staged_push = self.staged.get(&id)?;
            let pieces = staged_push.pieces.iter().map(Option::as_deref);
            staged.push((staged_push.base, pieces.collect::<Option<Vec<_>>>()?));
        }
        let point = Point {
            term,
            version: self.at.point.version + 1,
        };
        if let Some(shard) = &mut self.at.shard {
            let mut pushed = Vec::new();
            for (contribution, (base, pieces)) in entry.contributions.iter().zip(&staged) {
                let gradients = together(pieces)?;
                let pulled_versions = self.pulled_versions.get(&contribution.id.worker);
                let then = pulled_versions
                    .into_iter()
                    .flatten()
                    .find(|(version, _)| version == base);
                let then = then.map(|(_, weights)| weights.as_slice());
                pushed.push(Push { gradients, then });
            }
            let changes = shard.apply(point.version, entry, &pushed);
            self.changes.record(point.version, shard, changes);
        } else {
            let Payload::Initial { optimizer, parts } = staged.first()?.1.first()? else {
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
        self.entries.push_back(entry.clone());
        if self.entries.len() > IN_FLIGHT_MAX {
            self.entries.pop_front();
        }
        Some(())
    }
}

/// Gradients by part, of all pieces; `None` for initial weights. A part in several pieces has the
/// gradient of the first.
fn together<'a>(pieces: &[&'a Payload]) -> Option<Vec<Option<&'a Gradient>>> {
    let mut gradients = Vec::new();
    for piece in pieces {
        let Payload::Gradients(parts) = piece else {
            return None;
        };
        gradients.resize(parts.len(), None);
        for (gradient, part) in zip(&mut gradients, parts) {
            *gradient = gradient.or(part.as_ref());
        }
    }
    Some(gradients)
}

#[cfg(test)]
mod tests;
