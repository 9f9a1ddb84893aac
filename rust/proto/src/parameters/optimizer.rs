//! Keras' optimizers for servers, in the order of arithmetic of Keras 3, so that results round
//! equally.
//!
//! All values are float32. Expressions that Python evaluates before TensorFlow, such as `1 -
//! beta_1`, are float64 first. No multiplication is fused with an addition. Workers clip the
//! gradients, because Keras clips each gradient before the sum.

use std::iter::zip;

use serde::{Deserialize, Serialize};

/// Rule by which a gradient changes the weights, constant for the whole training. Programs pass it
/// as JSON with Keras' names.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Optimizer {
    /// `keras.optimizers.SGD`.
    Sgd {
        /// Momentum; 0 needs no slot.
        momentum: f64,
        /// True for Nesterov momentum.
        #[serde(rename = "nesterov")]
        is_nesterov: bool,
    },
    /// `keras.optimizers.Adagrad`.
    Adagrad {
        /// Initial value of the sums of squares.
        #[serde(rename = "initial_accumulator_value")]
        initial: f64,
        /// Added to avoid division by zero.
        epsilon: f64,
    },
    /// `keras.optimizers.Adam`; with a weight decay `AdamW`.
    Adam {
        /// Decay of the mean of gradients.
        beta_1: f64,
        /// Decay of the mean of squares.
        beta_2: f64,
        /// Added to avoid division by zero.
        epsilon: f64,
        /// True if the largest mean of squares so far is used.
        #[serde(rename = "amsgrad")]
        is_amsgrad: bool,
    },
}

/// Values that may change from step to step, and therefore come with every gradient.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Hyper {
    /// Learning rate of the step, from the worker's schedule or callback.
    pub learning_rate: f32,
    /// Decay of the weights per unit of learning rate; 0 for none.
    pub weight_decay: f32,
}

impl Optimizer {
    /// Initial value of each slot of a variable.
    pub fn initial_slots(&self) -> Vec<f32> {
        match *self {
            Self::Sgd { momentum: 0.0, .. } => vec![],
            Self::Sgd { .. } => vec![0.0],
            Self::Adagrad { initial, .. } => vec![initial as f32],
            Self::Adam { is_amsgrad, .. } => vec![0.0; 2 + usize::from(is_amsgrad)],
        }
    }

    /// Returns whether a gradient of zero changes neither weights nor slots. If so, an update of
    /// some rows need not touch the others.
    #[must_use]
    pub const fn keeps_without_gradient(&self) -> bool {
        matches!(self, Self::Sgd { momentum: 0.0, .. } | Self::Adagrad { .. })
    }

    /// Performs update `number`; the first is 1. Weights and slots must be as long as the gradient.
    ///
    /// # Panics
    /// If the number of slots is not that of the optimizer.
    pub fn update(
        &self,
        number: u64,
        hyper: &Hyper,
        weights: &mut [f32],
        slots: &mut [&mut [f32]],
        gradient: &[f32],
    ) {
        let rate = hyper.learning_rate;
        match (*self, slots) {
            (Self::Sgd { momentum: 0.0, .. }, []) => {
                for (weight, gradient) in zip(weights, gradient) {
                    *weight -= gradient * rate;
                }
            }
            (
                Self::Sgd {
                    momentum,
                    is_nesterov,
                },
                [velocity],
            ) => {
                let momentum = momentum as f32;
                for ((weight, velocity), gradient) in
                    zip(zip(weights, velocity.iter_mut()), gradient)
                {
                    let step = gradient * rate;
                    *velocity = *velocity * momentum - step;
                    *weight += if is_nesterov {
                        *velocity * momentum - step
                    } else {
                        *velocity
                    };
                }
            }
            (Self::Adagrad { epsilon, .. }, [squares]) => {
                let epsilon = epsilon as f32;
                for ((weight, squares), gradient) in zip(zip(weights, squares.iter_mut()), gradient)
                {
                    *squares += gradient * gradient;
                    *weight -= rate * gradient / (*squares + epsilon).sqrt();
                }
            }
            (
                Self::Adam {
                    beta_1,
                    beta_2,
                    epsilon,
                    ..
                },
                [mean, square, largest @ ..],
            ) => {
                let (kept_1, kept_2) = (power(beta_1, number), power(beta_2, number));
                let alpha = rate * (1.0 - kept_2).sqrt() / (1.0 - kept_1);
                let (new_1, new_2) = ((1.0 - beta_1) as f32, (1.0 - beta_2) as f32);
                let epsilon = epsilon as f32;
                let state = zip(mean.iter_mut(), square.iter_mut());
                for (place, ((weight, (mean, square)), gradient)) in
                    zip(zip(weights, state), gradient).enumerate()
                {
                    *mean += (gradient - *mean) * new_1;
                    *square += (gradient * gradient - *square) * new_2;
                    let mut square = *square;
                    if let [largest] = largest {
                        largest[place] = largest[place].max(square);
                        square = largest[place];
                    }
                    *weight -= *mean * alpha / (square.sqrt() + epsilon);
                }
            }
            (_, slots) => panic!("{self:?} has another number of slots than {}", slots.len()),
        }
    }
}

