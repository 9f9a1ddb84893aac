//! The search for ranks that all compute the same gradients, because they read the same samples.
//!
//! Nothing fails then, but each rank repeats the work of one, and a sum over the ranks is too large
//! by their number. A rank finds it alone: the sum is its own gradient times the number of ranks. It
//! compares a few elements of each bucket in the first steps, and none afterwards.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use gradring_core::communicator::Communicator;
use gradring_proto::collective::{Collective, Request};
use gradring_proto::dtype::{DType, ReduceOp};
use gradring_proto::lock::lock;

use crate::shared_by_nodes::WeakMap;
use crate::tensor::Tensor;

/// Largest number of elements of a bucket that are compared.
const SAMPLES_MAX: usize = 64;
/// Number of steps after which equal gradients are no chance. Weights that begin with zeros can
/// give equal gradients in the first ones.
const STEPS: u32 = 5;

/// Searches, by number of the communicator.
static SEARCHES: WeakMap<i64, Mutex<Search>> = WeakMap::new();

/// Search for equal gradients in one communicator. Nodes of all graphs share it.
pub(crate) struct EqualGradients(Arc<Mutex<Search>>);

/// State of a search.
enum Search {
    /// All gradients have been equal so far; number of steps of each bucket, by its name.
    Equal(HashMap<String, u32>),
    /// Nothing is compared any more.
    Ended,
}

/// Elements of this rank's gradients, from before they are reduced.
pub(crate) struct Sample {
    search: Arc<Mutex<Search>>,
    bucket: String,
    /// Result of the reduction over one, if all ranks have this rank's value.
    factor: f64,
    dtype: DType,
    values: Vec<f64>,
}

impl Default for Search {
    fn default() -> Self {
        Self::Equal(HashMap::new())
    }
}

impl EqualGradients {
    pub(crate) fn of(communicator: i64) -> Self {
        Self(SEARCHES.of(communicator))
    }

    /// Returns a sample of gradients that are about to be reduced; `None` if nothing is compared.
    pub(crate) fn sample(
        &self,
        communicator: &Communicator,
        request: &Request,
        tensors: &[Tensor],
    ) -> Option<Sample> {
        let world_size = communicator.world_size();
        // One rank is enough to tell the user.
        if communicator.rank != 0 || world_size == 1 || matches!(*lock(&self.0), Search::Ended) {
            return None;
        }
        let factor = match request.collective {
            Collective::AllReduce { op: ReduceOp::Sum } => world_size as f64,
            Collective::AllReduce { op: ReduceOp::Mean } => 1.0,
            _ => return None,
        };
        let dtype = request.buffer.dtype();
        Some(Sample {
            search: Arc::clone(&self.0),
            bucket: request.name.compared.clone(),
            factor,
            dtype,
            values: values(dtype, tensors)?,
        })
    }
}

impl Sample {
    /// Compares with the results, and warns if the ranks' gradients have been equal for long.
    pub(crate) fn compare(&self, communicator: &Communicator, results: &[Tensor]) {
        let found = values(self.dtype, results).unwrap_or_default();
        let Some(are_equal) = are_equal(&self.values, &found, self.factor) else {
            return;
        };
        if lock(&self.search).note(&self.bucket, are_equal) {
            communicator.log_line(&format!(
                "all {} ranks had equal gradients in {STEPS} steps, so each probably trains on the \
                 same samples; give each rank its own part of the data, as by \
                 strategy.experimental_distribute_dataset or dataset.shard",
                communicator.world_size(),
            ));
        }
    }
}

impl Search {
    /// Notes the comparison of a bucket; returns whether the user is to be told.
    fn note(&mut self, bucket: &str, are_equal: bool) -> bool {
        let Self::Equal(steps) = self else {
            return false;
        };
        if are_equal {
            let count = steps.entry(bucket.to_owned()).or_default();
            *count += 1;
            if *count < STEPS {
                return false;
            }
        }
        *self = Self::Ended;
        are_equal
    }
}

/// Returns whether results are those of equal gradients; `None` if that cannot be known, because
/// all are zero or one is not finite.
fn are_equal(own: &[f64], results: &[f64], factor: f64) -> Option<bool> {
    let is_known = own.iter().all(|value| value.is_finite())
        && results.iter().all(|value| value.is_finite())
        && own.iter().any(|value| *value != 0.0);
    // Each of the additions rounds once.
    let tolerance = 64.0 * f64::from(f32::EPSILON);
    is_known.then(|| {
        own.len() == results.len()
            && own.iter().zip(results).all(|(own, result)| {
                let expected = own * factor;
                (result - expected).abs() <= tolerance * expected.abs()
            })
    })
}

/// Returns at most `SAMPLES_MAX` elements, evenly distributed; `None` for other types than float32
/// and float64.
fn values(dtype: DType, tensors: &[Tensor]) -> Option<Vec<f64>> {
    let read: unsafe fn(*const u8, usize) -> f64 = match dtype {
        DType::F32 => read_as::<f32>,
        DType::F64 => read_as::<f64>,
        _ => return None,
    };
    let slices: Vec<_> = tensors.iter().filter_map(|it| it.slice(dtype)).collect();
    let total: usize = slices.iter().map(|slice| slice.count).sum();
    let stride = total.div_ceil(SAMPLES_MAX).max(1);
    let mut found = Vec::with_capacity(SAMPLES_MAX);
    let mut next = 0;
    for slice in slices {
        while next < slice.count {
            // SAFETY: the slice has more than `next` elements of this type, and only the op that
            // samples them uses its memory.
            found.push(unsafe { read(slice.start, next) });
            next += stride;
        }
        next -= slice.count;
    }
    Some(found)
}

/// Reads one element.
///
/// # Safety
/// More than `index` elements of this type must begin at `start`.
unsafe fn read_as<T: Copy + Into<f64>>(start: *const u8, index: usize) -> f64 {
    // SAFETY: the caller's promise; the alignment is not relied on.
    unsafe { start.cast::<T>().add(index).read_unaligned() }.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_equal_gradients_are_known_from_one_rank() {
        assert_eq!(are_equal(&[1.0, -2.0], &[3.0, -6.0], 3.0), Some(true));
        assert_eq!(are_equal(&[1.0, 0.0], &[1.0, 0.0], 1.0), Some(true));
        assert_eq!(are_equal(&[1.0, 0.0], &[1.0, 1e-9], 1.0), Some(false));
        assert_eq!(are_equal(&[1.0, -2.0], &[3.0, -5.9], 3.0), Some(false));
        assert_eq!(are_equal(&[0.0, 0.0], &[1.0, 0.0], 1.0), None);
        assert_eq!(are_equal(&[f64::NAN], &[1.0], 1.0), None);
        assert_eq!(are_equal(&[1.0], &[f64::INFINITY], 1.0), None);
        assert_eq!(are_equal(&[], &[], 1.0), None);
    }

    #[test]
    fn the_user_is_told_once_after_some_steps() {
        let mut search = Search::default();
        for _ in 1..STEPS {
            assert!(!search.note("a", true));
            assert!(!search.note("b", true));
        }
        assert!(search.note("a", true));
        assert!(!search.note("b", true));
    }

    #[test]
    fn one_difference_ends_the_search() {
        let mut search = Search::default();
        assert!(!search.note("a", true));
        assert!(!search.note("b", false));
        for _ in 0..2 * STEPS {
            assert!(!search.note("a", true));
        }
    }
}
