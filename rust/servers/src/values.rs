//! Values as bytes: numbers in little-endian order, which all supported processors have.

use gradring_proto::dtype::{bf16, f16};
use gradring_proto::parameters::floats::Floats;

/// Arrays of numbers that can be read and written as bytes.
pub trait Values {
    /// The bytes of all numbers, in order.
    fn bytes(&self) -> &[u8];

    /// The same bytes, for writing.
    fn bytes_mut(&mut self) -> &mut [u8];
}

macro_rules! values {
    ($($number:ty),*) => { $(
        impl Values for [$number] {
            fn bytes(&self) -> &[u8] {
                // SAFETY: the numbers have no padding, and bytes no alignment.
                unsafe { std::slice::from_raw_parts(self.as_ptr().cast(), size_of_val(self)) }
            }

            fn bytes_mut(&mut self) -> &mut [u8] {
                // SAFETY: as above; every pattern of bytes is a number.
                unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr().cast(), size_of_val(self)) }
            }
        }
    )* };
}

values!(f32, f64, bf16, f16, u32);

impl Values for Floats {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::F32(values) => (**values).bytes(),
            Self::F64(values) => (**values).bytes(),
            Self::Bf16(values) => (**values).bytes(),
            Self::F16(values) => (**values).bytes(),
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::F32(values) => (**values).bytes_mut(),
            Self::F64(values) => (**values).bytes_mut(),
            Self::Bf16(values) => (**values).bytes_mut(),
            Self::F16(values) => (**values).bytes_mut(),
        }
    }
}
