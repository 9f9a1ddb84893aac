//! Optimizers that divide each gradient by the root of a sum or a mean of its squares.

use std::iter::zip;

use serde::{Deserialize, Serialize};

use super::super::floats::Float;
use super::{Rule, Step, misfit};

/// `keras.optimizers.Adagrad`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Adagrad {
    /// Initial value of the sums of squares.
    #[serde(rename = "initial_accumulator_value")]
    pub initial: f64,
    /// Added to avoid division by zero.
    pub epsilon: f64,
}

/// `keras.optimizers.RMSprop`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rmsprop {
    /// Decay of the means.
    pub rho: f64,
    /// Momentum; 0 needs no slot.
    pub momentum: f64,
    /// Added to avoid division by zero.
    pub epsilon: f64,
    /// True if the variance is used instead of the mean of squares.
    #[serde(rename = "centered")]
    pub is_centered: bool,
}

/// `keras.optimizers.Adadelta`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Adadelta {
    /// Decay of the means.
    pub rho: f64,
    /// Added to both means before their roots.
    pub epsilon: f64,
}

impl Rule for Adagrad {
    fn initial_slots(&self) -> Vec<f64> {
        vec![self.initial]
    }

    fn keeps_without_gradient(&self) -> bool {
        true
    }

    fn update<T: Float>(&self, step: Step<'_, T>, slots: &mut [&mut [T]]) {
        let [squares] = slots else { misfit(slots) };
        let epsilon = T::of(self.epsilon);
        for ((weight, gradient), squares) in
            zip(zip(step.weights, step.gradient), squares.iter_mut())
        {
            *squares += *gradient * *gradient;
            *weight -= step.rate * *gradient / (*squares + epsilon).sqrt();
        }
    }
}

impl Rmsprop {
    fn has_momentum(&self) -> bool {
        self.momentum > 0.0
    }
}

impl Rule for Rmsprop {
    fn initial_slots(&self) -> Vec<f64> {
        vec![0.0; 1 + usize::from(self.has_momentum()) + usize::from(self.is_centered)]
    }

    fn update<T: Float>(&self, step: Step<'_, T>, slots: &mut [&mut [T]]) {
        let (square, mut velocity, mut mean) = match (slots, self.has_momentum(), self.is_centered)
        {
            ([square], false, false) => (square, None, None),
            ([square, velocity], true, false) => (square, Some(velocity), None),
            ([square, mean], false, true) => (square, None, Some(mean)),
            ([square, velocity, mean], true, true) => (square, Some(velocity), Some(mean)),
            (slots, ..) => misfit(slots),
        };
        let (rho, new) = (T::of(self.rho), T::of(1.0 - self.rho));
        let (momentum, epsilon) = (T::of(self.momentum), T::of(self.epsilon));
        for (place, ((weight, gradient), square)) in
            zip(zip(step.weights, step.gradient), square.iter_mut()).enumerate()
        {
            *square = rho * *square + new * (*gradient * *gradient);
            let mut variance = *square;
            if let Some(mean) = &mut mean {
                mean[place] = rho * mean[place] + new * *gradient;
                variance -= mean[place] * mean[place];
            }
            let mut change = step.rate * *gradient / (variance + epsilon).sqrt();
            if let Some(velocity) = &mut velocity {
                velocity[place] = momentum * velocity[place] + change;
                change = velocity[place];
            }
            *weight -= change;
        }
    }
}

impl Rule for Adadelta {
    fn initial_slots(&self) -> Vec<f64> {
        vec![0.0; 2]
    }

    fn update<T: Float>(&self, step: Step<'_, T>, slots: &mut [&mut [T]]) {
        let [square, changed] = slots else {
            misfit(slots)
        };
        let (rho, new) = (T::of(self.rho), T::of(1.0 - self.rho));
        let epsilon = T::of(self.epsilon);
        let state = zip(square.iter_mut(), changed.iter_mut());
        for ((weight, gradient), (square, changed)) in zip(zip(step.weights, step.gradient), state)
        {
            *square = rho * *square + new * (*gradient * *gradient);
            let change = -((*changed + epsilon).sqrt() * *gradient / (*square + epsilon).sqrt());
            *changed = rho * *changed + new * (change * change);
            *weight += step.rate * change;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::updated;
    use super::*;

    #[test]
    fn adagrad_divides_by_the_root_of_the_sum_and_epsilon() {
        let adagrad = |initial, epsilon| Adagrad { initial, epsilon };
        let expected = (1.0_f32 - 1.5 / 4.0, vec![16.0]);
        assert_eq!(updated(&adagrad(7.0, 0.0), &[3.0]), expected);
        assert_eq!(updated(&adagrad(1.0, 6.0), &[3.0_f32]).0, 1.0 - 1.5 / 4.0);
    }

    #[test]
    fn rmsprop_has_a_slot_for_momentum_and_one_for_the_mean_if_they_are_wanted() {
        let rmsprop = |momentum, epsilon, is_centered| Rmsprop {
            rho: 0.75,
            momentum,
            epsilon,
            is_centered,
        };
        // The mean of squares is 4, so the weight decreases by 0.5 * 4 / 2.
        assert_eq!(
            updated(&rmsprop(0.0, 0.0, false), &[4.0]),
            (0.0_f32, vec![4.0])
        );
        let moved = updated(&rmsprop(0.5, 1.0, false), &[4.0, 0.0]);
        let first = 2.0 / 5.0_f32.sqrt();
        assert_eq!(moved, (1.0 - first - first / 2.0, vec![3.0, first / 2.0]));
        // The variance is 4 - 1.
        let centered = updated(&rmsprop(0.0, 1.0, true), &[4.0_f32]);
        assert_eq!(centered, (0.0, vec![4.0, 1.0]));
        let both = updated(&rmsprop(0.5, 1.0, true), &[4.0_f32]);
        assert_eq!(both, (0.0, vec![4.0, 1.0, 1.0]));
    }

    #[test]
    fn adadelta_multiplies_by_the_root_of_its_changes() {
        let adadelta = Adadelta {
            rho: 0.25,
            epsilon: 1.0,
        };
        // The change is -sqrt(0 + 1) * 2 / sqrt(3 + 1), of which the rate takes a half.
        assert_eq!(updated(&adadelta, &[2.0]), (0.5_f32, vec![3.0, 0.75]));
    }
}
