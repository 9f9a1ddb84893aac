//! Optimizers of Adam's family: a mean of gradients, divided by a measure of their size.

use std::iter::zip;

use serde::{Deserialize, Serialize};

use super::super::float::{FloatType, typed};
use super::super::floats::Float;
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
    /// Type of the product of the mean's decays. Keras takes that of the first variable.
    #[serde(rename = "product_dtype")]
    pub product: FloatType,
}

impl Rule for Adam {
    fn initial_slots(&self) -> Vec<f64> {
        vec![0.0; 2 + usize::from(self.is_amsgrad)]
    }

    fn update<T: Float>(&self, step: Step<'_, T>, slots: &mut [&mut [T]]) {
        let [mean, square, largest @ ..] = slots else {
            misfit(slots)
        };
        let kept_1 = power(T::cast(self.beta_1), step.number);
        let kept_2 = power(T::cast(self.beta_2), step.number);
        let alpha = step.rate * (T::of(1.0) - kept_2).sqrt() / (T::of(1.0) - kept_1);
        let (new_1, new_2) = (T::of(1.0 - self.beta_1), T::of(1.0 - self.beta_2));
        let epsilon = T::of(self.epsilon);
        let state = zip(mean.iter_mut(), square.iter_mut());
        for (place, ((weight, gradient), (mean, square))) in
            zip(zip(step.weights, step.gradient), state).enumerate()
        {
            *mean += (*gradient - *mean) * new_1;
            *square += (*gradient * *gradient - *square) * new_2;
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
    fn initial_slots(&self) -> Vec<f64> {
        vec![0.0; 2]
    }

    fn update<T: Float>(&self, step: Step<'_, T>, slots: &mut [&mut [T]]) {
        let [mean, largest] = slots else {
            misfit(slots)
        };
        let new = T::of(1.0) - power(T::cast(self.beta_1), step.number);
        let new_1 = T::of(1.0 - self.beta_1);
        let (beta_2, epsilon) = (T::of(self.beta_2), T::of(self.epsilon));
        let state = zip(mean.iter_mut(), largest.iter_mut());
        for ((weight, gradient), (mean, largest)) in zip(zip(step.weights, step.gradient), state) {
            *mean += (*gradient - *mean) * new_1;
            *largest = maximum(beta_2 * *largest, gradient.abs());
            *weight -= step.rate * *mean / (new * (*largest + epsilon));
        }
    }
}

impl Nadam {
    /// Keras multiplies each decay of the mean by this factor.
    fn warmed<T: Float>(base: T, number: u64) -> T {
        T::of(1.0) - T::of(0.5) * power(base, number)
    }

    /// The product of the mean's decays up to an update.
    ///
    /// Keras has it in one variable for all weights, of type `P`, and multiplies it once in each
    /// update. Here it is computed from the number of the update, by the same multiplications. So
    /// it needs no slot, and is right for parts that had no gradient in some updates. A product
    /// that is small for weights of type `T` is not multiplied any further, because 1 minus this
    /// product rounds to 1. The factors grow, so a product that stays once stays for good.
    fn product<P: Float, T: Float>(&self, number: u64) -> T {
        let (mut product, beta_1) = (P::of(1.0), P::of(self.beta_1));
        for number in 1..=number {
            let next = product * beta_1 * Self::warmed(P::of(0.96), number);
            if next == product || product.number() <= T::EPSILON.number() / 4.0 {
                break;
            }
            product = next;
        }
        T::of(product.number())
    }
}

impl Rule for Nadam {
    fn initial_slots(&self) -> Vec<f64> {
        vec![0.0; 2]
    }

    fn update<T: Float>(&self, step: Step<'_, T>, slots: &mut [&mut [T]]) {
        let [mean, square] = slots else { misfit(slots) };
        // Unlike in Adam, Keras casts both betas before it subtracts them from 1.
        let (one, beta_1, beta_2) = (T::of(1.0), T::cast(self.beta_1), T::cast(self.beta_2));
        let warmed = |number| Self::warmed(T::cast(0.96), number);
        let now = beta_1 * warmed(step.number);
        let next = beta_1 * warmed(step.number + 1);
        let product = typed!(self.product, P => self.product::<P, T>(step.number));
        let next_product = product * next;
        let kept_2 = power(beta_2, step.number);
        let epsilon = T::of(self.epsilon);
        let state = zip(mean.iter_mut(), square.iter_mut());
        for ((weight, gradient), (mean, square)) in zip(zip(step.weights, step.gradient), state) {
            *mean += (*gradient - *mean) * (one - beta_1);
            *square += (*gradient * *gradient - *square) * (one - beta_2);
            let ahead =
                next * *mean / (one - next_product) + (one - now) * *gradient / (one - product);
            let square = *square / (one - kept_2);
            *weight -= ahead * step.rate / (square.sqrt() + epsilon);
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

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
        assert_eq!(
            updated(&adam(0.0, false), &[4.0]),
            (0.5_f32, vec![2.0, 4.0])
        );
        let (_, slots) = updated(&adam(0.0, true), &[4.0_f32, 0.0]);
        assert_eq!(slots, [1.0, 3.0, 4.0]);
        let (_, slots) = updated(&adam(0.0, true), &[f32::NAN, 0.0]);
        assert!(slots[2].is_nan());
        // The means are 2 and 4, so the weight decreases by 0.5 * sqrt(0.25) / 0.5 * 2 / (2 + 2).
        assert_eq!(updated(&adam(2.0, false), &[4.0_f32]).0, 0.75);
    }

    #[test]
    fn adamax_divides_by_the_largest_gradient() {
        let adamax = |epsilon| Adamax {
            beta_1: 0.5,
            beta_2: 0.75,
            epsilon,
        };
        assert_eq!(updated(&adamax(0.0), &[-4.0]), (1.5_f32, vec![-2.0, 4.0]));
        assert_eq!(updated(&adamax(4.0), &[4.0_f32]).0, 0.75);
        assert_eq!(updated(&adamax(0.0), &[4.0_f32, 1.0]).1, [1.5, 3.0]);
        assert!(updated(&adamax(0.0), &[f32::NAN, 1.0]).1[1].is_nan());
    }

    #[test]
    fn nadam_looks_ahead_by_the_decay_of_the_next_update() {
        let nadam = |beta_1, epsilon| Nadam {
            beta_1,
            beta_2: 0.75,
            epsilon,
            product: FloatType::F32,
        };
        // Without a mean the gradient remains, divided by the root of 4 / 0.25.
        assert_eq!(updated(&nadam(0.0, 0.0), &[4.0]), (0.5_f32, vec![4.0, 4.0]));
        assert_eq!(updated(&nadam(0.0, 4.0), &[4.0_f32]).0, 0.75);
        let (now, next) = (
            0.5_f32 * Nadam::warmed(0.96_f32, 1),
            0.5 * Nadam::warmed(0.96_f32, 2),
        );
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
            product: FloatType::F32,
        };
        assert_eq!(Nadam::warmed(0.96_f32, 1), 1.0 - 0.5 * 0.96);
        assert_eq!(nadam.product::<f32, f32>(0), 1.0);
        let two = 0.5 * Nadam::warmed(0.96_f32, 1) * 0.5 * Nadam::warmed(0.96_f32, 2);
        assert_eq!(nadam.product::<f32, f32>(2), two);
        assert_eq!(nadam.product::<f32, f64>(2), f64::from(two));
        let last = nadam.product::<f32, f32>(u64::MAX);
        assert!(last > 0.0 && 1.0 - last == 1.0);
        let last = nadam.product::<f64, f64>(u64::MAX);
        assert!(last > 0.0 && 1.0 - last == 1.0);
        // This decay rounds to 1 in bfloat16, and so does the factor of a late update.
        let slow = Nadam {
            beta_1: 0.999,
            ..nadam
        };
        let last = slow.product::<bf16, bf16>(u64::MAX);
        assert_eq!(last, slow.product::<bf16, bf16>(1000));
    }
}
