//! The one table from the core's errors to Python's exceptions.

use std::path::PathBuf;

use gradring_net::link::forks::PerProcess;
use gradring_proto::error::Error;
use pyo3::exceptions::{PyException, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Variable with the path of the file that `leave_for_launcher` writes.
const FAILURE_VARIABLE: &str = "GRADRING_FAILURE_FILE";

/// Path of that file, set only in the process that is the rank.
static FAILURE_FILE: PerProcess<Option<PathBuf>> = PerProcess::new();

/// Returns the exception for an error: an instance of a class in `gradring.errors`.
///
/// The exception of a signal handler has priority, because Ctrl-C often reaches all ranks, and a
/// peer's abort arrives with it.
pub(crate) fn to_python(py: Python<'_>, error: &Error) -> PyErr {
    if let Err(raised) = py.check_signals() {
        return raised;
    }
    gradring_tensorflow::failures::remember(error);
    leave_for_launcher(error);
    exception_of(py, error)
}

/// Takes the path out of the environment. A process that forms a group is the rank that the
/// launcher has started. The programs that it starts are not, so they must not inherit the
/// variable.
pub(crate) fn take_failure_file(py: Python<'_>) -> PyResult<()> {
    let environ = py.import("os")?.getattr("environ")?;
    let file = environ.call_method1("pop", (FAILURE_VARIABLE, py.None()))?;
    if let Some(file) = file.extract()? {
        *FAILURE_FILE.lock() = Some(file);
    }
    Ok(())
}

/// Writes the kind of error and the blamed rank to the file, for `gradring run`.
fn leave_for_launcher(error: &Error) {
    if let Some(file) = &*FAILURE_FILE.lock() {
        let rank = error.blamed_of_world();
        let rank = rank.map_or("null".into(), |rank| rank.to_string());
        let kind = error.kind.exception();
        // Writing into a pipe would block.
        if file.metadata().is_ok_and(|found| !found.is_file()) {
            return;
        }
        // A launcher that has ended has removed the directory.
        let _ = std::fs::write(file, format!(r#"{{"kind": "{kind}", "rank": {rank}}}"#));
    }
}

/// Overwrites the file when a group has formed, because earlier errors did not end this rank. The
/// file shows the launcher that this rank has been in a group, or that it is alone in its first
/// one, as before it joins others.
pub(crate) fn tell_of_group(is_alone: bool) {
    if let Some(file) = &*FAILURE_FILE.lock()
        && file.metadata().map_or(true, |found| found.is_file())
    {
        let text = if is_alone { r#"{"alone": true}"# } else { "{}" };
        let _ = std::fs::write(file, text);
    }
}

/// Returns the exception for an error, without a record for TensorFlow or the launcher.
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
