//! Keras' optimizers for servers, in the order of arithmetic of Keras 3, so that results round
//! equally.
//!
//! All values have the element type of the variable, to which Keras casts the learning rate and the
//! numbers of the optimizer. Expressions that Python evaluates before TensorFlow, such as `1 -
//! beta_1`, are float64 first. No multiplication is fused with an addition. Workers clip the
//! gradients, because Keras clips each gradient before the sum.

use std::iter::zip;

use serde::{Deserialize, Serialize};

pub use ftrl::Ftrl;
pub use lion::Lion;
pub use moments::{Adam, Adamax, Nadam};
pub use sgd::Sgd;
pub use squares::{Adadelta, Adagrad, Rmsprop};

use super::float::Number;
use super::floats::Float;

mod ftrl;
mod lion;
mod moments;
mod sgd;
mod squares;

/// Rule by which a gradient changes the weights, constant for the whole training. Programs pass it
/// as JSON with Keras' names. Snapshots have the place of the optimizer in this list, so new ones
/// come last.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
#[expect(missing_docs, reason = "the optimizers have docs of their own")]
pub enum Optimizer {
    Sgd(Sgd),
    Adagrad(Adagrad),
    Adam(Adam),
    Rmsprop(Rmsprop),
    Adadelta(Adadelta),
    Adamax(Adamax),
    Nadam(Nadam),
    Lion(Lion),
    Ftrl(Ftrl),
}

/// Values that may change from step to step, and therefore come with every gradient.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Hyper {
    /// Learning rate of the step, from the worker's schedule or callback.
    pub learning_rate: f64,
    /// Decay of the weights per unit of learning rate; 0 for none.
    pub weight_decay: f64,
}

/// The arithmetic of one optimizer.
trait Rule {
    /// Initial value of each slot of a variable.
    fn initial_slots(&self) -> Vec<f64>;

    /// Returns whether a gradient of zero changes neither weights nor slots.
    fn keeps_without_gradient(&self) -> bool {
        false
    }

    /// Changes weights and slots by one update.
    fn update<T: Float>(&self, step: Step<'_, T>, slots: &mut [&mut [T]]);
}

/// One update of some weights.
struct Step<'a, T> {
    /// The number of the update; the first is 1.
    number: u64,
    /// The learning rate.
    rate: T,
    weights: &'a mut [T],
    gradient: &'a [T],
}

/// Evaluates an expression with the rule of any optimizer.
macro_rules! each {
    ($optimizer:expr, $rule:ident => $result:expr) => {
        match $optimizer {
            Optimizer::Sgd($rule) => $result,
            Optimizer::Adagrad($rule) => $result,
            Optimizer::Adam($rule) => $result,
            Optimizer::Rmsprop($rule) => $result,
            Optimizer::Adadelta($rule) => $result,
            Optimizer::Adamax($rule) => $result,
            Optimizer::Nadam($rule) => $result,
            Optimizer::Lion($rule) => $result,
            Optimizer::Ftrl($rule) => $result,
        }
    };
}

impl Optimizer {
    /// Initial value of each slot of a variable.
    #[must_use]
    pub fn initial_slots(&self) -> Vec<f64> {
        each!(self, rule => rule.initial_slots())
    }

    /// Returns whether a gradient of zero changes neither weights nor slots. If so, an update of
    /// some rows need not touch the others.
    #[must_use]
    pub fn keeps_without_gradient(&self) -> bool {
        each!(self, rule => rule.keeps_without_gradient())
    }

    /// Performs update `number`; the first is 1. Weights and slots must be as long as the gradient.
    ///
    /// # Panics
    /// If the number of slots is not that of the optimizer.
    pub fn update<T: Float>(
        &self,
        number: u64,
        hyper: &Hyper,
        weights: &mut [T],
        slots: &mut [&mut [T]],
        gradient: &[T],
    ) {
        let step = Step {
            number,
            rate: T::of(hyper.learning_rate),
            weights,
            gradient,
        };
        each!(self, rule => rule.update(step, slots));
    }
}

/// Applies the weight decay, which is the first part of an update.
pub fn decay<T: Float>(hyper: &Hyper, weights: &mut [T]) {
    if hyper.weight_decay != 0.0 {
        let (decay, rate) = (T::cast(hyper.weight_decay), T::of(hyper.learning_rate));
        for weight in weights {
            *weight -= *weight * decay * rate;
        }
    }
}

/// Corrects a gradient for the change of the weights from `then` to `now`, with the square of the
/// gradient as its derivative. This is delay compensation (Zheng et al.: Asynchronous Stochastic
/// Gradient Descent with Delay Compensation, 2017, arXiv 1609.08326).
pub fn compensate<T: Float>(strength: f64, gradient: &mut [T::Sum], now: &[T], then: &[T]) {
    let strength = T::Sum::of(strength);
    for (gradient, (now, then)) in zip(gradient, zip(now, then)) {
        *gradient += strength * *gradient * *gradient * (now.widened() - then.widened());
    }
}

/// A power as TensorFlow computes it.
fn power<T: Float>(base: T, exponent: u64) -> T {
    base.powf(T::of(exponent as f64))
}

/// The maximum as in TensorFlow, which is NaN if one of both is.
fn maximum<T: Float>(one: T, other: T) -> T {
    if one > other || one.is_nan() {
        one
    } else {
        other
    }
}

