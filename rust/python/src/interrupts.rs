//! Ctrl-C ends a Wait inside TensorFlow: see [`gradring_tensorflow::interrupts`].

use std::ffi::{c_int, c_void};
use std::sync::Once;
use std::time::Duration;

use gradring_tensorflow::interrupts;
use pyo3::exceptions::{PyKeyboardInterrupt, PyRuntimeError};
use pyo3::ffi;
use pyo3::prelude::*;

use crate::entry::attached;

/// Time for the main thread to handle Ctrl-C by itself, before a blocked op is made to fail. Python
/// needs less time between two instructions.
const GRACE: Duration = Duration::from_millis(200);
/// The same before an op that does not block is made to fail. Most steps take less time, so a
/// program that saves weights after Ctrl-C saves those of whole steps.
const GRACE_OF_STEPS: Duration = Duration::from_millis(1200);

/// Starts a thread that sleeps until a SIGINT arrives.
pub(crate) fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // If the system has no descriptor or thread left, Ctrl-C takes effect when the op returns.
        if interrupts::start().is_ok() {
            let thread = std::thread::Builder::new().name("gradring-ctrl-c".into());
            drop(thread.spawn(|| {
                loop {
                    consider(interrupts::next());
                }
            }));
        }
    });
}

/// Makes ops fail for the SIGINTs up to number `arrived`, unless Python handles these first.
fn consider(arrived: u64) {
    let number = usize::try_from(arrived).unwrap_or(usize::MAX);
    // SAFETY: the function may be called from any thread, also without the interpreter, and gets a
    // number, not a pointer. Python calls back on its main thread, after the handlers of earlier
    // signals.
    let asked = unsafe { ffi::Py_AddPendingCall(Some(back), number as *mut c_void) };
    // The check comes second, because the thread may get the interpreter only when the main thread
    // is inside an op again.
    if asked == 0 && attached(raises_keyboard_interrupt) == Some(true) {
        std::thread::sleep(GRACE);
        interrupts::interrupt(arrived);
        std::thread::sleep(GRACE_OF_STEPS.saturating_sub(GRACE));
        interrupts::insist(arrived);
    }
}

/// Returns `true` if Python's default handler is installed; the effect of a program's own handler
/// is unknown.
fn raises_keyboard_interrupt(py: Python<'_>) -> bool {
    let usual = || -> PyResult<bool> {
        let signal = py.import("signal")?;
        let present = signal.call_method1("getsignal", (interrupts::SIGNAL,))?;
        Ok(present.is(&signal.getattr("default_int_handler")?))
    };
    usual().unwrap_or(false)
}

/// Called by Python on the main thread, between two instructions.
extern "C" fn back(arrived: *mut c_void) -> c_int {
    interrupts::handled(arrived as u64);
    Python::attach(|py| {
        if was_replaced(py).unwrap_or(false) {
            PyKeyboardInterrupt::new_err(()).restore(py);
            return -1;
        }
        0
    })
}

/// Returns `true` if the exception being handled has replaced a `KeyboardInterrupt`.
///
/// After the op has failed, TensorFlow makes an exception of its own in Python. Those are the first
/// instructions of the main thread, so Python raises the `KeyboardInterrupt` there. pybind11, the
/// library between TensorFlow and Python, then raises a `RuntimeError` that names both.
fn was_replaced(py: Python<'_>) -> PyResult<bool> {
    let exception = py.import("sys")?.call_method0("exc_info")?.get_item(1)?;
    Ok(exception.is_instance_of::<PyRuntimeError>()
        && exception
            .str()?
            .to_cow()?
            .contains("REPLACED BY KeyboardInterrupt"))
}
