//! The weights on one server, and the effect of an update on them.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::iter::zip;
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::floats::Floats;
use super::identity::Version;
use super::log::Entry;
use super::optimizer::{Hyper, Optimizer, compensate, decay};

/// Shape and properties of a part of a variable, without its values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// Number of rows.
    pub rows: usize,
    /// Elements per row.
    pub width: usize,
    /// True if weight decay applies to it.
    pub decays: bool,
}

/// The weights of a part, in memory that pulls share.
pub type Weights = Arc<Floats>;

/// The gradient of a part.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Gradient {
    /// Values for all elements.
    Dense(Floats),
    /// Values for some rows; the gradient of the other rows is zero.
    Rows {
        /// Indices of the rows, unique and ascending. They travel behind the head of a message, as
        /// floats do.
        #[serde(skip)]
        rows: Vec<u32>,
        /// Elements of these rows.
        values: Floats,
    },
}

/// A piece of a worker's push as staged on one server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Payload {
    /// The initial weights.
    Initial {
        /// Optimizer for all later updates.
        optimizer: Optimizer,
        /// Parts, with their values.
        parts: Vec<(Spec, Weights)>,
    },
    /// Gradients by part; `None` for a part without one in this piece.
    Gradients(Vec<Option<Gradient>>),
}

/// Gradients of one contribution to an update.
#[derive(Debug, Clone)]
pub struct Push<'a> {
    /// Gradients by part; `None` for a part without one.
    pub gradients: Vec<Option<&'a Gradient>>,
    /// Weights with which they were computed, if the server still has these.
    pub then: Option<&'a [Weights]>,
}

/// Effect of an update on the weights of a part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// All weights are as before.
    Nothing,
    /// No other rows have changed. The indices are unique and ascending.
    Rows(Vec<u32>),
    /// Any weight may have changed.
    All,
}

/// One part with its optimizer slots.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct ShardPart {
    spec: Spec,
    weights: Weights,
    slots: Vec<Weights>,
}

/// All parts on one server. A clone shares the values until one of the two changes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Shard {
    optimizer: Optimizer,
    parts: Vec<ShardPart>,
}

impl Spec {
    const fn elements(&self) -> usize {
        self.rows * self.width
    }
}

impl Gradient {
    /// Returns whether it has the shape of the part.
    fn fits(&self, spec: &Spec) -> bool {
        match self {
            Self::Dense(values) => values.len() == spec.elements(),
            Self::Rows { rows, values } => {
                rows.len().checked_mul(spec.width) == Some(values.len())
                    && rows.is_sorted_by(|one, next| one < next)
                    && rows.last().is_none_or(|&last| (last as usize) < spec.rows)
            }
        }
    }

    /// Ranges of elements in a part, with their gradients.
    fn pieces(&self, width: usize) -> Vec<(Range<usize>, &[f32])> {
        match self {
            Self::Dense(values) => vec![(0..values.len(), values)],
            Self::Rows { rows, values } => zip(rows, values.chunks_exact(width.max(1)))
                .map(|(&row, values)| (row as usize * width..(row as usize + 1) * width, values))
                .collect(),
        }
    }

    const fn is_dense(&self) -> bool {
        matches!(self, Self::Dense(_))
    }
}

impl Shard {
    /// A shard of a worker's initial weights, with fresh slots.
    #[must_use]
    pub fn new(optimizer: Optimizer, parts: &[(Spec, Weights)]) -> Self {
        let slot = |value, spec: &Spec| Arc::new(Floats::repeated(value, spec.elements()));
        let part = |(spec, weights): &(Spec, Weights)| ShardPart {
            spec: *spec,
            weights: weights.clone(),
            slots: optimizer
                .initial_slots()
                .iter()
                .map(|value| slot(*value, spec))
                .collect(),
        };
        let parts = parts.iter().map(part).collect();
        Self { optimizer, parts }
    }

    /// Returns whether initial weights have as many values as their specs require.
    #[must_use]
    pub fn is_whole(parts: &[(Spec, Weights)]) -> bool {
        let mut sizes = parts
            .iter()
            .map(|(spec, weights)| (spec.rows.checked_mul(spec.width), weights.len()));
        sizes.all(|(announced, there)| announced == Some(there))
    }

