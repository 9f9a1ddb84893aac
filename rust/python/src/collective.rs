//! `_native.Collective`.

use gradring_proto::collective;
use gradring_proto::dtype::ReduceOp;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyString;

/// A collective with its parameters, but without its arrays.
#[pyclass(frozen, module = "gradring._native")]
pub(crate) struct Collective(pub(crate) collective::Collective);

#[pymethods]
impl Collective {
    #[staticmethod]
    fn all_reduce(op: &Bound<'_, PyString>) -> PyResult<Self> {
        let op = reduce_op(op)?;
        Ok(Self(collective::Collective::AllReduce { op }))
    }

    #[staticmethod]
    fn reduce(op: &Bound<'_, PyString>, root: usize) -> PyResult<Self> {
        let op = reduce_op(op)?;
        Ok(Self(collective::Collective::Reduce { op, root }))
    }

    #[staticmethod]
    fn reduce_scatter(op: &Bound<'_, PyString>, counts: Vec<usize>) -> PyResult<Self> {
        let op = reduce_op(op)?;
        Ok(Self(collective::Collective::ReduceScatter { op, counts }))
    }

    #[staticmethod]
    fn all_gather(counts: Vec<usize>) -> Self {
        Self(collective::Collective::AllGather { counts })
    }

    #[staticmethod]
    fn broadcast(root: usize) -> Self {
        Self(collective::Collective::Broadcast { root })
    }

    #[staticmethod]
    fn gather(root: usize, chunk: usize) -> Self {
        Self(collective::Collective::Gather { root, chunk })
    }

    #[staticmethod]
    fn scatter(root: usize, chunk: usize) -> Self {
        Self(collective::Collective::Scatter { root, chunk })
    }

    #[staticmethod]
    fn send(to: usize) -> Self {
        Self(collective::Collective::Send { to })
    }

    #[staticmethod]
    fn receive(source: usize) -> Self {
        Self(collective::Collective::Receive { from: source })
    }

    #[staticmethod]
    fn all_to_all() -> Self {
        Self(collective::Collective::AllToAll)
    }

    #[staticmethod]
    fn all_to_all_v(sent: Vec<usize>, received: Vec<usize>) -> Self {
        Self(collective::Collective::AllToAllV { sent, received })
    }
}

/// Returns the reduce op of this name.
pub(crate) fn reduce_op(name: &Bound<'_, PyString>) -> PyResult<ReduceOp> {
    let name = name.to_string_lossy();
    ReduceOp::from_name(&name).ok_or_else(|| {
        let known = ReduceOp::ALL.map(ReduceOp::name).join(", ");
        let meant = match name.to_lowercase().as_str() {
            "avg" | "average" => "; did you mean mean?",
            "prod" => "; did you mean product?",
            _ => "",
        };
        PyValueError::new_err(format!("op={name:?} is none of {known}{meant}"))
    })
}
