//! `_native.Collective`.

use gradring_proto::collective;
use gradring_proto::dtype::ReduceOp;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// What a collective does, without the arrays that it works on.
#[pyclass(frozen, module = "gradring._native")]
pub(crate) struct Collective(pub(crate) collective::Collective);

#[pymethods]
impl Collective {
    #[staticmethod]
    fn all_reduce(op: &str) -> PyResult<Self> {
        let op = reduce_op(op)?;
        Ok(Self(collective::Collective::AllReduce { op }))
    }

    #[staticmethod]
    fn reduce(op: &str, root: usize) -> PyResult<Self> {
        let op = reduce_op(op)?;
        Ok(Self(collective::Collective::Reduce { op, root }))
    }

    #[staticmethod]
    fn reduce_scatter(op: &str, counts: Vec<usize>) -> PyResult<Self> {
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

/// The reduce op of this name.
pub(crate) fn reduce_op(name: &str) -> PyResult<ReduceOp> {
    ReduceOp::from_name(name).ok_or_else(|| {
        let known = ReduceOp::ALL.map(ReduceOp::name).join(", ");
        PyValueError::new_err(format!("op={name:?} is none of {known}"))
    })
}
