//! `_native.Work`.

use std::time::Duration;

use gradring_core::error::Error;
use gradring_core::work::WaitOutcome;
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
        let limit = timeout.map(|seconds| {
            // Anything that is not a sensible time is no time at all.
            Duration::try_from_secs_f64(seconds).unwrap_or(Duration::ZERO)
        });
        let mut program = Program::default();
        match py.detach(|| self.work.wait(limit, &mut program)) {
            WaitOutcome::Ended(Ok(())) => Ok(()),
            WaitOutcome::Ended(Err(error)) => Err(to_python(py, &error)),
            WaitOutcome::TimedOut => {
                let seconds = timeout.unwrap_or_default();
                let problem = format!("the work has not ended within {seconds} s; it goes on");
                Err(to_python(py, &Error::timeout(problem)))
            }
            WaitOutcome::Interrupted => Err(program.into_error()),
        }
    }
}
