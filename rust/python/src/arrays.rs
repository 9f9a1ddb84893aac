//! numpy arrays as buffers of the core: checked before anything is sent.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

use gradring_core::buffer::{Buffer, Slice};
use gradring_core::collective::push_shape;
use gradring_core::dtype::DType;
use gradring_core::link::forks::PerProcess;
use numpy::npyffi::flags::{NPY_ARRAY_ALIGNED, NPY_ARRAY_WRITEABLE};
use numpy::{PyArrayDescr, PyArrayDescrMethods as _, PyUntypedArray, PyUntypedArrayMethods as _};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use smallvec::SmallVec;

/// Arrays as Python passes them. One needs no list, which small messages notice.
pub(crate) enum Arrays<'py> {
    One(Bound<'py, PyUntypedArray>),
    Several(Vec<Bound<'py, PyUntypedArray>>),
}

impl<'py> FromPyObject<'_, 'py> for Arrays<'py> {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(array) = object.cast::<PyUntypedArray>() {
            return Ok(Self::One(array.to_owned()));
        }
        object.extract().map(Self::Several)
    }
}

impl<'py> Arrays<'py> {
    pub(crate) fn as_slice(&self) -> &[Bound<'py, PyUntypedArray>] {
        match self {
            Self::One(array) => std::slice::from_ref(array),
            Self::Several(arrays) => arrays,
        }
    }

    /// The arrays without the interpreter, which keep their memory alive.
    pub(crate) fn unbind(self) -> Vec<Py<PyUntypedArray>> {
        match self {
            Self::One(array) => vec![array.unbind()],
            Self::Several(arrays) => arrays.into_iter().map(Bound::unbind).collect(),
        }
    }
}

/// Arrays of one bucket.
pub(crate) struct Bucket {
    dtype: DType,
    slices: SmallVec<[Slice; 1]>,
    /// Such as `[3,4] [7]`.
    pub(crate) shapes: String,
}

