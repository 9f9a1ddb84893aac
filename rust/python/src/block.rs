//! `_native.Block`.

use gradring_net::link;
use pyo3::prelude::*;

/// Memory in the heap of a rank, which is free again once no array needs it.
#[pyclass(frozen, module = "gradring._native")]
pub(crate) struct Block(pub(crate) link::Block);

#[pymethods]
impl Block {
    /// The address of the first byte.
    #[getter]
    fn address(&self) -> usize {
        self.0.start().addr().get()
    }
}
