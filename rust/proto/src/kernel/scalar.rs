//! The loops, for any processor: fallback and oracle of every instruction set.
//!
//! Everything here is inlined into its caller, so that a caller with more processor features gets
//! the same arithmetic in wider vectors.

use std::{ptr, slice};

use half::{bf16, f16};

use super::element::Element;
use super::{Kernels, Task};
use crate::dtype::{DType, ReduceOp};

pub(super) static KERNELS: Kernels = Kernels {
    name: "scalar",
    run,
};

/// # Safety
///
/// Same contract as for the function in the task; pointers must not dangle even when `count` is
/// zero.
#[inline(always)]
pub(super) unsafe fn run(task: Task, target: *mut u8, source: *const u8, count: usize) {
    // SAFETY: the contract is the same.
    unsafe {
        match task {
            Task::Reduce(dtype, op) => reduce(dtype, op, target, source, count),
            Task::Widen(dtype, accumulator) => widen(dtype, accumulator, target, source, count),
            Task::Finish(dtype, op, world_size) => {
                finish(dtype, op, world_size, target, source, count);
            }
        }
    }
}

/// # Safety
///
/// Same contract as for [`super::reduce`].
#[inline(always)]
unsafe fn reduce(dtype: DType, op: ReduceOp, target: *mut u8, source: *const u8, count: usize) {
    // SAFETY: each arm casts to the element type that the caller vouches for.
    unsafe {
        match dtype {
            DType::F32 => reduce_as::<f32>(op, target, source, count),
            DType::F64 => reduce_as::<f64>(op, target, source, count),
            DType::F16 => reduce_as::<f16>(op, target, source, count),
            DType::Bf16 => reduce_as::<bf16>(op, target, source, count),
            DType::I32 => reduce_as::<i32>(op, target, source, count),
            DType::I64 => reduce_as::<i64>(op, target, source, count),
            DType::U8 => reduce_as::<u8>(op, target, source, count),
        }
    }
}

/// # Safety
///
/// Same contract as for [`super::widen`].
#[inline(always)]
unsafe fn widen(
    dtype: DType,
    accumulator: DType,
    target: *mut u8,
    source: *const u8,
    count: usize,
) {
    // SAFETY: each arm names the pair of element types that the caller vouches for.
    unsafe {
        match (dtype, accumulator) {
            (DType::F16, DType::F32) => convert(target, source, count, f16::to_f32_const),
            (DType::Bf16, DType::F32) => convert(target, source, count, bf16_to_f32),
            (DType::U8, DType::I32) => convert::<u8, i32>(target, source, count, i32::from),
            (DType::I32, DType::I64) => convert::<i32, i64>(target, source, count, i64::from),
            _ if dtype == accumulator => ptr::copy(source, target, count * dtype.size_bytes()),
            _ => panic!("{dtype:?} never accumulates in {accumulator:?}"),
        }
    }
}

/// # Safety
///
/// Same contract as for [`super::finish`].
#[inline(always)]
unsafe fn finish(
    dtype: DType,
    op: ReduceOp,
    world_size: usize,
    target: *mut u8,
    source: *const u8,
    count: usize,
) {
    let accumulator = dtype.accumulator(op);
    let mean = op == ReduceOp::Mean;
    // SAFETY: each arm names the element type of `dtype` and of its accumulator; where these are
    // the same, and the buffers may be too, it copies or takes `convert_same`.
    unsafe {
        match (dtype, accumulator) {
            (DType::F16, DType::F32) => {
                let scale = scale(op, world_size);
                let narrow = |value: f32| f16::from_f32_const(value * scale);
                convert(target, source, count, narrow);
            }
            (DType::Bf16, DType::F32) => {
                let scale = scale(op, world_size);
                let narrow = |value: f32| f32_to_bf16(value * scale);
                convert(target, source, count, narrow);
            }
            (DType::F32, _) if mean => {
                let scale = scale(op, world_size);
                convert_same(target, source, count, |value: f32| value * scale);
            }
            (DType::F64, _) if mean => {
                let scale = 1.0 / world_size as f64;
                convert_same(target, source, count, |value: f64| value * scale);
            }
            (DType::U8, DType::I32) => {
                let divisor = world_size as i32;
                convert(target, source, count, |sum: i32| (sum / divisor) as u8);
            }
            (DType::I32, DType::I64) => {
                let divisor = world_size as i64;
                convert(target, source, count, |sum: i64| (sum / divisor) as i32);
            }
            (DType::I64, _) if mean => {
                let divisor = world_size as i64;
                convert_same(target, source, count, |sum: i64| sum / divisor);
            }
            _ => ptr::copy(source, target, count * dtype.size_bytes()),
        }
    }
}

