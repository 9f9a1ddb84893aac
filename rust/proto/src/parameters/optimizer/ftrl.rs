//! FTRL, which computes each weight anew from sums over all gradients.

use std::iter::zip;

use serde::{Deserialize, Serialize};

use super::super::floats::Float;
use super::{Rule, Step, misfit};

/// `keras.optimizers.Ftrl`.
///
/// A gradient of zero changes weights: the first one sets them to 0, and later ones follow the
/// learning rate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ftrl {
    /// Power of the sums of squares by which the learning rate is multiplied; not above 0.
    #[serde(rename = "learning_rate_power")]
    pub power: f64,
    /// Initial value of the sums of squares.
    #[serde(rename = "initial_accumulator_value")]
    pub initial: f64,
    /// Strength of the L1 penalty.
    #[serde(rename = "l1_regularization_strength")]
    pub l1: f64,
    /// Strength of the L2 penalty.
    #[serde(rename = "l2_regularization_strength")]
    pub l2: f64,
    /// Strength of the L2 penalty that is added to gradients.
    #[serde(rename = "l2_shrinkage_regularization_strength")]
    pub shrinkage: f64,
    /// Divided by the learning rate and added to the L2 penalty.
    pub beta: f64,
}

impl Rule for Ftrl {
    fn initial_slots(&self) -> Vec<f64> {
        vec![self.initial, 0.0]
    }

    fn update<T: Float>(&self, step: Step<'_, T>, slots: &mut [&mut [T]]) {
        let [squares, linear] = slots else {
            misfit(slots)
        };
        let rate = step.rate;
        let (two, power, l1) = (T::of(2.0), T::of(-self.power), T::of(self.l1));
        let l2 = T::of(self.l2) + T::of(self.beta) / (two * rate);
        let shrinkage = T::of(2.0 * self.shrinkage);
        let state = zip(squares.iter_mut(), linear.iter_mut());
        for ((weight, gradient), (squares, linear)) in zip(zip(step.weights, step.gradient), state)
        {
            let shrinking = *gradient + shrinkage * *weight;
            let before = raised(*squares, power);
            *squares += *gradient * *gradient;
            let now = raised(*squares, power);
            *linear += shrinking - (now - before) / rate * *weight;
            let quadratic = now / rate + two * l2;
            *weight = (linear.clipped(-l1, l1) - *linear) / quadratic;
        }
    }
}

/// A power. Graphs of TensorFlow have roots where a program has powers of 0.5, too.
fn raised<T: Float>(base: T, exponent: T) -> T {
    if exponent == T::of(0.5) {
        base.sqrt()
    } else {
        base.powf(exponent)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::updated;
    use super::*;

    fn ftrl(initial: f64, l1: f64, l2: f64, shrinkage: f64, beta: f64) -> Ftrl {
        Ftrl {
            power: -0.5,
            initial,
            l1,
            l2,
            shrinkage,
            beta,
        }
    }

    #[test]
    fn small_numbers_come_out_as_on_paper() {
        // The roots are 0 and 4, so the sum becomes 4 - 4 / 0.5 and the divisor 4 / 0.5.
        let plain = updated(&ftrl(0.0, 0.0, 0.0, 0.0, 0.0), &[4.0_f32]);
        assert_eq!(plain, (4.0 / 8.0, vec![16.0, -4.0]));
        let l1 = updated(&ftrl(0.0, 1.0, 0.0, 0.0, 0.0), &[4.0_f32]);
        assert_eq!(l1, (3.0 / 8.0, vec![16.0, -4.0]));
        // The divisor grows by 2 * (2 + 2 / (2 * 0.5)).
        let l2 = updated(&ftrl(0.0, 1.0, 2.0, 0.0, 2.0), &[4.0_f32]);
        assert_eq!(l2, (3.0 / 16.0, vec![16.0, -4.0]));
        let all = updated(&ftrl(0.0, 1.0, 2.0, 0.25, 2.0), &[4.0_f32]);
        assert_eq!(all, (2.5 / 16.0, vec![16.0, -3.5]));
        // The roots are 3 and 5.
        let initial = updated(&ftrl(9.0, 0.0, 0.0, 0.0, 0.0), &[4.0_f32]);
        assert_eq!(initial, (0.0, vec![25.0, 0.0]));
    }

    #[test]
    fn other_powers_are_those_of_the_sum() {
        let constant = Ftrl {
            power: 0.0,
            ..ftrl(0.0, 0.0, 0.0, 0.0, 0.0)
        };
        assert_eq!(updated(&constant, &[4.0_f32]), (-2.0, vec![16.0, 4.0]));
        let linear = Ftrl {
            power: -1.0,
            ..constant
        };
        assert_eq!(updated(&linear, &[2.0_f32]), (6.0 / 8.0, vec![4.0, -6.0]));
    }

    #[test]
    fn a_gradient_of_zero_changes_weights_and_nan_spreads() {
        let plain = ftrl(1.0, 0.0, 0.0, 0.0, 0.0);
        assert_eq!(updated(&plain, &[0.0_f32]), (0.0, vec![1.0, 0.0]));
        assert!(updated(&plain, &[f32::NAN]).0.is_nan());
    }
}
