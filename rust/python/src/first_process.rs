//! SIGTERM in the first process of a container, for which Linux drops what has no handler.

use std::ffi::c_int;

use pyo3::prelude::*;

/// In a process whose number is 1, lets SIGTERM end it, as it does any other process, unless the
/// program handles or ignores it.
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

/// Ends the process at once, also while it waits inside of TensorFlow or of ours; a fork of it as
/// the system does.
extern "C" fn end(signal: c_int) {
    // SAFETY: all of these are allowed in a signal handler, and take no pointer.
    unsafe {
        if libc::getpid() == 1 {
            libc::_exit(128 + signal);
        }
        // Comes when this function is over.
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
}
