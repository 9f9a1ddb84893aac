//! Gradient descent, with or without momentum.

use std::iter::zip;

use serde::{Deserialize, Serialize};

use super::super::floats::Float;
use super::{Rule, Step, misfit};

/// `keras.optimizers.SGD`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sgd {
    /// Momentum; 0 needs no slot.
    pub momentum: f64,
    /// True for Nesterov momentum.
    #[serde(rename = "nesterov")]
    pub is_nesterov: bool,
}

impl Rule for Sgd {
    fn initial_slots(&self) -> Vec<f64> {
        if self.keeps_without_gradient() {
            vec![]
        } else {
            vec![0.0]
        }
    }

    fn keeps_without_gradient(&self) -> bool {
        self.momentum == 0.0
    }

    fn update<T: Float>(&self, step: Step<'_, T>, slots: &mut [&mut [T]]) {
        let elements = zip(step.weights, step.gradient);
        if self.keeps_without_gradient() {
            for (weight, gradient) in elements {
                *weight -= *gradient * step.rate;
            }
            return;
        }
        let [velocity] = slots else { misfit(slots) };
        let momentum = T::cast(self.momentum);
        for ((weight, gradient), velocity) in zip(elements, velocity.iter_mut()) {
            let change = *gradient * step.rate;
            *velocity = *velocity * momentum - change;
            *weight += if self.is_nesterov {
                *velocity * momentum - change
            } else {
                *velocity
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::updated;
    use super::*;

    #[test]
    fn small_numbers_come_out_as_on_paper() {
        let sgd = |momentum, is_nesterov| Sgd {
            momentum,
            is_nesterov,
        };
        assert_eq!(updated(&sgd(0.0, false), &[1.0, 2.0]), (-0.5_f32, vec![]));
        assert_eq!(
            updated(&sgd(0.5, false), &[1.0, 2.0]),
            (-0.75_f32, vec![-1.25])
        );
        assert_eq!(updated(&sgd(0.5, true), &[1.0]), (0.25_f32, vec![-0.5]));
    }
}
