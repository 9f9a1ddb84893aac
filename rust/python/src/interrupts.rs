//! Makes Ctrl-C end what TensorFlow waits for: see [`gradring_tensorflow::interrupts`].

use std::ffi::{c_int, c_void};
use std::sync::Once;
use std::time::Duration;

use gradring_tensorflow::interrupts;
use pyo3::exceptions::{PyKeyboardInterrupt, PyRuntimeError};
use pyo3::ffi;
use pyo3::prelude::*;

use crate::entry::attached;

/// How long the main thread may take to handle Ctrl-C by itself, before an op is made to fail for
/// it: longer than Python needs between two instructions.
const GRACE: Duration = Duration::from_millis(200);
/// The same for an op that goes on: longer than most steps take, so that weights are those of whole
/// steps where a program saves them after Ctrl-C.
const GRACE_OF_STEPS: Duration = Duration::from_millis(1200);

/// Watches for SIGINT from now on, in a thread that sleeps.
pub(crate) fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // Without room for a descriptor or a thread, Ctrl-C waits until the op returns.
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

/// Decides about the SIGINTs up to `arrived`.
fn consider(arrived: u64) {
    let number = usize::try_from(arrived).unwrap_or(usize::MAX);
    // SAFETY: the function may be called from any thread, without the interpreter too, and is given
    // a number, not a pointer. Python calls back on its main thread, after the handlers of signals
    // that came before.
    let asked = unsafe { ffi::Py_AddPendingCall(Some(back), number as *mut c_void) };
    // Only now: to wait for the interpreter may take until the main thread is inside an op again.
    if asked == 0 && attached(raises_keyboard_interrupt) == Some(true) {
        std::thread::sleep(GRACE);
        interrupts::interrupt(arrived);
        std::thread::sleep(GRACE_OF_STEPS.saturating_sub(GRACE));
        interrupts::insist(arrived);
    }
}

/// Whether Ctrl-C has its usual meaning; what a handler of the program would do is not known.
fn raises_keyboard_interrupt(py: Python<'_>) -> bool {
    let usual = || -> PyResult<bool> {
        let signal = py.import("signal")?;
        let present = signal.call_method1("getsignal", (interrupts::SIGNAL,))?;
        Ok(present.is(&signal.getattr("default_int_handler")?))
    };
    usual().unwrap_or(false)
}

/// The main thread is between two instructions of Python.
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

/// Whether the exception under way has taken the place of a `KeyboardInterrupt`.
///
/// The op has failed, so TensorFlow makes an exception of its own, in Python. That is the first
/// instruction that the main thread comes to, so Python raises there, and the library between
/// TensorFlow and Python (pybind11) answers with a `RuntimeError` that names both.
fn was_replaced(py: Python<'_>) -> PyResult<bool> {
    let exception = py.import("sys")?.call_method0("exc_info")?.get_item(1)?;
    Ok(exception.is_instance_of::<PyRuntimeError>()
        && exception
            .str()?
            .to_cow()?
            .contains("REPLACED BY KeyboardInterrupt"))
}
