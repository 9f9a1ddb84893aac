//! Element-wise arithmetic on the contributions of two ranks: the inner loops of every reduction.
//!
//! * [`reduce`] adds (or multiplies, or compares) what a peer sent to what this rank holds;
//! * [`widen`] turns elements into the type that partial results are kept in;
//! * [`finish`] turns fully reduced partial results into the elements the user sees.
//!
//! The loops are written once, in `scalar`, and compiled once per instruction set: the compiler
//! vectorises them for the features that each caller enables. Only the conversions of float16 need
//! intrinsics. The best set of this processor is chosen at run time, so that one build serves every
//! machine.
//!
//! Every instruction set gives the same bits, and so do ranks with different processors:
//!
//! * no multiplication and addition are ever fused;
//! * a NaN that comes out of [`reduce`] is the one canonical quiet NaN of its type, because which
//!   of two NaNs survives an addition, and with which sign, differs between instruction sets;
//! * minimum and maximum order -0.0 below 0.0, and a NaN in either operand wins.

mod scalar;
#[cfg(target_arch = "x86_64")]
mod x86_64;

use std::env;
use std::sync::OnceLock;

use crate::dtype::{DType, ReduceOp};

/// Environment variable that selects an instruction set; meant for tests and benchmarks.
const OVERRIDE_VARIABLE: &str = "GRADRING_KERNEL";

/// The kernels compiled for one instruction set.
///
/// The contracts are those of the public functions, except that pointers must not dangle even when
/// no element is asked for.
struct Kernels {
    /// Shown by [`instruction_set`] and accepted by the override.
    name: &'static str,
    reduce: unsafe fn(DType, ReduceOp, *mut u8, *const u8, usize),
    widen: unsafe fn(DType, DType, *mut u8, *const u8, usize),
    finish: unsafe fn(DType, ReduceOp, usize, *mut u8, *const u8, usize),
}

/// Combines two contributions: `target[i] = target[i] op source[i]` for `count` elements.
///
/// `dtype` is the type that partial results are kept in, see [`DType::accumulator`]. Mean combines
/// like sum; [`finish`] divides. Integers wrap around.
///
/// # Safety
///
/// `target` is valid for reads and writes, and `source` for reads, of `count` elements of `dtype`.
/// Both are aligned to one element. They do not overlap.
pub unsafe fn reduce(dtype: DType, op: ReduceOp, target: *mut u8, source: *const u8, count: usize) {
    // The pointers of an empty buffer may dangle, which slices do not forgive.
    if count > 0 {
        // SAFETY: the caller keeps the contract; `active` returns only what this processor can run.
        unsafe { (active().reduce)(dtype, op, target, source, count) }
    }
}

/// Converts `count` elements of `dtype` into `accumulator`, exactly.
///
/// Copies when the two types are the same.
///
/// # Panics
///
/// When `accumulator` is not an accumulator of `dtype` under any operation.
///
/// # Safety
///
/// `target` is valid for writes of `count` elements of `accumulator`, `source` for reads of `count`
/// elements of `dtype`, each aligned to one element of its type. They do not overlap.
pub unsafe fn widen(
    dtype: DType,
    accumulator: DType,
    target: *mut u8,
    source: *const u8,
    count: usize,
) {
    if count > 0 {
        // SAFETY: the caller keeps the contract; `active` returns only what this processor can run.
        unsafe { (active().widen)(dtype, accumulator, target, source, count) }
    }
}

/// Turns `count` fully reduced values into elements of `dtype`.
///
/// `source` holds values of `dtype.accumulator(op)`. For mean they are first multiplied by
/// 1/`world_size`, computed in the type of the accumulator; integers are divided instead, rounding
/// towards zero. 16-bit floats are rounded once, to nearest even, and overflow to infinity.
///
/// # Panics
///
/// When `world_size` is zero or does not fit an `i32`.
///
/// # Safety
///
/// `target` is valid for writes of `count` elements of `dtype`, `source` for reads of `count`
/// elements of the accumulator, each aligned to one element of its type. They do not overlap,
/// except that `target` may equal `source` when the two types are the same.
pub unsafe fn finish(
    dtype: DType,
    op: ReduceOp,
    world_size: usize,
    target: *mut u8,
    source: *const u8,
    count: usize,
) {
    assert!(
        world_size > 0 && i32::try_from(world_size).is_ok(),
        "no such world: {world_size}"
    );
    if count > 0 {
        // SAFETY: the caller keeps the contract; `active` returns only what this processor can run.
        unsafe { (active().finish)(dtype, op, world_size, target, source, count) }
    }
}

