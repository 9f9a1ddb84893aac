//! The way in from Python and back: lets no panic out, and keeps threads away from an interpreter
//! that ends.
//!
//! Before Python 3.14, a thread that wants the interpreter while it ends is ended itself, by
//! unwinding, which aborts the process if it comes through frames of Rust. Daemon threads may be
//! inside a collective at that time. So the thread that ends the interpreter first keeps others from coming
//! in, and waits until those inside have left.

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

/// No thread stays inside for longer, once all communicators are closed.
const LEAVING_LIMIT: Duration = Duration::from_secs(10);
/// How often to look whether all have left.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);

/// How many calls are under way.
static INSIDE: AtomicUsize = AtomicUsize::new(0);
/// How far the end of the interpreter has come.
static PHASE: AtomicU8 = AtomicU8::new(RUNNING);
const RUNNING: u8 = 0;
/// Only the thread that ends the interpreter may come in.
const LEAVING: u8 = 1;
/// No other thread may have the interpreter any more.
const GONE: u8 = 2;
/// What others are told then. Made before, because to make it runs code in Python.
static REFUSAL: Mutex<Option<Py<PyAny>>> = Mutex::new(None);

thread_local! {
    /// How many of the calls are this thread's: signal handlers may be at work.
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

/// Does what Python has called for; a panic becomes a `ProtocolError`.
///
/// Inline, so that it is where its caller is, however the compiler divides the crate.
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

/// Runs `body` without the interpreter; inside `enter`.
pub(crate) fn detached<T: Send>(py: Python<'_>, body: impl FnOnce() -> T + Send) -> T {
    py.detach(|| {
        let result = body();
        stay_away_once_gone();
        result
    })
}

/// Runs `body` with the interpreter, in a thread that is none of Python's; not once it ends.
pub(crate) fn attached<T>(body: impl FnOnce(Python<'_>) -> T) -> Option<T> {
    let _inside = Inside::begin();
    if PHASE.load(Ordering::SeqCst) != RUNNING {
        return None;
    }
    Python::try_attach(body)
}

/// What this thread is told if it has to leave because the interpreter ends.
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

/// Parks for ever a thread that has come too late to get the interpreter.
pub(crate) fn stay_away_once_gone() {
    while PHASE.load(Ordering::SeqCst) == GONE && !ENDS_THE_INTERPRETER.get() {
        std::thread::park();
    }
}

/// The interpreter ends: from now on, all threads but this one are refused with `exception`.
#[pyfunction]
pub(crate) fn refuse_others(exception: Py<PyAny>) {
    *lock(&REFUSAL) = Some(exception);
    ENDS_THE_INTERPRETER.set(true);
    PHASE.store(LEAVING, Ordering::SeqCst);
}

/// Waits until no other thread is inside, which the end of all communicators brings about.
#[pyfunction]
pub(crate) fn await_others(py: Python<'_>) {
    let own = OWN.get();
    py.detach(|| {
        let until = Instant::now() + LEAVING_LIMIT;
        while INSIDE.load(Ordering::SeqCst) > own && Instant::now() < until {
            std::thread::sleep(LOOK_INTERVAL);
        }
        PHASE.store(GONE, Ordering::SeqCst);
    });
}

/// In a fork there are no other threads.
pub(crate) fn forget_others() {
    INSIDE.store(OWN.get(), Ordering::SeqCst);
}
