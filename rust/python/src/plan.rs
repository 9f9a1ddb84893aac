//! `_native.Plan`.

use std::sync::Arc;

use gradring_core::communicator;
use gradring_proto::collective::{Call, Collective};
use numpy::npyffi::flags::{NPY_ARRAY_C_CONTIGUOUS, NPY_ARRAY_WRITEABLE};
use numpy::{PyUntypedArray, PyUntypedArrayMethods as _};
use pyo3::exceptions::PyValueError;
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
    communicator: Arc<communicator::Communicator>,
    call: Arc<Call>,
    /// The program's argument, which is also the result.
    arrays: Py<PyAny>,
    bucket: Bucket,
    /// The arrays as they were, if all are numpy's own. Each call checks other arrays anew.
    seen: Option<SmallVec<[Seen; 1]>>,
}

/// The part of a numpy array that a program can change in place.
#[derive(PartialEq, Eq)]
struct Seen {
    start: usize,
    descriptor: usize,
    count: usize,
    flags: i32,
}

impl Seen {
    #[inline]
    fn of(object: &Bound<'_, PyAny>) -> Option<Self> {
        let array = object.cast_exact::<PyUntypedArray>().ok()?;
        // SAFETY: the pointer is to a live array object, read while the interpreter is held.
        let fields = unsafe { &(*array.as_array_ptr()).fields };
        Some(Self {
            start: fields.data.addr(),
            descriptor: fields.descr.addr(),
            count: array.shape().iter().product(),
            flags: fields.flags & (NPY_ARRAY_WRITEABLE | NPY_ARRAY_C_CONTIGUOUS),
        })
    }
}

#[pymethods]
impl Plan {
    #[new]
    fn new(
        communicator: &Bound<'_, Communicator>,
        arrays: &Bound<'_, PyAny>,
        op: &Bound<'_, PyString>,
        name: &Bound<'_, PyString>,
    ) -> PyResult<Self> {
        let py = communicator.py();
        enter(py, || {
            let op = reduce_op(op)?;
            let bucket = Bucket::parse(arrays, true)?;
            let call = bucket.call(Collective::AllReduce { op }, &name.to_string_lossy());
            let is_list = arrays.is_instance_of::<PyList>() || arrays.is_instance_of::<PyTuple>();
            let seen = match is_list {
                true => arrays
                    .try_iter()?
                    .map(|array| Seen::of(&array.ok()?))
                    .collect(),
                false => Seen::of(arrays).map(|seen| SmallVec::from_iter([seen])),
            };
            Ok(Self {
                communicator: Arc::clone(&communicator.get().inner),
                call: Arc::new(call),
                arrays: arrays.clone().unbind(),
                seen,
                bucket,
            })
        })
    }

    #[classmethod]
    fn __class_getitem__(cls: &Bound<'_, PyType>, _arrays: &Bound<'_, PyAny>) -> Py<PyType> {
        cls.clone().unbind()
    }

    #[getter]
    fn arrays(&self, py: Python<'_>) -> Py<PyAny> {
        self.arrays.clone_ref(py)
    }

    fn __call__(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        enter(py, || {
            self.check(py)?;
            // SAFETY: this object owns the memory, and Python keeps it until the call returns; the
            // documentation asks other threads of the program to leave the arrays alone.
            let buffer = unsafe { self.bucket.buffer(Box::new(())) };
            let engine = &self.communicator.engine;
            guarded(py, |program| engine.run_again(&self.call, buffer, program))?;
            Ok(self.arrays.clone_ref(py))
        })
    }

    /// Starts the collective, and returns its work at once.
    fn begin(&self, py: Python<'_>) -> PyResult<Work> {
        enter(py, || {
            self.check(py)?;
            let owners = self.bucket.owners().iter().map(|owner| owner.clone_ref(py));
            let keepalive = Box::new((self.bucket.claim(), owners.collect::<Owners>()));
            // SAFETY: the arrays are kept alive; the documentation asks the program to leave them
            // alone until the work has ended.
            let buffer = unsafe { self.bucket.buffer(keepalive) };
            let started = self.communicator.engine.start_again(&self.call, buffer);
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
                self.has_items(arrays) && {
                    let owners = self.bucket.owners().iter();
                    owners
                        .zip(seen)
                        .all(|(array, seen)| Seen::of(array.bind(py)).as_ref() == Some(seen))
                }
            }
            None => self.bucket.is_same_memory(&Bucket::parse(arrays, true)?),
        };
        if !is_same {
            return Err(PyValueError::new_err(
                "an array of this plan has changed its memory, size, dtype or flags since \
                 prepare(), or has been replaced in its list; call prepare() again",
            ));
        }
        self.bucket.check_unclaimed()
    }

    /// Returns `false` if a list of the program has other items now.
    fn has_items(&self, arrays: &Bound<'_, PyAny>) -> bool {
        let Ok(list) = arrays.cast_exact::<PyList>() else {
            return true;
        };
        let owners = self.bucket.owners();
        list.len() == owners.len() && list.iter().zip(owners).all(|(item, owner)| item.is(owner))
    }
}
