//! `_native.inquire`: the state of a rank of a running job.

use std::time::Duration;

use gradring_core::inquire;
use gradring_proto::settings::LONGEST_S;
use gradring_proto::wire::state::{Collective, Phase, State};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::config::{TlsPaths, tls_files};
use crate::entry::{detached, enter};
use crate::errors::to_python;

/// Returns the state of the rank that listens at `host:port`; `timeout` is in seconds.
#[pyfunction]
#[pyo3(name = "inquire")]
pub(crate) fn ask<'py>(
    py: Python<'py>,
    address: &str,
    token: &[u8],
    tls: Option<TlsPaths>,
    timeout: f64,
) -> PyResult<Bound<'py, PyDict>> {
    let limit = Duration::try_from_secs_f64(timeout.min(LONGEST_S))
        .map_err(|error| PyValueError::new_err(format!("timeout={timeout}: {error}")))?;
    let tls = tls.map(tls_files);
    enter(py, || {
        let state = detached(py, || inquire(address, token, tls.as_ref(), limit));
        state_to_python(py, state.map_err(|error| to_python(py, &error))?)
    })
}

fn state_to_python(py: Python<'_>, state: State) -> PyResult<Bound<'_, PyDict>> {
    let result = PyDict::new(py);
    result.set_item("rank", state.rank)?;
    result.set_item("world_size", state.world_size)?;
    result.set_item("host", state.host)?;
    result.set_item("process_id", state.process_id)?;
    result.set_item("version", state.version)?;
    match state.phase {
        Phase::Forming {
            missing,
            generation,
        } => {
            result.set_item("missing", missing)?;
            result.set_item("formed", false)?;
            result.set_item("runs", generation > 0)?;
        }
        Phase::Between { is_outside } => {
            result.set_item("missing", None::<Vec<usize>>)?;
            result.set_item("formed", false)?;
            result.set_item("runs", !is_outside)?;
        }
        Phase::Formed {
            group,
            members,
            entered,
            beside,
            awaited,
            ended,
            failed,
        } => {
            result.set_item("formed", true)?;
            result.set_item("runs", true)?;
            result.set_item("group", group.to_string())?;
            result.set_item("members", members)?;
            result.set_item("entered", entered.map(collective))?;
            result.set_item("beside", beside.map(|beside| collective(*beside)))?;
            result.set_item("awaited", awaited)?;
            result.set_item("ended", ended.map(collective))?;
            result.set_item("failed", failed)?;
        }
    }
    Ok(result)
}

/// Returns ordinal, call, and age in seconds.
fn collective(collective: Collective) -> (u64, String, f64) {
    let Collective {
        sequence,
        call,
        age,
    } = collective;
    (sequence, call, age.as_secs_f64())
}
