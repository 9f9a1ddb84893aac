//! Element types of variables, with the arithmetic of TensorFlow.
//!
//! TensorFlow computes on 16-bit floats in float32, and rounds the result of each operation. So do
//! the types of the crate `half`.

use std::fmt::Debug;
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub, SubAssign};

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use crate::names::named;

named! {
    /// Element type of a variable. Messages and snapshots have its place in this list, so new ones
    /// come last.
    #[derive(Hash, PartialOrd, Ord, Serialize, Deserialize)]
    pub enum FloatType {
        /// IEEE 754 binary32.
        #[serde(rename = "float32")]
        F32: "float32",
        /// IEEE 754 binary64.
        #[serde(rename = "float64")]
        F64: "float64",
        /// bfloat16: the upper half of a binary32.
        #[serde(rename = "bfloat16")]
        Bf16: "bfloat16",
        /// IEEE 754 binary16.
        #[serde(rename = "float16")]
        F16: "float16",
    }
}

impl FloatType {
    /// Size of one element in bytes.
    #[must_use]
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F64 => 8,
            Self::Bf16 | Self::F16 => 2,
        }
    }
}

/// Names the Rust type of a [`FloatType`] in an expression.
macro_rules! typed {
    ($type:expr, $float:ident => $result:expr) => {
        match $type {
            $crate::parameters::float::FloatType::F32 => {
                type $float = f32;
                $result
            }
            $crate::parameters::float::FloatType::F64 => {
                type $float = f64;
                $result
            }
            $crate::parameters::float::FloatType::Bf16 => {
                type $float = half::bf16;
                $result
            }
            $crate::parameters::float::FloatType::F16 => {
                type $float = half::f16;
                $result
            }
        }
    };
}
pub(super) use typed;

/// The Rust type of a [`FloatType`].
pub trait Number:
    Copy
    + Debug
    + Default
    + PartialOrd
    + Add<Output = Self>
    + AddAssign
    + Div<Output = Self>
    + Mul<Output = Self>
    + MulAssign
    + Neg<Output = Self>
    + Sub<Output = Self>
    + SubAssign
    + 'static
{
    /// Distance from 1 to the next larger number.
    const EPSILON: Self;

    /// Rounds a number as TensorFlow converts one of Python: to float32 first, except for float64.
    fn of(value: f64) -> Self;
    /// Rounds a number as Keras casts one of Python: to float32 first, for every type.
    fn cast(value: f64) -> Self {
        Self::of(f64::from(value as f32))
    }
    /// The same number as a float64.
    fn number(self) -> f64;
    /// The square root.
    fn sqrt(self) -> Self;
    /// The value without its sign.
    fn abs(self) -> Self;
    /// The power.
    fn powf(self, exponent: Self) -> Self;
    /// 1 or -1; NaN for NaN.
    fn signum(self) -> Self;
    /// Returns whether this is not a number.
    fn is_nan(self) -> bool;
    /// The value between both bounds; the upper bound for NaN.
    fn clipped(self, low: Self, high: Self) -> Self;
}

/// Functions that all types have.
macro_rules! common {
    ($float:ident) => {
        const EPSILON: Self = $float::EPSILON;

        #[inline]
        fn abs(self) -> Self {
            $float::from_bits(self.to_bits() & !(1 << (8 * size_of::<$float>() - 1)))
        }

        #[inline]
        fn number(self) -> f64 {
            self.into()
        }

        #[inline]
        fn signum(self) -> Self {
            $float::signum(self)
        }

        #[inline]
        fn is_nan(self) -> bool {
            $float::is_nan(self)
        }

        #[inline]
        fn clipped(self, low: Self, high: Self) -> Self {
            $float::min(self, high).max(low)
        }
    };
}

macro_rules! wide {
    ($($float:ident,)*) => { $(
        impl Number for $float {
            common!($float);

            #[inline]
            fn of(value: f64) -> Self {
                value as $float
            }

            #[inline]
            fn sqrt(self) -> Self {
                $float::sqrt(self)
            }

            #[inline]
            fn powf(self, exponent: Self) -> Self {
                $float::powf(self, exponent)
            }
        }
    )* };
}

wide! { f32, f64, }

macro_rules! narrow {
    ($($float:ident,)*) => { $(
        impl Number for $float {
            common!($float);

            #[inline]
            fn of(value: f64) -> Self {
                $float::from_f32(value as f32)
            }

            #[inline]
            fn sqrt(self) -> Self {
                $float::from_f32(self.to_f32().sqrt())
            }

            #[inline]
            fn powf(self, exponent: Self) -> Self {
                $float::from_f32(self.to_f32().powf(exponent.to_f32()))
            }
        }
    )* };
}

narrow! { bf16, f16, }

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds<T: Number>(value: f64, expected: f64, wanted: FloatType) {
        assert_eq!(T::of(value), T::of(expected));
        assert_eq!(T::of(-expected).abs(), T::of(expected));
        assert_eq!(T::of(9.0).sqrt(), T::of(3.0));
        assert_eq!(T::of(2.0).powf(T::of(3.0)), T::of(8.0));
        let clipped = |value: f64| T::of(value).clipped(T::of(-1.0), T::of(1.0));
        assert_eq!(clipped(-3.0), T::of(-1.0));
        assert_eq!(clipped(3.0), T::of(1.0));
        assert_eq!(clipped(0.5), T::of(0.5));
        assert_eq!(wanted.size_bytes(), size_of::<T>());
    }

    #[test]
    fn each_type_rounds_as_its_bits_allow() {
        rounds::<f64>(1.1, 1.1, FloatType::F64);
        rounds::<f32>(1.1, f64::from(1.1_f32), FloatType::F32);
        rounds::<bf16>(1.01, 1.0078125, FloatType::Bf16);
        rounds::<f16>(1.001, 1.0009765625, FloatType::F16);
        // Rounding to float32 first makes a tie of this number, which goes to even.
        let tie = 1.0 + 1.0 / 256.0 + 1e-12;
        assert_eq!(<bf16 as Number>::of(tie), bf16::ONE);
    }
}
