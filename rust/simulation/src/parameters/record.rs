//! Record of a history, with its invariants.

use std::collections::{BTreeMap, BTreeSet};

use super::scenario::Scenario;
use gradring_proto::parameters::floats::Floats;
use gradring_proto::parameters::identity::{Incarnation, Point, PushId, Term};
use gradring_proto::parameters::log::{Contribution, Entry};
use gradring_proto::parameters::message::Start;
use gradring_proto::parameters::shard::Weights;
use gradring_proto::parameters::snapshot::Snapshot;

/// Rows and width of the two parts on each server. Most gradients of the second have few rows.
pub(super) const PARTS: [(usize, usize); 2] = [(2, 1), (16, 2)];
/// Number of elements of the first part, and of both.
pub(super) const FIRST: usize = PARTS[0].0 * PARTS[0].1;
pub(super) const ELEMENTS: usize = FIRST + PARTS[1].0 * PARTS[1].1;

/// A push of a worker.
#[derive(Debug, Clone, Copy)]
pub(super) struct PushedGradient {
    /// Oldest weights with which the gradient was computed.
    pub(super) base: Point,
    pub(super) is_initial: bool,
    /// True if servers gave weights of different versions for the gradient.
    pub(super) is_torn: bool,
}

/// Weights that some server had, and their origin.
struct Node {
    before: Option<Point>,
    entry: Option<Entry>,
    /// Weights and velocities of each server, computed by this test.
    values: Vec<[(f64, f64); ELEMENTS]>,
}

#[derive(Default)]
pub(super) struct Record {
    pushes: BTreeMap<PushId, PushedGradient>,
    nodes: BTreeMap<Point, Node>,
    examples: BTreeSet<&'static str>,
    /// Number of times that each worker received weights to compute with.
    pub(super) begun: Vec<u64>,
    /// Number of pushes of each worker.
    pushed: Vec<u64>,
    pub(super) dropped: u64,
    /// Version that all servers had saved, according to the messages to them.
    pub(super) stable: u64,
    /// Pushes in the log of the term.
    ordered: (Term, BTreeSet<PushId>),
    /// Pushes that their workers were allowed to forget.
    acknowledged: BTreeSet<PushId>,
    /// True if each shard had a live copy all the time since servers were restored.
    pub(super) has_all: bool,
    /// Last term in which servers were restored.
    term: Term,
    /// True if all processes have ended at once.
    pub(super) crashed: bool,
    /// True if the sequencer has gone on without some workers.
    pub(super) went_on: bool,
}

/// Element `index` of the part of a push for `server`.
pub(super) fn value(id: PushId, server: usize, index: usize) -> f64 {
    let mixed = id.number * 7 + u64::from(id.worker) * 3 + (server * 5 + index * 11) as u64;
    rounded(index, ((mixed + id.incarnation.0) % 17) as f64 / 3.0 - 2.5)
}

/// Rounds to the type of an element: float32 in the first part, float64 in the second.
fn rounded(index: usize, value: f64) -> f64 {
    match index < FIRST {
        true => f64::from(value as f32),
        false => value,
    }
}

fn numbers(values: &Floats) -> Vec<f64> {
    match values {
        Floats::F32(values) => values.iter().map(|it| f64::from(*it)).collect(),
        Floats::F64(values) => values.to_vec(),
        other => panic!("{other:?}"),
    }
}

/// Gradient of a push for the second part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Second {
    Nothing,
    Rows,
    Dense,
}

pub(super) const fn second(id: PushId) -> Second {
    match id.number % 12 {
        0 => Second::Dense,
        1 => Second::Nothing,
        _ => Second::Rows,
    }
}

/// Returns whether a gradient of rows has this row of the second part.
pub(super) const fn has_row(id: PushId, row: usize) -> bool {
    (id.number * 3 + id.worker as u64 * 7 + row as u64 * 2).is_multiple_of(5)
}