/// Factor that turns a reduced float32 into the result of `op`. One changes no value.
pub(super) fn scale(op: ReduceOp, world_size: usize) -> f32 {
    match op {
        ReduceOp::Mean => 1.0 / world_size as f32,
        _ => 1.0,
    }
}

#[inline(always)]
unsafe fn reduce_as<T: Element>(op: ReduceOp, target: *mut u8, source: *const u8, count: usize) {
    // SAFETY: the caller vouches for `count` aligned elements of `T` on either side, not
    // overlapping; every bit pattern is a valid `T`.
    let (target, source) = unsafe {
        (
            slice::from_raw_parts_mut(target.cast::<T>(), count),
            slice::from_raw_parts(source.cast::<T>(), count),
        )
    };
    match op {
        ReduceOp::Sum | ReduceOp::Mean => combine(target, source, T::sum),
        ReduceOp::Min => combine(target, source, T::minimum),
        ReduceOp::Max => combine(target, source, T::maximum),
        ReduceOp::Product => combine(target, source, T::product),
    }
}

#[inline(always)]
fn combine<T: Element>(target: &mut [T], source: &[T], op: impl Fn(T, T) -> T) {
    for (target, source) in target.iter_mut().zip(source) {
        *target = op(*target, *source);
    }
}

/// Writes `f` of every element of `source` into `target`; the two do not overlap.
#[inline(always)]
unsafe fn convert<S: Copy, T>(
    target: *mut u8,
    source: *const u8,
    count: usize,
    f: impl Fn(S) -> T,
) {
    // SAFETY: the caller vouches for `count` aligned elements on either side, not overlapping.
    let (target, source) = unsafe {
        (
            slice::from_raw_parts_mut(target.cast::<T>(), count),
            slice::from_raw_parts(source.cast::<S>(), count),
        )
    };
    for (target, source) in target.iter_mut().zip(source) {
        *target = f(*source);
    }
}

/// Like [`convert`] within one type, where `target` may be `source` itself.
#[inline(always)]
unsafe fn convert_same<T: Copy>(
    target: *mut u8,
    source: *const u8,
    count: usize,
    f: impl Fn(T) -> T,
) {
    if !ptr::eq(target, source) {
        // SAFETY: the caller vouches that buffers which are not the same do not overlap.
        return unsafe { convert(target, source, count, f) };
    }
    // SAFETY: the caller vouches for `count` aligned elements; only this one slice is made of them.
    for value in unsafe { slice::from_raw_parts_mut(target.cast::<T>(), count) } {
        *value = f(*value);
    }
}