    /// All values: for each part its weights, then its slots.
    pub fn arrays(&self) -> impl Iterator<Item = &Weights> {
        let parts = self.parts.iter();
        parts.flat_map(|part| std::iter::once(&part.weights).chain(&part.slots))
    }

    /// All values in the order of [`Self::arrays`], to be filled.
    pub fn arrays_mut(&mut self) -> impl Iterator<Item = &mut Weights> {
        let parts = self.parts.iter_mut();
        parts.flat_map(|part| std::iter::once(&mut part.weights).chain(&mut part.slots))
    }

    /// Returns whether it has as many values as its parts and its optimizer require.
    #[must_use]
    pub fn fits_itself(&self) -> bool {
        let slots = self.optimizer.initial_slots().len();
        self.parts.iter().all(|part| {
            let count = part.spec.rows.checked_mul(part.spec.width);
            let mut arrays = std::iter::once(&part.weights).chain(&part.slots);
            part.slots.len() == slots && arrays.all(|it| Some(it.len()) == count)
        })
    }

    /// Returns whether gradients have the shapes of its parts.
    #[must_use]
    pub fn fits(&self, gradients: &[Option<Gradient>]) -> bool {
        let fits = |(part, gradient): (&ShardPart, &Option<Gradient>)| {
            gradient.as_ref().is_none_or(|it| it.fits(&part.spec))
        };
        gradients.len() == self.parts.len() && zip(&self.parts, gradients).all(fits)
    }

    /// Weights for a pull, without a copy.
    #[must_use]
    pub fn weights(&self) -> Vec<Weights> {
        self.parts.iter().map(|part| part.weights.clone()).collect()
    }

    /// Number of rows of a part.
    pub(super) fn rows(&self, part: usize) -> usize {
        self.parts[part].spec.rows
    }

    /// Values of some rows of a part, one row after the other.
    pub(super) fn values_of(&self, part: usize, rows: &[u32]) -> Floats {
        let ShardPart { spec, weights, .. } = &self.parts[part];
        let mut values = Vec::with_capacity(rows.len() * spec.width);
        for &row in rows {
            values.extend_from_slice(&weights[row as usize * spec.width..][..spec.width]);
        }
        values.into()
    }

    /// Performs the update that leads to this version, with one push for each contribution. Returns
    /// its effect on the weights of each part.
    ///
    /// # Panics
    /// If a gradient does not fit its part.
    pub fn apply(&mut self, version: Version, entry: &Entry, pushed: &[Push<'_>]) -> Vec<Change> {
        let mut changes = Vec::new();
        for (index, part) in self.parts.iter_mut().enumerate() {
            let mut gradients = Vec::new();
            for (push, contribution) in zip(pushed, &entry.contributions) {
                let Some(gradient) = push.gradients[index] else {
                    continue;
                };
                let mut gradient = Cow::Borrowed(gradient);
                let treatment = contribution.treatment;
                if let (Some(strength), Some(then)) = (treatment.compensation, push.then) {
                    correct(strength, gradient.to_mut(), part, &then[index]);
                }
                multiply(treatment.weight, &mut gradient);
                gradients.push(gradient);
            }
            let Some(mut gradient) = sum(gradients, &part.spec) else {
                changes.push(Change::Nothing);
                continue;
            };
            multiply(entry.scale, &mut gradient);
            // Version 1 has the initial weights, so the first update leads to version 2.
            part.update(&self.optimizer, version - 1, &entry.hyper, &gradient);
            changes.push(part.change(&self.optimizer, &entry.hyper, &gradient));
        }
        changes
    }
}

impl ShardPart {
    /// The effect of an update with this gradient on the weights.
    fn change(&self, optimizer: &Optimizer, hyper: &Hyper, gradient: &Gradient) -> Change {
        let decays = self.spec.decays && hyper.weight_decay != 0.0;
        match gradient {
            Gradient::Rows { rows, .. } if optimizer.keeps_without_gradient() && !decays => {
                Change::Rows(rows.clone())
            }
            _ => Change::All,
        }
    }