fn misfit<T>(slots: &[&mut [T]]) -> ! {
    panic!(
        "the optimizer has another number of slots than {}",
        slots.len()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::codec;

    const HYPER: Hyper = Hyper {
        learning_rate: 0.5,
        weight_decay: 0.25,
    };

    /// A weight that was 1, and its slots, after one update for each gradient. The learning rate is
    /// 0.5.
    pub(super) fn updated<T: Float>(rule: &impl Rule, gradients: &[T]) -> (T, Vec<T>) {
        let (mut weights, slots) = ([T::of(1.0)], rule.initial_slots());
        let mut slots: Vec<_> = slots.into_iter().map(|slot| [T::of(slot)]).collect();
        for (number, gradient) in (1..).zip(gradients) {
            let mut slots: Vec<_> = slots.iter_mut().map(<[T; 1]>::as_mut_slice).collect();
            let step = Step {
                number,
                rate: T::of(HYPER.learning_rate),
                weights: &mut weights,
                gradient: &[*gradient],
            };
            rule.update(step, &mut slots);
        }
        (weights[0], slots.concat())
    }

    fn all() -> Vec<Optimizer> {
        let all = r#"[
            {"sgd": {"momentum": 0.0, "nesterov": false}},
            {"adagrad": {"initial_accumulator_value": 0.1, "epsilon": 1e-7}},
            {"sgd": {"momentum": 0.5, "nesterov": false}},
            {"rmsprop": {"rho": 0.9, "momentum": 0.0, "epsilon": 1e-7, "centered": false}},
            {"rmsprop": {"rho": 0.9, "momentum": 0.5, "epsilon": 1e-7, "centered": true}},
            {"adadelta": {"rho": 0.95, "epsilon": 1e-7}},
            {"adam": {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "amsgrad": false}},
            {"adam": {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "amsgrad": true}},
            {"adamax": {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7}},
            {"nadam": {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7,
                       "product_dtype": "float32"}},
            {"lion": {"beta_1": 0.9, "beta_2": 0.99}},
            {"ftrl": {"learning_rate_power": -0.5, "initial_accumulator_value": 0.1,
                      "l1_regularization_strength": 0.0, "l2_regularization_strength": 0.0,
                      "l2_shrinkage_regularization_strength": 0.0, "beta": 0.0}}
        ]"#;
        serde_json::from_str(all).expect("each is an optimizer")
    }

    #[test]
    fn programs_name_an_optimizer_and_all_its_numbers() {
        let adam = Optimizer::Adam(Adam {
            beta_1: 0.9,
            beta_2: 0.999,
            epsilon: 1e-7,
            is_amsgrad: true,
        });
        assert!(all().contains(&adam));
        for optimizer in all() {
            let text = serde_json::to_string(&optimizer).expect("it is JSON");
            assert_eq!(serde_json::from_str::<Optimizer>(&text).unwrap(), optimizer);
        }
        for wrong in [
            r#"{"adam": {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7}}"#,
            r#"{"lion": {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7}}"#,
            r#"{"lamb": {}}"#,
        ] {
            assert!(serde_json::from_str::<Optimizer>(wrong).is_err());
        }
    }

    #[test]
    fn snapshots_have_the_place_of_an_optimizer_and_then_its_numbers() {
        let places = all().into_iter().map(|optimizer| {
            let bytes = codec::encode(&optimizer, 100).expect("it is short");
            assert_eq!(codec::decode::<Optimizer>(&bytes).unwrap(), optimizer);
            bytes[0]
        });
        assert_eq!(
            places.collect::<Vec<_>>(),
            [0, 1, 0, 3, 3, 4, 2, 2, 5, 6, 7, 8]
        );
        let momentum = Optimizer::Sgd(Sgd {
            momentum: 0.5,
            is_nesterov: true,
        });
        let bytes = [&[0], 0.5_f64.to_le_bytes().as_slice(), &[1]].concat();
        assert_eq!(codec::encode(&momentum, 100).unwrap(), bytes);
    }

    #[test]
    fn an_optimizer_that_keeps_without_a_gradient_does_and_others_do_not() {
        for optimizer in all() {
            let updated = |gradients: &[f32]| each!(&optimizer, rule => updated(rule, gradients));
            let (once, twice) = (updated(&[1.0]), updated(&[1.0, 0.0]));
            let keeps = once == twice && updated(&[]) == updated(&[0.0]);
            assert_eq!(keeps, optimizer.keeps_without_gradient(), "{optimizer:?}");
        }
        let keep = all();
        let keep = keep.iter().take_while(|it| it.keeps_without_gradient());
        assert_eq!(keep.count(), 2);
    }

    #[test]
    fn a_gradient_that_is_not_a_number_makes_weights_such_for_good() {
        for optimizer in all() {
            let (weight, _) = each!(&optimizer, rule => updated(rule, &[f32::NAN, 1.0]));
            assert!(weight.is_nan(), "{optimizer:?}");
        }
    }

    #[test]
    fn decay_is_a_part_of_each_weight() {
        let mut weights = [2.0];
        decay::<f32>(&HYPER, &mut weights);
        assert_eq!(weights, [1.75]);
    }

    #[test]
    fn compensation_follows_the_weights_and_does_nothing_where_they_stayed() {
        let mut gradient = [2.0, 2.0];
        compensate::<f32>(0.5, &mut gradient, &[1.0, 3.0], &[1.0, 1.0]);
        assert_eq!(gradient, [2.0, 6.0]);
    }
}
