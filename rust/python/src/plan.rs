//! `_native.Plan`.

use std::sync::Arc;

use gradring_proto::collective::{Call, Collective};
use numpy::npyffi::flags::{NPY_ARRAY_C_CONTIGUOUS, NPY_ARRAY_WRITEABLE};
use numpy::{PyArrayDescr, PyUntypedArray, PyUntypedArrayMethods as _};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyString, PyTuple, PyType};
use smallvec::SmallVec;

use crate::arrays::{Bucket, Owners};
use crate::caller::guarded;
use crate::collective::reduce_op;
use crate::communicator::Communicator;
use crate::entry::enter;
use crate::errors::to_python;
use crate::work::Work;

/// An all-reduce of the same arrays, which are checked once. A call only looks whether they have
/// changed in place.
#[pyclass(frozen, subclass, module = "gradring._native")]
pub(crate) struct Plan {
    /// The `gradring.Communicator`. Its native part changes when its group forms again, and in a
    /// fork.
    communicator: Py<PyAny>,
    call: Arc<Call>,
    /// The program's argument, which is also the result.
    arrays: Py<PyAny>,
    bucket: Bucket,
    /// The arrays as they were, if all are numpy's own. Each call checks other arrays anew.
    seen: Option<SmallVec<[Seen; 1]>>,
}

/// The part of a numpy array that a program can change in place.
struct Seen {
    start: usize,
    /// Kept, so that no other dtype gets its address.
    dtype: Py<PyArrayDescr>,
    shape: SmallVec<[usize; 4]>,
    flags: i32,
}

/// Flags on which a collective depends.
const FLAGS: i32 = NPY_ARRAY_WRITEABLE | NPY_ARRAY_C_CONTIGUOUS;

impl Seen {
    fn of(object: &Bound<'_, PyAny>) -> Option<Self> {
        let array = object.cast_exact::<PyUntypedArray>().ok()?;
        // SAFETY: the pointer is to a live array object, read while the interpreter is held.
        let fields = unsafe { &(*array.as_array_ptr()).fields };
        Some(Self {
            start: fields.data.addr(),
            dtype: array.dtype().unbind(),
            shape: SmallVec::from_slice(array.shape()),
            flags: fields.flags & FLAGS,
        })
    }

    /// Returns `true` if the array, which was exactly numpy's, is as it was.
    #[inline]
    fn is_still(&self, object: &Bound<'_, PyAny>) -> bool {
        let Ok(array) = object.cast_exact::<PyUntypedArray>() else {
            return false;
        };
        // SAFETY: as above.
        let fields = unsafe { &(*array.as_array_ptr()).fields };
        fields.data.addr() == self.start
            && fields.descr.addr() == self.dtype.as_ptr().addr()
            && fields.flags & FLAGS == self.flags
            && array.shape() == &*self.shape
    }
}

#[pymethods]
impl Plan {
    #[new]
    fn new(
        communicator: &Bound<'_, PyAny>,
        arrays: &Bound<'_, PyAny>,
        op: &Bound<'_, PyString>,
        name: &Bound<'_, PyString>,
    ) -> PyResult<Self> {
        let py = communicator.py();
        enter(py, || {
            native(communicator)?;
            let op = reduce_op(op)?;
            let bucket = Bucket::parse(arrays, true)?;
            let call = bucket.call(Collective::AllReduce { op }, &name.to_string_lossy());
            Ok(Self {
                communicator: communicator.clone().unbind(),
                call: Arc::new(call),
                arrays: arrays.clone().unbind(),
                seen: seen(arrays, bucket.owners()),
                bucket,
            })
        })
    }

