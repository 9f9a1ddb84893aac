//! `_native.Participant`.

use std::sync::Arc;
use std::time::Duration;

use gradring_core::agreement::quorum::{Id, Peer};
use gradring_core::config::LONGEST_S;
use gradring_core::elastic;
use pyo3::prelude::*;

use crate::caller::guarded;
use crate::communicator::Communicator;
use crate::config::Config;
use crate::entry::{detached, enter};
use crate::errors::to_python;

/// Generation, rank, and where each member listens.
pub(crate) type Agreement = (u32, usize, Vec<String>);

/// Who a process is, and where it listens.
type PeerTuple = ([u8; 16], String);

/// This process in an elastic job.
#[pyclass(frozen, module = "gradring._native")]
pub(crate) struct Participant {
    pub(crate) inner: Arc<elastic::Participant>,
}

#[pymethods]
impl Participant {
    #[new]
    #[pyo3(signature = (*, group, addresses, patience, config))]
    fn new(
        py: Python<'_>,
        group: Option<Py<Communicator>>,
        addresses: Vec<String>,
        patience: f64,
        config: &Bound<'_, Config>,
    ) -> PyResult<Self> {
        enter(py, || {
            let config = config.get().inner.clone();
            let patience = Duration::from_secs_f64(patience.clamp(0.0, LONGEST_S));
            let group = group.map(|group| Arc::clone(&group.get().inner));
            let inner = detached(py, || {
                elastic::Participant::new(&config, group.as_deref(), &addresses, patience)
            });
            let inner = Arc::new(inner.map_err(|error| to_python(py, &error))?);
            Ok(Self { inner })
        })
    }

    #[getter]
    fn peer(&self) -> PeerTuple {
        let peer = self.inner.peer();
        (peer.id.0, peer.address)
    }

    fn found(&self, peers: Vec<PeerTuple>, generation: u64, least: usize, most: usize) {
        let peers = peers.into_iter().map(|(id, address)| Peer {
            id: Id(id),
            address,
        });
        self.inner.found(peers.collect(), generation, least..=most);
    }

    fn join(&self, addresses: Vec<String>, least: usize, most: usize) {
        self.inner.join(addresses, least..=most);
    }

    fn agree(&self, py: Python<'_>) -> PyResult<Option<Agreement>> {
        enter(py, || {
            let agreed = guarded(py, |program| self.inner.agree(program))?;
            Ok(agreed.map(|agreed| (agreed.generation, agreed.rank, agreed.addresses)))
        })
    }

    fn connected(&self, py: Python<'_>, group: &Bound<'_, Communicator>) -> PyResult<()> {
        let group = Arc::clone(&group.get().inner);
        enter(py, || {
            detached(py, || self.inner.connected(&group));
            Ok(())
        })
    }

    fn reform(&self, py: Python<'_>, unreached: Vec<usize>) -> PyResult<()> {
        enter(py, || {
            let reformed = detached(py, || self.inner.reform(&unreached));
            reformed.map_err(|error| to_python(py, &error))
        })
    }

    #[getter]
    fn joiners(&self) -> Vec<String> {
        self.inner.joiners()
    }

    #[getter]
    fn call(&self) -> Option<String> {
        self.inner.call()
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
