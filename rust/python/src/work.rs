//! `_native.Work`.

use std::time::Duration;

use gradring_core::work::WaitOutcome;
use gradring_net::link::forks::Process;
use gradring_proto::error::Abort;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::caller::Program;
use crate::entry::{detached, enter};
use crate::errors::to_python;

/// An asynchronous collective.
#[pyclass(frozen, module = "gradring._native")]
pub(crate) struct Work {
    work: gradring_core::work::Work,
    /// Process whose threads complete it.
    process: Process,
}

impl Work {
    pub(crate) fn new(work: gradring_core::work::Work) -> Self {
        let process = Process::this();
        Self { work, process }
    }

    fn enter<T>(&self, py: Python<'_>, body: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
        enter(py, || match self.process.is_this() {
            true => body(),
            false => Err(to_python(py, &Abort::OfParent.into())),
        })
    }
}

#[pymethods]
impl Work {
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        self.enter(py, || Ok(self.work.done()))
    }

    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let limit = match timeout {
            Some(seconds) if seconds.is_nan() || seconds < 0.0 => {
                let problem = format!("timeout={seconds} is not a number of seconds from 0 up");
                return Err(PyValueError::new_err(problem));
            }
            // A time that no `Duration` can hold, such as infinity, means no limit.
            seconds => seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()),
        };
        self.enter(py, || {
            let mut program = Program::default();
            let outcome = detached(py, || self.work.wait(limit, &mut program));
            match outcome {
                WaitOutcome::Ended(Ok(())) => Ok(()),
                WaitOutcome::Ended(Err(error)) | WaitOutcome::TimedOut(error) => {
                    Err(to_python(py, &error))
                }
                WaitOutcome::Interrupted => Err(program.into_error()),
            }
        })
    }
}
