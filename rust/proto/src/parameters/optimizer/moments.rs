//! Optimizers of Adam's family: a mean of gradients, divided by a measure of their size.

use std::iter::zip;

use serde::{Deserialize, Serialize};

use super::{Rule, Step, maximum, misfit, power};

/// `keras.optimizers.Adam`; with a weight decay `AdamW`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Adam {
    /// Decay of the mean of gradients.
    pub beta_1: f64,
    /// Decay of the mean of squares.
    pub beta_2: f64,
    /// Added to avoid division by zero.
    pub epsilon: f64,
    /// True if the largest mean of squares so far is used.
    #[serde(rename = "amsgrad")]
    pub is_amsgrad: bool,
}

/// `keras.optimizers.Adamax`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Adamax {
    /// Decay of the mean of gradients.
    pub beta_1: f64,
    /// Decay of the largest gradient.
    pub beta_2: f64,
    /// Added to avoid division by zero.
    pub epsilon: f64,
}

/// `keras.optimizers.Nadam`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nadam {
    /// Decay of the mean of gradients.
    pub beta_1: f64,
    /// Decay of the mean of squares.
    pub beta_2: f64,
    /// Added to avoid division by zero.
    pub epsilon: f64,
}

impl Rule for Adam {
    fn initial_slots(&self) -> Vec<f32> {
        vec![0.0; 2 + usize::from(self.is_amsgrad)]
    }

    fn update(&self, step: Step<'_>, slots: &mut [&mut [f32]]) {
        let [mean, square, largest @ ..] = slots else {
            misfit(slots)
        };
        let kept_1 = power(self.beta_1 as f32, step.number);
        let kept_2 = power(self.beta_2 as f32, step.number);
        let alpha = step.rate * (1.0 - kept_2).sqrt() / (1.0 - kept_1);
        let new_1 = (1.0 - self.beta_1) as f32;
        let new_2 = (1.0 - self.beta_2) as f32;
        let epsilon = self.epsilon as f32;
        let state = zip(mean.iter_mut(), square.iter_mut());
        for (place, ((weight, gradient), (mean, square))) in
            zip(zip(step.weights, step.gradient), state).enumerate()
        {
            *mean += (gradient - *mean) * new_1;
            *square += (gradient * gradient - *square) * new_2;
            let mut square = *square;
            if let [largest] = largest {
                largest[place] = maximum(largest[place], square);
                square = largest[place];
            }
            *weight -= *mean * alpha / (square.sqrt() + epsilon);
        }
    }
}

impl Rule for Adamax {
    fn initial_slots(&self) -> Vec<f32> {
        vec![0.0; 2]
    }

    fn update(&self, step: Step<'_>, slots: &mut [&mut [f32]]) {
        let [mean, largest] = slots else {
            misfit(slots)
        };
        let kept_1 = power(self.beta_1 as f32, step.number);
        let new_1 = (1.0 - self.beta_1) as f32;
        let (beta_2, epsilon) = (self.beta_2 as f32, self.epsilon as f32);
        let state = zip(mean.iter_mut(), largest.iter_mut());
        for ((weight, gradient), (mean, largest)) in zip(zip(step.weights, step.gradient), state) {
            *mean += (gradient - *mean) * new_1;
            *largest = maximum(beta_2 * *largest, gradient.abs());
            *weight -= step.rate * *mean / ((1.0 - kept_1) * (*largest + epsilon));
        }
    }
}

impl Nadam {
    /// Keras multiplies each decay of the mean by this factor.
    fn warmed(number: u64) -> f32 {
        1.0 - 0.5 * power(0.96, number)
    }

    /// The product of the mean's decays up to an update.
    ///
    /// Keras has it in one variable for all weights, and multiplies it once in each update. Here it
    /// is computed from the number of the update, by the same multiplications. So it needs no
    /// slot, and is right for parts that had no gradient in some updates. A small product is not
    /// multiplied any further, because 1 minus this product rounds to 1.
    fn product(&self, number: u64) -> f32 {
        let mut product = 1.0;
        for number in 1..=number {
            if product <= f32::EPSILON / 4.0 {
                break;
            }
            product = product * self.beta_1 as f32 * Self::warmed(number);
        }
        product
    }
}

impl Rule for Nadam {
    fn initial_slots(&self) -> Vec<f32> {
        vec![0.0; 2]
    }

