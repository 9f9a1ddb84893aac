//! The one table from the core's errors to Python's exceptions.

use gradring_core::error::Error;
use pyo3::exceptions::{PyException, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// The exception that stands for an error: an instance of a class in `gradring.errors`.
///
/// What a signal handler raises wins: Ctrl-C often comes to all ranks, and a peer's abort with it.
pub(crate) fn to_python(py: Python<'_>, error: &Error) -> PyErr {
    if let Err(raised) = py.check_signals() {
        return raised;
    }
    gradring_tensorflow::failures::remember(error);
    exception_of(py, error)
}

/// The same, of an error that need not be remembered.
pub(crate) fn exception_of(py: Python<'_>, error: &Error) -> PyErr {
    build(py, error).unwrap_or_else(|failure| {
        if !failure.is_instance_of::<PyException>(py) {
            return failure;
        }
        PyRuntimeError::new_err(format!("{error} (and gradring.errors failed: {failure})"))
    })
}

fn build(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let class = error.kind.exception();
    let facts = PyDict::new(py);
    let blamed = error.blamed.as_ref();
    facts.set_item("rank", blamed.map(|blamed| blamed.rank))?;
    facts.set_item("host", blamed.map(|blamed| &blamed.host))?;
    facts.set_item("collective", &error.collective)?;
    facts.set_item("sequence", error.sequence)?;
    facts.set_item("elapsed_s", error.elapsed.map(|time| time.as_secs_f64()))?;
    let class = py.import("gradring.errors")?.getattr(class)?;
    let exception = class.call((error.to_string(),), Some(&facts))?;
    Ok(PyErr::from_value(exception))
}
