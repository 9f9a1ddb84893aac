//! SIGTERM in the first process of a container, where Linux drops signals without a handler.

use std::ffi::c_int;

use pyo3::prelude::*;

/// Lets SIGTERM end a process with the number 1, unless the program handles or ignores it.
#[pyfunction]
pub(crate) fn end_by_sigterm() {
    if std::process::id() != 1 {
        return;
    }
    // SAFETY: all-zero bytes are a valid sigaction, and the pointers are alive during the calls.
    unsafe {
        let mut present: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(libc::SIGTERM, std::ptr::null(), &raw mut present) == 0
            && present.sa_sigaction == libc::SIG_DFL
        {
            present.sa_sigaction = end as extern "C" fn(c_int) as libc::sighandler_t;
            libc::sigaction(libc::SIGTERM, &raw const present, std::ptr::null_mut());
        }
    }
}

/// Ends the process at once, even while it waits inside TensorFlow or gradring. A fork ends by the
/// system's default action.
extern "C" fn end(signal: c_int) {
    // SAFETY: all of these are allowed in a signal handler, and take no pointer.
    unsafe {
        if libc::getpid() == 1 {
            libc::_exit(128 + signal);
        }
        // The signal is delivered when this function returns.
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
}
