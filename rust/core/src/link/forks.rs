//! Sockets that a fork of this process must not keep: while it has them, the end of this process
//! does not end its connections, and its port stays taken.

use std::collections::BTreeSet;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

/// Inodes, which no other socket has: a descriptor may be duplicated, closed and used again.
static NOTED: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

/// How often this process and those that it was forked from have been forked.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// What ends a call in whose middle the process was forked, in the fork.
pub(crate) const INSIDE: &str = "this process was forked in the middle of the call, which goes on in its \
                                 parent only";

/// A process, as opposed to its forks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process(u32);

impl Process {
    /// The one that runs this.
    #[must_use]
    pub fn this() -> Self {
        Self(GENERATION.load(Ordering::Relaxed))
    }

    /// Whether this is still the same one: memory of a fork remembers its parent.
    #[must_use]
    pub fn is_this(self) -> bool {
        self == Self::this()
    }
}

/// Remembers a socket by which peers know that this process lives.
pub(crate) fn note(socket: &impl AsRawFd) {
    let mut noted = NOTED.lock().unwrap_or_else(PoisonError::into_inner);
    noted.extend(socket_inode(socket.as_raw_fd()));
}

/// Closes the sockets that were noted before this process was forked from its parent, which keeps
/// its own. Whoever owns one in this process must never use or drop it.
pub fn close_inherited() {
    // A thread of the parent, which does not exist here, may have held the lock.
    let Ok(noted) = NOTED.try_lock() else { return };
    let Ok(descriptors) = std::fs::read_dir("/proc/self/fd") else {
        return;
    };
    let descriptors: Vec<RawFd> = descriptors
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    for descriptor in descriptors {
        if socket_inode(descriptor).is_some_and(|inode| noted.contains(&inode)) {
            // SAFETY: the socket is one of ours, and its owner leaves it alone from now on.
            unsafe { libc::close(descriptor) };
        }
    }
}

fn socket_inode(descriptor: RawFd) -> Option<u64> {
    let mut stat = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: a status is written, if the call succeeds.
    let stat = unsafe {
        if libc::fstat(descriptor, stat.as_mut_ptr()) != 0 {
            return None;
        }
        stat.assume_init()
    };
    (stat.st_mode & libc::S_IFMT == libc::S_IFSOCK).then_some(stat.st_ino)
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
