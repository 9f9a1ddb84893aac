//! The loops of `scalar`, compiled for AVX2 and for AVX-512.
//!
//! The conversions of float16 are written with intrinsics, because the compiler does not discover
//! F16C. They are bound by memory, not by width: both instruction sets use eight lanes.

use std::arch::x86_64::{
    _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm_storeu_si128, _mm256_cvtph_ps, _mm256_cvtps_ph,
    _mm256_loadu_ps, _mm256_mul_ps, _mm256_set1_ps, _mm256_storeu_ps,
};

use super::{Kernels, Task, scalar};
use crate::dtype::{DType, ReduceOp};

/// Elements that one F16C instruction converts.
const F16_LANES: usize = 8;

static AVX2: Kernels = Kernels {
    name: "avx2",
    run: run_avx2,
};

static AVX512: Kernels = Kernels {
    name: "avx512",
    run: run_avx512,
};

/// Kernels that this processor can run, best first.
pub(super) fn supported() -> impl Iterator<Item = &'static Kernels> {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c");
    let avx512 = avx2
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    let candidates = [(avx512, &AVX512), (avx2, &AVX2)];
    candidates
        .into_iter()
        .filter_map(|(runs, kernels)| runs.then_some(kernels))
}

#[target_feature(enable = "avx2,f16c")]
unsafe fn run_avx2(task: Task, target: *mut u8, source: *const u8, count: usize) {
    // SAFETY: the contract is the same, and F16C is there.
    unsafe { run(task, target, source, count) }
}

#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn run_avx512(task: Task, target: *mut u8, source: *const u8, count: usize) {
    // SAFETY: the contract is the same, and F16C is there.
    unsafe { run(task, target, source, count) }
}

/// # Safety
///
/// Same contract as for [`scalar::run`]; the processor has AVX2 and F16C.
#[inline(always)]
unsafe fn run(task: Task, target: *mut u8, source: *const u8, count: usize) {
    // SAFETY: the contract is the same; the tasks name the element types of the two conversions.
    unsafe {
        match task {
            Task::Widen(DType::F16, DType::F32) => widen_f16(target, source, count),
            Task::Finish(DType::F16, op, world_size)
                if DType::F16.accumulator(op) == DType::F32 =>
            {
                finish_f16(op, world_size, target, source, count);
            }
            _ => scalar::run(task, target, source, count),
        }
    }
}

#[target_feature(enable = "avx2,f16c")]
unsafe fn widen_f16(target: *mut u8, source: *const u8, count: usize) {
    let converted = count - count % F16_LANES;
    for index in (0..converted).step_by(F16_LANES) {
        // SAFETY: `index + F16_LANES <= count`, and the caller vouches for `count` elements of
        // float32 in `target` and of float16 in `source`; these accesses need no alignment.
        unsafe {
            let halves = _mm_loadu_si128(source.add(2 * index).cast());
            _mm256_storeu_ps(target.add(4 * index).cast(), _mm256_cvtph_ps(halves));
        }
    }
    // SAFETY: the elements from `converted` to `count` remain.
    unsafe {
        let (target, source) = (target.add(4 * converted), source.add(2 * converted));
        let rest = Task::Widen(DType::F16, DType::F32);
        scalar::run(rest, target, source, count - converted);
    }
}