    #[classmethod]
    fn __class_getitem__(cls: &Bound<'_, PyType>, _arrays: &Bound<'_, PyAny>) -> Py<PyType> {
        cls.clone().unbind()
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.communicator)?;
        visit.call(&self.arrays)?;
        self.bucket
            .owners()
            .iter()
            .try_for_each(|owner| visit.call(owner))
    }

    #[getter]
    fn arrays(&self, py: Python<'_>) -> Py<PyAny> {
        self.arrays.clone_ref(py)
    }

    fn __call__(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        enter(py, || {
            let native = native(self.communicator.bind(py))?;
            self.check(py)?;
            // SAFETY: this object owns the memory, and Python keeps it until the call returns; the
            // documentation asks other threads of the program to leave the arrays alone.
            let buffer = unsafe { self.bucket.buffer(Box::new(())) };
            let engine = &native.get().inner.engine;
            guarded(py, |program| engine.run_again(&self.call, buffer, program))?;
            Ok(self.arrays.clone_ref(py))
        })
    }

    fn _begin(&self, py: Python<'_>) -> PyResult<Work> {
        enter(py, || {
            let native = native(self.communicator.bind(py))?;
            self.check(py)?;
            let owners = self.bucket.owners().iter().map(|owner| owner.clone_ref(py));
            let keepalive = Box::new((self.bucket.claim(), owners.collect::<Owners>()));
            // SAFETY: the arrays are kept alive; the documentation asks the program to leave them
            // alone until the work has ended.
            let buffer = unsafe { self.bucket.buffer(keepalive) };
            let started = native.get().inner.engine.start_again(&self.call, buffer);
            started
                .map(Work::new)
                .map_err(|error| to_python(py, &error))
        })
    }
}

impl Plan {
    /// Raises `ValueError` if the arrays are not what they were when the plan was made, or a
    /// collective under way uses them.
    #[inline]
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let arrays = self.arrays.bind(py);
        let is_same = match &self.seen {
            Some(seen) => {
                let owners = self.bucket.owners();
                has_items(arrays, owners)
                    && owners
                        .iter()
                        .zip(seen)
                        .all(|(array, seen)| seen.is_still(array.bind(py)))
            }
            None => self.bucket.is_same_memory(&Bucket::parse(arrays, true)?),
        };
        if !is_same {
            return Err(PyValueError::new_err(
                "an array of this plan has changed its memory, shape, dtype or flags since \
                 prepare(), or has been replaced in its list; call prepare() again",
            ));
        }
        self.bucket.check_unclaimed()
    }
}

/// Returns the native part of a `gradring.Communicator`.
#[inline]
fn native<'py>(communicator: &Bound<'py, PyAny>) -> PyResult<Bound<'py, Communicator>> {
    let py = communicator.py();
    let native = communicator.getattr(intern!(py, "_native"));
    let native = native.map_err(|_| PyTypeError::new_err("Communicator.prepare makes plans"))?;
    native.cast_into::<Communicator>().map_err(|error| {
        // In a fork this says why.
        match error.into_inner().getattr(intern!(py, "all_reduce")) {
            Ok(_) => PyTypeError::new_err("Communicator.prepare makes plans"),
            Err(error) => error,
        }
    })
}

/// Returns the arrays as they are, if all are numpy's own.
fn seen(arrays: &Bound<'_, PyAny>, owners: &Owners) -> Option<SmallVec<[Seen; 1]>> {
    let py = arrays.py();
    let is_plain = arrays.is_exact_instance_of::<PyList>()
        || arrays.is_exact_instance_of::<PyTuple>()
        || arrays.cast_exact::<PyUntypedArray>().is_ok();
    if !is_plain || !has_items(arrays, owners) {
        return None;
    }
    owners
        .iter()
        .map(|array| Seen::of(array.bind(py)))
        .collect()
}

/// Returns `true` unless a list or tuple has other items than these.
#[inline]
fn has_items(arrays: &Bound<'_, PyAny>, owners: &Owners) -> bool {
    let are = |items: &mut dyn Iterator<Item = Bound<'_, PyAny>>| {
        owners
            .iter()
            .all(|owner| items.next().is_some_and(|item| item.is(owner)))
            && items.next().is_none()
    };
    if let Ok(list) = arrays.cast_exact::<PyList>() {
        are(&mut list.iter())
    } else if let Ok(tuple) = arrays.cast_exact::<PyTuple>() {
        are(&mut tuple.iter())
    } else {
        true
    }
}