/// The instruction set that the kernels use on this machine: `avx512`, `avx2` or `scalar`.
///
/// Detected once. `GRADRING_KERNEL` with one of these names overrides the choice; a set that is
/// unknown, or that this processor lacks, is ignored.
#[must_use]
pub fn instruction_set() -> &'static str {
    active().name
}

fn active() -> &'static Kernels {
    static ACTIVE: OnceLock<&'static Kernels> = OnceLock::new();
    ACTIVE.get_or_init(|| select(env::var(OVERRIDE_VARIABLE).ok().as_deref()))
}

/// The wanted kernels if this processor can run them, else the best it can run.
fn select(wanted: Option<&str>) -> &'static Kernels {
    let supported = supported();
    let chosen = supported
        .iter()
        .find(|kernels| Some(kernels.name) == wanted);
    chosen.unwrap_or(&supported[0])
}

/// What this processor can run, best first. Scalar code always closes the list.
fn supported() -> Vec<&'static Kernels> {
    #[cfg(target_arch = "x86_64")]
    let vectorised = x86_64::supported();
    #[cfg(not(target_arch = "x86_64"))]
    let vectorised = std::iter::empty();
    vectorised.chain([&scalar::KERNELS]).collect()
}

/// Runs kernels on bit patterns, for the tests of all instruction sets.
#[cfg(test)]
mod testing {
    use super::Kernels;
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
                // SAFETY: `blank` made room for `values.len()` elements of `size_bytes` each.
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
        unsafe { (kernels.reduce)(dtype, op, pointer, source.pointer(), count) };
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
        unsafe { (kernels.widen)(dtype, accumulator, pointer, source.pointer(), count) };
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
        // SAFETY: the buffers hold `count` aligned elements of the types named.
        unsafe { (kernels.finish)(dtype, op, world_size, target.pointer(), from, count) };
        if dtype == dtype.accumulator(op) {
            // SAFETY: equal types may share their buffer.
            unsafe { (kernels.finish)(dtype, op, world_size, from, from, count) };
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_override_selects_what_the_processor_supports_and_ignores_the_rest() {
        let supported = supported();
        for kernels in &supported {
            assert_eq!(select(Some(kernels.name)).name, kernels.name);
        }
        for ignored in [None, Some(""), Some("avx1024"), Some("AVX2")] {
            assert_eq!(select(ignored).name, supported[0].name);
        }
        assert_eq!(supported.last().unwrap().name, "scalar");
    }

    #[test]
    fn the_active_instruction_set_is_a_supported_one() {
        let names: Vec<_> = supported().iter().map(|kernels| kernels.name).collect();
        assert!(names.contains(&instruction_set()));
    }

    #[test]
    fn empty_buffers_may_dangle() {
        let (target, source) = (std::ptr::null_mut(), std::ptr::null());
        for dtype in DType::ALL {
            for op in ReduceOp::ALL {
                let accumulator = dtype.accumulator(op);
                // SAFETY: no element is accessed, so that no pointer has to be valid.
                unsafe {
                    reduce(dtype, op, target, source, 0);
                    widen(dtype, accumulator, target, source, 0);
                    finish(dtype, op, 3, target, source, 0);
                }
            }
        }
    }

    #[test]
    fn a_mean_over_ranks_passes_through_all_three_functions() {
        let contributions: [[u8; 3]; 3] = [[255, 1, 0], [255, 1, 0], [254, 3, 1]];
        let mut partial = [0_i32; 3];
        let mut received = [0_i32; 3];
        let mut result = [0_u8; 3];
        // SAFETY: all arrays hold three elements of the types named, and are distinct.
        unsafe {
            let partial = partial.as_mut_ptr().cast();
            let received = received.as_mut_ptr().cast();
            widen(DType::U8, DType::I32, partial, contributions[0].as_ptr(), 3);
            for contribution in &contributions[1..] {
                widen(DType::U8, DType::I32, received, contribution.as_ptr(), 3);
                reduce(DType::I32, ReduceOp::Mean, partial, received, 3);
            }
            let result = result.as_mut_ptr();
            finish(DType::U8, ReduceOp::Mean, 3, result, partial, 3);
        }
        assert_eq!(result, [254, 1, 0]);
    }
}
