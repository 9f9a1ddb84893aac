//! `_native.Config`: how a process takes part in groups, read and checked once.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use gradring_net::config::timing::Timing;
use gradring_net::config::{self, GROUP, PLACE, PROCESS, Setting, Settings, TlsFiles};
use gradring_proto::error::Unusable;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::caller::log_warning;
use crate::errors::to_python;

/// Paths of the authority's certificate, the own one, and its key.
pub(crate) type TlsPaths = (PathBuf, PathBuf, PathBuf);

/// The settings of a process, where it listens, and what proves that it belongs to the job.
#[pyclass(frozen, module = "gradring._native")]
pub(crate) struct Config {
    pub(crate) inner: config::Config,
}

#[pymethods]
impl Config {
    #[new]
    #[pyo3(signature = (settings, *, listen=None, ports=None, interface=None, announce=None,
        job="", token=None, tls=None))]
    #[expect(clippy::too_many_arguments, reason = "Python passes them by name")]
    fn new(
        py: Python<'_>,
        settings: BTreeMap<String, String>,
        listen: Option<String>,
        ports: Option<(u16, u16)>,
        interface: Option<&str>,
        announce: Option<String>,
        job: &str,
        token: Option<Vec<u8>>,
        tls: Option<TlsPaths>,
    ) -> PyResult<Self> {
        let interface = interface.map(|interface| {
            interface.parse().map_err(|_| {
                let fact = Unusable::Value {
                    name: "interface".into(),
                    value: interface.into(),
                    wanted: "an IP address".into(),
                };
                to_python(py, &fact.into())
            })
        });
        let inner = config::Config {
            listen,
            ports,
            interface: interface.transpose()?,
            announce,
            job: job.into(),
            token: token.unwrap_or_default(),
            tls: tls.map(tls_files),
            settings: Settings::of(&settings).map_err(|error| to_python(py, &error))?,
            timing: timing(),
            on_warning: log_warning,
            ..config::Config::new(0, 1, "")
        };
        Ok(Self { inner })
    }

    fn listening_at(&self, listen: Option<String>) -> Self {
        let inner = config::Config {
            listen,
            ..self.inner.clone()
        };
        Self { inner }
    }

    #[getter]
    fn listen(&self) -> Option<&str> {
        self.inner.listen.as_deref()
    }

    #[getter]
    fn ports(&self) -> Option<(u16, u16)> {
        self.inner.ports
    }

    #[getter]
    fn announce(&self) -> Option<&str> {
        self.inner.announce.as_deref()
    }

    #[getter]
    fn job(&self) -> &str {
        &self.inner.job
    }

    #[getter]
    fn keeps_strangers_out(&self) -> bool {
        !self.inner.token.is_empty() || self.inner.tls.is_some()
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

/// The table of settings, as `gradring.config.settings.Setting` has its rows.
#[pyfunction]
pub(crate) fn settings(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyDict>>> {
    let row = |setting: &Setting| {
        let row = PyDict::new(py);
        row.set_item("name", setting.name)?;
        row.set_item("variable", setting.variable)?;
        row.set_item("kind", setting.kind)?;
        row.set_item("choices", setting.choices)?;
        row.set_item("default", setting.default)?;
        row.set_item("argument", setting.argument)?;
        row.set_item("agreed", setting.agreed)?;
        row.set_item("reader", format!("{:?}", setting.reader))?;
        row.set_item("meaning", setting.meaning)?;
        Ok(row)
    };
    [PLACE, GROUP, PROCESS].concat().iter().map(row).collect()
}
