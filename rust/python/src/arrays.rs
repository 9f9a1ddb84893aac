//! The program's arrays as buffers of the core: checked before anything is sent.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

use gradring_net::link::forks::PerProcess;
use gradring_proto::buffer::{Buffer, Slice};
use gradring_proto::collective::{Call, Collective, Request, push_shape};
use gradring_proto::dtype::DType;
use numpy::npyffi::flags::NPY_ARRAY_WRITEABLE;
use numpy::{PyArrayDescr, PyArrayDescrMethods as _, PyUntypedArray, PyUntypedArrayMethods as _};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyFloat, PyInt, PyList, PyMemoryView, PyTuple};
use smallvec::SmallVec;

use crate::dlpack::{Lent, refused, unsupported};

/// Initial capacity for the text of an array's shape, because growing the text would slow small
/// messages down.
const SHAPES_BYTES: usize = 16;

/// The program's arrays for one collective, all of one element type.
pub(crate) struct Bucket {
    dtype: Option<DType>,
    slices: SmallVec<[Slice; 1]>,
    /// Shapes of the arrays, such as `[3,4] [7]`.
    shapes: String,
    owners: Owners,
    /// `true` if the collective writes to the memory.
    writes: bool,
}

/// Objects that keep the arrays' memory alive.
pub(crate) type Owners = SmallVec<[Py<PyAny>; 1]>;

impl Bucket {
    /// Checks and collects an array, or a list of arrays, for a collective that `writes` to them or
    /// does not.
    ///
    /// An array is one of numpy's, or has the buffer protocol or `__dlpack__`. Raises `TypeError`
    /// for other objects, for an unsupported element type, or for several types; `ValueError` for
    /// arrays that are read-only, not C-contiguous, not aligned, or that overlap.
    pub(crate) fn parse(arrays: &Bound<'_, PyAny>, writes: bool) -> PyResult<Self> {
        let mut bucket = Self {
            dtype: None,
            slices: SmallVec::new(),
            shapes: String::with_capacity(SHAPES_BYTES),
            owners: Owners::new(),
            writes,
        };
        if let Ok(array) = arrays.cast_exact::<PyUntypedArray>() {
            bucket.add_numpy(array)?;
        } else if arrays.is_instance_of::<PyList>() || arrays.is_instance_of::<PyTuple>() {
            for array in arrays.try_iter()? {
                bucket.add(&array?)?;
            }
        } else {
            bucket.add(arrays)?;
        }
        let element_bytes = bucket.dtype().size_bytes();
        check_disjoint(&bucket.slices, element_bytes)?;
        check_unclaimed(&bucket.slices, element_bytes, writes)?;
        Ok(bucket)
    }

    /// Returns the element type; any type if there are no arrays.
    fn dtype(&self) -> DType {
        self.dtype.unwrap_or(DType::F32)
    }

    fn add(&mut self, object: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = object.py();
        if let Ok(array) = object.cast_exact::<PyUntypedArray>() {
            return self.add_numpy(array);
        }
        check_plain(object)?;
        if let Ok(array) = object.cast::<PyUntypedArray>() {
            return self.add_numpy(array);
        }
        check_no_number(object)?;
        match PyMemoryView::from(object) {
            Ok(view) => {
                let array = py.import("numpy")?.call_method1("asarray", (view,))?;
                return self.add_numpy(array.cast()?);
            }
            // An array of jax or TensorFlow, whose buffers do not support bfloat16. DLPack is not
            // tried, because an unversioned capsule has no flag for read-only memory.
            Err(error) if !error.is_instance_of::<PyTypeError>(py) => {
                return Err(refused(object, error));
            }
            Err(_) => {}
        }
        if !object.hasattr("__dlpack_device__")? {
            return Err(PyTypeError::new_err(format!(
                "a {} is not a writable buffer; pass a numpy array, anything with the buffer \
                 protocol or DLPack, or a list of them",
                object.get_type().name()?
            )));
        }
        let lent = Lent::in_place(object)?;
        self.push(
            lent.dtype()?,
            &lent.shape,
            lent.start,
            lent.is_writable,
            lent.is_contiguous,
        )?;
        self.owners.push(lent.owner.unbind());
        Ok(())
    }

