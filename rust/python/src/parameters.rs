//! `_native.ParameterServer` and `_native.ParameterClient`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use gradring_proto::error::Result;
use gradring_proto::parameters::optimizer::{Hyper, Optimizer};
use gradring_proto::parameters::rules::Rules;
use gradring_proto::settings::{LONGEST_S, wrong};
use gradring_servers::message::Counted;
use gradring_servers::model::{Given, Model, Variable};
use gradring_servers::server::{Place, Server};
use gradring_servers::worker::Worker;
use numpy::{PyArrayDyn, PyArrayMethods as _, PyReadonlyArrayDyn, PyUntypedArrayMethods as _};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::caller::guarded;
use crate::config::Config;
use crate::entry::{detached, enter};
use crate::errors::to_python;

/// One server of parameters.
#[pyclass(frozen, module = "gradring._native")]
pub(crate) struct ParameterServer {
    inner: Server,
}

/// One worker's way to all servers.
#[pyclass(frozen, module = "gradring._native")]
pub(crate) struct ParameterClient {
    inner: Worker,
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
                let place = Place {
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
    #[pyo3(signature = (*, worker, addresses, config))]
    fn new(
        py: Python<'_>,
        worker: usize,
        addresses: Vec<String>,
        config: &Bound<'_, Config>,
    ) -> PyResult<Self> {
        enter(py, || {
            let config = config.get().inner.clone();
            let made = check_server(0, addresses.len())
                .and_then(|()| Worker::new(worker, addresses, &config));
            let inner = made.map_err(|error| to_python(py, &error))?;
            Ok(Self { inner })
        })
    }

    #[pyo3(signature = (variables, optimizer, placement=None))]
    fn begin(
        &self,
        py: Python<'_>,
        variables: Vec<(String, Vec<usize>, String, bool)>,
        optimizer: &Bound<'_, PyDict>,
        placement: Option<BTreeMap<usize, usize>>,
    ) -> PyResult<()> {
        enter(py, || {
            let placement = placement.unwrap_or_default();
            let optimizer = optimizer_of(optimizer)?;
            let servers = self.inner.servers();
            let model = model_of(variables, optimizer, &placement, servers);
            let begun = model.and_then(|model| detached(py, || self.inner.begin(model)));
            begun.map_err(|error| to_python(py, &error))
        })
    }

    fn pull(&self, py: Python<'_>, into: Vec<Bound<'_, PyAny>>) -> PyResult<Option<u64>> {
        enter(py, || {
            let model = self.model(py)?;
            let mut arrays = Vec::new();
            for (index, array) in into.iter().enumerate() {
                arrays.push(floats(array, &format!("into[{index}]"))?.readwrite_checked(index)?);
            }
            check_shapes(&model, arrays.iter().map(|it| it.shape().to_vec()), "into")?;
            let mut slices = Vec::new();
            for (index, array) in arrays.iter_mut().enumerate() {
                slices.push(
                    array
                        .as_slice_mut()
                        .map_err(|_| not_contiguous("into", index))?,
                );
            }
            guarded(py, |program| self.inner.pull(&mut slices, program))
        })
    }

    fn push_initial(&self, py: Python<'_>, weights: Vec<Bound<'_, PyAny>>) -> PyResult<bool> {
        enter(py, || {
            let model = self.model(py)?;
            let mut arrays = Vec::new();
            for (index, array) in weights.iter().enumerate() {
                arrays.push(floats(array, &format!("weights[{index}]"))?.readonly());
            }
            check_shapes(
                &model,
                arrays.iter().map(|it| it.shape().to_vec()),
                "weights",
            )?;
            let slices: PyResult<Vec<_>> = arrays
                .iter()
                .enumerate()
                .map(|(index, it)| it.as_slice().map_err(|_| not_contiguous("weights", index)))
                .collect();
            let taken = self.inner.push_initial(&slices?);
            taken.map_err(|error| to_python(py, &error))
        })
    }

    #[pyo3(signature = (gradients, learning_rate, weight_decay=0.0))]
    fn push(
        &self,
        py: Python<'_>,
        gradients: Vec<Bound<'_, PyAny>>,
        learning_rate: f32,
        weight_decay: f32,
    ) -> PyResult<bool> {
        enter(py, || {
            let model = self.model(py)?;
            if gradients.len() != model.variables().len() {
                return Err(wrong_count(&model, gradients.len(), "gradients"));
            }
            let mut taken = Vec::new();
            for (index, (gradient, variable)) in gradients.iter().zip(model.variables()).enumerate()
            {
                taken.push(Taken::of(gradient, variable, index)?);
            }
            let given: PyResult<Vec<_>> = taken
                .iter()
                .enumerate()
                .map(|(index, it)| it.given(index))
                .collect();
            let hyper = Hyper {
                learning_rate,
                weight_decay,
            };
            let pushed = self.inner.push(&given?, hyper);
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
    fn model(&self, py: Python<'_>) -> PyResult<std::sync::Arc<Model>> {
        let model = self.inner.begun();
        model.map_err(|error| to_python(py, &error))
    }
}

/// `GradientCounts` of the stub.
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

/// A gradient of the program, held while it is copied.
enum Taken<'py> {
    Nothing,
    Dense(PyReadonlyArrayDyn<'py, f32>),
    Rows(Vec<usize>, PyReadonlyArrayDyn<'py, f32>),
}

impl<'py> Taken<'py> {
    fn of(gradient: &Bound<'py, PyAny>, variable: &Variable, index: usize) -> PyResult<Self> {
        if gradient.is_none() {
            return Ok(Self::Nothing);
        }
        let what = format!("gradients[{index}] ({})", variable.name);
        let Ok(pair) = gradient.cast::<PyTuple>() else {
            let values = floats(gradient, &what)?.readonly();
            if values.shape() != variable.shape {
                return Err(wrong_shape(&what, values.shape(), &variable.shape));
            }
            return Ok(Self::Dense(values));
        };
        let (rows, values): (Bound<'py, PyAny>, Bound<'py, PyAny>) = pair.extract()?;
        let rows: Vec<usize> = rows_of(&rows, &what, variable)?;
        let values = floats(&values, &what)?.readonly();
        let mut wanted = vec![rows.len()];
        wanted.extend(variable.shape.iter().skip(1));
        if values.shape() != wanted {
            return Err(wrong_shape(&what, values.shape(), &wanted));
        }
        Ok(Self::Rows(rows, values))
    }

    fn given(&self, index: usize) -> PyResult<Option<Given<'_>>> {
        Ok(match self {
            Self::Nothing => None,
            Self::Dense(values) => Some(Given::Dense(
                values
                    .as_slice()
                    .map_err(|_| not_contiguous("gradients", index))?,
            )),
            Self::Rows(rows, values) => Some(Given::Rows(
                rows,
                values
                    .as_slice()
                    .map_err(|_| not_contiguous("gradients", index))?,
            )),
        })
    }
}

/// Row numbers of a sparse gradient.
fn rows_of(rows: &Bound<'_, PyAny>, what: &str, variable: &Variable) -> PyResult<Vec<usize>> {
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
    let count = variable.shape.first().copied().unwrap_or(1);
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

fn floats<'a, 'py>(
    array: &'a Bound<'py, PyAny>,
    what: &str,
) -> PyResult<&'a Bound<'py, PyArrayDyn<f32>>> {
    array.cast::<PyArrayDyn<f32>>().map_err(|_| {
        let kind = array.get_type();
        PyTypeError::new_err(format!(
            "{what} must be a numpy array of float32; it is {}",
            array
                .getattr("dtype")
                .map_or_else(|_| kind.to_string(), |dtype| format!("of {dtype}"))
        ))
    })
}

/// Lends an array to be filled.
trait Writable<'py> {
    fn readwrite_checked(&self, index: usize) -> PyResult<numpy::PyReadwriteArrayDyn<'py, f32>>;
}

impl<'py> Writable<'py> for Bound<'py, PyArrayDyn<f32>> {
    fn readwrite_checked(&self, index: usize) -> PyResult<numpy::PyReadwriteArrayDyn<'py, f32>> {
        self.try_readwrite().map_err(|problem| {
            PyValueError::new_err(format!("into[{index}] cannot be filled: {problem}"))
        })
    }
}

fn not_contiguous(what: &str, index: usize) -> PyErr {
    PyValueError::new_err(format!(
        "{what}[{index}] is not C-contiguous; pass a contiguous copy"
    ))
}

fn wrong_shape(what: &str, shape: &[usize], wanted: &[usize]) -> PyErr {
    PyValueError::new_err(format!("{what} has the shape {shape:?} and not {wanted:?}"))
}

fn wrong_count(model: &Model, count: usize, what: &str) -> PyErr {
    let variables = model.variables().len();
    PyValueError::new_err(format!(
        "{what} has {count} items for {variables} variables"
    ))
}

fn check_shapes(
    model: &Model,
    shapes: impl ExactSizeIterator<Item = Vec<usize>>,
    what: &str,
) -> PyResult<()> {
    if shapes.len() != model.variables().len() {
        return Err(wrong_count(model, shapes.len(), what));
    }
    for (index, (shape, variable)) in shapes.zip(model.variables()).enumerate() {
        if shape != variable.shape {
            let what = format!("{what}[{index}] ({})", variable.name);
            return Err(wrong_shape(&what, &shape, &variable.shape));
        }
    }
    Ok(())
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

fn model_of(
    variables: Vec<(String, Vec<usize>, String, bool)>,
    optimizer: Optimizer,
    placement: &BTreeMap<usize, usize>,
    servers: usize,
) -> Result<Model> {
    for (name, _, dtype, _) in &variables {
        if dtype != "float32" {
            let what = format!("dtype of {name}");
            return Err(wrong(
                &what,
                dtype,
                "float32, the only one that parameter servers keep",
            ));
        }
    }
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
    let variables = variables
        .into_iter()
        .map(|(name, shape, _, decays)| Variable {
            name,
            shape,
            decays,
        })
        .collect();
    Ok(Model::new(variables, optimizer, placement, servers))
}

fn optimizer_of(said: &Bound<'_, PyDict>) -> PyResult<Optimizer> {
    let py = said.py();
    let wrong = |name: &str, shown: &str, wanted: &str| to_python(py, &wrong(name, shown, wanted));
    let kind: String = match said.get_item("kind")? {
        Some(kind) => kind.extract()?,
        None => {
            return Err(wrong(
                "optimizer",
                "a dict without kind",
                "sgd, adagrad or adam",
            ));
        }
    };
    let keys: &[&str] = match kind.as_str() {
        "sgd" => &["momentum", "nesterov"],
        "adagrad" => &["initial_accumulator_value", "epsilon"],
        "adam" => &["beta_1", "beta_2", "epsilon", "amsgrad"],
        other => {
            return Err(wrong(
                "optimizer",
                other,
                "sgd, adagrad or adam, which servers know",
            ));
        }
    };
    if said.len() != keys.len() + 1 {
        let shown = said.repr()?.to_string();
        return Err(wrong(
            "optimizer",
            &shown,
            &format!("kind, {}", keys.join(", ")),
        ));
    }
    let item = |key: &str| -> PyResult<Bound<'_, PyAny>> {
        said.get_item(key)?.ok_or_else(|| {
            wrong(
                "optimizer",
                &format!("without {key}"),
                &format!("kind, {}", keys.join(", ")),
            )
        })
    };
    let number = |key: &str| -> PyResult<f64> {
        let number: f64 = item(key)?.extract()?;
        match number.is_finite() {
            true => Ok(number),
            false => Err(wrong(key, &number.to_string(), "a finite number")),
        }
    };
    let flag = |key: &str| -> PyResult<bool> { item(key)?.extract() };
    Ok(match kind.as_str() {
        "sgd" => Optimizer::Sgd {
            momentum: number("momentum")?,
            is_nesterov: flag("nesterov")?,
        },
        "adagrad" => Optimizer::Adagrad {
            initial: number("initial_accumulator_value")?,
            epsilon: number("epsilon")?,
        },
        _ => Optimizer::Adam {
            beta_1: number("beta_1")?,
            beta_2: number("beta_2")?,
            epsilon: number("epsilon")?,
            is_amsgrad: flag("amsgrad")?,
        },
    })
}
