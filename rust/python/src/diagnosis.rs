//! `_native.diagnose`: ranks to blame, found from the reports or flight records of ranks.

use std::time::Duration;

use gradring_core::{Known, Statement, diagnose};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Ordinal, call (`None` if it is not to be compared), step, and `true` if the rank has left it.
type Collective = (u64, Option<String>, u64, bool);

/// Finds the ranks to blame.
///
/// A statement is a rank, its collectives, the ranks for which it waits, and the seconds for which
/// it has waited.
#[pyfunction]
#[pyo3(name = "diagnose")]
pub(crate) fn ask<'py>(
    py: Python<'py>,
    world_size: usize,
    statements: Vec<(usize, Vec<Collective>, Vec<usize>, f64)>,
) -> PyResult<Option<Bound<'py, PyDict>>> {
    let statements: PyResult<Vec<Statement>> = statements
        .into_iter()
        .map(|(rank, collectives, awaited, idle_s)| {
            Ok(Statement {
                rank,
                collectives: collectives.into_iter().map(known).collect(),
                awaited,
                idle: Duration::try_from_secs_f64(idle_s)
                    .map_err(|error| PyValueError::new_err(format!("{idle_s} s: {error}")))?,
            })
        })
        .collect();
    let Some(found) = diagnose(world_size, &statements?) else {
        return Ok(None);
    };
    let result = PyDict::new(py);
    result.set_item("sequence", found.sequence)?;
    result.set_item("problem", found.problem.name())?;
    result.set_item("blamed", found.blamed)?;
    result.set_item("calls", found.calls)?;
    result.set_item("late", found.late)?;
    Ok(Some(result))
}

fn known((sequence, call, step, done): Collective) -> Known {
    Known {
        sequence,
        call: call.map(|call| (call, step)),
        done,
    }
}
