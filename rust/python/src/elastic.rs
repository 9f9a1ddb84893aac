//! `_native.Participant`.

use std::sync::Arc;
use std::time::Duration;

use gradring_core::elastic::{self, Event};
use gradring_net::caller::Caller;
use gradring_proto::consensus::quorum::{Id, Peer};
use gradring_proto::settings::LONGEST_S;
use pyo3::prelude::*;

use crate::caller::{Program, guarded};
use crate::communicator::Communicator;
use crate::config::Config;
use crate::entry::{detached, enter, stay_away_once_gone};
use crate::errors::{tell_of_group, to_python};

/// Id and listening address of a process.
type PeerTuple = ([u8; 16], String);

/// This process in an elastic job.
#[pyclass(frozen, module = "gradring._native")]
pub(crate) struct Participant {
    inner: elastic::Participant,
}

/// The program that waits for the next group, and its object that receives the events until then.
struct ProgramObserver<'a> {
    program: &'a mut Program,
    progress: &'a Py<PyAny>,
}

impl Caller for ProgramObserver<'_> {
    fn interrupts(&mut self) -> bool {
        self.program.interrupts()
    }
}

impl elastic::Observer for ProgramObserver<'_> {
    /// Calls the object's method for the event; an exception cancels the wait.
    fn on_event(&mut self, event: Event<'_>) -> bool {
        stay_away_once_gone();
        if self.program.exception.is_none() {
            let failure = Python::attach(|py| {
                let progress = self.progress.bind(py);
                let outcome = match event {
                    Event::Left => progress.call_method0("left"),
                    Event::Agreed { joins_again } => {
                        progress.call_method1("agreed", (joins_again,))
                    }
                    Event::NotFormed(error) => {
                        let exception = to_python(py, error).into_value(py);
                        progress.call_method1("not_formed", (exception,))
                    }
                };
                outcome.err()
            });
            self.program.exception = failure;
        }
        self.program.exception.is_none()
    }
}

#[pymethods]
impl Participant {
    #[new]
    #[pyo3(signature = (*, group, addresses, workers, worker_timeout, config))]
    fn new(
        py: Python<'_>,
        group: &Bound<'_, Communicator>,
        addresses: Vec<String>,
        workers: (usize, usize),
        worker_timeout: f64,
        config: &Bound<'_, Config>,
    ) -> PyResult<Self> {
        let group = Arc::clone(&group.get().inner);
        enter(py, || {
            let config = gradring_net::config::Config {
                id: Some(group.id),
                ..config.get().inner.clone()
            };
            let workers = workers.0..=workers.1;
            let worker_timeout = Duration::from_secs_f64(worker_timeout.clamp(0.0, LONGEST_S));
            let inner = detached(py, || {
                elastic::Participant::new(
                    &config,
                    Some(&group),
                    &addresses,
                    workers,
                    worker_timeout,
                )
            });
            let inner = inner.map_err(|error| to_python(py, &error))?;
            Ok(Self { inner })
        })
    }

    #[getter]
    fn peer(&self) -> PeerTuple {
        let peer = self.inner.peer();
        (peer.id.0, peer.address)
    }

    fn found(&self, peers: Vec<PeerTuple>, generation: u64) {
        let peers = peers.into_iter().map(|(id, address)| Peer {
            id: Id(id),
            address,
        });
        self.inner.found(peers.collect(), generation);
    }

    /// Forms the next group.
    ///
    /// Returns it with the address at which its first rank listens, or None if all processes have
    /// finished the training.
    fn next_group(
        &self,
        py: Python<'_>,
        last: &Bound<'_, Communicator>,
        progress: Py<PyAny>,
        newcomers_failed: bool,
    ) -> PyResult<Option<(Communicator, String)>> {
        let last = Arc::clone(&last.get().inner);
        enter(py, || {
            let formed = guarded(py, |program| {
                let progress = &progress;
                let mut observer = ProgramObserver { program, progress };
                self.inner
                    .next_group(&last, newcomers_failed, &mut observer)
            })?;
            Ok(formed.map(|(inner, rendezvous)| {
                tell_of_group(false);
                (Communicator { inner }, rendezvous)
            }))
        })
    }

    #[getter]
    fn has_state(&self) -> bool {
        self.inner.has_state()
    }

    fn establish(&self, py: Python<'_>, group: &Bound<'_, Communicator>) -> PyResult<()> {
        let group = Arc::clone(&group.get().inner);
        enter(py, || {
            guarded(py, |program| self.inner.establish(&group, program))
        })
    }

    #[getter]
    fn joiners(&self) -> Vec<String> {
        self.inner.joiners()
    }

    #[getter]
    fn reconfigured_by(&self) -> Option<String> {
        self.inner.reconfigured_by()
    }

    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        enter(py, || {
            detached(py, || self.inner.finish());
            Ok(())
        })
    }

    fn leave(&self, py: Python<'_>, tells: bool) -> PyResult<()> {
        enter(py, || {
            detached(py, || self.inner.leave(tells));
            Ok(())
        })
    }
}
