//! Arithmetic of two elements of each type; the same bits on every machine.

use half::{bf16, f16};

/// Operations on one pair of elements.
pub(super) trait Element: Copy {
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
    fn minimum(self, other: Self) -> Self;
    fn maximum(self, other: Self) -> Self;
}

macro_rules! integer_elements {
    ($($integer:ty),*) => {$(
        impl Element for $integer {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            #[inline(always)]
            fn product(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }

            #[inline(always)]
            fn minimum(self, other: Self) -> Self {
                self.min(other)
            }

            #[inline(always)]
            fn maximum(self, other: Self) -> Self {
                self.max(other)
            }
        }
    )*};
}

integer_elements!(i32, i64, u8);

macro_rules! float_elements {
    ($($float:ty),*) => {$(
        impl Element for $float {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                let sum = self + other;
                if sum.is_nan() { Self::NAN } else { sum }
            }

            #[inline(always)]
            fn product(self, other: Self) -> Self {
                let product = self * other;
                if product.is_nan() { Self::NAN } else { product }
            }

            // Equal operands have equal bits unless they are zeros: their signs decide.
            #[inline(always)]
            fn minimum(self, other: Self) -> Self {
                let lower = if self < other { self } else { other };
                let either = Self::from_bits(self.to_bits() | other.to_bits());
                let minimum = if self == other { either } else { lower };
                if self.is_nan() | other.is_nan() { Self::NAN } else { minimum }
            }

            #[inline(always)]
            fn maximum(self, other: Self) -> Self {
                let higher = if self > other { self } else { other };
                let both = Self::from_bits(self.to_bits() & other.to_bits());
                let maximum = if self == other { both } else { higher };
                if self.is_nan() | other.is_nan() { Self::NAN } else { maximum }
            }
        }
    )*};
}

float_elements!(f32, f64);

/// Maps the bits of a 16-bit float to an integer of the same order, and back.
#[inline(always)]
fn order(bits: u16) -> i16 {
    let bits = bits as i16;
    bits ^ ((bits >> 15) & 0x7FFF)
}

macro_rules! half_elements {
    ($($half:ty),*) => {$(
        impl Element for $half {
            // Ranks exchange sums and products in their accumulator, float32; these two only keep
            // the trait complete. float32 is wide enough that rounding twice changes nothing.
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                let sum = self.to_f32_const() + other.to_f32_const();
                if sum.is_nan() { Self::NAN } else { Self::from_f32_const(sum) }
            }

            #[inline(always)]
            fn product(self, other: Self) -> Self {
                let product = self.to_f32_const() * other.to_f32_const();
                if product.is_nan() { Self::NAN } else { Self::from_f32_const(product) }
            }

            #[inline(always)]
            fn minimum(self, other: Self) -> Self {
                let lower = order(self.to_bits()).min(order(other.to_bits()));
                let minimum = Self::from_bits(order(lower as u16) as u16);
                if self.is_nan() | other.is_nan() { Self::NAN } else { minimum }
            }

            #[inline(always)]
            fn maximum(self, other: Self) -> Self {
                let higher = order(self.to_bits()).max(order(other.to_bits()));
                let maximum = Self::from_bits(order(higher as u16) as u16);
                if self.is_nan() | other.is_nan() { Self::NAN } else { maximum }
            }
        }
    )*};
}

half_elements!(f16, bf16);
