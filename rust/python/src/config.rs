//! `_native.Config`: a process's configuration for its groups, read and checked once.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use gradring_net::config::timing::Timing;
use gradring_net::config::{self, GROUP, PLACE, PROCESS, Setting, Settings, TlsFiles};
use gradring_proto::settings::wrong;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::caller::log_warning;
use crate::errors::to_python;

/// A `gradring.TlsFiles`.
#[derive(FromPyObject)]
pub(crate) struct TlsPaths {
    ca: PathBuf,
    cert: PathBuf,
    key: PathBuf,
}

/// The settings of a process, its listening address, and its credentials.
#[pyclass(frozen, module = "gradring._native")]
pub(crate) struct Config {
    pub(crate) inner: config::Config,
}

#[pymethods]
impl Config {
    #[new]
    #[pyo3(signature = (settings, *, listen=None, announce=None, job="", versions=""))]
    fn new(
        settings: &Bound<'_, PyAny>,
        listen: Option<String>,
        announce: Option<String>,
        job: &str,
        versions: &str,
    ) -> PyResult<Self> {
        let value = |name| settings.getattr(name);
        let mut texts = BTreeMap::new();
        for row in GROUP {
            let value = value(row.name)?;
            if !value.is_none() {
                texts.insert(row.name.into(), value.str()?.extract()?);
            }
        }
        let unusable = |error| to_python(settings.py(), &error);
        let interface: Option<String> = value("interface")?.extract()?;
        // Python also accepts addresses with a zone, which Rust does not parse.
        let interface = interface.map(|text| {
            let address = text.parse();
            address.map_err(|_| unusable(wrong("interface", &text, "an IP address")))
        });
        let inner = config::Config {
            listen,
            ports: value("port")?.extract()?,
            interface: interface.transpose()?,
            announce,
            job: job.into(),
            versions: versions.into(),
            token: value("token")?.extract::<Option<_>>()?.unwrap_or_default(),
            tls: value("tls")?.extract::<Option<_>>()?.map(tls_files),
            settings: Settings::of(&texts).map_err(unusable)?,
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

/// Seconds of silence after which a rank is lost; only for tests of this package.
const SILENCE_VARIABLE: &str = "_GRADRING_SILENCE_S";

fn timing() -> Timing {
    let seconds = std::env::var(SILENCE_VARIABLE).ok();
    let seconds = seconds.and_then(|text| text.parse().ok());
    let silence = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    silence.map_or(Timing::USUAL, Timing::with_silence)
}

pub(crate) fn tls_files(paths: TlsPaths) -> TlsFiles {
    TlsFiles {
        ca: paths.ca,
        certificate: paths.cert,
        key: paths.key,
    }
}

/// Returns the table of settings, with rows for `gradring.config.settings.Setting`.
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
