//! `_native.Listening`.

use std::net::TcpListener;
use std::sync::Arc;

use gradring_core::communicator;
use gradring_net::config::Config;
use pyo3::prelude::*;

/// A port that a process has opened for a group that has not formed yet.
#[pyclass(frozen, module = "gradring._native")]
pub(crate) struct Listening {
    pub(crate) socket: Arc<TcpListener>,
    #[pyo3(get)]
    pub(crate) address: String,
    /// Group from which ranks will join the new group.
    pub(crate) beside: Arc<communicator::Communicator>,
}

impl Listening {
    /// Changes a configuration so that its process listens on this port.
    pub(crate) fn prepare(&self, config: &mut Config) {
        config.listen = Some(self.address.clone());
        config.announce = Some(self.address.clone());
        config.socket = Some(Arc::clone(&self.socket));
    }
}
