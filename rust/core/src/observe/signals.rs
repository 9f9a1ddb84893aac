//! SIGUSR2 makes every communicator of the process write its flight record.
//!
//! The handler only counts, which is safe in a signal handler; the monitors read the count. A
//! Python handler would not work: Python runs it between two of its own instructions, and a program
//! that hangs inside TensorFlow never reaches one.

use std::sync::atomic::{AtomicU64, Ordering};

static ASKED: AtomicU64 = AtomicU64::new(0);

/// Number of signals so far.
#[must_use]
pub fn asked() -> u64 {
    ASKED.load(Ordering::Relaxed)
}

/// Handles SIGUSR2 from now on, unless the program handles or ignores it itself.
pub fn listen() {
    // SAFETY: all-zero bytes are a valid sigaction, and both pointers are alive during the calls.
    unsafe {
        let mut present: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(libc::SIGUSR2, std::ptr::null(), &raw mut present) != 0
            || present.sa_sigaction != libc::SIG_DFL
        {
            return;
        }
        let mut ours: libc::sigaction = std::mem::zeroed();
        ours.sa_sigaction = count as extern "C" fn(libc::c_int) as libc::sighandler_t;
        ours.sa_flags = libc::SA_RESTART;
        libc::sigaction(libc::SIGUSR2, &raw const ours, std::ptr::null_mut());
    }
}

extern "C" fn count(_signal: libc::c_int) {
    ASKED.fetch_add(1, Ordering::Relaxed);
}
