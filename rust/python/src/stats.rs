//! Statistics of a communicator, as dictionaries.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use gradring_core::communicator::Communicator;
use gradring_core::drive::MAPPED;
use gradring_core::observe::stats::{Lateness, Stats, Totals};
use gradring_proto::schedule::Algorithm;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Returns the dictionary of `Communicator.stats()`.
pub(crate) fn to_python<'py>(
    py: Python<'py>,
    communicator: &Communicator,
) -> PyResult<Bound<'py, PyDict>> {
    let stats = communicator.stats();
    let collectives = PyDict::new(py);
    for (name, totals) in &stats.collectives {
        collectives.set_item(name, totals_to_python(py, totals)?)?;
    }
    let result = totals_to_python(py, &stats.all)?;
    result.set_item("transport", &communicator.transport_name)?;
    result.set_item("streams", communicator.streams)?;
    result.set_item("checksum", communicator.checksum)?;
    result.set_item("collectives", collectives)?;
    result.set_item("algorithms", algorithms(py, communicator, &stats)?)?;
    result.set_item("exposed_s", stats.exposed.as_secs_f64())?;
    let now = Instant::now();
    let by_peer = |time: fn(&Lateness, Instant) -> Duration| -> BTreeMap<usize, f64> {
        let peers = stats.lateness.iter();
        peers
            .map(|(&rank, lateness)| (rank, time(lateness, now).as_secs_f64()))
            .collect()
    };
    result.set_item("lateness_s", by_peer(|lateness, _| lateness.total))?;
    result.set_item(
        "lateness_recent_s",
        by_peer(|lateness, now| lateness.recent(now)),
    )?;
    let congestion = communicator.tcp_congestion.iter();
    let congestion: BTreeMap<&str, String> = congestion
        .map(|(name, reasons)| {
            let reasons: Vec<&str> = reasons.iter().map(String::as_str).collect();
            (name.as_str(), reasons.join("; "))
        })
        .collect();
    result.set_item("tcp_congestion", congestion)?;
    Ok(result)
}

/// Returns the statistics of each algorithm that was used, measured, chosen or set by the user.
fn algorithms<'py>(
    py: Python<'py>,
    communicator: &Communicator,
    stats: &Stats,
) -> PyResult<Bound<'py, PyDict>> {
    let policy = communicator.engine.policy();
    let explained = policy.explain();
    let result = PyDict::new(py);
    let named = Algorithm::ALL.map(|algorithm| (algorithm.name(), Some(algorithm)));
    for (name, algorithm) in named.into_iter().chain([(MAPPED, None)]) {
        let used = stats.algorithms.get(name);
        let cost = algorithm.and_then(|algorithm| policy.measured(algorithm));
        let chosen = explained.get(name);
        if used.is_none() && cost.is_none() && chosen.is_none() {
            continue;
        }
        let used = used.copied().unwrap_or_default();
        let known = PyDict::new(py);
        known.set_item("count", used.count)?;
        known.set_item("bytes", used.bytes)?;
        known.set_item("latency_s", cost.map(|cost| cost.latency.as_secs_f64()))?;
        known.set_item("seconds_per_byte", cost.map(|cost| cost.seconds_per_byte))?;
        known.set_item("chosen", chosen)?;
        result.set_item(name, known)?;
    }
    Ok(result)
}

fn totals_to_python<'py>(py: Python<'py>, totals: &Totals) -> PyResult<Bound<'py, PyDict>> {
    let time_s = (totals.waiting + totals.moving).as_secs_f64();
    let algbw_gbps = if time_s > 0.0 {
        totals.bytes as f64 / time_s / 1e9
    } else {
        0.0
    };
    let result = PyDict::new(py);
    result.set_item("count", totals.count)?;
    result.set_item("bytes", totals.bytes)?;
    result.set_item("bytes_sent", totals.bytes_sent)?;
    result.set_item("time_s", time_s)?;
    result.set_item("waiting_s", totals.waiting.as_secs_f64())?;
    result.set_item("moving_s", totals.moving.as_secs_f64())?;
    result.set_item("algbw_gbps", algbw_gbps)?;
    result.set_item("algorithm", totals.algorithm)?;
    Ok(result)
}
