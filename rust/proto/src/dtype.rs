//! Element types and reduce operations.

pub use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use crate::names::named;

named! {
    /// Element type of a buffer, under the name that numpy and ml_dtypes use.
    #[derive(Hash, Serialize, Deserialize)]
    #[repr(u8)]
    pub enum DType {
        /// IEEE 754 binary32.
        F32 = 1: "float32",
        /// IEEE 754 binary64.
        F64 = 2: "float64",
        /// IEEE 754 binary16.
        F16 = 3: "float16",
        /// bfloat16: the upper half of a binary32.
        Bf16 = 4: "bfloat16",
        /// Signed 32-bit integer.
        I32 = 5: "int32",
        /// Signed 64-bit integer.
        I64 = 6: "int64",
        /// Unsigned 8-bit integer.
        U8 = 7: "uint8",
    }
}

impl DType {
    /// Size of one element in bytes.
    #[must_use]
    #[inline]
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::F64 | Self::I64 => 8,
            Self::F16 | Self::Bf16 => 2,
            Self::U8 => 1,
        }
    }

    /// Type in which partial results of `op` are kept and travel.
    ///
    /// 16-bit floats accumulate in float32 and are rounded once, at the end. The integer mean
    /// accumulates in a wider integer, so that only the mean itself has to fit.
    #[must_use]
    #[inline]
    pub const fn accumulator(self, op: ReduceOp) -> Self {
        match (self, op) {
            (Self::F16 | Self::Bf16, ReduceOp::Sum | ReduceOp::Mean | ReduceOp::Product) => {
                Self::F32
            }
            (Self::U8, ReduceOp::Mean) => Self::I32,
            (Self::I32, ReduceOp::Mean) => Self::I64,
            _ => self,
        }
    }
}

/// A Rust type whose values are elements of a buffer as they lie in memory.
///
/// Sealed: each [`DType`] has one such type. 16-bit floats are those of the crate `half`.
pub trait Element: Copy + sealed::Sealed {
    /// The element type.
    const DTYPE: DType;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! elements {
    ($($type:ty: $dtype:ident,)*) => {$(
        impl sealed::Sealed for $type {}

        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}

elements! {
    f32: F32,
    f64: F64,
    f16: F16,
    bf16: Bf16,
    i32: I32,
    i64: I64,
    u8: U8,
}

named! {
    /// Operation that combines the contributions of the ranks, element by element.
    #[derive(Hash, Serialize, Deserialize)]
    #[repr(u8)]
    pub enum ReduceOp {
        /// Sum; integers wrap around.
        Sum = 1: "sum",
        /// Sum times 1/N; the integer mean is rounded towards zero.
        Mean = 2: "mean",
        /// Minimum; a NaN in any contribution wins.
        Min = 3: "min",
        /// Maximum; a NaN in any contribution wins.
        Max = 4: "max",
        /// Product; integers wrap around.
        Product = 5: "product",
    }
}
