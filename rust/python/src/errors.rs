//! The one table from the core's errors to Python's exceptions.

use std::path::PathBuf;

use gradring_net::link::forks::PerProcess;
use gradring_proto::error::Error;
use pyo3::exceptions::{PyException, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Names the file for `leave_for_launcher`.
const FAILURE_VARIABLE: &str = "GRADRING_FAILURE_FILE";

/// That file, in the process that is the rank.
static FAILURE_FILE: PerProcess<Option<PathBuf>> = PerProcess::new();

/// The exception that stands for an error: an instance of a class in `gradring.errors`.
///
/// What a signal handler raises wins: Ctrl-C often comes to all ranks, and a peer's abort with it.
pub(crate) fn to_python(py: Python<'_>, error: &Error) -> PyErr {
    if let Err(raised) = py.check_signals() {
        return raised;
    }
    gradring_tensorflow::failures::remember(error);
    leave_for_launcher(error);
    exception_of(py, error)
}

/// This process forms a group, so it is the rank that the launcher has started. The programs that it
/// starts are not, so they do not get the variable.
pub(crate) fn take_failure_file(py: Python<'_>) -> PyResult<()> {
    let environ = py.import("os")?.getattr("environ")?;
    let file = environ.call_method1("pop", (FAILURE_VARIABLE, py.None()))?;
    if let Some(file) = file.extract()? {
        *FAILURE_FILE.lock() = Some(file);
    }
    Ok(())
}

/// `gradring run` sees that a rank ends, and learns here what has happened and which rank is blamed.
fn leave_for_launcher(error: &Error) {
    if let Some(file) = &*FAILURE_FILE.lock() {
        let rank = error.blamed_of_world();
        let rank = rank.map_or("null".into(), |rank| rank.to_string());
        let kind = error.kind.exception();
        // To write into a pipe would block.
        if file.metadata().is_ok_and(|found| !found.is_file()) {
            return;
        }
        // The directory is gone with the launcher.
        let _ = std::fs::write(file, format!(r#"{{"kind": "{kind}", "rank": {rank}}}"#));
    }
}

/// A new group has formed: what happened before did not end this rank. The launcher sees by the file
/// that this rank has been in a group, or that it is alone in its first, as before it joins others.
pub(crate) fn tell_of_group(is_alone: bool) {
    if let Some(file) = &*FAILURE_FILE.lock()
        && file.metadata().map_or(true, |found| found.is_file())
    {
        let text = if is_alone { r#"{"alone": true}"# } else { "{}" };
        let _ = std::fs::write(file, text);
    }
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
    facts.set_item("advice", error.advice())?;
    facts.set_item("rank", blamed.map(|blamed| blamed.rank))?;
    facts.set_item("host", blamed.map(|blamed| &blamed.host))?;
    facts.set_item("collective", &error.collective)?;
    facts.set_item("sequence", error.sequence)?;
    facts.set_item("elapsed_s", error.elapsed.map(|time| time.as_secs_f64()))?;
    let class = py.import("gradring.errors")?.getattr(class)?;
    let exception = class.call((error.happened().to_string(),), Some(&facts))?;
    Ok(PyErr::from_value(exception))
}
