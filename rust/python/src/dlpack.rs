//! Memory that another library lends by DLPack: the one place that reads its structures.
//!
//! The layout is that of `dlpack.h`, version 1. A capsule lends its memory once. The borrower
//! renames the capsule, and calls the deleter at the end.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;
use std::slice;

use gradring_proto::dtype::DType;
use pyo3::exceptions::{PyBufferError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyTuple};
use smallvec::SmallVec;

/// `kDLCPU`, `kDLCUDAHost` and `kDLROCMHost`: memory that the CPU can access.
const HOST_DEVICES: [i32; 3] = [1, 3, 11];
/// Names of a capsule before and after it has lent its memory.
const VERSIONED: [&CStr; 2] = [c"dltensor_versioned", c"used_dltensor_versioned"];
const UNVERSIONED: [&CStr; 2] = [c"dltensor", c"used_dltensor"];
const BORROWED: &CStr = c"gradring._native.borrowed";
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

type Deleter = Option<unsafe extern "C" fn(*mut c_void)>;

/// `DLManagedTensor`.
#[repr(C)]
struct Unversioned {
    tensor: Tensor,
    _manager: *mut c_void,
    deleter: Deleter,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct Versioned {
    major: u32,
    _minor: u32,
    _manager: *mut c_void,
    deleter: Deleter,
    flags: u64,
    tensor: Tensor,
}

/// Memory borrowed from a capsule; given back when dropped.
struct Borrowed {
    managed: NonNull<c_void>,
    deleter: Deleter,
}

// SAFETY: only dropped, by a thread that holds the interpreter.
unsafe impl Send for Borrowed {}

impl Drop for Borrowed {
    fn drop(&mut self) {
        if let Some(deleter) = self.deleter {
            // SAFETY: the capsule was renamed, so nobody else calls the deleter.
            unsafe { deleter(self.managed.as_ptr()) }
        }
    }
}

/// Memory that an object of another library lends.
pub(crate) struct Lent<'py> {
    /// Object that keeps the memory alive.
    pub(crate) owner: Bound<'py, PyAny>,
    pub(crate) start: *mut u8,
    /// numpy's name of the element type; any text if numpy does not have the type.
    type_name: String,
    pub(crate) shape: SmallVec<[usize; 4]>,
    /// Strides in elements; `None` if they follow from the shape.
    strides: Option<SmallVec<[i64; 4]>>,
    pub(crate) is_writable: bool,
    is_copied: bool,
    pub(crate) is_contiguous: bool,
}

/// Owner of the memory, name of its element type, and the entries of numpy's array interface.
type Readable<'py> = (Bound<'py, PyAny>, &'static str, Bound<'py, PyDict>);

/// Borrows the memory of `object` for reading; None for an object without DLPack.
#[pyfunction]
pub(crate) fn lent<'py>(object: &Bound<'py, PyAny>) -> PyResult<Option<Readable<'py>>> {
    if !object.hasattr("__dlpack_device__")? {
        return Ok(None);
    }
    let (py, lent) = (object.py(), Lent::from(object)?);
    let dtype = lent.dtype()?;
    let strides = lent.strides.map(|strides| {
        let in_bytes = |&stride: &i64| stride * dtype.size_bytes() as i64;
        PyTuple::new(py, strides.iter().map(in_bytes).collect::<Vec<_>>())
    });
    let interface = PyDict::new(py);
    interface.set_item("version", 3)?;
    interface.set_item("shape", PyTuple::new(py, &lent.shape)?)?;
    interface.set_item("strides", strides.transpose()?)?;
    interface.set_item("data", (lent.start.addr(), true))?;
    Ok(Some((lent.owner, dtype.name(), interface)))
}

impl<'py> Lent<'py> {
    /// Borrows the memory of an object to write to it.
    ///
    /// Raises `ValueError` if the object lends a copy, and the exceptions of `from`.
    pub(crate) fn in_place(object: &Bound<'py, PyAny>) -> PyResult<Self> {
        let lent = Self::from(object)?;
        if lent.is_copied {
            return Err(PyValueError::new_err(format!(
                "{} lends a copy only, so that it cannot change in place; pass a numpy array",
                object.get_type()
            )));
        }
        Ok(lent)
    }

