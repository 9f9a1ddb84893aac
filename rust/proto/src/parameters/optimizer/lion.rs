//! Lion, of which each step has one length.

use std::iter::zip;

use serde::{Deserialize, Serialize};

use super::super::floats::Float;
use super::{Rule, Step, misfit};

/// `keras.optimizers.Lion`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lion {
    /// Share of the mean in a step.
    pub beta_1: f64,
    /// Decay of the mean of gradients.
    pub beta_2: f64,
}

impl Rule for Lion {
    fn initial_slots(&self) -> Vec<f64> {
        vec![0.0]
    }

    fn update<T: Float>(&self, step: Step<'_, T>, slots: &mut [&mut [T]]) {
        let [mean] = slots else { misfit(slots) };
        // Keras casts both betas before it subtracts them from 1.
        let (one, beta_1, beta_2) = (T::of(1.0), T::cast(self.beta_1), T::cast(self.beta_2));
        for ((weight, gradient), mean) in zip(zip(step.weights, step.gradient), mean.iter_mut()) {
            *weight -= step.rate * sign(*mean * beta_1 + *gradient * (one - beta_1));
            *mean = *mean * beta_2 + *gradient * (one - beta_2);
        }
    }
}

/// The sign as in TensorFlow, which is 0 for 0.
fn sign<T: Float>(value: T) -> T {
    let zero = T::default();
    if value == zero { zero } else { value.signum() }
}

#[cfg(test)]
mod tests {
    use super::super::tests::updated;
    use super::*;

    #[test]
    fn each_step_has_the_length_of_the_learning_rate_or_none() {
        let lion = Lion {
            beta_1: 0.5,
            beta_2: 0.75,
        };
        assert_eq!(updated(&lion, &[4.0]), (0.5_f32, vec![1.0]));
        assert_eq!(updated(&lion, &[4.0, -2.0]), (1.0_f32, vec![0.25]));
        // The mean and the gradient cancel each other.
        assert_eq!(updated(&lion, &[4.0, -1.0]), (0.5_f32, vec![0.5]));
        assert_eq!(updated(&lion, &[-0.0]), (1.0_f32, vec![0.0]));
        assert!(updated(&lion, &[f32::NAN]).0.is_nan());
    }
}
