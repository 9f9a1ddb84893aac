//! Waiting for sockets with `poll(2)`, together with a wake-up from other threads.

use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::time::Duration;

/// Ends a `wait` from another thread, once or for good: an eventfd.
pub(crate) struct WakeUp {
    event: OwnedFd,
}

impl WakeUp {
    pub(crate) fn new() -> std::io::Result<Self> {
        // SAFETY: the call takes no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and nobody else's.
        let event = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { event })
    }

    /// Ends the current or next wait, and all later ones until `reset`.
    pub(crate) fn wake(&self) {
        let one = 1_u64;
        // SAFETY: writes the eight bytes of `one`. A full counter is readable too.
        unsafe { libc::write(self.event.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Lets waits sleep again.
    pub(crate) fn reset(&self) {
        let mut count = 0_u64;
        // SAFETY: reads at most the eight bytes of `count`.
        unsafe { libc::read(self.event.as_raw_fd(), (&raw mut count).cast(), 8) };
    }
}

impl AsFd for WakeUp {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// A descriptor and what is wanted of it.
pub(crate) struct Interested(libc::pollfd);

impl Interested {
    pub(crate) const fn readable(fd: RawFd) -> Self {
        Self(Self::entry(fd, libc::POLLIN))
    }

    pub(crate) const fn writable(fd: RawFd) -> Self {
        Self(Self::entry(fd, libc::POLLOUT))
    }

    const fn entry(fd: RawFd, events: libc::c_short) -> libc::pollfd {
        libc::pollfd {
            fd,
            events,
            revents: 0,
        }
    }
}

/// Sleeps until a socket is ready, somebody wakes, a signal arrives, or the time is over.
pub(crate) fn wait(sockets: impl Iterator<Item = Interested>, wake_up: &WakeUp, timeout: Duration) {
    let wake_up = Interested::readable(wake_up.event.as_raw_fd());
    wait_without_waker(sockets.chain([wake_up]), timeout);
}

/// Sleeps until a socket is ready, a signal arrives, or the time is over.
pub(crate) fn wait_without_waker(sockets: impl Iterator<Item = Interested>, timeout: Duration) {
    let mut entries: Vec<libc::pollfd> = sockets.map(|socket| socket.0).collect();
    // Rounded up, so that a wait for less than a millisecond does not turn into spinning.
    let timeout_ms = timeout.as_micros().div_ceil(1000).min(60_000) as libc::c_int;
    // SAFETY: `entries` is valid for its length during the call. Errors (a signal) end the wait.
    unsafe {
        libc::poll(
            entries.as_mut_ptr(),
            entries.len() as libc::nfds_t,
            timeout_ms,
        )
    };
}
