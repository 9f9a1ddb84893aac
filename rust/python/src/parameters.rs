//! `_native.ParameterServer` and `_native.ParameterClient`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use gradring_proto::dtype::{bf16, f16};
use gradring_proto::error::Result;
use gradring_proto::parameters::float::FloatType;
use gradring_proto::parameters::floats::FloatSlice;
use gradring_proto::parameters::optimizer::{Hyper, Optimizer};
use gradring_proto::parameters::rules::Rules;
use gradring_proto::settings::{LONGEST_S, wrong};
use gradring_proto::wire::handshake::MODELS_MAX;
use gradring_servers::message::Counted;
use gradring_servers::model::{Given, Model, Variable};
use gradring_servers::server::{Server, ServerPlace};
use gradring_servers::values::Values as _;
use gradring_servers::worker::Worker;
use numpy::{
    Element, PyArrayDyn, PyArrayMethods as _, PyReadonlyArrayDyn, PyReadwriteArrayDyn,
    PyUntypedArrayMethods as _,
};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};

use crate::caller::guarded;
use crate::config::Config;
use crate::entry::{detached, enter};
use crate::errors::to_python;

/// One parameter server.
#[pyclass(frozen, module = "gradring._native")]
pub(crate) struct ParameterServer {
    inner: Server,
}

/// Connections of one worker to all servers.
#[pyclass(frozen, module = "gradring._native")]
pub(crate) struct ParameterClient {
    inner: Arc<Worker>,
}

#[pymethods]
impl ParameterServer {
    #[new]
    #[pyo3(signature = (*, index, addresses, rules, directory=None, worker_timeout=60.0, config))]
    fn new(
        py: Python<'_>,
        index: usize,
        addresses: Vec<String>,
        rules: BTreeMap<String, String>,
        directory: Option<PathBuf>,
        worker_timeout: f64,
        config: &Bound<'_, Config>,
    ) -> PyResult<Self> {
        enter(py, || {
            let config = config.get().inner.clone();
            let made = check_server(index, addresses.len()).and_then(|()| {
                let place = ServerPlace {
                    server: index,
                    addresses,
                };
                let worker_timeout = Duration::from_secs_f64(worker_timeout.clamp(0.0, LONGEST_S));
                let rules = Rules::of(&rules)?;
                detached(py, || {
                    Server::new(place, &rules, directory.as_deref(), worker_timeout, &config)
                })
            });
            let inner = made.map_err(|error| to_python(py, &error))?;
            Ok(Self { inner })
        })
    }

    fn serve(&self, py: Python<'_>) -> PyResult<()> {
        enter(py, || guarded(py, |program| self.inner.serve(program)))
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        enter(py, || {
            let stats = self.inner.stats().map_err(|error| to_python(py, &error))?;
            let applied = stats.applied.iter();
            let applied: BTreeMap<u32, (u64, u32, u64)> = applied
                .map(|(worker, (incarnation, number))| {
                    (*worker, (incarnation.0, incarnation.1, *number))
                })
                .collect();
            let result = PyDict::new(py);
            result.set_item("server", self.inner.place().server)?;
            result.set_item("optimizers", stats.models)?;
            result.set_item("address", self.inner.address())?;
            result.set_item("term", stats.term)?;
            result.set_item("version", stats.version)?;
            result.set_item("history", stats.history)?;
            result.set_item("applied", applied)?;
            result.set_item("replicas", stats.replicas)?;
            result.set_item("staged", stats.staged)?;
            result.set_item("bytes_sent", stats.bytes_sent)?;
            result.set_item("bytes_received", stats.bytes_received)?;
            result.set_item("connections", stats.connections)?;
            result.set_item("restored", stats.restored)?;
            result.set_item("members", stats.members)?;
            result.set_item("left", stats.left)?;
            set_counted(&result, stats.counted)?;
            Ok(result)
        })
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        enter(py, || {
            detached(py, || self.inner.close());
            Ok(())
        })
    }
}

#[pymethods]
impl ParameterClient {
    #[new]
    #[pyo3(signature = (*, worker, addresses, config, optimizer=0))]
    fn new(
        py: Python<'_>,
        worker: usize,
        addresses: Vec<String>,
        config: &Bound<'_, Config>,
        optimizer: usize,
    ) -> PyResult<Self> {
        enter(py, || {
            let config = config.get().inner.clone();
            let made = check_server(0, addresses.len())
                .and_then(|()| check_optimizer(optimizer))
                .and_then(|()| Worker::new(worker, optimizer, addresses, &config));
            let inner = made.map_err(|error| to_python(py, &error))?;
            Ok(Self { inner })
        })
    }

    #[getter]
    fn id(&self) -> u64 {
        self.inner.id
    }