    fn update(&self, step: Step<'_>, slots: &mut [&mut [f32]]) {
        let [mean, square] = slots else { misfit(slots) };
        // Unlike in Adam, all of this is float32, because Keras casts both betas first.
        let (beta_1, beta_2) = (self.beta_1 as f32, self.beta_2 as f32);
        let now = beta_1 * Self::warmed(step.number);
        let next = beta_1 * Self::warmed(step.number + 1);
        let product = self.product(step.number);
        let next_product = product * next;
        let kept_2 = power(beta_2, step.number);
        let epsilon = self.epsilon as f32;
        let state = zip(mean.iter_mut(), square.iter_mut());
        for ((weight, gradient), (mean, square)) in zip(zip(step.weights, step.gradient), state) {
            *mean += (gradient - *mean) * (1.0 - beta_1);
            *square += (gradient * gradient - *square) * (1.0 - beta_2);
            let ahead =
                next * *mean / (1.0 - next_product) + (1.0 - now) * gradient / (1.0 - product);
            let square = *square / (1.0 - kept_2);
            *weight -= ahead * step.rate / (square.sqrt() + epsilon);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::updated;
    use super::*;

    #[test]
    fn adam_takes_steps_of_the_learning_rate_and_amsgrad_remembers_the_largest() {
        let adam = |epsilon, is_amsgrad| Adam {
            beta_1: 0.5,
            beta_2: 0.75,
            epsilon,
            is_amsgrad,
        };
        // The first step of Adam has the length of the learning rate for any gradient.
        assert_eq!(updated(&adam(0.0, false), &[4.0]), (0.5, vec![2.0, 4.0]));
        let (_, slots) = updated(&adam(0.0, true), &[4.0, 0.0]);
        assert_eq!(slots, [1.0, 3.0, 4.0]);
        let (_, slots) = updated(&adam(0.0, true), &[f32::NAN, 0.0]);
        assert!(slots[2].is_nan());
        // The means are 2 and 4, so the weight decreases by 0.5 * sqrt(0.25) / 0.5 * 2 / (2 + 2).
        assert_eq!(updated(&adam(2.0, false), &[4.0]).0, 0.75);
    }

    #[test]
    fn adamax_divides_by_the_largest_gradient() {
        let adamax = |epsilon| Adamax {
            beta_1: 0.5,
            beta_2: 0.75,
            epsilon,
        };
        assert_eq!(updated(&adamax(0.0), &[-4.0]), (1.5, vec![-2.0, 4.0]));
        assert_eq!(updated(&adamax(4.0), &[4.0]).0, 0.75);
        assert_eq!(updated(&adamax(0.0), &[4.0, 1.0]).1, [1.5, 3.0]);
        assert!(updated(&adamax(0.0), &[f32::NAN, 1.0]).1[1].is_nan());
    }

    #[test]
    fn nadam_looks_ahead_by_the_decay_of_the_next_update() {
        let nadam = |beta_1, epsilon| Nadam {
            beta_1,
            beta_2: 0.75,
            epsilon,
        };
        // Without a mean the gradient remains, divided by the root of 4 / 0.25.
        assert_eq!(updated(&nadam(0.0, 0.0), &[4.0]), (0.5, vec![4.0, 4.0]));
        assert_eq!(updated(&nadam(0.0, 4.0), &[4.0]).0, 0.75);
        let (now, next) = (0.5 * Nadam::warmed(1), 0.5 * Nadam::warmed(2));
        let ahead = next * 2.0 / (1.0 - now * next) + (1.0 - now) * 4.0 / (1.0 - now);
        let (weight, _) = updated(&nadam(0.5, 0.0), &[4.0]);
        assert_eq!(weight, 1.0 - ahead * 0.5 / 4.0);
    }

    #[test]
    fn the_product_of_decays_ends_where_it_does_not_count() {
        let nadam = Nadam {
            beta_1: 0.5,
            beta_2: 0.75,
            epsilon: 0.0,
        };
        assert_eq!(Nadam::warmed(1), 1.0 - 0.5 * 0.96);
        assert_eq!(nadam.product(0), 1.0);
        let two = 0.5 * Nadam::warmed(1) * 0.5 * Nadam::warmed(2);
        assert_eq!(nadam.product(2), two);
        let last = nadam.product(u64::MAX);
        assert!(last > 0.0 && 1.0 - last == 1.0);
    }
}
