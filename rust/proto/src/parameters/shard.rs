//! The weights on one server, and the effect of an update on them.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::iter::zip;
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::float::typed;
use super::floats::Float;
use super::floats::{Array, Floats};
use super::identity::Version;
use super::log::Entry;
use super::optimizer::{Hyper, Optimizer, compensate, decay};
use super::rules::Treatment;

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
    /// Returns whether it has the shape and the element type of the part.
    fn fits(&self, part: &ShardPart) -> bool {
        let ShardPart { spec, weights, .. } = part;
        let (rows, values) = self.split();
        let has_shape = match rows {
            None => values.len() == spec.elements(),
            Some(rows) => {
                rows.len().checked_mul(spec.width) == Some(values.len())
                    && rows.is_sorted_by(|one, next| one < next)
                    && rows.last().is_none_or(|&last| (last as usize) < spec.rows)
            }
        };
        has_shape && values.float_type() == weights.float_type()
    }

    /// Indices of the rows, `None` for all elements; and the values.
    fn split(&self) -> (Option<&[u32]>, &Floats) {
        match self {
            Self::Dense(values) => (None, values),
            Self::Rows { rows, values } => (Some(rows), values),
        }
    }
}

/// A gradient with values of one type, borrowed or computed.
struct TypedGradient<'a, T: Float> {
    /// Indices of the rows; `None` if there are values for all elements.
    rows: Option<Cow<'a, [u32]>>,
    values: Cow<'a, Array<T>>,
}

impl<'a, T: Float> TypedGradient<'a, T> {
    /// Ranges of elements in a part, with their gradients.
    fn pieces(&self, width: usize) -> Vec<(Range<usize>, &[T])> {
        let Some(rows) = &self.rows else {
            return vec![(0..self.values.len(), &self.values[..])];
        };
        let values = self.values.chunks_exact(width.max(1));
        let place = |row: usize| row * width..(row + 1) * width;
        zip(rows.iter(), values)
            .map(|(&row, values)| (place(row as usize), values))
            .collect()
    }

    const fn is_dense(&self) -> bool {
        self.rows.is_none()
    }

    fn multiply(&mut self, factor: f64) {
        if factor != 1.0 {
            let factor = T::of(factor);
            for value in self.values.to_mut().iter_mut() {
                *value *= factor;
            }
        }
    }

    /// The values for all elements of a part.
    fn into_dense(self, spec: &Spec) -> Cow<'a, Array<T>> {
        if self.is_dense() {
            return self.values;
        }
        let mut all = Array::repeated(T::default(), spec.elements());
        for (place, piece) in self.pieces(spec.width) {
            all[place].copy_from_slice(piece);
        }
        Cow::Owned(all)
    }
}

