//! `_native.Communicator`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use gradring_core::communicator;
use gradring_core::observe::board::NOTE_BYTES_MAX;
use gradring_net::caller::Caller as _;
use gradring_net::config;
use gradring_proto::collective::Collective::AllReduce;
use gradring_proto::collective::{self, Request};
use gradring_proto::error::Subgroup;
use gradring_proto::wire::gossip::Gossip;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};

use crate::arrays::Bucket;
use crate::block::Block;
use crate::caller::guarded;
use crate::collective::{Collective, reduce_op};
use crate::config::Config;
use crate::entry::{detached, enter};
use crate::errors::{take_failure_file, tell_of_group, to_python};
use crate::listening::Listening;
use crate::stats;
use crate::work::Work;

/// A connected group of ranks.
#[pyclass(frozen, module = "gradring._native")]
pub(crate) struct Communicator {
    pub(crate) inner: Arc<communicator::Communicator>,
}

#[pymethods]
impl Communicator {
    #[new]
    #[pyo3(signature = (*, rank, world_size, rendezvous, addresses, config, listening=None, part=None))]
    #[expect(clippy::too_many_arguments, reason = "Python passes them by name")]
    fn new(
        py: Python<'_>,
        rank: usize,
        world_size: usize,
        rendezvous: String,
        addresses: Vec<String>,
        config: &Bound<'_, Config>,
        listening: Option<(Py<Listening>, Vec<usize>)>,
        part: Option<(Bound<'_, PyString>, Vec<usize>)>,
    ) -> PyResult<Self> {
        enter(py, || {
            take_failure_file(py)?;
            let part = part.map(|(name, world_ranks)| {
                let name = name.to_string_lossy().into_owned();
                Arc::new(Subgroup { name, world_ranks })
            });
            let mut config = config::Config {
                rank,
                world_size,
                rendezvous,
                addresses,
                part,
                ..config.get().inner.clone()
            };
            let beside = listening.map(|(listening, ranks)| {
                let listening = listening.get();
                listening.prepare(&mut config);
                (Arc::clone(&listening.beside), ranks)
            });
            let inner = guarded(py, |program| match beside {
                None => communicator::Communicator::connect(&config, program),
                Some((group, ranks)) => {
                    let mut or_lost = || program.interrupts() || group.failure_by(&ranks).is_some();
                    communicator::Communicator::connect(&config, &mut or_lost)
                        .map_err(|error| error.within(config.part.as_ref()))
                        .map_err(|error| group.failure_by(&ranks).unwrap_or(error))
                }
            })?;
            tell_of_group(inner.world_size() == 1 && inner.generation == 0);
            Ok(Self { inner })
        })
    }

    #[getter]
    fn id(&self) -> u64 {
        self.inner.id
    }

    #[getter]
    fn generation(&self) -> u32 {
        self.inner.generation
    }

    #[getter]
    fn rank(&self) -> usize {
        self.inner.rank
    }

    #[getter]
    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    #[getter]
    fn local_rank(&self) -> usize {
        self.inner.roster.local_rank(self.inner.rank)
    }

    #[getter]
    fn local_size(&self) -> usize {
        self.inner.roster.local_size(self.inner.rank)
    }

    fn listen_beside(&self, py: Python<'_>, ports: Option<(u16, u16)>) -> PyResult<Listening> {
        let opened = self.outside(py, |inner| inner.listen_beside(ports))?;
        let (socket, address) = opened.map_err(|error| to_python(py, &error))?;
        let beside = Arc::clone(&self.inner);
        Ok(Listening {
            socket,
            address,
            beside,
        })
    }

    #[getter]
    fn hosts(&self) -> Vec<&str> {
        (0..self.inner.world_size())
            .map(|rank| self.inner.roster.host(rank))
            .collect()
    }

    #[getter]
    fn versions(&self) -> Vec<&str> {
        self.inner.roster.versions().collect()
    }

    #[getter]
    fn reachable_from_other_hosts(&self) -> Vec<usize> {
        self.inner.roster.reachable_from_other_hosts().collect()
    }

    #[getter]
    fn transport(&self) -> &str {
        &self.inner.transport_name
    }

    #[getter]
    fn memory_not_shared(&self) -> BTreeMap<usize, String> {
        self.inner.memory_not_shared.clone()
    }

    fn all_reduce(
        &self,
        py: Python<'_>,
        arrays: &Bound<'_, PyAny>,
        op: &Bound<'_, PyString>,
        name: &Bound<'_, PyString>,
    ) -> PyResult<()> {
        let op = reduce_op(op)?;
        self.run_over(py, arrays, None, name, AllReduce { op })
    }

    /// Runs a collective over `arrays`.
    ///
    /// All ranks must have arrays of the same shapes, or pass the same `shape`.
    #[pyo3(signature = (collective, arrays, name, shape=None))]
    fn run(
        &self,
        py: Python<'_>,
        collective: &Collective,
        arrays: &Bound<'_, PyAny>,
        name: &Bound<'_, PyString>,
        shape: Option<Vec<usize>>,
    ) -> PyResult<()> {
        self.run_over(py, arrays, shape.as_deref(), name, collective.0.clone())
    }

    /// Starts a collective over `arrays`, and returns its work at once.
    ///
    /// Arguments are those of `run`.
    #[pyo3(signature = (collective, arrays, name, shape=None))]
    fn start(
        &self,
        py: Python<'_>,
        collective: &Collective,
        arrays: &Bound<'_, PyAny>,
        name: &Bound<'_, PyString>,
        shape: Option<Vec<usize>>,
    ) -> PyResult<Work> {
        enter(py, || {
            let name = &name.to_string_lossy();
            let writes = collective.0.writes(self.inner.rank);
            let mut bucket = Bucket::parse(arrays, writes)?;
            let keepalive = Box::new((bucket.claim(), bucket.take_owners()));
            bucket.agree_on(shape.as_deref());
            // SAFETY: the arrays are kept alive; the documentation asks the program to leave them
            // alone until the work has ended.
            let request = unsafe { bucket.into_request(collective.0.clone(), name, keepalive) };
            self.start_request(py, request)
        })
    }

    /// Returns memory for an array that all ranks read; None if not all ranks have heaps.
    fn allocate(&self, py: Python<'_>, bytes: usize) -> PyResult<Option<Block>> {
        let allocated = self.outside(py, |inner| inner.allocate(bytes))?;
        let block = allocated.map_err(|error| to_python(py, &error))?;
        Ok(block.map(Block))
    }

    fn start_barrier(&self, py: Python<'_>) -> PyResult<Work> {
        enter(py, || self.start_request(py, Request::barrier()))
    }

    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        enter(py, || {
            guarded(py, |program| {
                self.inner.engine.run(Request::barrier(), program)
            })
        })
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        enter(py, || stats::to_python(py, &self.inner))
    }

