//! The extension module `gradring._native`: one file for each Python class. Functions parse their
//! arguments, release the interpreter, and delegate to the core.

use gradring_net::link::forks;
use gradring_proto::error::SURVIVABLE;
use gradring_proto::schedule::Algorithm;
use pyo3::prelude::*;
use pyo3::types::PyDict;

mod arrays;
mod block;
mod caller;
mod collective;
mod communicator;
mod config;
mod diagnosis;
mod dlpack;
mod elastic;
mod entry;
mod errors;
mod first_process;
mod interrupts;
mod listening;
mod parameters;
mod plan;
mod state;
mod stats;
mod tensorflow;
mod timing;
mod work;

/// Returns version and kind of build, so that a benchmark can refuse a debug build.
#[pyfunction]
fn build_info(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let info = PyDict::new(py);
    info.set_item("version", env!("CARGO_PKG_VERSION"))?;
    info.set_item("debug", cfg!(debug_assertions))?;
    info.set_item("instruction_set", gradring_proto::kernel::instruction_set())?;
    Ok(info)
}

/// Called in a fork: leaves communicators to the parent process, where their threads are.
#[pyfunction]
fn leave_to_parent(communicators: Vec<Py<communicator::Communicator>>) {
    forks::end_in_child();
    entry::forget_others();
    // Dropping one would wait for its threads.
    std::mem::forget(communicators);
}

/// Called by a thread before it forks the process.
#[pyfunction]
fn before_fork() {
    forks::begin();
}

/// Called in the parent by the thread that has forked the process.
#[pyfunction]
fn after_fork() {
    forks::end_in_parent();
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<communicator::Communicator>()?;
    module.add_class::<block::Block>()?;
    module.add_class::<collective::Collective>()?;
    module.add_class::<config::Config>()?;
    module.add_class::<listening::Listening>()?;
    module.add_class::<work::Work>()?;
    module.add_class::<plan::Plan>()?;
    module.add_class::<elastic::Participant>()?;
    module.add_class::<parameters::ParameterServer>()?;
    module.add_class::<parameters::ParameterClient>()?;
    module.add("ALGORITHMS", Algorithm::ALL.map(Algorithm::name))?;
    module.add("SURVIVABLE", SURVIVABLE)?;
    module.add_function(wrap_pyfunction!(config::settings, module)?)?;
    module.add_function(wrap_pyfunction!(build_info, module)?)?;
    module.add_function(wrap_pyfunction!(leave_to_parent, module)?)?;
    module.add_function(wrap_pyfunction!(before_fork, module)?)?;
    module.add_function(wrap_pyfunction!(after_fork, module)?)?;
    module.add_function(wrap_pyfunction!(entry::refuse_others, module)?)?;
    module.add_function(wrap_pyfunction!(entry::await_others, module)?)?;
    module.add_function(wrap_pyfunction!(arrays::check_dtype, module)?)?;
    module.add_function(wrap_pyfunction!(arrays::check_readable, module)?)?;
    module.add_function(wrap_pyfunction!(arrays::check_plain, module)?)?;
    module.add_function(wrap_pyfunction!(arrays::check_unused, module)?)?;
    module.add_function(wrap_pyfunction!(dlpack::lent, module)?)?;
    module.add_function(wrap_pyfunction!(state::ask, module)?)?;
    module.add_function(wrap_pyfunction!(diagnosis::ask, module)?)?;
    module.add_function(wrap_pyfunction!(timing::time_collective, module)?)?;
    module.add_function(wrap_pyfunction!(first_process::end_by_sigterm, module)?)?;
    tensorflow::add_to(module)
}