/// Applies the weight decay, which is the first part of an update.
pub fn decay(hyper: &Hyper, weights: &mut [f32]) {
    if hyper.weight_decay != 0.0 {
        for weight in weights {
            *weight -= *weight * hyper.weight_decay * hyper.learning_rate;
        }
    }
}

/// Corrects a gradient for the change of the weights from `then` to `now`, with the square of the
/// gradient as its derivative. This is delay compensation (Zheng et al.: Asynchronous Stochastic
/// Gradient Descent with Delay Compensation, 2017, arXiv 1609.08326).
pub fn compensate(strength: f32, gradient: &mut [f32], now: &[f32], then: &[f32]) {
    for (gradient, (now, then)) in zip(gradient, zip(now, then)) {
        *gradient += strength * *gradient * *gradient * (now - then);
    }
}

/// A power as TensorFlow computes it in float32.
fn power(base: f64, exponent: u64) -> f32 {
    (base as f32).powf(exponent as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYPER: Hyper = Hyper {
        learning_rate: 0.5,
        weight_decay: 0.25,
    };

    fn updated(optimizer: Optimizer, gradients: &[f32]) -> (f32, Vec<f32>) {
        let (mut weights, slots) = ([1.0], optimizer.initial_slots());
        let mut slots: Vec<_> = slots.into_iter().map(|slot| [slot]).collect();
        for (number, gradient) in (1..).zip(gradients) {
            let mut slots: Vec<_> = slots.iter_mut().map(<[f32; 1]>::as_mut_slice).collect();
            optimizer.update(number, &HYPER, &mut weights, &mut slots, &[*gradient]);
        }
        (weights[0], slots.concat())
    }

    #[test]
    fn small_numbers_come_out_as_on_paper() {
        let sgd = |momentum, is_nesterov| Optimizer::Sgd {
            momentum,
            is_nesterov,
        };
        assert_eq!(updated(sgd(0.0, false), &[1.0, 2.0]), (-0.5, vec![]));
        assert_eq!(updated(sgd(0.5, false), &[1.0, 2.0]), (-0.75, vec![-1.25]));
        assert_eq!(updated(sgd(0.5, true), &[1.0]), (0.25, vec![-0.5]));
        let adagrad = Optimizer::Adagrad {
            initial: 7.0,
            epsilon: 0.0,
        };
        assert_eq!(updated(adagrad, &[3.0]), (1.0 - 1.5 / 4.0, vec![16.0]));
        let adam = |is_amsgrad| Optimizer::Adam {
            beta_1: 0.5,
            beta_2: 0.75,
            epsilon: 0.0,
            is_amsgrad,
        };
        // The first step of Adam has the length of the learning rate for any gradient.
        assert_eq!(updated(adam(false), &[4.0]), (0.5, vec![2.0, 4.0]));
        let (_, slots) = updated(adam(true), &[4.0, 0.0]);
        assert_eq!(slots, [1.0, 3.0, 4.0]);
        let mut weights = [2.0];
        decay(&HYPER, &mut weights);
        assert_eq!(weights, [1.75]);
    }

    #[test]
    fn epsilon_is_added_and_slots_that_decay_change_without_a_gradient() {
        let sgd = |momentum| Optimizer::Sgd {
            momentum,
            is_nesterov: false,
        };
        let adagrad = Optimizer::Adagrad {
            initial: 1.0,
            epsilon: 6.0,
        };
        assert_eq!(updated(adagrad, &[3.0]).0, 1.0 - 1.5 / 4.0);
        let adam = Optimizer::Adam {
            beta_1: 0.5,
            beta_2: 0.75,
            epsilon: 2.0,
            is_amsgrad: false,
        };
        // The means are 2 and 4, so the weight decreases by 0.5 * sqrt(0.25) / 0.5 * 2 / (2 + 2).
        assert_eq!(updated(adam, &[4.0]).0, 0.75);
        let keep = [sgd(0.0), sgd(0.5), adagrad, adam].map(|it| it.keeps_without_gradient());
        assert_eq!(keep, [true, false, true, false]);
    }

    #[test]
    fn compensation_follows_the_weights_and_does_nothing_where_they_stayed() {
        let mut gradient = [2.0, 2.0];
        compensate(0.5, &mut gradient, &[1.0, 3.0], &[1.0, 1.0]);
        assert_eq!(gradient, [2.0, 6.0]);
    }
}
