//! Element types and reduce operations.

use serde::{Deserialize, Serialize};

/// Element type of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum DType {
    /// IEEE 754 binary32.
    F32 = 1,
    /// IEEE 754 binary64.
    F64 = 2,
    /// IEEE 754 binary16.
    F16 = 3,
    /// bfloat16: the upper half of a binary32.
    Bf16 = 4,
    /// Signed 32-bit integer.
    I32 = 5,
    /// Signed 64-bit integer.
    I64 = 6,
    /// Unsigned 8-bit integer.
    U8 = 7,
}

impl DType {
    /// Every element type, for tests and for tables.
    pub const ALL: [Self; 7] = [
        Self::F32,
        Self::F64,
        Self::F16,
        Self::Bf16,
        Self::I32,
        Self::I64,
        Self::U8,
    ];

    /// Size of one element in bytes.
    #[must_use]
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::F64 | Self::I64 => 8,
            Self::F16 | Self::Bf16 => 2,
            Self::U8 => 1,
        }
    }

    /// The name that numpy and ml_dtypes use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F64 => "float64",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
            Self::I32 => "int32",
            Self::I64 => "int64",
            Self::U8 => "uint8",
        }
    }

    /// Type in which partial results of `op` are kept and travel.
    ///
    /// 16-bit floats accumulate in float32 and are rounded once, at the end. The integer mean
    /// accumulates in a wider integer, so that only the mean itself has to fit.
    #[must_use]
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

/// How the contributions of the ranks are combined, element by element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum ReduceOp {
    /// Sum; integers wrap around.
    Sum = 1,
    /// Sum times 1/N; the integer mean is rounded towards zero.
    Mean = 2,
    /// Minimum; a NaN in any contribution wins.
    Min = 3,
    /// Maximum; a NaN in any contribution wins.
    Max = 4,
    /// Product; integers wrap around.
    Product = 5,
}

impl ReduceOp {
    /// Every operation, for tests and for tables.
    pub const ALL: [Self; 5] = [Self::Sum, Self::Mean, Self::Min, Self::Max, Self::Product];

    /// The name used in every interface.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Mean => "mean",
            Self::Min => "min",
            Self::Max => "max",
            Self::Product => "product",
        }
    }

    /// The operation of this name, if there is one.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|op| op.name() == name)
    }
}