    #[inline]
    fn add_numpy(&mut self, array: &Bound<'_, PyUntypedArray>) -> PyResult<()> {
        // SAFETY: the pointer is to a live array object, read while the interpreter is held.
        let (data, flags) = unsafe {
            let object = &*array.as_array_ptr();
            (object.fields.data, object.fields.flags)
        };
        self.push(
            dtype_of(&array.dtype())?,
            array.shape(),
            data.cast(),
            flags & NPY_ARRAY_WRITEABLE != 0,
            array.is_c_contiguous(),
        )?;
        self.owners.push(array.as_any().clone().unbind());
        Ok(())
    }

    #[inline]
    fn push(
        &mut self,
        dtype: DType,
        shape: &[usize],
        start: *mut u8,
        is_writable: bool,
        is_contiguous: bool,
    ) -> PyResult<()> {
        if *self.dtype.get_or_insert(dtype) != dtype {
            return Err(PyTypeError::new_err(
                "the arrays of one bucket must have the same dtype; reduce each dtype on its own",
            ));
        }
        let problem = if !is_writable {
            "is read-only; pass a writable copy"
        } else if !is_contiguous {
            "is not C-contiguous; pass a contiguous copy of it and copy the result back"
        } else if !start.addr().is_multiple_of(dtype.size_bytes()) {
            "is not aligned to its elements; pass a copy"
        } else {
            let count = shape.iter().product();
            self.slices.push(Slice { start, count });
            push_shape(&mut self.shapes, shape.iter().copied());
            return Ok(());
        };
        Err(PyValueError::new_err(format!(
            "the array of shape {shape:?} {problem}"
        )))
    }

    /// Claims the arrays' memory. No collective that writes to it may be launched before the claim
    /// is dropped. If this collective writes, none that reads it may be launched either.
    pub(crate) fn claim(&self) -> Claim {
        let ranges = ranges(&self.slices, self.dtype().size_bytes());
        let mut claimed = CLAIMED.lock();
        match self.writes {
            true => claimed.written.extend(ranges.iter().copied()),
            false => ranges
                .iter()
                .for_each(|&range| *claimed.read.entry(range).or_default() += 1),
        }
        CLAIMS.fetch_add(ranges.len(), Ordering::Relaxed);
        Claim {
            ranges,
            writes: self.writes,
        }
    }

    /// Raises `ValueError` if a collective under way uses the memory.
    pub(crate) fn check_unclaimed(&self) -> PyResult<()> {
        check_unclaimed(&self.slices, self.dtype().size_bytes(), self.writes)
    }

    /// Returns `true` if the other bucket has the same elements at the same addresses.
    pub(crate) fn is_same_memory(&self, other: &Self) -> bool {
        self.dtype() == other.dtype() && self.slices == other.slices
    }

    /// The objects that keep the memory alive, in the order of the arrays.
    pub(crate) fn owners(&self) -> &Owners {
        &self.owners
    }

    /// Returns what ranks compare for a collective over this memory.
    pub(crate) fn call(&self, collective: Collective, name: &str) -> Call {
        Call {
            collective,
            dtype: self.dtype(),
            count: self.slices.iter().map(|slice| slice.count).sum(),
            name: name.into(),
            shapes: self.shapes.clone(),
            is_mapped: false,
        }
    }

    /// Returns the memory as a buffer.
    ///
    /// # Safety
    /// As for `into_request`.
    pub(crate) unsafe fn buffer(&self, keepalive: Box<dyn Any + Send>) -> Buffer {
        // SAFETY: `parse` saw valid, aligned, writable, disjoint memory; the rest is promised.
        unsafe { Buffer::new(self.dtype(), self.slices.iter().copied(), keepalive) }
    }

    /// Hands over the objects that keep the memory alive; from now on the caller must hold them.
    pub(crate) fn take_owners(&mut self) -> Owners {
        std::mem::take(&mut self.owners)
    }

    /// Sets the shape that ranks compare in place of the arrays' own, if one is given.
    pub(crate) fn agree_on(&mut self, shape: Option<&[usize]>) {
        if let Some(shape) = shape {
            self.shapes.clear();
            push_shape(&mut self.shapes, shape.iter().copied());
        }
    }

