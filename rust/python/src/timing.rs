//! `_native.time_collective`: predicted times of collectives.

use gradring_model::{Network, Path, Timing, Traffic, Uplink};
use gradring_proto::error::Result;
use gradring_proto::schedule::Algorithm;
use gradring_proto::schedule::algorithm_rules::Rules;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::caller::Program;
use crate::entry::{detached, enter};
use crate::errors::to_python;

/// A network of equal hosts, as passed from Python.
#[derive(FromPyObject)]
pub(crate) struct Described {
    world_size: usize,
    ranks_per_host: usize,
    latency_s: f64,
    bytes_per_s: f64,
    local_latency_s: f64,
    local_bytes_per_s: f64,
    hosts_per_rack: Option<usize>,
    uplink_bytes_per_s: Option<f64>,
    cores: Option<usize>,
    message_s: f64,
    copy_s_per_byte: f64,
    fold_s_per_byte: f64,
    stragglers: Vec<(usize, f64)>,
}

impl From<Described> for Network {
    fn from(described: Described) -> Self {
        let path = |latency_s, bytes_per_s| Path {
            latency_s,
            bytes_per_s,
        };
        let uplink = described.hosts_per_rack.zip(described.uplink_bytes_per_s);
        Self {
            world_size: described.world_size,
            ranks_per_host: described.ranks_per_host,
            between: path(described.latency_s, described.bytes_per_s),
            inside: path(described.local_latency_s, described.local_bytes_per_s),
            uplink: uplink.map(|(hosts, bytes_per_s)| Uplink { hosts, bytes_per_s }),
            cores: described.cores,
            message_s: described.message_s,
            copy_s_per_byte: described.copy_s_per_byte,
            fold_s_per_byte: described.fold_s_per_byte,
            stragglers: described.stragglers,
        }
    }
}

/// Predicts the times of float32 sums of `sizes` bytes on a network.
///
/// If `algorithm` names one algorithm, that one is timed. Otherwise it is the option with which a
/// group would choose. `splits` are relative chunk sizes of an all-to-all, which is then timed in
/// place of a sum.
#[pyfunction]
#[pyo3(signature = (network, sizes, algorithm, splits=None))]
pub(crate) fn time_collective<'py>(
    py: Python<'py>,
    network: Described,
    sizes: Vec<usize>,
    algorithm: &str,
    splits: Option<Vec<u32>>,
) -> PyResult<Vec<Bound<'py, PyDict>>> {
    enter(py, || {
        let network = Network::from(network);
        let traffic = |bytes| match splits.clone() {
            None => Traffic::AllReduce { bytes },
            Some(splits) => Traffic::AllToAll { bytes, splits },
        };
        let all: Vec<Traffic> = sizes.into_iter().map(traffic).collect();
        let mut program = Program::default();
        let found = detached(py, || times(&network, &all, algorithm, &mut program));
        if program.exception.is_some() {
            return Err(program.into_error());
        }
        let found = found.map_err(|error| to_python(py, &error))?;
        let row = |(traffic, (algorithm, timing)): (&Traffic, (Algorithm, Timing))| {
            let row = PyDict::new(py);
            row.set_item("algorithm", algorithm.name())?;
            row.set_item("seconds", timing.seconds)?;
            row.set_item("first_seconds", timing.first_seconds)?;
            row.set_item("pieces", timing.pieces)?;
            row.set_item("busiest_line", timing.busiest_line)?;
            row.set_item("busiest_rank", timing.busiest_rank)?;
            row.set_item("bandwidth_bound_s", network.bandwidth_bound_s(traffic))?;
            row.set_item("latency_bound_s", network.latency_bound_s())?;
            Ok(row)
        };
        all.iter().zip(found).map(row).collect()
    })
}

fn times(
    network: &Network,
    all: &[Traffic],
    algorithm: &str,
    program: &mut Program,
) -> Result<Vec<(Algorithm, Timing)>> {
    let rules = Rules::parse(algorithm)?;
    let policy = match Algorithm::from_name(algorithm) {
        Some(_) => None,
        None => Some(gradring_model::policy(rules, network, program)?),
    };
    let mut time = |traffic: &Traffic| {
        let ruled = Algorithm::from_name(algorithm);
        let call = traffic.call(0, network.world_size);
        let chosen = policy.as_ref().map(|policy| policy.choose(&call));
        let chosen = ruled.or(chosen).expect("there is a policy without a rule");
        let timing = gradring_model::time(traffic, chosen, network, program)?;
        Ok((chosen, timing))
    };
    all.iter().map(&mut time).collect()
}
