//! Counts of elements that are infinite or NaN.
//!
//! One pass over memory, which the compiler vectorises for any processor. The pass is bound by
//! memory, so wider vectors gain nothing. Elements are counted only in blocks that have some to
//! count.

use std::slice;

use crate::dtype::DType;

/// Elements that are tested together.
const BLOCK: usize = 4096;

/// The number of elements that are infinite or NaN; 0 for integers.
///
/// # Safety
///
/// `source` is valid for reads of `count` elements of `dtype` and aligned to one element. It may
/// dangle when `count` is zero.
#[must_use]
pub unsafe fn non_finite(dtype: DType, source: *const u8, count: usize) -> usize {
    if count == 0 {
        return 0;
    }
    // SAFETY: the caller vouches for `count` aligned elements; an element has the size and the
    // alignment of its bits, and every pattern of bits is valid.
    unsafe {
        match dtype {
            DType::F32 => f32_bits(slice::from_raw_parts(source.cast(), count)),
            DType::F64 => f64_bits(slice::from_raw_parts(source.cast(), count)),
            DType::F16 => f16_bits(slice::from_raw_parts(source.cast(), count)),
            DType::Bf16 => bf16_bits(slice::from_raw_parts(source.cast(), count)),
            DType::I32 | DType::I64 | DType::U8 => 0,
        }
    }
}

/// A float is infinite or NaN if all bits of its exponent are set.
macro_rules! count_exponents {
    ($($name:ident: $bits:ty, $exponent:literal;)*) => {$(
        fn $name(elements: &[$bits]) -> usize {
            let is_set = |bits: &$bits| bits & $exponent == $exponent;
            elements
                .chunks(BLOCK)
                .map(|block| {
                    // An OR keeps lanes as wide as the elements; a sum would widen them.
                    let found = block
                        .iter()
                        .fold(0, |found, bits| found | <$bits>::from(is_set(bits)));
                    if found == 0 {
                        0
                    } else {
                        block.iter().filter(|bits| is_set(bits)).count()
                    }
                })
                .sum()
        }
    )*};
}

count_exponents! {
    f32_bits: u32, 0x7f80_0000;
    f64_bits: u64, 0x7ff0_0000_0000_0000;
    f16_bits: u16, 0x7c00;
    bf16_bits: u16, 0x7f80;
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    /// `values` cycled to `count` elements.
    fn count_of<T: Copy>(dtype: DType, values: &[T], count: usize) -> usize {
        let elements: Vec<T> = values.iter().copied().cycle().take(count).collect();
        // SAFETY: the vector holds `count` elements of the type that the test names.
        unsafe { non_finite(dtype, elements.as_ptr().cast(), count) }
    }

    macro_rules! check {
        ($float:ty, $dtype:expr) => {
            let tame = [
                <$float>::MAX,
                <$float>::MIN,
                <$float>::MIN_POSITIVE,
                <$float>::from_bits(1),
                <$float>::from_bits(0),
            ];
            for count in [0, 1, 5, BLOCK, 3 * BLOCK + 7] {
                assert_eq!(count_of($dtype, &tame, count), 0);
            }
            let wild = [
                tame[0],
                <$float>::NAN,
                -<$float>::NAN,
                <$float>::INFINITY,
                <$float>::NEG_INFINITY,
            ];
            assert_eq!(count_of($dtype, &wild, 5), 4);
            assert_eq!(count_of($dtype, &wild, 5 * BLOCK), 4 * BLOCK);
            // A single one is found at any position.
            for place in [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 6] {
                let mut elements = vec![tame[0]; 2 * BLOCK + 7];
                elements[place] = wild[1];
                assert_eq!(count_of($dtype, &elements, elements.len()), 1);
            }
        };
    }

    #[test]
    fn infinities_and_nans_are_counted_and_nothing_else() {
        check!(f32, DType::F32);
        check!(f64, DType::F64);
        check!(f16, DType::F16);
        check!(bf16, DType::Bf16);
    }

    #[test]
    fn integers_are_finite() {
        assert_eq!(count_of(DType::I32, &[-1_i32, i32::MAX], 10), 0);
        assert_eq!(count_of(DType::I64, &[-1_i64, i64::MAX], 10), 0);
        assert_eq!(count_of(DType::U8, &[255_u8], 10), 0);
    }
}
