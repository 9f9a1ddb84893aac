//! Entry and exit of calls from Python: turns panics into exceptions, and keeps threads away from
//! an interpreter that is shutting down.
//!
//! Before Python 3.14, a thread that attaches to the interpreter during its shutdown is ended by
//! unwinding, which aborts the process if it passes through frames of Rust. Daemon threads may be
//! inside a collective at that time. So the thread that shuts the interpreter down first has calls
//! of other threads refused, and waits until calls under way have returned.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use gradring_proto::error::{Error, message_of};
use gradring_proto::lock::lock;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::errors::to_python;

/// Longest time for which calls stay under way once all communicators are closed.
const LEAVING_LIMIT: Duration = Duration::from_secs(10);
/// Interval between two checks for calls under way.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Number of calls under way.
static INSIDE: AtomicUsize = AtomicUsize::new(0);
/// Phase of the interpreter's shutdown.
static PHASE: AtomicU8 = AtomicU8::new(RUNNING);
const RUNNING: u8 = 0;
/// Only the thread that shuts the interpreter down may begin a call.
const LEAVING: u8 = 1;
/// No other thread may attach to the interpreter any more.
const GONE: u8 = 2;
/// Exception for refused calls. It is made in advance, because making it runs code in Python.
static REFUSAL: Mutex<Option<Py<PyAny>>> = Mutex::new(None);

thread_local! {
    /// Number of this thread's calls under way: a signal handler may make a call inside another.
    static OWN: Cell<usize> = const { Cell::new(0) };
    static ENDS_THE_INTERPRETER: Cell<bool> = const { Cell::new(false) };
}

/// A call that is under way.
struct Inside;

impl Inside {
    fn begin() -> Self {
        INSIDE.fetch_add(1, Ordering::SeqCst);
        OWN.set(OWN.get() + 1);
        Self
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        OWN.set(OWN.get() - 1);
        INSIDE.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Runs the body of a call from Python; a panic becomes a `ProtocolError`.
///
/// Inline, so that it is compiled with each caller, even if the compiler splits the crate between
/// them.
#[inline]
pub(crate) fn enter<T>(py: Python<'_>, body: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    if let Some(refusal) = refusal(py) {
        return Err(refusal);
    }
    let _inside = Inside::begin();
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let what = message_of(&*panic);
        Err(to_python(py, &Error::panicked("gradring", what)))
    })
}

/// Runs `body` without the interpreter. Call it only inside `enter`.
pub(crate) fn detached<T: Send>(py: Python<'_>, body: impl FnOnce() -> T + Send) -> T {
    py.detach(|| {
        let result = body();
        stay_away_once_gone();
        result
    })
}

/// Runs `body` with the interpreter, in a thread that Python has not created. Returns `None` during
/// shutdown.
pub(crate) fn attached<T>(body: impl FnOnce(Python<'_>) -> T) -> Option<T> {
    let _inside = Inside::begin();
    if PHASE.load(Ordering::SeqCst) != RUNNING {
        return None;
    }
    Python::try_attach(body)
}

/// Returns the exception for this thread if it must return because the interpreter is shutting
/// down.
pub(crate) fn refusal(py: Python<'_>) -> Option<PyErr> {
    if PHASE.load(Ordering::SeqCst) == RUNNING || ENDS_THE_INTERPRETER.get() {
        return None;
    }
    let refusal = lock(&REFUSAL);
    Some(match &*refusal {
        Some(refusal) => PyErr::from_value(refusal.bind(py).clone()),
        None => PyRuntimeError::new_err("the interpreter ends"),
    })
}

/// Parks this thread for ever if it can no longer attach to the interpreter.
pub(crate) fn stay_away_once_gone() {
    while PHASE.load(Ordering::SeqCst) == GONE && !ENDS_THE_INTERPRETER.get() {
        std::thread::park();
    }
}

/// Begins the shutdown: from now on, calls of all other threads fail with `exception`.
#[pyfunction]
pub(crate) fn refuse_others(exception: Py<PyAny>) {
    *lock(&REFUSAL) = Some(exception);
    ENDS_THE_INTERPRETER.set(true);
    PHASE.store(LEAVING, Ordering::SeqCst);
}

/// Waits until the calls of all other threads have returned.
///
/// They return once all communicators are closed. The wait has a limit of ten seconds.
#[pyfunction]
pub(crate) fn await_others(py: Python<'_>) {
    let own = OWN.get();
    py.detach(|| {
        let until = Instant::now() + LEAVING_LIMIT;
        while INSIDE.load(Ordering::SeqCst) > own && Instant::now() < until {
            std::thread::sleep(POLL_INTERVAL);
        }
        PHASE.store(GONE, Ordering::SeqCst);
    });
}

/// Called in a fork, which has no other threads: forgets their calls.
pub(crate) fn forget_others() {
    INSIDE.store(OWN.get(), Ordering::SeqCst);
}