impl Shard {
    /// A shard of a worker's initial weights, with fresh slots.
    #[must_use]
    pub fn new(optimizer: Optimizer, parts: &[(Spec, Weights)]) -> Self {
        let slot = |value, (spec, weights): &(Spec, Weights)| {
            let slot = Floats::repeated(
                weights.float_type(),
                f64::from(value as f32),
                spec.elements(),
            );
            Arc::new(slot)
        };
        let slots = optimizer.initial_slots();
        let part = |part: &(Spec, Weights)| ShardPart {
            spec: part.0,
            weights: part.1.clone(),
            slots: slots.iter().map(|value| slot(*value, part)).collect(),
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
            let float_type = part.weights.float_type();
            part.slots.len() == slots
                && arrays.all(|it| Some(it.len()) == count && it.float_type() == float_type)
        })
    }

    /// Returns whether gradients have the shapes and element types of its parts.
    #[must_use]
    pub fn fits(&self, gradients: &[Option<Gradient>]) -> bool {
        let fits = |(part, gradient): (&ShardPart, &Option<Gradient>)| {
            gradient.as_ref().is_none_or(|it| it.fits(part))
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

    /// Returns whether so many rows of a part, with their indices, may be longer than all weights.
    pub(super) fn are_long(&self, part: usize, rows: usize) -> bool {
        let ShardPart { spec, weights, .. } = &self.parts[part];
        let row_bytes = spec.width * weights.float_type().size_bytes();
        rows > spec.rows / 2 || rows * (row_bytes + size_of::<u32>()) > weights.size_bytes()
    }

    /// Values of some rows of a part, one row after the other.
    pub(super) fn values_of(&self, part: usize, rows: &[u32]) -> Floats {
        fn picked<T: Float>(weights: &[T], rows: &[u32], width: usize) -> Floats {
            let mut values = Vec::with_capacity(rows.len() * width);
            for &row in rows {
                values.extend_from_slice(&weights[row as usize * width..][..width]);
            }
            T::floats(values.into())
        }
        let ShardPart { spec, weights, .. } = &self.parts[part];
        typed!(weights.float_type(), T => picked::<T>(weights.of::<T>(), rows, spec.width))
    }

    /// Performs the update that leads to this version, with one push for each contribution. Returns
    /// its effect on the weights of each part.
    ///
    /// # Panics
    /// If a gradient does not fit its part.
    pub fn apply(&mut self, version: Version, entry: &Entry, pushed: &[Push<'_>]) -> Vec<Change> {
        let update = |(index, part): (usize, &mut ShardPart)| {
            let contributions = zip(pushed, &entry.contributions);
            let given = contributions.filter_map(|(push, contribution)| {
                let then = push.then.map(|then| &*then[index]);
                Some((push.gradients[index]?, contribution.treatment, then))
            });
            let (float_type, optimizer) = (part.weights.float_type(), &self.optimizer);
            typed!(float_type, T => part.apply::<T>(optimizer, version, entry, given))
        };
        self.parts.iter_mut().enumerate().map(update).collect()
    }
}

impl ShardPart {
    /// Performs an update of given gradients. Returns its effect on the weights.
    fn apply<'a, T: Float>(
        &mut self,
        optimizer: &Optimizer,
        version: Version,
        entry: &Entry,
        given: impl Iterator<Item = (&'a Gradient, Treatment, Option<&'a Floats>)>,
    ) -> Change {
        let mut gradients = Vec::new();
        for (gradient, treatment, then) in given {
            let (rows, values) = gradient.split();
            let mut gradient = TypedGradient {
                rows: rows.map(Cow::Borrowed),
                values: T::all_widened(values.of()),
            };
            if let (Some(strength), Some(then)) = (treatment.compensation, then) {
                self.correct::<T>(strength, &mut gradient, then.of::<T>());
            }
            gradient.multiply(treatment.weight);
            gradients.push(gradient);
        }
        let Some(mut sum) = sum(gradients, &self.spec) else {
            return Change::Nothing;
        };
        sum.multiply(entry.scale);
        let gradient = TypedGradient {
            rows: sum.rows,
            values: T::all_rounded(sum.values),
        };
        let keeps = optimizer.keeps_without_gradient();
        let decays = self.spec.decays && entry.hyper.weight_decay != 0.0;
        let changed = match &gradient.rows {
            Some(rows) if keeps && !decays => Change::Rows(rows.to_vec()),
            _ => Change::All,
        };
        let gradient = match keeps {
            true => gradient,
            false => TypedGradient {
                values: gradient.into_dense(&self.spec),
                rows: None,
            },
        };
        // Version 1 has the initial weights, so the first update leads to version 2.
        self.update(optimizer, version - 1, &entry.hyper, &gradient);
        changed
    }

    fn update<T: Float>(
        &mut self,
        optimizer: &Optimizer,
        number: u64,
        hyper: &Hyper,
        gradient: &TypedGradient<'_, T>,
    ) {
        let weights = Arc::make_mut(&mut self.weights).of_mut::<T>();
        let slots = self.slots.iter_mut().map(Arc::make_mut);
        let mut slots: Vec<_> = slots.map(Floats::of_mut::<T>).collect();
        if self.spec.decays {
            decay(hyper, weights);
        }
        for (place, gradient) in gradient.pieces(self.spec.width) {
            let mut slots: Vec<_> = slots
                .iter_mut()
                .map(|slot| &mut slot[place.clone()])
                .collect();
            optimizer.update(number, hyper, &mut weights[place], &mut slots, gradient);
        }
    }

    fn correct<T: Float>(
        &self,
        strength: f64,
        gradient: &mut TypedGradient<'_, T::Sum>,
        then: &[T],
    ) {
        let places = gradient.pieces(self.spec.width).into_iter();
        let places: Vec<_> = places.map(|(place, _)| place).collect();
        let now = self.weights.of::<T>();
        let mut rest = &mut gradient.values.to_mut()[..];
        for place in places {
            let (values, others) = rest.split_at_mut(place.len());
            compensate(strength, values, &now[place.clone()], &then[place]);
            rest = others;
        }
    }
}

fn add<T: Float>(total: &mut [T], values: &[T]) {
    for (total, value) in zip(total, values) {
        *total += *value;
    }
}

/// The sum from left to right, as in `all_reduce` with `reproducible=True`.
fn sum<'a, T: Float>(
    gradients: Vec<TypedGradient<'a, T>>,
    spec: &Spec,
) -> Option<TypedGradient<'a, T>> {
    if gradients.len() < 2 {
        return gradients.into_iter().next();
    }
    if gradients.iter().any(TypedGradient::is_dense) {
        let mut gradients = gradients.into_iter();
        let mut total = gradients.next()?.into_dense(spec);
        let sums = total.to_mut();
        for gradient in gradients {
            for (place, piece) in gradient.pieces(spec.width) {
                add(&mut sums[place], piece);
            }
        }
        return Some(TypedGradient {
            rows: None,
            values: total,
        });
    }
    let mut total = BTreeMap::<usize, Vec<T>>::new();
    for gradient in &gradients {
        for (place, piece) in gradient.pieces(spec.width) {
            let row = place.start / spec.width.max(1);
            match total.get_mut(&row) {
                None => {
                    total.insert(row, piece.to_vec());
                }
                Some(total) => add(total, piece),
            }
        }
    }
    let rows: Vec<_> = total.keys().map(|&row| row as u32).collect();
    let values: Vec<_> = total.into_values().flatten().collect();
    Some(TypedGradient {
        rows: Some(rows.into()),
        values: Cow::Owned(values.into()),
    })
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::float::FloatType;
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
        let other = |part: &mut ShardPart| {
            part.slots[0] = Arc::new(Floats::repeated(FloatType::F64, 0.0, 6));
        };
        assert!(!changed(other));
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
        shard.weights()[0].of::<f32>().to_vec()
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

    #[test]
    fn gradients_of_another_element_type_do_not_fit() {
        let shard = Shard::new(MOMENTUM, &[part(2, 1, 2)]);
        for float_type in FloatType::ALL {
            let values = Floats::repeated(float_type, 1.0, 2);
            let fits = shard.fits(&[Some(Gradient::Dense(values))]);
            assert_eq!(fits, float_type == FloatType::F32);
        }
    }

    #[test]
    fn sums_of_16_bit_gradients_are_rounded_once_and_64_bits_stay() {
        let sgd = Optimizer::Sgd(Sgd {
            momentum: 0.0,
            is_nesterov: false,
        });
        let (spec, _) = part(1, 1, 1);
        let updated = |float_type, gradients: &[f64]| {
            let weights = Arc::new(Floats::repeated(float_type, 0.0, 1));
            let mut shard = Shard::new(sgd, &[(spec, weights)]);
            let mut entry = entry();
            entry.contributions = vec![entry.contributions[0]; gradients.len()];
            (entry.scale, entry.hyper.learning_rate) = (1.0 / 3.0, -1.0);
            let dense = |it: &f64| Gradient::Dense(Floats::repeated(float_type, *it, 1));
            let gradients: Vec<_> = gradients.iter().map(dense).collect();
            let push = |it| Push {
                gradients: vec![Some(it)],
                then: None,
            };
            let pushed: Vec<_> = gradients.iter().map(push).collect();
            assert_eq!(shard.apply(2, &entry, &pushed), [Change::All]);
            shard.weights()[0].clone()
        };
        // The sum of bfloat16 would be 256.
        let mean = updated(FloatType::Bf16, &[256.0, 1.0, 1.0]);
        assert_eq!(mean.of::<bf16>()[0], bf16::from_f32(86.0));
        let mean = updated(FloatType::F64, &[1.0, 1e-12, 0.0]);
        assert_eq!(mean.of::<f64>()[0], (1.0 + 1e-12) * (1.0 / 3.0));
    }

    #[test]
    fn few_rows_of_narrow_weights_are_longer_than_all_of_them() {
        for (float_type, width, rows_max) in [
            (FloatType::F32, 1, 4),
            (FloatType::F32, 5, 4),
            (FloatType::F64, 1, 4),
            (FloatType::Bf16, 1, 2),
            (FloatType::F16, 2, 4),
        ] {
            let (spec, _) = part(8, width, 0);
            let weights = Arc::new(Floats::repeated(float_type, 0.0, 8 * width));
            let shard = Shard::new(MOMENTUM, &[(spec, weights)]);
            assert!(!shard.are_long(0, rows_max) && shard.are_long(0, rows_max + 1));
        }
    }
}