    /// Returns the request for a collective over the arrays' memory.
    ///
    /// # Safety
    /// The bucket's owners must live until `keepalive` is dropped, and the program must leave the
    /// arrays alone for that time.
    pub(crate) unsafe fn into_request(
        self,
        collective: Collective,
        name: &str,
        keepalive: Box<dyn Any + Send>,
    ) -> Request {
        Request {
            collective,
            // SAFETY: `parse` saw valid, aligned, writable, disjoint memory; the rest is promised.
            buffer: unsafe { Buffer::new(self.dtype(), self.slices, keepalive) },
            name: name.into(),
            shapes: self.shapes,
        }
    }
}

/// Attributes that give the numbers in memory another meaning: name, problem and cure.
const MEANINGS: [(&str, &str, &str); 6] = [
    (
        "is_neg",
        "its memory has the other sign",
        "call resolve_neg()",
    ),
    (
        "is_conj",
        "its memory is not conjugated",
        "call resolve_conj()",
    ),
    (
        "is_quantized",
        "its scale would be ignored",
        "call dequantize()",
    ),
    ("mask", "its mask would be ignored", "pass x.filled(value)"),
    ("unit", UNIT_LOST, NUMBERS_ONLY),
    ("units", UNIT_LOST, NUMBERS_ONLY),
];
const UNIT_LOST: &str = "its unit would be ignored";
const NUMBERS_ONLY: &str = "pass its numbers, of the same unit on every rank";

/// Raises `TypeError` if memory alone does not give an object's numbers, as with a mask.
#[pyfunction]
pub(crate) fn check_plain(object: &Bound<'_, PyAny>) -> PyResult<()> {
    for (name, problem, cure) in MEANINGS {
        let Ok(Some(found)) = object.getattr_opt(name) else {
            continue;
        };
        let is_more = match (name.starts_with("is_"), found.is_callable()) {
            (true, true) => found.call0()?.is_truthy()?,
            (true, false) => found.is_truthy()?,
            (false, is_method) => !is_method && !found.is_none(),
        };
        if is_more {
            let kind = object.get_type().name()?;
            let text = format!("a {kind} cannot travel: {problem}; {cure}");
            return Err(PyTypeError::new_err(text));
        }
    }
    Ok(())
}

fn check_no_number(object: &Bound<'_, PyAny>) -> PyResult<()> {
    if object.is_instance_of::<PyInt>()
        || object.is_instance_of::<PyFloat>()
        || object.is_instance(&object.py().import("numpy")?.getattr("generic")?)?
    {
        let number = object.repr()?;
        return Err(PyTypeError::new_err(format!(
            "a number ({number}) cannot change in place; pass a numpy array"
        )));
    }
    Ok(())
}

fn check_disjoint(slices: &[Slice], element_bytes: usize) -> PyResult<()> {
    if slices.len() < 2 {
        return Ok(());
    }
    let mut ranges = ranges(slices, element_bytes);
    ranges.sort_unstable();
    if ranges.windows(2).any(|two| two[0].1 > two[1].0) {
        return Err(PyValueError::new_err(
            "two arrays of one bucket share memory; pass each array once",
        ));
    }
    Ok(())
}

/// Returns the first address and the end of each slice that has elements.
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

/// Memory of the asynchronous collectives under way on all communicators.
static CLAIMED: PerProcess<Claimed> = PerProcess::new();
/// Number of claimed ranges. While it is 0, small messages are spared the lock.
static CLAIMS: AtomicUsize = AtomicUsize::new(0);

#[derive(Default)]
struct Claimed {
    /// Ends of written ranges, by first address. They overlap with no other range.
    written: BTreeMap<usize, usize>,
    /// Number of claims of each range that is only read, because several collectives may send it.
    read: BTreeMap<(usize, usize), usize>,
}

impl Claimed {
    /// Returns `true` if a new collective must not use this memory.
    fn forbids(&self, (start, end): (usize, usize), writes: bool) -> bool {
        // Written ranges do not overlap, so only the last one that begins before `end` can reach
        // `start`.
        let before = self.written.range(..end).next_back();
        if before.is_some_and(|(_, written_end)| *written_end > start) {
            return true;
        }
        let mut before = self.read.range(..(end, 0));
        writes && before.any(|((_, read_end), _)| *read_end > start)
    }
}

