//! The Python program that makes a blocking call: its signal handlers, its log, and the place of
//! the call.

use std::path::Path;

use gradring_net::caller::Caller;
use gradring_proto::error::Error;
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::entry::{self, attached, detached};
use crate::errors::to_python;

/// Largest length of a file's name. Longer names lose their beginning, because thousands of records
/// are kept.
const FILE_BYTES_MAX: usize = 100;

/// Lets Python's signal handlers run while the core waits, and keeps their exceptions.
#[derive(Default)]
pub(crate) struct Program {
    /// Exception that a handler raised, as for Ctrl-C.
    pub(crate) exception: Option<PyErr>,
}

impl Program {
    pub(crate) fn into_error(self) -> PyErr {
        self.exception
            .unwrap_or_else(|| PyKeyboardInterrupt::new_err(()))
    }
}

impl Caller for Program {
    fn interrupts(&mut self) -> bool {
        entry::stay_away_once_gone();
        if self.exception.is_none() {
            self.exception = Python::attach(|py| {
                let raised = py.check_signals().err();
                raised.or_else(|| entry::refusal(py))
            });
        }
        self.exception.is_some()
    }

    fn place(&mut self) -> Option<String> {
        entry::stay_away_once_gone();
        // An interpreter that hides its frames gives no place.
        Python::attach(place).ok().flatten()
    }
}

/// Runs `body` without the interpreter; a signal handler's exception has priority over its error.
pub(crate) fn guarded<T: Send>(
    py: Python<'_>,
    body: impl FnOnce(&mut Program) -> Result<T, Error> + Send,
) -> PyResult<T> {
    let mut program = Program::default();
    let result = detached(py, || body(&mut program));
    match (result, program.exception) {
        (_, Some(exception)) => Err(exception),
        (result, None) => result.map_err(|error| to_python(py, &error)),
    }
}

/// Hands a warning to Python's logging on a new thread, because no thread of the core may wait for
/// the interpreter.
pub(crate) fn log_warning(warning: String) {
    let log = move || {
        let logged = attached(|py| {
            let logger = py
                .import("logging")?
                .call_method1("getLogger", ("gradring",))?;
            logger.call_method1("warning", ("%s", warning)).map(drop)
        });
        // During shutdown nobody reads the warning, and errors of a logging handler are the
        // program's.
        drop(logged);
    };
    // If the system has no thread left, the warning is dropped.
    drop(std::thread::Builder::new().spawn(log));
}

/// Returns file and line of this thread's innermost frame outside this package. Runs no code in
/// Python, in which a signal handler could raise.
fn place(py: Python<'_>) -> PyResult<Option<String>> {
    let mut frame = py.import("sys")?.call_method0("_getframe")?;
    while !frame.is_none() {
        let module = frame.getattr("f_globals")?.get_item("__name__");
        let module = module.and_then(|name| name.extract::<String>());
        if !module.is_ok_and(|name| name == "gradring" || name.starts_with("gradring.")) {
            let file = frame.getattr("f_code")?.getattr("co_filename")?;
            let file = file.cast::<PyString>()?.to_string_lossy().into_owned();
            let line: usize = frame.getattr("f_lineno")?.extract()?;
            return Ok(Some(format!("{}:{line}", shortened(&file))));
        }
        frame = frame.getattr("f_back")?;
    }
    Ok(None)
}

/// Returns a file's path from the working directory, cut to its end if it is too long.
fn shortened(file: &str) -> String {
    let here = std::env::current_dir().unwrap_or_default();
    let seen = Path::new(file).strip_prefix(here).ok();
    let seen = seen.and_then(Path::to_str).unwrap_or(file);
    let cut = seen.len().saturating_sub(FILE_BYTES_MAX);
    let cut = (cut..).find(|&cut| seen.is_char_boundary(cut));
    let end = &seen[cut.unwrap_or_default()..];
    format!("{}{end}", if end == seen { "" } else { "..." })
}