    fn gossip<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let to_python = |gossip: Gossip| {
            let seconds = |ns: u64| Duration::from_nanos(ns).as_secs_f64();
            let late: BTreeMap<usize, (f64, f64)> = gossip
                .late
                .iter()
                .map(|late| (late.rank, (seconds(late.total_ns), seconds(late.recent_ns))))
                .collect();
            let dict = PyDict::new(py);
            dict.set_item("rank", gossip.rank)?;
            dict.set_item("lateness_s", late)?;
            dict.set_item("note", PyBytes::new(py, &gossip.note))?;
            Ok(dict)
        };
        enter(py, || {
            self.inner.gossip().into_iter().map(to_python).collect()
        })
    }

    fn note(&self, py: Python<'_>, note: Vec<u8>, now: bool) -> PyResult<()> {
        if note.len() > NOTE_BYTES_MAX {
            let problem = format!("a note has {} bytes; {NOTE_BYTES_MAX} at most", note.len());
            return Err(PyValueError::new_err(problem));
        }
        self.outside(py, |inner| inner.note(note, now))
    }

    fn write_records_to(&self, py: Python<'_>, directory: PathBuf) -> PyResult<()> {
        self.outside(py, |inner| inner.write_records_to(&directory))
    }

    fn start_trace(&self, py: Python<'_>, limit: usize) -> PyResult<()> {
        self.outside(py, |inner| inner.start_trace(limit))
    }

    fn take_trace<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let json = self.outside(py, communicator::Communicator::take_trace)?;
        Ok(json.map(|json| PyBytes::new(py, &json)))
    }

    #[getter]
    fn launched(&self) -> u64 {
        self.inner.engine.launched()
    }

    #[getter]
    fn has_failed(&self) -> bool {
        self.inner.has_failed()
    }

    fn begin_step(&self, collective_exit: bool) {
        self.inner.engine.begin_step(collective_exit);
    }

    fn end_step(&self, left: Option<&Bound<'_, PyString>>) -> (u64, u64) {
        let left = left.map(|left| left.to_string_lossy());
        self.inner.engine.end_step(left.as_deref())
    }

    fn abort(&self, reason: &Bound<'_, PyString>) -> PyResult<()> {
        let text = reason.to_string_lossy();
        self.outside(reason.py(), |inner| inner.abort(&text))
    }

    /// Fails every rank, because this one has no memory for `bytes` of `what`.
    fn fail_without_memory(&self, py: Python<'_>, bytes: usize, what: &str) -> PyResult<()> {
        let error = self.outside(py, |inner| inner.fail_without_memory(bytes, what))?;
        Err(to_python(py, &error))
    }

    /// Returns the number of elements that arrive from each rank in `call`.
    ///
    /// `rows` are the numbers that the ranks have announced; a row has `elements` of `bytes` each.
    /// Impossible or too large numbers fail every rank.
    fn elements_of_rows(
        &self,
        py: Python<'_>,
        rows: Vec<i64>,
        elements: usize,
        bytes: usize,
        call: &str,
    ) -> PyResult<Vec<usize>> {
        self.outside(py, |inner| {
            inner.elements_of_rows(&rows, (elements, bytes), call)
        })?
        .map_err(|error| to_python(py, &error))
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.outside(py, communicator::Communicator::close)
    }
}