    #[pyo3(signature = (variables, optimizer, placement=None))]
    fn begin(
        &self,
        py: Python<'_>,
        variables: Vec<(Bound<'_, PyString>, Vec<usize>, String, bool)>,
        optimizer: &str,
        placement: Option<BTreeMap<usize, usize>>,
    ) -> PyResult<()> {
        enter(py, || {
            let placement = placement.unwrap_or_default();
            let servers = self.inner.servers();
            let model = model_of(variables, optimizer, &placement, servers);
            let begun = model.and_then(|model| detached(py, || self.inner.begin(model)));
            begun.map_err(|error| to_python(py, &error))
        })
    }

    fn pull(&self, py: Python<'_>, into: Vec<Bound<'_, PyAny>>) -> PyResult<Option<u64>> {
        enter(py, || {
            let (model, mut arrays) = (self.model(py)?, Vec::new());
            for (array, variable, what) in named(&into, &model, "into")? {
                arrays.push(Filled::of(array, variable, &what)?);
            }
            let slices: PyResult<Vec<_>> = arrays.iter_mut().map(Filled::bytes_mut).collect();
            let mut slices = slices?;
            guarded(py, |program| self.inner.pull(&mut slices, program))
        })
    }

    fn push_initial(&self, py: Python<'_>, weights: Vec<Bound<'_, PyAny>>) -> PyResult<bool> {
        enter(py, || {
            let (model, mut arrays) = (self.model(py)?, Vec::new());
            for (array, variable, what) in named(&weights, &model, "weights")? {
                arrays.push(Held::of(
                    array,
                    variable.float_type,
                    &variable.shape,
                    &what,
                )?);
            }
            let slices: PyResult<Vec<_>> = arrays.iter().map(Held::values).collect();
            let slices = slices?;
            let taken = detached(py, || self.inner.push_initial(&slices));
            taken.map_err(|error| to_python(py, &error))
        })
    }

    #[pyo3(signature = (gradients, learning_rate, weight_decay=0.0))]
    fn push(
        &self,
        py: Python<'_>,
        gradients: Vec<Bound<'_, PyAny>>,
        learning_rate: f64,
        weight_decay: f64,
    ) -> PyResult<bool> {
        enter(py, || {
            let (model, mut taken) = (self.model(py)?, Vec::new());
            for (gradient, variable, what) in named(&gradients, &model, "gradients")? {
                taken.push(Taken::of(gradient, variable, &what)?);
            }
            let given: PyResult<Vec<_>> = taken.iter().map(Taken::given).collect();
            let hyper = Hyper {
                learning_rate,
                weight_decay,
            };
            let given = given?;
            let pushed = detached(py, || self.inner.push(&given, hyper));
            pushed.map_err(|error| to_python(py, &error))
        })
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        enter(py, || {
            let stats = self.inner.stats().map_err(|error| to_python(py, &error))?;
            let result = PyDict::new(py);
            result.set_item("worker", self.inner.index())?;
            result.set_item("version", stats.version)?;
            result.set_item("term", stats.term)?;
            result.set_item("pushes", stats.pushes)?;
            result.set_item("dropped", stats.dropped)?;
            result.set_item("pulls", stats.pulls)?;
            result.set_item("unsettled", stats.unsettled)?;
            result.set_item("bytes_sent", stats.bytes_sent)?;
            result.set_item("bytes_received", stats.bytes_received)?;
            result.set_item("reconnects", stats.reconnects)?;
            result.set_item("transport", stats.transport)?;
            result.set_item("waited_s", stats.waited.as_secs_f64())?;
            let servers = PyDict::new(py);
            servers.set_item("version", stats.counted.version)?;
            set_counted(&servers, stats.counted)?;
            result.set_item("servers", servers)?;
            Ok(result)
        })
    }

    fn leave(&self, py: Python<'_>) -> PyResult<()> {
        enter(py, || guarded(py, |program| self.inner.leave(program)))
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        enter(py, || {
            detached(py, || self.inner.close());
            Ok(())
        })
    }
}

impl ParameterClient {
    fn model(&self, py: Python<'_>) -> PyResult<Arc<Model>> {
        let model = self.inner.begun();
        model.map_err(|error| to_python(py, &error))
    }
}

/// Adds the fields of the stub's `GradientCounts` to `result`.
fn set_counted(result: &Bound<'_, PyDict>, counted: Counted) -> PyResult<()> {
    let counts = counted.counts;
    result.set_item("queue", counted.queue)?;
    result.set_item("pushes", counts.applied)?;
    result.set_item("updates", counted.updates)?;
    result.set_item("dropped_late", counts.late)?;
    result.set_item("dropped_overflow", counts.overflowed)?;
    result.set_item("held_overflow", counts.held)?;
    result.set_item("dropped_lost", counts.lost)?;
    result.set_item("superfluous", counts.superfluous)?;
    result.set_item("staleness", counted.staleness)
}

/// An array of the program, held while it is copied.
enum Held<'py> {
    F32(PyReadonlyArrayDyn<'py, f32>),
    F64(PyReadonlyArrayDyn<'py, f64>),
    Bf16(PyReadonlyArrayDyn<'py, bf16>),
    F16(PyReadonlyArrayDyn<'py, f16>),
}

impl<'py> Held<'py> {
    fn of(
        array: &Bound<'py, PyAny>,
        float_type: FloatType,
        shape: &[usize],
        what: &str,
    ) -> PyResult<Self> {
        let wanted = (float_type, shape, what);
        Ok(match float_type {
            FloatType::F32 => Self::F32(floats(array, wanted)?.readonly()),
            FloatType::F64 => Self::F64(floats(array, wanted)?.readonly()),
            FloatType::Bf16 => Self::Bf16(floats(array, wanted)?.readonly()),
            FloatType::F16 => Self::F16(floats(array, wanted)?.readonly()),
        })
    }

    fn values(&self) -> PyResult<FloatSlice<'_>> {
        Ok(match self {
            Self::F32(array) => FloatSlice::F32(array.as_slice()?),
            Self::F64(array) => FloatSlice::F64(array.as_slice()?),
            Self::Bf16(array) => FloatSlice::Bf16(array.as_slice()?),
            Self::F16(array) => FloatSlice::F16(array.as_slice()?),
        })
    }
}

/// An array of the program that a pull fills.
enum Filled<'py> {
    F32(PyReadwriteArrayDyn<'py, f32>),
    F64(PyReadwriteArrayDyn<'py, f64>),
    Bf16(PyReadwriteArrayDyn<'py, bf16>),
    F16(PyReadwriteArrayDyn<'py, f16>),
}

impl<'py> Filled<'py> {
    fn of(array: &Bound<'py, PyAny>, variable: &Variable, what: &str) -> PyResult<Self> {
        fn writable<'py, T: Element>(
            array: &Bound<'py, PyAny>,
            variable: &Variable,
            what: &str,
        ) -> PyResult<PyReadwriteArrayDyn<'py, T>> {
            let array = floats(array, (variable.float_type, &variable.shape, what))?;
            array.try_readwrite().map_err(|problem| {
                PyValueError::new_err(format!("{what} cannot be filled: {problem}"))
            })
        }
        Ok(match variable.float_type {
            FloatType::F32 => Self::F32(writable(array, variable, what)?),
            FloatType::F64 => Self::F64(writable(array, variable, what)?),
            FloatType::Bf16 => Self::Bf16(writable(array, variable, what)?),
            FloatType::F16 => Self::F16(writable(array, variable, what)?),
        })
    }

    fn bytes_mut(&mut self) -> PyResult<&mut [u8]> {
        Ok(match self {
            Self::F32(array) => array.as_slice_mut()?.bytes_mut(),
            Self::F64(array) => array.as_slice_mut()?.bytes_mut(),
            Self::Bf16(array) => array.as_slice_mut()?.bytes_mut(),
            Self::F16(array) => array.as_slice_mut()?.bytes_mut(),
        })
    }
}

/// A gradient of the program, held while it is copied.
enum Taken<'py> {
    Nothing,
    Dense(Held<'py>),
    Rows(Vec<usize>, Held<'py>),
}

impl<'py> Taken<'py> {
    fn of(gradient: &Bound<'py, PyAny>, variable: &Variable, what: &str) -> PyResult<Self> {
        let Variable {
            shape, float_type, ..
        } = variable;
        if gradient.is_none() {
            return Ok(Self::Nothing);
        }
        let Ok(pair) = gradient.cast::<PyTuple>() else {
            return Ok(Self::Dense(Held::of(gradient, *float_type, shape, what)?));
        };
        let (rows, values): (Bound<'py, PyAny>, Bound<'py, PyAny>) = pair.extract()?;
        let rows = rows_of(&rows, what, shape.first().copied().unwrap_or(1))?;
        let shape = [&[rows.len()], shape.get(1..).unwrap_or_default()].concat();
        let values = Held::of(&values, *float_type, &shape, what)?;
        Ok(Self::Rows(rows, values))
    }

    fn given(&self) -> PyResult<Option<Given<'_>>> {
        Ok(match self {
            Self::Nothing => None,
            Self::Dense(values) => Some(Given::Dense(values.values()?)),
            Self::Rows(rows, values) => Some(Given::Rows(rows, values.values()?)),
        })
    }
}

/// Pairs the program's item for each variable with the variable and its name in messages.
fn named<'a, 'py>(
    items: &'a [Bound<'py, PyAny>],
    model: &'a Model,
    what: &str,
) -> PyResult<impl Iterator<Item = (&'a Bound<'py, PyAny>, &'a Variable, String)>> {
    let (count, variables) = (items.len(), model.variables());
    if count != variables.len() {
        let problem = format!("{what} has {count} items for {} variables", variables.len());
        return Err(PyValueError::new_err(problem));
    }
    let words = |(index, variable): (usize, &'a Variable)| {
        let name = format!("{what}[{index}] ({})", variable.name);
        (variable, name)
    };
    let words: Vec<_> = variables.iter().enumerate().map(words).collect();
    Ok(items
        .iter()
        .zip(words)
        .map(|(item, (variable, what))| (item, variable, what)))
}

/// Returns the row numbers of a sparse gradient.
fn rows_of(rows: &Bound<'_, PyAny>, what: &str, count: usize) -> PyResult<Vec<usize>> {
    let numbers: Vec<i64> = if let Ok(rows) = rows.cast::<PyArrayDyn<i64>>() {
        rows.readonly().as_array().iter().copied().collect()
    } else if let Ok(rows) = rows.cast::<PyArrayDyn<i32>>() {
        rows.readonly()
            .as_array()
            .iter()
            .map(|it| i64::from(*it))
            .collect()
    } else {
        let problem = format!("{what}: indices must be a numpy array of int32 or int64");
        return Err(PyTypeError::new_err(problem));
    };
    let row = |number: i64| {
        usize::try_from(number)
            .ok()
            .filter(|row| *row < count)
            .ok_or_else(|| {
                let problem = format!("{what}: row {number} does not exist among {count}");
                PyValueError::new_err(problem)
            })
    };
    numbers.into_iter().map(row).collect()
}

/// Checks that an array is C-contiguous, of this element type and of this shape.
fn floats<'a, 'py, T: Element>(
    array: &'a Bound<'py, PyAny>,
    (float_type, shape, what): (FloatType, &[usize], &str),
) -> PyResult<&'a Bound<'py, PyArrayDyn<T>>> {
    let found = array.getattr("dtype").map(|dtype| dtype.to_string());
    // Only an array of bfloat16 proves that numpy has this type, without which the cast panics.
    let is_known = found.as_ref().is_ok_and(|it| it == float_type.name());
    let cast = is_known
        .then(|| array.cast::<PyArrayDyn<T>>().ok())
        .flatten();
    let array = cast.ok_or_else(|| {
        let kind = array.get_type();
        PyTypeError::new_err(format!(
            "{what} must be a numpy array of {}; it is {}",
            float_type.name(),
            found.map_or_else(|_| kind.to_string(), |dtype| format!("of {dtype}"))
        ))
    })?;
    let problem = if array.shape() != shape {
        let found = array.shape();
        format!("{what} has the shape {found:?} and not {shape:?}")
    } else if !array.is_c_contiguous() {
        format!("{what} is not C-contiguous; pass a contiguous copy")
    } else {
        return Ok(array);
    };
    Err(PyValueError::new_err(problem))
}

fn check_server(index: usize, servers: usize) -> Result<()> {
    match index < servers {
        true => Ok(()),
        false => Err(wrong(
            "index",
            &index.to_string(),
            "a server with an address",
        )),
    }
}

fn check_optimizer(number: usize) -> Result<()> {
    match number < MODELS_MAX {
        true => Ok(()),
        false => Err(wrong(
            "optimizer",
            &number.to_string(),
            &format!("less than {MODELS_MAX}, the number that a job may have"),
        )),
    }
}

fn model_of(
    variables: Vec<(Bound<'_, PyString>, Vec<usize>, String, bool)>,
    optimizer: &str,
    placement: &BTreeMap<usize, usize>,
    servers: usize,
) -> Result<Model> {
    for (variable, server) in placement {
        if *variable >= variables.len() || *server >= servers {
            let shown = format!("{variable}: {server}");
            return Err(wrong(
                "placement",
                &shown,
                "a variable and a server that there are",
            ));
        }
    }
    let optimizer: Optimizer = serde_json::from_str(optimizer).map_err(|error| {
        wrong(
            "optimizer",
            optimizer,
            &format!("one that servers know: {error}"),
        )
    })?;
    let variables = variables.into_iter().map(|(name, shape, dtype, decays)| {
        let name = name.to_string_lossy().into_owned();
        let float_type = FloatType::from_name(&dtype).ok_or_else(|| {
            let kept = FloatType::ALL.map(FloatType::name).join(", ");
            let wanted = format!("one that parameter servers keep: {kept}");
            wrong(&format!("dtype of {name}"), &dtype, &wanted)
        })?;
        Ok(Variable {
            name,
            shape,
            float_type,
            decays,
        })
    });
    let variables = variables.collect::<Result<_>>()?;
    Ok(Model::new(variables, optimizer, placement, servers))
}