    /// Borrows the memory of an object that has `__dlpack__`.
    ///
    /// Raises `TypeError` if it is not in the host's memory, and `ValueError` if the object does
    /// not lend it.
    fn from(object: &Bound<'py, PyAny>) -> PyResult<Self> {
        let (device, _): (i32, i32) = object.call_method0("__dlpack_device__")?.extract()?;
        check_device(object, device)?;
        let capsule = capsule_of(object).map_err(|error| refused(object, error))?;
        let capsule = capsule.cast_into::<PyCapsule>()?;
        let Contents { tensor, flags, .. } = contents(&capsule)?;
        check_device(object, tensor.device_type)?;
        // SAFETY: the capsule is alive, so the structure and the arrays that it points to are.
        let (shape, strides, is_contiguous) =
            unsafe { (tensor.shape(), tensor.strides(), tensor.is_contiguous()) };
        let shape = shape.ok_or_else(|| {
            PyValueError::new_err(format!(
                "{} lends by DLPack what cannot be memory: no address, or an impossible shape",
                object.get_type()
            ))
        })?;
        Ok(Self {
            start: tensor.start(),
            type_name: tensor.type_name(),
            shape,
            strides,
            is_writable: flags & READ_ONLY == 0,
            is_copied: flags & IS_COPIED != 0,
            is_contiguous,
            owner: borrow(&capsule)?,
        })
    }

    /// Returns the element type; raises `TypeError` if it is not supported.
    pub(crate) fn dtype(&self) -> PyResult<DType> {
        DType::from_name(&self.type_name).ok_or_else(|| unsupported(&self.type_name))
    }
}

fn check_device(object: &Bound<'_, PyAny>, device: i32) -> PyResult<()> {
    if HOST_DEVICES.contains(&device) {
        return Ok(());
    }
    Err(PyTypeError::new_err(format!(
        "{} is not in the host's memory (DLPack device {device}); pass a copy that is",
        object.get_type()
    )))
}

/// Takes the memory out of the capsule. Python gives it back when it collects the returned object.
fn borrow<'py>(capsule: &Bound<'py, PyCapsule>) -> PyResult<Bound<'py, PyAny>> {
    let py = capsule.py();
    let Contents {
        managed,
        deleter,
        used,
        ..
    } = contents(capsule)?;
    // SAFETY: the capsule is alive, and so is a constant.
    if unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) } != 0 {
        return Err(PyErr::fetch(py));
    }
    let borrowed = Borrowed { managed, deleter };
    Ok(PyCapsule::new_with_value(py, borrowed, BORROWED)?.into_any())
}

/// Returns the object's capsule. Older libraries have no versions, and no flag for read-only
/// memory.
fn capsule_of<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    let options = PyDict::new(py);
    options.set_item("max_version", (MAJOR_VERSION, 0))?;
    match object.call_method("__dlpack__", (), Some(&options)) {
        Err(error) if error.is_instance_of::<PyTypeError>(py) => object.call_method0("__dlpack__"),
        result => result,
    }
}

/// Turns an object's refusal to lend its memory into a `ValueError`; returns other errors
/// unchanged.
pub(crate) fn refused(object: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
    let py = object.py();
    let is_refusal = error.is_instance_of::<PyBufferError>(py)
        || error.is_instance_of::<PyRuntimeError>(py)
        || error.is_instance_of::<PyValueError>(py);
    if !is_refusal {
        return error;
    }
    let kind = object.get_type();
    let problem = PyValueError::new_err(format!(
        "{kind} does not lend its memory: {error}; pass a numpy array"
    ));
    problem.set_cause(py, Some(error));
    problem
}

/// Contents of a capsule that has not lent its memory yet.
struct Contents<'a> {
    tensor: &'a Tensor,
    flags: u64,
    managed: NonNull<c_void>,
    deleter: Deleter,
    /// Name of the capsule once it has lent its memory.
    used: &'static CStr,
}