impl Communicator {
    /// Runs `body` without the interpreter. `body` must not wait for peers.
    fn outside<T: Send>(
        &self,
        py: Python<'_>,
        body: impl FnOnce(&communicator::Communicator) -> T + Send,
    ) -> PyResult<T> {
        enter(py, || Ok(detached(py, || body(&self.inner))))
    }

    fn start_request(&self, py: Python<'_>, request: Request) -> PyResult<Work> {
        let started = self.inner.start(request);
        started
            .map(Work::new)
            .map_err(|error| to_python(py, &error))
    }

    /// Runs a blocking collective over `arrays`.
    fn run_over(
        &self,
        py: Python<'_>,
        arrays: &Bound<'_, PyAny>,
        shape: Option<&[usize]>,
        name: &Bound<'_, PyString>,
        collective: collective::Collective,
    ) -> PyResult<()> {
        enter(py, || {
            // A name that quotes a file's name may be invalid UTF-8.
            let name = &name.to_string_lossy();
            let writes = collective.writes(self.inner.rank);
            let mut bucket = Bucket::parse(arrays, writes)?;
            let _owners = bucket.take_owners();
            bucket.agree_on(shape);
            // SAFETY: the owners outlive the collective; the documentation asks other threads of
            // the program to leave the arrays alone.
            let request = unsafe { bucket.into_request(collective, name, Box::new(())) };
            guarded(py, |program| self.inner.run(request, program))
        })
    }
}