#[inline(always)]
fn bf16_to_f32(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

/// Rounds to nearest even. A NaN keeps its sign and upper payload and becomes quiet.
#[inline(always)]
fn f32_to_bf16(value: f32) -> bf16 {
    let bits = value.to_bits();
    let quiet_nan = (bits >> 16) | 0x40;
    let rounds_up = 0x7FFF + ((bits >> 16) & 1);
    let rounded = bits.wrapping_add(rounds_up) >> 16;
    bf16::from_bits(if value.is_nan() { quiet_nan } else { rounded } as u16)
}

#[cfg(test)]
mod tests {
    use std::cmp::Ordering;

    use super::super::testing::{COUNTS, finished, reduced, values, widened};
    use super::*;

    const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::Bf16];
    const HALVES: [DType; 2] = [DType::F16, DType::Bf16];
    const INTEGERS: [DType; 3] = [DType::I32, DType::I64, DType::U8];

    /// A float type as float64 values. The 16-bit formats are computed from their definition.
    struct Float {
        dtype: DType,
        /// Values of all magnitudes of a 16-bit format up to infinity. Infinity stands at the next
        /// power of two, because rounding overflows half way to it.
        magnitudes: Vec<f64>,
    }

    impl Float {
        fn new(dtype: DType) -> Self {
            let mantissa_bits = if dtype == DType::F16 { 10 } else { 7 };
            let implicit_one = 1 << mantissa_bits;
            let special = (1 << (15 - mantissa_bits)) - 1;
            let scale = |exponent| 2_f64.powi(exponent - special / 2 - mantissa_bits);
            let magnitude = |bits: i32| match (bits / implicit_one, bits % implicit_one) {
                (0, fraction) => f64::from(fraction) * scale(1),
                (exponent, fraction) => f64::from(implicit_one + fraction) * scale(exponent),
            };
            let magnitudes = (0..=special * implicit_one).map(magnitude).collect();
            Self { dtype, magnitudes }
        }

        fn decode(&self, bits: u64) -> f64 {
            match self.dtype {
                DType::F32 => return f64::from(f32::from_bits(bits as u32)),
                DType::F64 => return f64::from_bits(bits),
                _ => {}
            }
            let (magnitude, infinity) = (bits as usize & 0x7FFF, self.magnitudes.len() - 1);
            let value = match magnitude.cmp(&infinity) {
                Ordering::Less => self.magnitudes[magnitude],
                Ordering::Equal => f64::INFINITY,
                Ordering::Greater => f64::NAN,
            };
            if bits >= 0x8000 { -value } else { value }
        }

        /// The nearest value; of two equally near ones, the one with even bits. NaN is canonical.
        fn encode(&self, value: f64) -> u64 {
            match self.dtype {
                DType::F32 if value.is_nan() => return 0x7FC0_0000,
                DType::F64 if value.is_nan() => return 0x7FF8_0000_0000_0000,
                DType::F16 if value.is_nan() => return 0x7E00,
                DType::Bf16 if value.is_nan() => return 0x7FC0,
                DType::F32 => return u64::from((value as f32).to_bits()),
                DType::F64 => return value.to_bits(),
                _ => {}
            }
            let magnitude = value.abs();
            let above = self.magnitudes.partition_point(|known| *known <= magnitude);
            let nearest = match self.magnitudes.get(above) {
                None => above - 1,
                Some(upper) => {
                    let middle = (self.magnitudes[above - 1] + upper) / 2.0;
                    let up = magnitude > middle || (magnitude == middle && above % 2 == 0);
                    if up { above } else { above - 1 }
                }
            };
            u64::from(value.is_sign_negative()) << 15 | nearest as u64
        }
    }

    /// `op` in float64, which is wide enough that rounding the result again changes nothing.
    fn combine_floats(op: ReduceOp, a: f64, b: f64) -> f64 {
        let zeros = a == 0.0 && b == 0.0;
        let negative = a.is_sign_negative() || b.is_sign_negative();
        let positive = a.is_sign_positive() || b.is_sign_positive();
        match op {
            ReduceOp::Sum | ReduceOp::Mean => a + b,
            ReduceOp::Product => a * b,
            _ if a.is_nan() || b.is_nan() => f64::NAN,
            ReduceOp::Min if zeros && negative => -0.0,
            ReduceOp::Max if zeros && positive => 0.0,
            ReduceOp::Min => a.min(b),
            ReduceOp::Max => a.max(b),
        }
    }

    fn combine_integers(op: ReduceOp, a: i128, b: i128) -> i128 {
        match op {
            ReduceOp::Sum | ReduceOp::Mean => a + b,
            ReduceOp::Product => a * b,
            ReduceOp::Min => a.min(b),
            ReduceOp::Max => a.max(b),
        }
    }

    fn decode_integer(dtype: DType, bits: u64) -> i128 {
        match dtype {
            DType::I32 => i128::from(bits as i32),
            DType::I64 => i128::from(bits as i64),
            DType::U8 => i128::from(bits as u8),
            _ => panic!("not an integer"),
        }
    }

    fn encode_integer(dtype: DType, value: i128) -> u64 {
        value as u64 & (u64::MAX >> (64 - 8 * dtype.size_bytes()))
    }

    fn assert_reduces(dtype: DType, expected: impl Fn(ReduceOp, u64, u64) -> u64) {
        for (op, count) in ReduceOp::ALL.iter().flat_map(|op| COUNTS.map(|c| (*op, c))) {
            let target = values(dtype, count, 1);
            let source = values(dtype, count, 2);
            let actual = reduced(&KERNELS, (dtype, op), &target, &source);
            for ((a, b), actual) in target.into_iter().zip(source).zip(actual) {
                let context = format!("{dtype:?} {op:?} of {a:#x} and {b:#x}");
                assert_eq!(actual, expected(op, a, b), "{context}");
            }
        }
    }

    #[test]
    fn floats_reduce_to_the_rounded_result_of_float64_arithmetic() {
        for dtype in FLOATS {
            let float = Float::new(dtype);
            assert_reduces(dtype, |op, a, b| {
                float.encode(combine_floats(op, float.decode(a), float.decode(b)))
            });
        }
    }

    #[test]
    fn integers_reduce_to_the_low_bits_of_exact_arithmetic() {
        for dtype in INTEGERS {
            assert_reduces(dtype, |op, a, b| {
                let (a, b) = (decode_integer(dtype, a), decode_integer(dtype, b));
                encode_integer(dtype, combine_integers(op, a, b))
            });
        }
    }

    #[test]
    fn every_16_bit_float_widens_exactly_and_comes_back() {
        let patterns: Vec<u64> = (0..=0xFFFF).collect();
        for dtype in HALVES {
            let (float, single) = (Float::new(dtype), Float::new(DType::F32));
            let wide = widened(&KERNELS, dtype, DType::F32, &patterns);
            let back = finished(&KERNELS, (dtype, ReduceOp::Sum), 5, &wide);
            for ((bits, wide), back) in patterns.iter().zip(wide).zip(back) {
                let (value, expected) = (single.decode(wide), float.decode(*bits));
                if expected.is_nan() {
                    assert!(value.is_nan(), "{dtype:?} {bits:#x}");
                    assert!(float.decode(back).is_nan(), "{dtype:?} {bits:#x}");
                } else {
                    assert_eq!(value.to_bits(), expected.to_bits(), "{dtype:?} {bits:#x}");
                    assert_eq!(back, *bits, "{dtype:?}");
                }
            }
        }
    }

    #[test]
    fn narrowing_rounds_to_nearest_even_between_all_neighbours() {
        for dtype in HALVES {
            for (lower, pair) in Float::new(dtype).magnitudes.windows(2).enumerate() {
                let middle = ((pair[0] + pair[1]) / 2.0) as f32;
                let around = [middle.next_down(), middle, middle.next_up()];
                let source = [around, around.map(|value| -value)].concat();
                let source: Vec<_> = source.iter().map(|v| u64::from(v.to_bits())).collect();
                let (lower, upper) = (lower as u64, lower as u64 + 1);
                let even = if lower % 2 == 0 { lower } else { upper };
                let expected = [lower, even, upper];
                let expected = [expected, expected.map(|bits| bits | 0x8000)].concat();
                let actual = finished(&KERNELS, (dtype, ReduceOp::Sum), 1, &source);
                assert_eq!(actual, expected, "{dtype:?} around {middle:e}");
            }
        }
    }

    #[test]
    fn a_nan_whose_payload_is_cut_off_stays_a_nan() {
        for bits in [0x7F80_0001, 0xFF80_0001] {
            assert!(f32_to_bf16(f32::from_bits(bits)).is_nan());
        }
    }

    #[test]
    fn widening_an_integer_keeps_its_value() {
        for (dtype, accumulator) in [(DType::U8, DType::I32), (DType::I32, DType::I64)] {
            for count in COUNTS {
                let source = values(dtype, count, 3);
                let actual = widened(&KERNELS, dtype, accumulator, &source);
                let decoded = actual.iter().map(|bits| decode_integer(accumulator, *bits));
                let expected = source.iter().map(|bits| decode_integer(dtype, *bits));
                assert!(decoded.eq(expected), "{dtype:?} x {count}");
            }
        }
    }

    #[test]
    fn a_float_mean_is_the_sum_times_the_reciprocal_rounded_once() {
        for (dtype, world_size) in FLOATS
            .iter()
            .flat_map(|d| [1, 2, 3, 7, 1000].map(|n| (*d, n)))
        {
            let wide = dtype.accumulator(ReduceOp::Mean);
            let (float, accumulator) = (Float::new(dtype), Float::new(wide));
            let source = values(wide, 10_000, 4);
            let actual = finished(&KERNELS, (dtype, ReduceOp::Mean), world_size, &source);
            for (bits, actual) in source.into_iter().zip(actual) {
                let sum = accumulator.decode(bits);
                let mean = match wide {
                    DType::F64 => sum * (1.0 / world_size as f64),
                    _ => f64::from(sum as f32 * (1.0 / world_size as f32)),
                };
                let nans = mean.is_nan() && float.decode(actual).is_nan();
                let context = format!("{dtype:?} {bits:#x} / {world_size}: {actual:#x}");
                assert!(nans || actual == float.encode(mean), "{context}");
            }
        }
    }

    #[test]
    fn an_integer_mean_rounds_towards_zero() {
        let sums = [7_i64, 8, 9, -7, -8, -9, 0, 1, -1].map(|sum| sum as u64);
        let means = [2_i64, 2, 3, -2, -2, -3, 0, 0, 0].map(|mean| mean as u64);
        assert_eq!(
            finished(&KERNELS, (DType::I64, ReduceOp::Mean), 3, &sums),
            means
        );
        for dtype in INTEGERS {
            let accumulator = dtype.accumulator(ReduceOp::Mean);
            for (world_size, count) in [1, 2, 3, 7].iter().flat_map(|n| COUNTS.map(|c| (*n, c))) {
                let source = values(accumulator, count, 5);
                let actual = finished(&KERNELS, (dtype, ReduceOp::Mean), world_size, &source);
                let mean = |bits| decode_integer(accumulator, bits) / world_size as i128;
                let expected = source
                    .into_iter()
                    .map(|bits| encode_integer(dtype, mean(bits)));
                assert!(expected.eq(actual), "{dtype:?} / {world_size}");
            }
        }
    }

    #[test]
    fn finishing_without_a_change_of_type_or_value_copies() {
        for (dtype, op) in DType::ALL
            .iter()
            .flat_map(|d| ReduceOp::ALL.map(|op| (*d, op)))
        {
            if op != ReduceOp::Mean && dtype == dtype.accumulator(op) {
                let source = values(dtype, 1000, 6);
                assert_eq!(finished(&KERNELS, (dtype, op), 3, &source), source);
            }
        }
    }

    #[test]
    #[should_panic(expected = "F64 never accumulates in F32")]
    fn widening_into_a_foreign_type_is_a_programmer_error() {
        widened(&KERNELS, DType::F64, DType::F32, &[0]);
    }
}