impl Bucket {
    /// Checks and collects arrays.
    ///
    /// Raises `TypeError` for an element type that is not supported, or for several; `ValueError`
    /// for arrays that are read-only, not C-contiguous, not aligned, or that overlap.
    pub(crate) fn parse(arrays: &[Bound<'_, PyUntypedArray>]) -> PyResult<Self> {
        let mut dtype = None;
        let mut slices = SmallVec::with_capacity(arrays.len());
        let mut shapes = String::with_capacity(16 * arrays.len());
        for array in arrays {
            let own = dtype_of(&array.dtype())?;
            if *dtype.get_or_insert(own) != own {
                return Err(PyTypeError::new_err(
                    "the arrays of one bucket must have the same dtype; reduce each dtype on its own",
                ));
            }
            slices.push(slice_of(array)?);
            push_shape(&mut shapes, array.shape().iter().copied());
        }
        let dtype = dtype.unwrap_or(DType::F32);
        check_disjoint(&slices, dtype.size_bytes())?;
        check_unclaimed(&slices, dtype.size_bytes())?;
        Ok(Self {
            dtype,
            slices,
            shapes,
        })
    }

    /// Claims the arrays' memory: nothing else may be launched on it before the claim is dropped.
    pub(crate) fn claim(&self) -> Claim {
        let ranges = ranges(&self.slices, self.dtype.size_bytes());
        CLAIMED.lock().extend(ranges.iter().copied());
        CLAIMS.fetch_add(ranges.len(), Ordering::Relaxed);
        Claim(ranges)
    }

    /// The arrays' memory as a buffer.
    ///
    /// # Safety
    /// `keepalive` must keep the arrays alive for as long as the buffer lives, and whoever has
    /// the arrays must leave them alone for that time.
    pub(crate) unsafe fn into_buffer(self, keepalive: Box<dyn Any + Send>) -> Buffer {
        // SAFETY: `parse` saw valid, aligned, writable, disjoint memory; the rest is promised.
        unsafe { Buffer::new(self.dtype, self.slices, keepalive) }
    }
}

fn slice_of(array: &Bound<'_, PyUntypedArray>) -> PyResult<Slice> {
    // SAFETY: the pointer is to a live array object, read while the interpreter is held.
    let (data, flags) = unsafe {
        let object = &*array.as_array_ptr();
        (object.fields.data, object.fields.flags)
    };
    let problem = if flags & NPY_ARRAY_WRITEABLE == 0 {
        "is read-only; pass a writable copy"
    } else if !array.is_c_contiguous() {
        "is not C-contiguous; pass numpy.ascontiguousarray of it and copy the result back"
    } else if flags & NPY_ARRAY_ALIGNED == 0 {
        "is not aligned to its elements; pass a copy"
    } else {
        return Ok(Slice {
            start: data.cast(),
            count: array.len(),
        });
    };
    let shape = array.shape();
    Err(PyValueError::new_err(format!(
        "the array of shape {shape:?} {problem}"
    )))
}

fn check_disjoint(slices: &[Slice], element_bytes: usize) -> PyResult<()> {
    if slices.len() < 2 {
        return Ok(());
    }
    let mut ranges = ranges(slices, element_bytes);
    ranges.sort_unstable();
    if ranges.windows(2).any(|pair| pair[0].1 > pair[1].0) {
        return Err(PyValueError::new_err(
            "two arrays of one bucket share memory; pass each array once",
        ));
    }
    Ok(())
}

/// First and last address of each slice that has elements.
fn ranges(slices: &[Slice], element_bytes: usize) -> Vec<(usize, usize)> {
    slices
        .iter()
        .filter(|slice| slice.count > 0)
        .map(|slice| {
            let start = slice.start.addr();
            (start, start + slice.count * element_bytes)
        })
        .collect()
}

/// The memory of asynchronous collectives under way, of whatever communicator: from the first
/// address to the last.
static CLAIMED: PerProcess<BTreeMap<usize, usize>> = PerProcess::new();
/// How many ranges that are; small messages notice a lock.
static CLAIMS: AtomicUsize = AtomicUsize::new(0);

/// Memory that belongs to a collective under way.
pub(crate) struct Claim(Vec<(usize, usize)>);

impl Drop for Claim {
    fn drop(&mut self) {
        let mut claimed = CLAIMED.lock();
        for (start, _) in &self.0 {
            claimed.remove(start);
        }
        CLAIMS.fetch_sub(self.0.len(), Ordering::Relaxed);
    }
}

fn check_unclaimed(slices: &[Slice], element_bytes: usize) -> PyResult<()> {
    if CLAIMS.load(Ordering::Relaxed) == 0 {
        return Ok(());
    }
    let claimed = CLAIMED.lock();
    // Claims do not overlap, so only the last one that begins before the end can.
    let is_claimed = |&(start, end): &(usize, usize)| {
        let before = claimed.range(..end).next_back();
        before.is_some_and(|(_, claimed_end)| *claimed_end > start)
    };
    if ranges(slices, element_bytes).iter().any(is_claimed) {
        return Err(PyValueError::new_err(
            "an array shares memory with one of an asynchronous collective that is under way; \
             wait() for that work first",
        ));
    }
    Ok(())
}

/// numpy's number of ml_dtypes' bfloat16 once seen; types from outside get theirs at run time.
static BFLOAT16_NUMBER: AtomicI32 = AtomicI32::new(-1);

/// Raises `TypeError` if arrays of this element type are not supported.
#[pyfunction]
pub(crate) fn check_dtype(descriptor: &Bound<'_, PyArrayDescr>) -> PyResult<()> {
    dtype_of(descriptor).map(drop)
}

fn dtype_of(descriptor: &Bound<'_, PyArrayDescr>) -> PyResult<DType> {
    let number = descriptor.num();
    let native = descriptor.is_native_byteorder().unwrap_or(true);
    // The numbers are part of numpy's ABI: ubyte 2, int 5, long 7, long long 9, float 11,
    // double 12, half 23.
    match (number, descriptor.itemsize()) {
        (2, 1) => return Ok(DType::U8),
        (5, 4) if native => return Ok(DType::I32),
        (7 | 9, 8) if native => return Ok(DType::I64),
        (11, 4) if native => return Ok(DType::F32),
        (12, 8) if native => return Ok(DType::F64),
        (23, 2) if native => return Ok(DType::F16),
        (_, 2) if native && number == BFLOAT16_NUMBER.load(Ordering::Relaxed) => {
            return Ok(DType::Bf16);
        }
        _ => {}
    }
    let name: String = descriptor.getattr("name")?.extract()?;
    if native && name == "bfloat16" {
        BFLOAT16_NUMBER.store(number, Ordering::Relaxed);
        return Ok(DType::Bf16);
    }
    let known: Vec<&str> = DType::ALL.iter().map(|dtype| dtype.name()).collect();
    let order = if native { "" } else { " in foreign byte order" };
    Err(PyTypeError::new_err(format!(
        "arrays of {name}{order} are not supported; use one of {}",
        known.join(", ")
    )))
}