/// Returns whether a gradient has element `index`; `None` without a gradient for its part.
fn has_element(id: PushId, index: usize) -> Option<bool> {
    let Some(place) = index.checked_sub(FIRST) else {
        return Some(true);
    };
    match second(id) {
        Second::Nothing => None,
        Second::Rows => Some(has_row(id, place / PARTS[1].1)),
        Second::Dense => Some(true),
    }
}

/// Learning rate of a push.
pub(super) fn learning_rate(id: PushId) -> f64 {
    1.0 / (3 + id.number) as f64
}

impl Record {
    pub(super) fn new(scenario: &Scenario) -> Self {
        let workers = scenario.paces.len();
        Self {
            begun: vec![0; workers],
            pushed: vec![0; workers],
            nodes: [(
                Point::default(),
                Node {
                    before: None,
                    entry: None,
                    values: vec![[(0.0, 0.0); ELEMENTS]; scenario.keepers.servers],
                },
            )]
            .into(),
            ..Self::default()
        }
    }

    pub(super) fn note(&mut self, example: &'static str) {
        self.examples.insert(example);
    }

    pub(super) fn examples(&self) -> Vec<&'static str> {
        self.examples.iter().copied().collect()
    }

    /// Records a new push of a worker.
    pub(super) fn pushes(&mut self, id: PushId, pushed: PushedGradient) -> Result<(), String> {
        if !pushed.is_initial {
            self.pushed[id.worker as usize] += 1;
        }
        match self.pushes.insert(id, pushed) {
            None => Ok(()),
            Some(_) => Err(format!("two gradients are called {id:?}")),
        }
    }

    /// Records the pushes in the log of a term.
    pub(super) fn ordered(&mut self, term: Term, entries: &[Entry]) {
        if self.ordered.0 != term {
            self.ordered = (term, BTreeSet::new());
        }
        let contributions = entries.iter().flat_map(|entry| &entry.contributions);
        self.ordered.1.extend(contributions.map(|it| it.id));
    }

    /// Records that a worker may forget its pushes up to `number`.
    pub(super) fn settled(&mut self, worker: u32, incarnation: Incarnation, number: u64) {
        let id = |number| PushId {
            worker,
            incarnation,
            number,
        };
        let settled = self.ordered.1.range(id(0)..=id(number));
        self.acknowledged.extend(settled);
    }

    /// Checks that servers with copies lose no update that a worker cannot push again.
    pub(super) fn check_term_start(
        &mut self,
        scenario: &Scenario,
        start: &Start,
    ) -> Result<(), String> {
        if self.term >= start.terms.term() {
            return Ok(());
        }
        self.term = start.terms.term();
        let mut past = BTreeSet::new();
        let mut at = Some(start.point);
        while let Some(node) = at.and_then(|at| self.nodes.get(&at)) {
            let contributions = node.entry.iter().flat_map(|entry| &entry.contributions);
            past.extend(contributions.map(|it| it.id));
            at = node.before;
        }
        if self.has_all && scenario.keepers.replicas > 0 {
            if let Some(id) = self.acknowledged.difference(&past).next() {
                return Err(format!("{id:?} was acknowledged, and is lost"));
            }
            if start.point.version > 0 {
                self.examples.insert("nothing was lost with a server");
            }
        }
        self.acknowledged.retain(|id| past.contains(id));
        Ok(())
    }

    /// Checks that only a lost shard makes a server go back to an earlier point.
    pub(super) fn taken_back(&mut self, to: Point) -> Result<(), String> {
        self.examples.insert("an update was taken back");
        if self.has_all {
            return Err(format!(
                "updates were taken back to {to:?}, though there were copies"
            ));
        }
        Ok(())
    }

    /// Checks and records that a server went from one point to the next by an entry.
    pub(super) fn applied(
        &mut self,
        scenario: &Scenario,
        before: Point,
        after: Point,
        entry: &Entry,
    ) -> Result<(), String> {
        if let Some(node) = self.nodes.get(&after) {
            let is_same = node.before == Some(before) && node.entry.as_ref() == Some(entry);
            return is_same
                .then_some(())
                .ok_or_else(|| format!("two servers have another entry at {after:?}"));
        }
        for contribution in &entry.contributions {
            let id = contribution.id;
            let mut at = Some(before);
            while let Some(node) = at.and_then(|at| self.nodes.get(&at)) {
                let mut ids = node.entry.iter().flat_map(|entry| &entry.contributions);
                if ids.any(|it| it.id == id) {
                    return Err(format!("{id:?} is applied twice, again at {after:?}"));
                }
                at = node.before;
            }
        }
        self.check_rule(scenario, before, entry)?;
        let from = self.nodes.get(&before).ok_or("an entry after nothing")?;
        let mut values = from.values.clone();
        for (server, values) in values.iter_mut().enumerate() {
            for (index, (weight, velocity)) in values.iter_mut().enumerate() {
                if before.version == 0 {
                    let id = entry.contributions.first().ok_or("an empty entry")?.id;
                    *weight = value(id, server, index);
                    continue;
                }
                let has = |id| has_element(id, index);
                let round = |value| rounded(index, value);
                let contributions = || entry.contributions.iter();
                if contributions().all(|it| has(it.id).is_none()) {
                    continue;
                }
                let terms = contributions().filter(|it| has(it.id) == Some(true));
                let weighted = |it: &Contribution| {
                    round(value(it.id, server, index) * round(it.treatment.weight))
                };
                let sum = terms.map(weighted).reduce(|sum, term| round(sum + term));
                if sum.is_some() || scenario.momentum != 0.0 {
                    let rate = round(learning_rate(entry.contributions[0].id));
                    let mean = round(sum.unwrap_or(0.0) * round(entry.scale));
                    let kept = round(*velocity * f64::from(scenario.momentum));
                    *velocity = round(kept - round(mean * rate));
                    *weight = round(*weight + *velocity);
                }
            }
        }
        let node = Node {
            before: Some(before),
            entry: Some(entry.clone()),
            values,
        };
        self.nodes.insert(after, node);
        Ok(())
    }

    /// Checks that the update rule allows this update.
    fn check_rule(
        &mut self,
        scenario: &Scenario,
        before: Point,
        entry: &Entry,
    ) -> Result<(), String> {
        let rules = &scenario.rules;
        let mut bases = Vec::new();
        for contribution in &entry.contributions {
            let pushed = self.pushes.get(&contribution.id);
            let pushed = pushed.ok_or_else(|| format!("nobody pushed {contribution:?}"))?;
            let is_awaited = rules.backup == 0 && !self.went_on;
            if rules.is_synchronous() && is_awaited && pushed.is_torn {
                return Err(format!("{contribution:?} is of weights of two versions"));
            }
            if pushed.is_initial != (before.version == 0) {
                return Err(format!("{contribution:?} as entry {}", before.version + 1));
            }
            if !self.is_past(before, pushed.base) {
                return Err(format!(
                    "{contribution:?} was computed with weights given up"
                ));
            }
            let staleness = before.version - pushed.base.version;
            if before.version > 0 && rules.treatment(staleness) != Some(contribution.treatment) {
                return Err(format!("{contribution:?} is {staleness} versions late"));
            }
            if contribution.treatment.weight < 1.0 {
                self.examples.insert("a late gradient counted less");
            }
            bases.push(pushed.base.version);
        }
        let ids: Vec<_> = entry.contributions.iter().map(|it| it.id).collect();
        if !ids.is_sorted() {
            return Err(format!("the sum is in the order {ids:?}"));
        }
        if before.version == 0 {
            return Ok(());
        }
        let on_time = bases.iter().filter(|base| **base == before.version).count();
        let calm = scenario.loses_nobody();
        if rules.is_synchronous() {
            let workers = ids
                .iter()
                .map(|id| id.worker)
                .collect::<BTreeSet<_>>()
                .len();
            if workers < ids.len() {
                return Err(format!("a worker is twice in {ids:?}"));
            }
            if calm && on_time < rules.needed(scenario.paces.len()) {
                return Err(format!("an update of only {on_time} gradients"));
            }
            if calm && self.crashed {
                self.examples
                    .insert("all went on together after a crash of all");
            }
            if on_time < ids.len() {
                self.examples.insert("a straggler was folded in");
            }
        } else if ids.len() > rules.aggregate {
            return Err(format!("an update of {} gradients", ids.len()));
        } else if calm && rules.staleness.is_none() && ids.len() < rules.aggregate {
            return Err(format!("an update of only {} gradients", ids.len()));
        }
        Ok(())
    }

    fn is_past(&self, of: Point, point: Point) -> bool {
        let mut at = Some(of);
        while let Some(here) = at {
            if here == point {
                return true;
            }
            at = self.nodes.get(&here).and_then(|node| node.before);
        }
        false
    }

    /// Checks that a server's weights are the ones that its log makes.
    pub(super) fn check_server(&self, server: usize, at: &Snapshot) -> Result<(), String> {
        match &at.shard {
            Some(shard) => self.check_weights(server, at.point, &shard.weights()),
            None => Ok(()),
        }
    }

    fn check_weights(
        &self,
        server: usize,
        point: Point,
        weights: &[Weights],
    ) -> Result<(), String> {
        let node = self.nodes.get(&point);
        let node = node.ok_or_else(|| format!("weights of {point:?} from nowhere"))?;
        let expected = node.values[server]
            .iter()
            .map(|(weight, _)| weight.to_bits());
        let expected: Vec<_> = expected.collect();
        let there: Vec<_> = weights
            .iter()
            .flat_map(|part| numbers(part))
            .map(|it| it.to_bits())
            .collect();
        (there == expected).then_some(()).ok_or_else(|| {
            format!("server {server} has other weights at {point:?} than its log makes")
        })
    }

    /// Checks that a worker may begin to compute with these weights.
    pub(super) fn begins(
        &mut self,
        scenario: &Scenario,
        worker: usize,
        pulled: &[(Point, Vec<Weights>)],
    ) -> Result<(), String> {
        self.begun[worker] += 1;
        for (server, (point, weights)) in pulled.iter().enumerate() {
            self.check_weights(server, *point, weights)?;
        }
        let rules = &scenario.rules;
        let (Some(staleness), true) = (rules.staleness, scenario.faults.is_empty()) else {
            return Ok(());
        };
        if rules.is_synchronous() && rules.backup > 0 {
            return Ok(());
        }
        let mine = self.pushed[worker];
        for (other, pushed) in self.pushed.iter().enumerate() {
            if mine > pushed + staleness {
                return Err(format!(
                    "worker {worker} begins {mine}, worker {other} {pushed}"
                ));
            }
        }
        // Dropped gradients would count as well, so the check needs a history without any.
        if self.dropped == 0 {
            let oldest = pulled.iter().map(|(point, _)| *point).min();
            let counts = self.counts(oldest.unwrap_or_default());
            for other in 0..self.pushed.len() {
                let has = counts.get(&other).copied().unwrap_or(0);
                if mine > has + staleness {
                    return Err(format!("{has} of worker {other} are in weights for {mine}"));
                }
            }
        }
        Ok(())
    }

    /// Number of gradients of each worker in the log up to a point.
    fn counts(&self, point: Point) -> BTreeMap<usize, u64> {
        let mut counts = BTreeMap::new();
        let mut at = Some(point);
        while let Some(node) = at.and_then(|at| self.nodes.get(&at)) {
            for it in node.entry.iter().flat_map(|entry| &entry.contributions) {
                if !self.pushes[&it.id].is_initial {
                    *counts.entry(it.id.worker as usize).or_default() += 1;
                }
            }
            at = node.before;
        }
        counts
    }
}
