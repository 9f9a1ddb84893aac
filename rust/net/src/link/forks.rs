//! Handles that a fork of this process must not keep. An inherited socket would keep connections
//! open and the port taken after this process has ended. Values that refer to threads and links are
//! useless in the fork, which has neither.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::os::fd::{AsRawFd, FromRawFd as _, OwnedFd, RawFd};
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard};

use gradring_proto::lock::lock;

/// Inodes of sockets that a fork must close. An inode belongs to one socket, whereas a descriptor
/// may be duplicated, closed and reused.
static NOTED: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

type Noted = MutexGuard<'static, BTreeSet<u64>>;

thread_local! {
    /// Lock on `NOTED`, held while this thread forks so that the fork finds the set consistent, and
    /// the number of this thread's forks under way. A signal handler during a fork may begin
    /// another.
    static HELD: Cell<Option<(Noted, usize)>> = const { Cell::new(None) };
}

/// Number of forks from the original process down to this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// A process, as distinguished from its forks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process(u32);

impl Process {
    /// Returns the calling process.
    #[must_use]
    pub fn this() -> Self {
        Self(GENERATION.load(Ordering::Relaxed))
    }

    /// Returns `true` if this is the calling process; in a fork, copies of the parent's memory
    /// return `false`.
    #[must_use]
    pub fn is_this(self) -> bool {
        self == Self::this()
    }
}

/// A process-wide value that starts anew in a fork. The parent's value refers to resources that the
/// fork lacks, and may be locked for ever by a thread that does not exist there.
pub struct PerProcess<T>(AtomicPtr<Owned<T>>);

struct Owned<T> {
    process: Process,
    value: Mutex<T>,
}

impl<T: Default> PerProcess<T> {
    /// Creates the holder; the value is made by the first `lock`.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "only statics are made of it")]
    pub const fn new() -> Self {
        Self(AtomicPtr::new(std::ptr::null_mut()))
    }

    /// Locks this process's value.
    pub fn lock(&'static self) -> MutexGuard<'static, T> {
        loop {
            let present = self.0.load(Ordering::Acquire);
            // SAFETY: null, or a box that was put here and is never freed.
            if let Some(owned) = unsafe { present.as_ref() }
                && owned.process.is_this()
            {
                return lock(&owned.value);
            }
            let new = Box::into_raw(Box::new(Owned {
                process: Process::this(),
                value: Mutex::default(),
            }));
            let put = self
                .0
                .compare_exchange(present, new, Ordering::AcqRel, Ordering::Acquire);
            if put.is_err() {
                // SAFETY: the box was made above, and nobody else has seen it.
                drop(unsafe { Box::from_raw(new) });
            }
        }
    }
}

/// Registers a socket that forks must close, because peers take its end for the end of this
/// process.
pub fn note(socket: &impl AsRawFd) {
    let inode = socket_inode(socket.as_raw_fd());
    match HELD.take() {
        Some((mut noted, forks)) => {
            noted.extend(inode);
            HELD.set(Some((noted, forks)));
        }
        None => lock(&NOTED).extend(inode),
    }
}

/// Called by a thread before it forks the process.
pub fn begin() {
    let (noted, forks) = HELD.take().unwrap_or_else(|| (lock(&NOTED), 0));
    HELD.set(Some((noted, forks + 1)));
}

/// Called in the parent by the thread that has forked the process.
pub fn end_in_parent() {
    if let Some((noted, forks @ 2..)) = HELD.take() {
        HELD.set(Some((noted, forks - 1)));
    }
}

/// Called in the fork: closes the fork's copies of the registered sockets; the parent keeps its
/// own. Objects that own these sockets in the fork must never be used or dropped.
pub fn end_in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    let Some((mut noted, _)) = HELD.take() else {
        return;
    };
    let noted = std::mem::take(&mut *noted);
    let Ok(descriptors) = std::fs::read_dir("/proc/self/fd") else {
        return;
    };
    let descriptors: Vec<RawFd> = descriptors
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    for descriptor in descriptors {
        if socket_inode(descriptor).is_some_and(|inode| noted.contains(&inode)) {
            // SAFETY: the socket is one of ours, and its owner leaves it alone from now on.
            drop(unsafe { OwnedFd::from_raw_fd(descriptor) });
        }
    }
}

fn socket_inode(descriptor: RawFd) -> Option<u64> {
    let link = std::fs::read_link(format!("/proc/self/fd/{descriptor}")).ok()?;
    let inode = link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
    inode.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_socket_and_its_duplicates_have_one_inode_and_files_have_none_here() {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let copy = socket.try_clone().unwrap();
        let inode = |socket: &TcpListener| socket_inode(socket.as_raw_fd());
        assert!(inode(&socket).is_some());
        assert_eq!(inode(&socket), inode(&copy));
        assert_ne!(inode(&socket), inode(&other));
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert_eq!(socket_inode(file.as_raw_fd()), None);
        assert_eq!(socket_inode(-1), None);
    }
}
