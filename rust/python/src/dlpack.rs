//! Memory that another library lends by DLPack: the one place that reads its structures.
//!
//! The layout is that of `dlpack.h`, version 1. A capsule that has not been consumed gives the memory
//! back when it is collected, so to borrow is to keep the capsule.

use std::ffi::{CStr, c_void};
use std::slice;

use pyo3::exceptions::{PyBufferError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};
use smallvec::SmallVec;

/// `kDLCPU`, `kDLCUDAHost` and `kDLROCMHost`: memory that a processor reads and writes.
const HOST_DEVICES: [i32; 3] = [1, 3, 11];
const VERSIONED: &CStr = c"dltensor_versioned";
const UNVERSIONED: &CStr = c"dltensor";
const MAJOR_VERSION: u32 = 1;
const READ_ONLY: u64 = 1;
const IS_COPIED: u64 = 2;

/// `DLTensor`, with `DLDevice` and `DLDataType` in it.
#[repr(C)]
struct Tensor {
    data: *mut u8,
    device_type: i32,
    _device_id: i32,
    dimensions: i32,
    type_code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// The beginning of `DLManagedTensorVersioned`.
#[repr(C)]
struct Versioned {
    major: u32,
    _minor: u32,
    _manager: *mut c_void,
    _deleter: *const c_void,
    flags: u64,
    tensor: Tensor,
}

/// Lent memory.
pub(crate) struct Lent<'py> {
    /// Lends as long as it lives.
    pub(crate) capsule: Bound<'py, PyCapsule>,
    pub(crate) start: *mut u8,
    /// Of an element, as numpy calls it; any text where numpy has no such type.
    pub(crate) type_name: String,
    pub(crate) shape: SmallVec<[usize; 4]>,
    pub(crate) is_writable: bool,
    pub(crate) is_contiguous: bool,
}

impl<'py> Lent<'py> {
    /// Borrows the memory of an object that has `__dlpack__`.
    ///
    /// Raises `TypeError` for what is not in the host's memory, and `ValueError` if the object does
    /// not lend it.
    pub(crate) fn from(object: &Bound<'py, PyAny>) -> PyResult<Self> {
        let (device, _): (i32, i32) = object.call_method0("__dlpack_device__")?.extract()?;
        if !HOST_DEVICES.contains(&device) {
            return Err(PyTypeError::new_err(format!(
                "{} is not in the host's memory (DLPack device {device}); pass a copy that is",
                object.get_type()
            )));
        }
        let capsule = capsule_of(object).map_err(|error| refused(object, error))?;
        let capsule = capsule.cast_into::<PyCapsule>()?;
        let (tensor, flags) = contents(&capsule)?;
        // SAFETY: the capsule is alive, so the structure and the arrays that it points to are.
        let (shape, is_contiguous) = unsafe { (tensor.shape(), tensor.is_contiguous()) };
        if flags & IS_COPIED != 0 {
            return Err(PyValueError::new_err(format!(
                "{} lends a copy only, so that it cannot change in place; pass a numpy array",
                object.get_type()
            )));
        }
        Ok(Self {
            start: tensor.start(),
            type_name: tensor.type_name(),
            shape,
            is_writable: flags & READ_ONLY == 0,
            is_contiguous,
            capsule,
        })
    }
}

/// What the object exports; old ones know no versions, and cannot say that they are read-only.
fn capsule_of<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    let options = PyDict::new(py);
    options.set_item("max_version", (MAJOR_VERSION, 0))?;
    match object.call_method("__dlpack__", (), Some(&options)) {
        Err(error) if error.is_instance_of::<PyTypeError>(py) => object.call_method0("__dlpack__"),
        result => result,
    }
}

fn refused(object: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
    let py = object.py();
    if !error.is_instance_of::<PyBufferError>(py) && !error.is_instance_of::<PyRuntimeError>(py) {
        return error;
    }
    let kind = object.get_type();
    let problem = PyValueError::new_err(format!("{kind} does not lend its memory: {error}"));
    problem.set_cause(py, Some(error));
    problem
}

/// The tensor in the capsule, and its flags.
fn contents<'a>(capsule: &'a Bound<'_, PyCapsule>) -> PyResult<(&'a Tensor, u64)> {
    if let Ok(pointer) = capsule.pointer_checked(Some(VERSIONED)) {
        // SAFETY: what a capsule of this name points to begins so in every version, and lives as
        // long as the capsule.
        let versioned = unsafe { pointer.cast::<Versioned>().as_ref() };
        if versioned.major != MAJOR_VERSION {
            let problem = format!("DLPack {} is unknown; pass a numpy array", versioned.major);
            return Err(PyValueError::new_err(problem));
        }
        return Ok((&versioned.tensor, versioned.flags));
    }
    let pointer = capsule.pointer_checked(Some(UNVERSIONED))?;
    // SAFETY: a capsule of this name points to a `DLManagedTensor`, which begins with the tensor.
    Ok((unsafe { pointer.cast::<Tensor>().as_ref() }, 0))
}

impl Tensor {
    /// Such as `float32`.
    fn type_name(&self) -> String {
        let kind = match self.type_code {
            0 => "int",
            1 => "uint",
            2 => "float",
            4 => "bfloat",
            5 => "complex",
            6 => return "bool".into(),
            _ => "type of DLPack ",
        };
        let lanes = if self.lanes == 1 { "" } else { " vector" };
        format!("{kind}{}{lanes}", self.bits)
    }

    /// Where the first element is; not null where there is none.
    fn start(&self) -> *mut u8 {
        if self.data.is_null() {
            return std::ptr::dangling_mut::<u64>().cast();
        }
        let offset = usize::try_from(self.byte_offset).unwrap_or_default();
        self.data.wrapping_add(offset)
    }

    /// # Safety
    /// `shape` must point to as many numbers as there are dimensions.
    unsafe fn shape(&self) -> SmallVec<[usize; 4]> {
        // SAFETY: as promised.
        let dims = unsafe { numbers(self.shape, self.dimensions) };
        dims.iter()
            .map(|&dim| usize::try_from(dim).unwrap_or_default())
            .collect()
    }

    /// Whether the elements lie in memory as they are counted, the last axis first.
    ///
    /// # Safety
    /// `shape`, and `strides` unless null, must point to as many numbers as there are dimensions.
    unsafe fn is_contiguous(&self) -> bool {
        if self.strides.is_null() {
            return true;
        }
        // SAFETY: as promised.
        let (dims, strides) = unsafe {
            let numbers = |start| numbers(start, self.dimensions);
            (numbers(self.shape), numbers(self.strides))
        };
        let mut expected = 1;
        dims.contains(&0)
            || dims.iter().zip(strides).rev().all(|(&dim, &stride)| {
                let fits = dim == 1 || stride == expected;
                expected *= dim;
                fits
            })
    }
}

/// # Safety
/// `start` must point to `count` numbers, if there are any, that live for `'a`.
unsafe fn numbers<'a>(start: *const i64, count: i32) -> &'a [i64] {
    let count = usize::try_from(count).unwrap_or_default();
    if count == 0 {
        return &[];
    }
    // SAFETY: as promised.
    unsafe { slice::from_raw_parts(start, count) }
}