fn contents<'a>(capsule: &'a Bound<'_, PyCapsule>) -> PyResult<Contents<'a>> {
    let [name, used] = VERSIONED;
    if let Ok(managed) = capsule.pointer_checked(Some(name)) {
        // SAFETY: in every version, a capsule of this name points to a structure that begins with
        // this number and lives as long as the capsule.
        let major = unsafe { managed.cast::<u32>().read() };
        if major != MAJOR_VERSION {
            let problem = format!("DLPack {major} is unknown; pass a numpy array");
            return Err(PyValueError::new_err(problem));
        }
        // SAFETY: as above, and of this version.
        let versioned = unsafe { managed.cast::<Versioned>().as_ref() };
        return Ok(Contents {
            tensor: &versioned.tensor,
            flags: versioned.flags,
            managed,
            deleter: versioned.deleter,
            used,
        });
    }
    let [name, used] = UNVERSIONED;
    let managed = capsule.pointer_checked(Some(name)).map_err(|_| {
        PyValueError::new_err(
            "a DLPack capsule that has lent its memory before lends it no more; \
             export the memory anew",
        )
    })?;
    // SAFETY: a capsule of this name points to this structure, which lives as long as the capsule.
    let unversioned = unsafe { managed.cast::<Unversioned>().as_ref() };
    Ok(Contents {
        tensor: &unversioned.tensor,
        flags: 0,
        managed,
        deleter: unversioned.deleter,
        used,
    })
}

/// Returns the exception for an unsupported type, which names the supported ones.
pub(crate) fn unsupported(kind: &str) -> PyErr {
    let known = DType::ALL.map(DType::name).join(", ");
    PyTypeError::new_err(format!(
        "arrays of {kind} are not supported; use one of {known}"
    ))
}

impl Tensor {
    /// Returns the name of the element type, such as `float32`.
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

    /// Returns the address of the first element; dangling, but not null, if there is no memory.
    fn start(&self) -> *mut u8 {
        if self.data.is_null() {
            return std::ptr::dangling_mut::<u64>().cast();
        }
        let offset = usize::try_from(self.byte_offset).unwrap_or_default();
        self.data.wrapping_add(offset)
    }

    /// Returns the shape; `None` if it is impossible.
    ///
    /// # Safety
    /// `shape` must be null or point to as many numbers as there are dimensions.
    unsafe fn shape(&self) -> Option<SmallVec<[usize; 4]>> {
        if self.dimensions < 0 || self.dimensions > 0 && self.shape.is_null() {
            return None;
        }
        // SAFETY: as promised.
        let dims = unsafe { numbers(self.shape, self.dimensions) };
        let shape: Option<SmallVec<_>> = dims.iter().map(|&dim| dim.try_into().ok()).collect();
        let shape = shape.filter(|shape| !self.data.is_null() || shape.contains(&0))?;
        let element = usize::from(self.bits).div_ceil(8) * usize::from(self.lanes);
        let bytes = shape
            .iter()
            .try_fold(element, |n, &dim: &usize| n.checked_mul(dim));
        bytes
            .filter(|&bytes| isize::try_from(bytes).is_ok())
            .map(|_| shape)
    }

    /// # Safety
    /// `strides`, unless null, must point to as many numbers as there are dimensions.
    unsafe fn strides(&self) -> Option<SmallVec<[i64; 4]>> {
        // SAFETY: as promised.
        let strides = || unsafe { numbers(self.strides, self.dimensions) };
        (!self.strides.is_null()).then(|| strides().into())
    }

    /// Returns `true` if the elements are in C order without gaps.
    ///
    /// # Safety
    /// `shape`, and `strides` unless null, must point to as many numbers as there are dimensions.
    unsafe fn is_contiguous(&self) -> bool {
        if self.shape.is_null() || self.strides.is_null() {
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
                expected = dim.wrapping_mul(expected);
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
