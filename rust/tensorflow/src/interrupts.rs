//! Ctrl-C while TensorFlow runs.
//!
//! Python's own handler for SIGINT only records the signal; the exception is raised when the main
//! thread is between two instructions of Python. Inside TensorFlow that is when the op returns, and
//! an op that waits for a late rank returns after its timeout. So:
//!
//! 1. a handler in front of Python's calls that one, counts the signal, and wakes a thread;
//! 2. the thread checks that Python's handler is the default one, and registers a call that Python
//!    makes when the main thread is back;
//! 3. a blocked Wait polls `outstanding` and fails, the op returns, and Python raises;
//! 4. if that takes long, as in a function of many steps, the next Wait fails even if it would not
//!    block: see `overdue`.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use libc::{sigaction, siginfo_t};

/// Signal that Ctrl-C sends.
pub const SIGNAL: c_int = libc::SIGINT;

/// Number of SIGINTs that have arrived.
static ARRIVED: AtomicU64 = AtomicU64::new(0);
/// Number of the last SIGINT that fails a Wait that blocks.
static INTERRUPTING: AtomicU64 = AtomicU64::new(0);
/// Number of the last SIGINT that also fails a Wait that does not block.
static INSISTING: AtomicU64 = AtomicU64::new(0);
/// Number of the last SIGINT that Python has handled.
static HANDLED: AtomicU64 = AtomicU64::new(0);

/// Eventfd that wakes the thread.
static DOORBELL: OnceLock<c_int> = OnceLock::new();
/// Address of the previous handler, which ours calls; 0 for none.
static PREVIOUS: AtomicUsize = AtomicUsize::new(0);
static PREVIOUS_FLAGS: AtomicUsize = AtomicUsize::new(0);

/// Returns `true` if a blocked Wait must fail so that the main thread can handle Ctrl-C.
pub(crate) fn outstanding() -> bool {
    listen();
    INTERRUPTING.load(Ordering::Acquire) > HANDLED.load(Ordering::Acquire)
}

/// Returns `true` if the main thread has been inside TensorFlow for long since Ctrl-C.
pub(crate) fn overdue() -> bool {
    INSISTING.load(Ordering::Acquire) > HANDLED.load(Ordering::Acquire)
}

/// Lets SIGINTs up to number `arrived` fail the next Wait, even if it does not block, unless Python
/// has handled them.
pub fn insist(arrived: u64) {
    INSISTING.fetch_max(arrived, Ordering::AcqRel);
}

/// Lets SIGINTs up to number `arrived` fail a Wait that blocks, unless Python has handled them.
pub fn interrupt(arrived: u64) {
    INTERRUPTING.fetch_max(arrived, Ordering::AcqRel);
}

/// Records that Python has handled all SIGINTs up to number `arrived`.
pub fn handled(arrived: u64) {
    HANDLED.fetch_max(arrived, Ordering::AcqRel);
}

/// Installs the signal handler, so that [`next`] can wait for signals. Call it once.
///
/// # Errors
/// When the system has no descriptor left.
pub fn start() -> std::io::Result<()> {
    // SAFETY: the call takes no pointers.
    let doorbell = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
    if doorbell < 0 {
        return Err(std::io::Error::last_os_error());
    }
    DOORBELL.get_or_init(|| doorbell);
    listen();
    Ok(())
}

/// Waits for a SIGINT; returns the number of all that have arrived.
#[must_use]
pub fn next() -> u64 {
    let mut rung = 0_u64;
    if let Some(&doorbell) = DOORBELL.get() {
        // SAFETY: reads at most the eight bytes of `rung`. If the read fails, the function only
        // returns early.
        unsafe { libc::read(doorbell, (&raw mut rung).cast(), size_of::<u64>()) };
    }
    ARRIVED.load(Ordering::Acquire)
}

/// Puts our handler in front of Python's, and again if Python has reinstalled its own.
///
/// A signal that is ignored or ends the process is left as it is. A handler that another library
/// has put in front of ours also stays: it calls ours, and putting ours in front of it would make a
/// cycle.
fn listen() {
    // SAFETY: all-zero bytes are a valid sigaction, and the pointers are alive during the calls.
    unsafe {
        let mut present: sigaction = std::mem::zeroed();
        if DOORBELL.get().is_none()
            || libc::sigaction(SIGNAL, std::ptr::null(), &raw mut present) != 0
            || matches!(present.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN)
            || present.sa_sigaction == ours()
        {
            return;
        }
        let first =
            PREVIOUS.compare_exchange(0, present.sa_sigaction, Ordering::AcqRel, Ordering::Acquire);
        if first.is_err_and(|previous| previous != present.sa_sigaction) {
            return;
        }
        PREVIOUS_FLAGS.store(present.sa_flags as usize, Ordering::Release);
        present.sa_sigaction = ours();
        present.sa_flags |= libc::SA_SIGINFO;
        libc::sigaction(SIGNAL, &raw const present, std::ptr::null_mut());
    }
}

fn ours() -> usize {
    arrive as extern "C" fn(c_int, *mut siginfo_t, *mut c_void) as libc::sighandler_t
}

/// Calls the previous handler, counts the signal, and wakes the thread. All of that is allowed in a
/// signal handler.
extern "C" fn arrive(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let previous = PREVIOUS.load(Ordering::Acquire);
    let flags = PREVIOUS_FLAGS.load(Ordering::Acquire);
    // SAFETY: the address is that of the handler which the system would have called with the same
    // arguments; errno is this thread's own.
    unsafe {
        let errno = *libc::__errno_location();
        if flags & libc::SA_SIGINFO as usize != 0 {
            let previous: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) =
                std::mem::transmute(previous);
            previous(signal, info, context);
        } else {
            let previous: extern "C" fn(c_int) = std::mem::transmute(previous);
            previous(signal);
        }
        ARRIVED.fetch_add(1, Ordering::AcqRel);
        if let Some(&doorbell) = DOORBELL.get() {
            let one = 1_u64;
            libc::write(doorbell, (&raw const one).cast(), size_of::<u64>());
        }
        *libc::__errno_location() = errno;
    }
}
