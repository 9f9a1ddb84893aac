//! Ctrl-C while TensorFlow runs.
//!
//! Python's own handler for SIGINT only notes the signal; the exception is raised when the main
//! thread is back between two instructions of Python. While it is inside TensorFlow, that is when
//! the op returns, and an op that waits for a late rank returns when its time is over. So:
//!
//! 1. a handler in front of Python's counts the signals and wakes a thread, and does nothing else;
//! 2. the thread asks Python whether Ctrl-C means what it usually means, and asks to be told when
//!    the main thread is back;
//! 3. a Wait that is blocked looks whether it has to be: see `outstanding`. It then fails, the
//!    op returns, and Python raises;
//! 4. when that takes long, as in a function of many steps, the next Wait fails too, though it need
//!    not wait: see `overdue`.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use libc::{sigaction, siginfo_t};

/// What Ctrl-C sends.
pub const SIGNAL: c_int = libc::SIGINT;

/// How many SIGINTs have come.
static ARRIVED: AtomicU64 = AtomicU64::new(0);
/// How many of them are to end what TensorFlow waits for.
static INTERRUPTING: AtomicU64 = AtomicU64::new(0);
/// How many of them end it although nothing keeps it waiting.
static INSISTING: AtomicU64 = AtomicU64::new(0);
/// How many of them Python has handled.
static HANDLED: AtomicU64 = AtomicU64::new(0);

/// Wakes the thread: an eventfd.
static DOORBELL: OnceLock<c_int> = OnceLock::new();
/// The handler that was there, and is called: as a number, 0 for none.
static PREVIOUS: AtomicUsize = AtomicUsize::new(0);
static PREVIOUS_FLAGS: AtomicUsize = AtomicUsize::new(0);

/// Whether the main thread would handle Ctrl-C if it came back from TensorFlow.
pub(crate) fn outstanding() -> bool {
    listen();
    INTERRUPTING.load(Ordering::Acquire) > HANDLED.load(Ordering::Acquire)
}

/// Whether the main thread has been inside TensorFlow for long since Ctrl-C.
pub(crate) fn overdue() -> bool {
    INSISTING.load(Ordering::Acquire) > HANDLED.load(Ordering::Acquire)
}

/// A SIGINT that ends what TensorFlow does when it comes to the next collective, likewise.
pub fn insist(arrived: u64) {
    INSISTING.fetch_max(arrived, Ordering::AcqRel);
}

/// A SIGINT that ends what TensorFlow waits for, unless Python has handled it.
pub fn interrupt(arrived: u64) {
    INTERRUPTING.fetch_max(arrived, Ordering::AcqRel);
}

/// Python has handled all SIGINTs up to this one.
pub fn handled(arrived: u64) {
    HANDLED.fetch_max(arrived, Ordering::AcqRel);
}

/// Begins to listen for [`next`]; to be called once.
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

/// Waits for a SIGINT; returns how many have come.
#[must_use]
pub fn next() -> u64 {
    let mut rung = 0_u64;
    if let Some(&doorbell) = DOORBELL.get() {
        // SAFETY: reads at most the eight bytes of `rung`. A read that fails only comes back early.
        unsafe { libc::read(doorbell, (&raw mut rung).cast(), size_of::<u64>()) };
    }
    ARRIVED.load(Ordering::Acquire)
}

/// Puts our handler in front of Python's, again if Python has put its own back since.
///
/// A signal that is ignored or ends the process stays so. A handler that another library has put in
/// front of ours stays there: it calls ours, so one more in front of it would go in circles.
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

/// Counts, rings, and calls the handler that was there; all of it is allowed in a signal handler.
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
