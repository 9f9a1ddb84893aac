//! Element-wise arithmetic on the contributions of two ranks: the inner loops of every reduction.
//!
//! * [`reduce`] combines a peer's elements with those of this rank;
//! * [`widen`] converts elements into the accumulator type, in which partial results are kept;
//! * [`finish`] converts complete results into elements of the buffer's type;
//! * [`non_finite`] counts elements that are infinite or NaN.
//!
//! The loops are written once, in `scalar`, and compiled once per instruction set: the compiler
//! vectorises them for the features that each caller enables. Only the conversions of float16 need
//! intrinsics. The best instruction set of the processor is chosen at run time, so one build serves
//! every machine.
//!
//! Every instruction set gives the same bits, and so do ranks with different processors:
//!
//! * no multiplication and addition are ever fused;
//! * a NaN result of [`reduce`] is the canonical quiet NaN of its type, because instruction sets
//!   differ in the operand and the sign of a NaN that survives an addition;
//! * minimum and maximum order -0.0 below 0.0, and a NaN in either operand wins.

mod element;
mod finite;
mod scalar;
#[cfg(test)]
mod testing;
#[cfg(target_arch = "x86_64")]
mod x86_64;

use std::env;
use std::sync::OnceLock;

pub use finite::non_finite;

use crate::dtype::{DType, ReduceOp};

/// Environment variable that selects an instruction set; meant for tests and benchmarks.
const OVERRIDE_VARIABLE: &str = "GRADRING_KERNEL";

/// The kernels compiled for one instruction set.
struct Kernels {
    /// Name in [`instruction_set`] and in the override.
    name: &'static str,
    run: Run,
}

/// Performs a task from source to target over a number of elements.
///
/// The contracts are those of the public functions, except that pointers must not dangle even when
/// the number is zero.
type Run = unsafe fn(Task, *mut u8, *const u8, usize);

/// A public function with its arguments, except for the memory.
#[derive(Clone, Copy)]
enum Task {
    Reduce(DType, ReduceOp),
    Widen(DType, DType),
    Finish(DType, ReduceOp, usize),
}

#[expect(
    clippy::disallowed_methods,
    reason = "tests choose before anybody can hand it over"
)]
fn override_of_tests() -> Option<String> {
    env::var(OVERRIDE_VARIABLE).ok()
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
    // SAFETY: the contract is the same.
    unsafe { run(Task::Reduce(dtype, op), target, source, count) }
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
    // SAFETY: the contract is the same.
    unsafe { run(Task::Widen(dtype, accumulator), target, source, count) }
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
    // SAFETY: the contract is the same.
    unsafe { run(Task::Finish(dtype, op, world_size), target, source, count) }
}

/// # Safety
///
/// Same contract as for the function in the task.
unsafe fn run(task: Task, target: *mut u8, source: *const u8, count: usize) {
    // The pointers of an empty buffer may dangle, which slices do not allow.
    if count > 0 {
        // SAFETY: the caller keeps the contract; `active` returns only what this processor can run.
        unsafe { (active().run)(task, target, source, count) }
    }
}

/// The instruction set that the kernels use on this machine: `avx512`, `avx2` or `scalar`.
///
/// Detected once. `GRADRING_KERNEL` with one of these names overrides the choice. A set that the
/// processor lacks is ignored; [`ignored_override`] reports that.
#[must_use]
pub fn instruction_set() -> &'static str {
    active().name
}

/// A sentence about `GRADRING_KERNEL`, if it names another set than the one in use.
#[must_use]
pub fn ignored_override() -> Option<String> {
    let (wanted, used) = (override_of_tests()?, instruction_set());
    let known: Vec<_> = supported().iter().map(|kernels| kernels.name).collect();
    (!wanted.is_empty() && wanted != used).then(|| {
        format!(
            "{OVERRIDE_VARIABLE}={wanted:?} is ignored, and {used} used; this processor has {}",
            known.join(", ")
        )
    })
}

fn active() -> &'static Kernels {
    static ACTIVE: OnceLock<&'static Kernels> = OnceLock::new();
    ACTIVE.get_or_init(|| select(override_of_tests().as_deref()))
}

/// The wanted kernels if this processor can run them, else the best it can run.
fn select(wanted: Option<&str>) -> &'static Kernels {
    let supported = supported();
    let chosen = supported
        .iter()
        .find(|kernels| Some(kernels.name) == wanted);
    chosen.unwrap_or(&supported[0])
}

/// Kernels that this processor can run, best first. Scalar code is always the last.
fn supported() -> Vec<&'static Kernels> {
    #[cfg(target_arch = "x86_64")]
    let vectorised = x86_64::supported();
    #[cfg(not(target_arch = "x86_64"))]
    let vectorised = std::iter::empty();
    vectorised.chain([&scalar::KERNELS]).collect()
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
