//! Runs kernels on bit patterns, for the tests of all instruction sets.

use super::{Kernels, Task};
use crate::dtype::{DType, ReduceOp};

/// Counts around the widths of vectors and of unrolled loops.
pub(super) const COUNTS: [usize; 14] = [0, 1, 2, 3, 7, 15, 16, 17, 31, 33, 64, 65, 1000, 4097];

const GUARD: u8 = 0xA5;

/// A buffer that starts one element past an aligned address, so that no vector is aligned, and
/// that has guard bytes on both sides.
struct Elements {
    words: Vec<u64>,
    size_bytes: usize,
    count: usize,
}

impl Elements {
    fn blank(dtype: DType, count: usize) -> Self {
        let size_bytes = dtype.size_bytes();
        let words = ((count + 2) * size_bytes).div_ceil(8);
        Self {
            words: vec![u64::from_ne_bytes([GUARD; 8]); words],
            size_bytes,
            count,
        }
    }

    fn from_bits(dtype: DType, values: &[u64]) -> Self {
        let mut elements = Self::blank(dtype, values.len());
        let size_bytes = elements.size_bytes;
        for (index, value) in values.iter().enumerate() {
            let low = value.to_le_bytes();
            // SAFETY: `blank` reserved `values.len()` elements of `size_bytes` each.
            unsafe {
                let element = elements.pointer().add(index * size_bytes);
                element.copy_from_nonoverlapping(low.as_ptr(), size_bytes);
            }
        }
        elements
    }

    fn pointer(&mut self) -> *mut u8 {
        let start = self.words.as_mut_ptr().cast::<u8>();
        start.wrapping_add(self.size_bytes)
    }

    /// The elements, zero-extended. Fails when a byte outside of them was written.
    fn bits(&self) -> Vec<u64> {
        let bytes: Vec<u8> = self.words.iter().flat_map(|w| w.to_ne_bytes()).collect();
        let (before, rest) = bytes.split_at(self.size_bytes);
        let (elements, after) = rest.split_at(self.count * self.size_bytes);
        let mut guards = before.iter().chain(after);
        assert!(guards.all(|byte| *byte == GUARD), "wrote out of bounds");
        let zero_extended = elements.chunks_exact(self.size_bytes).map(|element| {
            let mut word = [0; 8];
            word[..element.len()].copy_from_slice(element);
            u64::from_le_bytes(word)
        });
        zero_extended.collect()
    }
}

pub(super) fn reduced(
    kernels: &Kernels,
    (dtype, op): (DType, ReduceOp),
    target: &[u64],
    source: &[u64],
) -> Vec<u64> {
    let mut target = Elements::from_bits(dtype, target);
    let mut source = Elements::from_bits(dtype, source);
    let (pointer, count) = (target.pointer(), source.count);
    // SAFETY: both buffers hold `count` aligned elements of `dtype`.
    unsafe { (kernels.run)(Task::Reduce(dtype, op), pointer, source.pointer(), count) };
    target.bits()
}

pub(super) fn widened(
    kernels: &Kernels,
    dtype: DType,
    accumulator: DType,
    source: &[u64],
) -> Vec<u64> {
    let mut target = Elements::blank(accumulator, source.len());
    let mut source = Elements::from_bits(dtype, source);
    let (pointer, count) = (target.pointer(), source.count);
    // SAFETY: the buffers hold `count` aligned elements of the types named.
    unsafe {
        (kernels.run)(
            Task::Widen(dtype, accumulator),
            pointer,
            source.pointer(),
            count,
        )
    };
    target.bits()
}

/// Finishes out of place and, where that is allowed, in place, which must not differ.
pub(super) fn finished(
    kernels: &Kernels,
    (dtype, op): (DType, ReduceOp),
    world_size: usize,
    source: &[u64],
) -> Vec<u64> {
    let mut target = Elements::blank(dtype, source.len());
    let mut source = Elements::from_bits(dtype.accumulator(op), source);
    let (from, count) = (source.pointer(), source.count);
    let task = Task::Finish(dtype, op, world_size);
    // SAFETY: the buffers hold `count` aligned elements of the types named.
    unsafe { (kernels.run)(task, target.pointer(), from, count) };
    if dtype == dtype.accumulator(op) {
        // SAFETY: equal types may share their buffer.
        unsafe { (kernels.run)(task, from, from, count) };
        assert_eq!(source.bits(), target.bits(), "in place {dtype:?} {op:?}");
    }
    target.bits()
}

/// `count` bit patterns of `dtype`, half of them awkward: NaNs, infinities, subnormals, signed
/// zeros and extremes. The other half is random bits.
pub(super) fn values(dtype: DType, count: usize, seed: u64) -> Vec<u64> {
    let mask = u64::MAX >> (64 - 8 * dtype.size_bytes());
    let awkward = awkward_values(dtype, mask);
    let mut state = seed;
    let mut random = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB)
    };
    let pick = |random: u64| match random >> 63 {
        0 => awkward[(random >> 32) as usize % awkward.len()],
        _ => random & mask,
    };
    (0..count).map(|_| pick(random())).collect()
}

fn awkward_values(dtype: DType, mask: u64) -> Vec<u64> {
    let sign = (mask >> 1) + 1;
    let mantissa_bits = match dtype {
        DType::F32 => 23,
        DType::F64 => 52,
        DType::F16 => 10,
        DType::Bf16 => 7,
        DType::I32 | DType::I64 | DType::U8 => {
            return vec![0, 1, 2, 3, sign - 1, sign, sign + 1, mask - 1, mask];
        }
    };
    let smallest_normal = 1_u64 << mantissa_bits;
    let infinity = sign - smallest_normal;
    let one = (infinity >> 1) & infinity;
    let quiet_nan = infinity | (smallest_normal >> 1);
    let subnormals = [1, smallest_normal >> 1, smallest_normal - 1];
    let normals = [smallest_normal, one, one + 1, infinity - 1];
    let others = [0, infinity, infinity + 1, quiet_nan, quiet_nan + 3];
    let magnitudes = subnormals.into_iter().chain(normals).chain(others);
    magnitudes.flat_map(|value| [value, value | sign]).collect()
}