#[target_feature(enable = "avx2,f16c")]
unsafe fn finish_f16(
    op: ReduceOp,
    world_size: usize,
    target: *mut u8,
    source: *const u8,
    count: usize,
) {
    let scale = _mm256_set1_ps(scalar::scale(op, world_size));
    let converted = count - count % F16_LANES;
    for index in (0..converted).step_by(F16_LANES) {
        // SAFETY: `index + F16_LANES <= count`, and the caller vouches for `count` elements of
        // float16 in `target` and of float32 in `source`; these accesses need no alignment.
        unsafe {
            let scaled = _mm256_mul_ps(_mm256_loadu_ps(source.add(4 * index).cast()), scale);
            let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(scaled);
            _mm_storeu_si128(target.add(2 * index).cast(), halves);
        }
    }
    let (remaining, task) = (count - converted, Task::Finish(DType::F16, op, world_size));
    // SAFETY: the elements from `converted` to `count` remain.
    unsafe {
        let (target, source) = (target.add(2 * converted), source.add(4 * converted));
        scalar::run(task, target, source, remaining);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{COUNTS, finished, reduced, values, widened};
    use super::*;

    fn every_pair() -> impl Iterator<Item = (DType, ReduceOp)> {
        let with_all = |dtype| ReduceOp::ALL.map(|op| (dtype, op));
        DType::ALL.into_iter().flat_map(with_all)
    }

    #[test]
    fn every_instruction_set_reduces_to_the_bits_of_the_scalar_code() {
        for (kernels, pair, count) in supported().flat_map(|kernels| {
            every_pair().flat_map(move |pair| COUNTS.map(|count| (kernels, pair, count)))
        }) {
            for seed in 0..4 {
                let target = values(pair.0, count, seed);
                let source = values(pair.0, count, seed + 100);
                let expected = reduced(&scalar::KERNELS, pair, &target, &source);
                let actual = reduced(kernels, pair, &target, &source);
                assert_eq!(actual, expected, "{} {pair:?} x {count}", kernels.name);
            }
        }
    }

    #[test]
    fn every_instruction_set_widens_to_the_bits_of_the_scalar_code() {
        for (kernels, (dtype, op)) in supported().flat_map(|k| every_pair().map(move |p| (k, p))) {
            let accumulator = dtype.accumulator(op);
            for count in COUNTS {
                let source = values(dtype, count, 7);
                let expected = widened(&scalar::KERNELS, dtype, accumulator, &source);
                let actual = widened(kernels, dtype, accumulator, &source);
                assert_eq!(actual, expected, "{} {dtype:?} x {count}", kernels.name);
            }
        }
    }

    #[test]
    fn every_instruction_set_finishes_to_the_bits_of_the_scalar_code() {
        for (kernels, pair, count) in supported().flat_map(|kernels| {
            every_pair().flat_map(move |pair| COUNTS.map(|count| (kernels, pair, count)))
        }) {
            let source = values(pair.0.accumulator(pair.1), count, 8);
            for world_size in [1, 2, 3, 7, 1000] {
                let expected = finished(&scalar::KERNELS, pair, world_size, &source);
                let actual = finished(kernels, pair, world_size, &source);
                let name = kernels.name;
                assert_eq!(actual, expected, "{name} {pair:?} x {count} / {world_size}");
            }
        }
    }

    #[test]
    fn every_16_bit_pattern_widens_alike_with_every_instruction_set() {
        let patterns: Vec<u64> = (0..=0xFFFF).collect();
        for (kernels, dtype) in supported().flat_map(|k| [(k, DType::F16), (k, DType::Bf16)]) {
            let expected = widened(&scalar::KERNELS, dtype, DType::F32, &patterns);
            let actual = widened(kernels, dtype, DType::F32, &patterns);
            assert!(actual == expected, "{} {dtype:?}", kernels.name);
        }
    }

    #[test]
    fn float32_of_every_magnitude_narrows_alike_with_every_instruction_set() {
        // The stride is odd, so that the low bits, which decide the rounding, vary too.
        let patterns: Vec<u64> = (0..=u64::from(u32::MAX)).step_by(4093).collect();
        for (kernels, dtype) in supported().flat_map(|k| [(k, DType::F16), (k, DType::Bf16)]) {
            for pair in [(dtype, ReduceOp::Sum), (dtype, ReduceOp::Mean)] {
                let expected = finished(&scalar::KERNELS, pair, 3, &patterns);
                let actual = finished(kernels, pair, 3, &patterns);
                assert!(actual == expected, "{} {pair:?}", kernels.name);
            }
        }
    }
}
