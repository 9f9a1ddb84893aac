//! Waiting for sockets with `poll(2)`, and a wake-up from other threads and processes.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

pub use rustix::event::PollFd;
use rustix::event::{EventfdFlags, PollFlags, Timespec, eventfd};

/// Longest single wait, after which the caller checks again.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// An eventfd with which another thread or process ends a wait.
pub struct WakeUp {
    event: OwnedFd,
}

impl WakeUp {
    /// Creates a wake-up that has not been rung.
    ///
    /// # Errors
    /// When the system has no file descriptor left.
    pub fn new() -> std::io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { event })
    }

    /// Ends the current or next wait, and all later ones until `reset`.
    pub fn wake(&self) {
        ring(&self.event);
    }

    /// Lets waits sleep again; returns the number of wake-ups since the last reset.
    pub fn reset(&self) -> u64 {
        let mut count = [0; size_of::<u64>()];
        // If it was not woken, the read fails and `count` stays 0.
        let _ = rustix::io::read(&self.event, &mut count);
        u64::from_ne_bytes(count)
    }

    /// Returns the entry to poll in a wait that this wake-up should end.
    pub fn awaited(&self) -> PollFd<'_> {
        readable(&self.event)
    }
}

impl AsFd for WakeUp {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// Wakes the thread that polls this non-blocking eventfd. A write fails only if the counter is
/// full, and then it is readable as well.
pub(crate) fn ring(event: &impl AsFd) {
    let _ = rustix::io::write(event, &1_u64.to_ne_bytes());
}

/// Returns the entry with which `poll` waits for bytes to read.
pub fn readable(descriptor: &impl AsFd) -> PollFd<'_> {
    PollFd::new(descriptor, PollFlags::IN)
}

/// Returns the entry with which `poll` waits for capacity to write.
pub fn writable(descriptor: &impl AsFd) -> PollFd<'_> {
    PollFd::new(descriptor, PollFlags::OUT)
}

/// Sleeps until one of these is ready, a signal arrives, or `timeout` has passed.
pub fn wait<'a>(awaited: impl IntoIterator<Item = PollFd<'a>>, timeout: Duration) {
    let mut awaited: Vec<PollFd<'a>> = awaited.into_iter().collect();
    let timeout = Timespec::try_from(timeout.min(WAIT_MAX)).expect("a minute is not long");
    // An error (a signal) ends the wait.
    let _ = rustix::event::poll(&mut awaited, Some(&timeout));
}