    fn update(&mut self, optimizer: &Optimizer, number: u64, hyper: &Hyper, gradient: &Gradient) {
        let weights = Arc::make_mut(&mut self.weights);
        let mut slots: Vec<_> = self.slots.iter_mut().map(Arc::make_mut).collect();
        if self.spec.decays {
            decay(hyper, weights);
        }
        let whole;
        let gradient = if gradient.is_dense() || optimizer.keeps_without_gradient() {
            gradient
        } else {
            whole = Gradient::Dense(dense(gradient, &self.spec));
            &whole
        };
        for (place, gradient) in gradient.pieces(self.spec.width) {
            let mut slots: Vec<_> = slots
                .iter_mut()
                .map(|slot| &mut slot[place.clone()])
                .collect();
            optimizer.update(number, hyper, &mut weights[place], &mut slots, gradient);
        }
    }
}

fn values(gradient: &mut Gradient) -> &mut [f32] {
    match gradient {
        Gradient::Dense(values) => values,
        Gradient::Rows { values, .. } => values,
    }
}

fn multiply(factor: f32, gradient: &mut Cow<'_, Gradient>) {
    if factor != 1.0 {
        for value in values(gradient.to_mut()) {
            *value *= factor;
        }
    }
}

fn correct(strength: f32, gradient: &mut Gradient, part: &ShardPart, then: &Weights) {
    let places = gradient.pieces(part.spec.width).into_iter();
    let places: Vec<_> = places.map(|(place, _)| place).collect();
    let mut rest = values(gradient);
    for place in places {
        let (values, others) = rest.split_at_mut(place.len());
        compensate(strength, values, &part.weights[place.clone()], &then[place]);
        rest = others;
    }
}

fn dense(gradient: &Gradient, spec: &Spec) -> Floats {
    let mut values = Floats::repeated(0.0, spec.elements());
    for (place, piece) in gradient.pieces(spec.width) {
        values[place].copy_from_slice(piece);
    }
    values
}

/// The sum from left to right, as in `all_reduce` with `reproducible=True`.
fn sum<'a>(gradients: Vec<Cow<'a, Gradient>>, spec: &Spec) -> Option<Cow<'a, Gradient>> {
    if gradients.len() < 2 {
        return gradients.into_iter().next();
    }
    if gradients.iter().any(|it| it.is_dense()) {
        let mut gradients = gradients.into_iter();
        let mut total = dense_of(gradients.next()?, spec);
        for gradient in gradients {
            for (place, piece) in gradient.pieces(spec.width) {
                for (total, value) in zip(&mut total[place], piece) {
                    *total += value;
                }
            }
        }
        return Some(Cow::Owned(Gradient::Dense(total)));
    }
    let mut total = BTreeMap::<usize, Vec<f32>>::new();
    for gradient in &gradients {
        for (place, piece) in gradient.pieces(spec.width) {
            let row = place.start / spec.width.max(1);
            match total.get_mut(&row) {
                None => {
                    total.insert(row, piece.to_vec());
                }
                Some(total) => {
                    for (total, value) in zip(total, piece) {
                        *total += value;
                    }
                }
            }
        }
    }
    let rows = total.keys().map(|&row| row as u32).collect();
    let values: Vec<_> = total.into_values().flatten().collect();
    let values = values.into();
    Some(Cow::Owned(Gradient::Rows { rows, values }))
}

fn dense_of(gradient: Cow<'_, Gradient>, spec: &Spec) -> Floats {
    match gradient {
        Cow::Owned(Gradient::Dense(values)) => values,
        Cow::Borrowed(Gradient::Dense(values)) => values.clone(),
        rows => dense(&rows, spec),
    }
}

#[cfg(test)]
mod tests {
    use super::super::optimizer::{Adagrad, Adam, Sgd};
    use super::*;

    const MOMENTUM: Optimizer = Optimizer::Sgd(Sgd {
        momentum: 0.5,
        is_nesterov: false,
    });

    fn part(rows: usize, width: usize, count: usize) -> (Spec, Weights) {
        let decays = false;
        let spec = Spec {
            rows,
            width,
            decays,
        };
        (spec, Arc::new(vec![0.0; count].into()))
    }

