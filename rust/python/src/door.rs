//! Where a process listens, and with what it proves to others that it belongs to the job.

use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use gradring_core::communicator;
use gradring_core::config::timing::Timing;
use gradring_core::config::{Config, TlsFiles};
use gradring_core::error::Unusable;
use pyo3::prelude::*;

use crate::communicator::log_warning;
use crate::errors::to_python;

/// Paths of the authority's certificate, the own one, and its key.
pub(crate) type TlsPaths = (PathBuf, PathBuf, PathBuf);

/// A port that a process has opened for a group that is yet to form.
#[pyclass(frozen, module = "gradring._native")]
pub(crate) struct Listening {
    pub(crate) socket: Arc<TcpListener>,
    #[pyo3(get)]
    pub(crate) address: String,
    /// Some of whose ranks are to be in the other group.
    pub(crate) beside: Arc<communicator::Communicator>,
}

impl Listening {
    /// Makes a process with this configuration listen there.
    pub(crate) fn prepare(&self, config: &mut Config) {
        config.listen = Some(self.address.clone());
        config.announce = Some(self.address.clone());
        config.socket = Some(Arc::clone(&self.socket));
    }
}

/// `Door` of the stub.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Door {
    listen: Option<String>,
    ports: Option<(u16, u16)>,
    interface: Option<String>,
    announce: Option<String>,
    job: String,
    token: Vec<u8>,
    tls: Option<TlsPaths>,
}

impl Door {
    /// That of a process that is alone so far.
    pub(crate) fn config(self, py: Python<'_>) -> PyResult<Config> {
        let interface = self.interface.map(|interface| {
            interface.parse().map_err(|_| {
                let fact = Unusable::Value {
                    name: "interface".into(),
                    value: interface.into(),
                    wanted: "an IP address".into(),
                };
                to_python(py, &fact.into())
            })
        });
        Ok(Config {
            listen: self.listen,
            ports: self.ports,
            interface: interface.transpose()?,
            announce: self.announce,
            job: self.job,
            token: self.token,
            tls: self.tls.map(tls_files),
            timing: timing(),
            on_warning: log_warning,
            ..Config::new(0, 1, "")
        })
    }
}

/// For tests of this package alone: after how many seconds of silence a rank is lost.
const SILENCE_VARIABLE: &str = "_GRADRING_SILENCE_S";

fn timing() -> Timing {
    let seconds = std::env::var(SILENCE_VARIABLE).ok();
    let seconds = seconds.and_then(|text| text.parse().ok());
    let silence = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    silence.map_or(Timing::USUAL, Timing::with_silence)
}

pub(crate) fn tls_files((ca, certificate, key): TlsPaths) -> TlsFiles {
    TlsFiles {
        ca,
        certificate,
        key,
    }
}
