//! `_native.Work`.

use std::time::Duration;

use gradring_core::work::WaitOutcome;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::caller::Program;
use crate::errors::to_python;

/// An asynchronous collective.
#[pyclass(frozen, module = "gradring._native")]
pub(crate) struct Work {
    work: gradring_core::work::Work,
}

impl Work {
    pub(crate) const fn new(work: gradring_core::work::Work) -> Self {
        Self { work }
    }
}

#[pymethods]
impl Work {
    fn done(&self) -> bool {
        self.work.done()
    }

    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let limit = match timeout {
            Some(seconds) if seconds.is_nan() || seconds < 0.0 => {
                let problem = format!("timeout={seconds} is not a number of seconds from 0 up");
                return Err(PyValueError::new_err(problem));
            }
            // What is too long for a duration, such as infinity, is no limit.
            seconds => seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()),
        };
        let mut program = Program::default();
        match py.detach(|| self.work.wait(limit, &mut program)) {
            WaitOutcome::Ended(Ok(())) => Ok(()),
            WaitOutcome::Ended(Err(error)) | WaitOutcome::TimedOut(error) => {
                Err(to_python(py, &error))
            }
            WaitOutcome::Interrupted => Err(program.into_error()),
        }
    }
}