/// Memory that belongs to a collective under way.
pub(crate) struct Claim {
    ranges: Vec<(usize, usize)>,
    writes: bool,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut claimed = CLAIMED.lock();
        for range in &self.ranges {
            if self.writes {
                claimed.written.remove(&range.0);
            } else if let Some(count) = claimed.read.get_mut(range) {
                *count -= 1;
                if *count == 0 {
                    claimed.read.remove(range);
                }
            }
        }
        CLAIMS.fetch_sub(self.ranges.len(), Ordering::Relaxed);
    }
}

fn check_unclaimed(slices: &[Slice], element_bytes: usize, writes: bool) -> PyResult<()> {
    if CLAIMS.load(Ordering::Relaxed) == 0 {
        return Ok(());
    }
    let claimed = CLAIMED.lock();
    let mut ranges = ranges(slices, element_bytes).into_iter();
    if ranges.any(|range| claimed.forbids(range, writes)) {
        return Err(under_way());
    }
    Ok(())
}

fn under_way() -> PyErr {
    PyValueError::new_err(
        "an array shares memory with one of an asynchronous collective that is under way; \
         wait() for that work first",
    )
}

/// Raises an exception if a collective that writes into `arrays` could not begin now.
#[pyfunction]
pub(crate) fn check_unused(arrays: &Bound<'_, PyAny>) -> PyResult<()> {
    Bucket::parse(arrays, true).map(drop)
}

/// numpy's number of ml_dtypes' bfloat16, once it is known. numpy numbers types of other packages
/// at run time.
static BFLOAT16_NUMBER: AtomicI32 = AtomicI32::new(-1);

/// Raises `TypeError` if arrays of this element type are not supported.
#[pyfunction]
pub(crate) fn check_dtype(descriptor: &Bound<'_, PyArrayDescr>) -> PyResult<()> {
    dtype_of(descriptor).map(drop)
}

/// Checks that an array of any element type can be copied now.
///
/// Raises `ValueError` if an asynchronous collective that is under way writes to its memory.
#[pyfunction]
pub(crate) fn check_readable(array: &Bound<'_, PyUntypedArray>) -> PyResult<()> {
    if CLAIMS.load(Ordering::Relaxed) == 0 {
        return Ok(());
    }
    // SAFETY: the pointer is to a live array object, read while the interpreter is held.
    let start = unsafe { (*array.as_array_ptr()).fields.data }.addr();
    let axes = array
        .shape()
        .iter()
        .copied()
        .zip(array.strides().iter().copied());
    let mut view = View {
        start,
        // All elements of a broadcast axis are at one address.
        axes: axes
            .filter(|&(length, stride)| length == 0 || stride != 0)
            .collect(),
        element_bytes: array.dtype().itemsize(),
    };
    view.axes
        .sort_unstable_by_key(|(_, stride)| stride.unsigned_abs());
    let is_claimed = view.may_be_written(&CLAIMED.lock());
    match is_claimed {
        true => Err(under_way()),
        false => Ok(()),
    }
}

/// Memory of an array whose elements may have gaps between them.
struct View {
    start: usize,
    /// Length and stride in bytes of each axis; the longest stride is last.
    axes: SmallVec<[(usize, isize); 4]>,
    element_bytes: usize,
}

impl View {
    /// Returns `true` if a collective under way writes to one of the elements.
    fn may_be_written(mut self, claimed: &Claimed) -> bool {
        if self.axes.iter().any(|&(length, _)| length == 0) {
            return false;
        }
        let (mut first, mut last) = (self.start, self.start);
        for &(length, stride) in &self.axes {
            let reach = stride.unsigned_abs() * (length - 1);
            match stride < 0 {
                true => first -= reach,
                false => last += reach,
            }
        }
        let end = last + self.element_bytes;
        if !claimed.forbids((first, end), false) {
            return false;
        }
        let elements: usize = self.axes.iter().map(|&(length, _)| length).product();
        if elements * self.element_bytes >= end - first {
            return true;
        }
        let Some((length, stride)) = self.axes.pop() else {
            return true;
        };
        (0..length).any(|index| {
            let part = Self {
                start: self.start.wrapping_add_signed(stride * index as isize),
                axes: self.axes.clone(),
                element_bytes: self.element_bytes,
            };
            part.may_be_written(claimed)
        })
    }
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
    let order = if native { "" } else { " in foreign byte order" };
    Err(unsupported(&(name + order)))
}