    #[test]
    fn weights_and_slots_are_as_many_as_their_parts_say() {
        for (parts, is_whole) in [
            (vec![], true),
            (vec![part(2, 3, 6)], true),
            (vec![part(2, 3, 6), part(0, 3, 0)], true),
            (vec![part(2, 3, 5)], false),
            (vec![part(2, 3, 6), part(2, 3, 7)], false),
            (vec![part(usize::MAX, 2, 0)], false),
        ] {
            assert_eq!(Shard::is_whole(&parts), is_whole);
        }
        let shard = Shard::new(MOMENTUM, &[part(2, 3, 6)]);
        assert!(shard.fits_itself());
        assert_eq!(
            shard.arrays().map(|it| it.len()).collect::<Vec<_>>(),
            [6, 6]
        );
        let changed = |change: fn(&mut ShardPart)| {
            let mut changed = shard.clone();
            change(&mut changed.parts[0]);
            changed.fits_itself()
        };
        assert!(changed(|_| ()));
        assert!(!changed(|part| part.slots.clear()));
        assert!(!changed(|part| part.slots[0] = Arc::default()));
        assert!(!changed(|part| part.weights = Arc::default()));
        assert!(!changed(|part| part.spec.rows = 3));
    }

    /// An update of one gradient of weight 1.
    fn entry() -> Entry {
        use crate::parameters::identity::{Incarnation, PushId};
        use crate::parameters::log::Contribution;
        use crate::parameters::rules::Treatment;

        let id = PushId {
            worker: 0,
            incarnation: Incarnation(1, 1),
            number: 1,
        };
        let treatment = Treatment {
            weight: 1.0,
            compensation: None,
        };
        let hyper = Hyper {
            learning_rate: 0.5,
            weight_decay: 0.0,
        };
        Entry {
            contributions: vec![Contribution { id, treatment }],
            scale: 1.0,
            hyper,
        }
    }

    /// Weights after one update per gradient, each of weight 1. All weights start at 1.
    fn updated(optimizer: Optimizer, version: Version, gradients: &[Gradient]) -> Vec<f32> {
        let (spec, _) = part(2, 1, 0);
        let weights = Arc::new(vec![1.0; 2].into());
        let mut shard = Shard::new(optimizer, &[(spec, weights)]);
        for (number, gradient) in (version..).zip(gradients) {
            let gradients = vec![Some(gradient)];
            let then = None;
            shard.apply(number, &entry(), &[Push { gradients, then }]);
        }
        shard.weights()[0].to_vec()
    }

    #[test]
    fn rows_without_a_gradient_follow_their_momentum() {
        let rows = Gradient::Rows {
            rows: vec![1],
            values: vec![2.0].into(),
        };
        let both = [Gradient::Dense(vec![2.0, 2.0].into()), rows];
        // Momentum moves both by 1, then by half as much; the gradient moves the second row by 1
        // more.
        assert_eq!(updated(MOMENTUM, 2, &both), [-0.5, -1.5]);
    }

    #[test]
    fn the_first_update_leads_to_the_second_version() {
        let adam = Optimizer::Adam(Adam {
            beta_1: 0.5,
            beta_2: 0.75,
            epsilon: 0.0,
            is_amsgrad: false,
        });
        // Adam's first step has the length of the learning rate.
        let gradient = Gradient::Dense(vec![4.0, 4.0].into());
        assert_eq!(updated(adam, 2, &[gradient]), [0.5, 0.5]);
    }

    #[test]
    fn an_update_says_which_rows_it_has_changed() {
        let sgd = Optimizer::Sgd(Sgd {
            momentum: 0.0,
            is_nesterov: false,
        });
        let adagrad = Optimizer::Adagrad(Adagrad {
            initial: 0.1,
            epsilon: 1e-7,
        });
        let rows = Gradient::Rows {
            rows: vec![1],
            values: vec![2.0].into(),
        };
        let dense = Gradient::Dense(vec![2.0; 2].into());
        let some = || Change::Rows(vec![1]);
        for (optimizer, decays, weight_decay, gradient, expected) in [
            (sgd, false, 0.5, &rows, some()),
            (sgd, true, 0.0, &rows, some()),
            (adagrad, true, 0.0, &rows, some()),
            (sgd, true, 0.5, &rows, Change::All),
            (MOMENTUM, false, 0.0, &rows, Change::All),
            (sgd, false, 0.0, &dense, Change::All),
        ] {
            let (mut spec, weights) = part(2, 1, 2);
            spec.decays = decays;
            let mut shard = Shard::new(optimizer, &[(spec, weights.clone()), (spec, weights)]);
            let mut entry = entry();
            entry.hyper.weight_decay = weight_decay;
            let gradients = vec![Some(gradient), None];
            let then = None;
            let changes = shard.apply(2, &entry, &[Push { gradients, then }]);
            assert_eq!(changes, [expected, Change::Nothing]);
        }
    }
}
