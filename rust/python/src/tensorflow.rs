//! TensorFlow's ops: registration, counters and errors.

use gradring_tensorflow::{RegisterError, counters, failures};
use pyo3::exceptions::{PyImportError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict as _, PyDict};

use crate::entry::{detached, enter};
use crate::errors::exception_of;
use crate::interrupts;

/// Adds this file's functions to the extension module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(tensorflow_register, module)?)?;
    module.add_function(wrap_pyfunction!(tensorflow_counters, module)?)?;
    module.add_function(wrap_pyfunction!(tensorflow_failure, module)?)
}

/// Registers gradring's ops with the imported TensorFlow. Further calls do nothing.
#[pyfunction]
fn tensorflow_register(py: Python<'_>) -> PyResult<()> {
    enter(py, || {
        interrupts::watch();
        detached(py, gradring_tensorflow::register).map_err(|error| match error {
            RegisterError::NotLoaded { .. } | RegisterError::MissingSymbol { .. } => {
                PyImportError::new_err(error.to_string())
            }
            RegisterError::Refused { .. } => PyRuntimeError::new_err(error.to_string()),
        })
    })
}

/// Returns the counters of the ops that have run in this process, as a dict of ints.
#[pyfunction]
fn tensorflow_counters(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    counters::read().into_py_dict(py)
}

/// Returns the exception behind the message of a failed op, or None if it is not gradring's.
#[pyfunction]
fn tensorflow_failure(py: Python<'_>, message: &str) -> Option<Py<PyAny>> {
    let error = failures::find(message)?;
    Some(exception_of(py, &error).into_value(py).into_any())
}
