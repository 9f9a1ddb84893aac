//! Waiting for sockets with `poll(2)`, and a wake-up from other threads and processes.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

pub use rustix::event::PollFd;
use rustix::event::{EventfdFlags, PollFlags, Timespec, eventfd};

/// The longest wait: the caller looks again after it.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// Ends a wait from another thread or process, once or for good: an eventfd.
pub struct WakeUp {
    event: OwnedFd,
}

impl WakeUp {
    /// One that has not been woken.
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

    /// Lets waits sleep again; returns how often it was woken.
    pub fn reset(&self) -> u64 {
        let mut count = [0; size_of::<u64>()];
        // Without a wake-up nothing is read.
        let _ = rustix::io::read(&self.event, &mut count);
        u64::from_ne_bytes(count)
    }

    /// What a wait polls that is to end with it.
    pub fn awaited(&self) -> PollFd<'_> {
        readable(&self.event)
    }
}

impl AsFd for WakeUp {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// Wakes who waits for this eventfd, which does not block. A full counter is readable too.
pub(crate) fn ring(event: &impl AsFd) {
    let _ = rustix::io::write(event, &1_u64.to_ne_bytes());
}

/// A descriptor of which bytes are wanted.
pub fn readable(descriptor: &impl AsFd) -> PollFd<'_> {
    PollFd::new(descriptor, PollFlags::IN)
}

/// A descriptor of which room is wanted.
pub fn writable(descriptor: &impl AsFd) -> PollFd<'_> {
    PollFd::new(descriptor, PollFlags::OUT)
}

/// Sleeps until one of these is ready, a signal arrives, or the time is over.
pub fn wait<'a>(awaited: impl IntoIterator<Item = PollFd<'a>>, timeout: Duration) {
    let mut awaited: Vec<PollFd<'a>> = awaited.into_iter().collect();
    let timeout = Timespec::try_from(timeout.min(WAIT_MAX)).expect("a minute is not long");
    // An error (a signal) ends the wait.
    let _ = rustix::event::poll(&mut awaited, Some(&timeout));
}
