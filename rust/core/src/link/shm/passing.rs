//! File descriptors over Unix sockets (SCM_RIGHTS), and who is at the other end.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

/// Descriptors in one message.
const DESCRIPTORS_MAX: usize = 2;
/// Memory for control messages in eight-byte words, which aligns it as they need.
const CONTROL_WORDS: usize = 8;

// SAFETY: a computation.
const CONTROL_BYTES: usize =
    unsafe { libc::CMSG_SPACE((DESCRIPTORS_MAX * size_of::<RawFd>()) as u32) as usize };
const _: () = assert!(CONTROL_BYTES <= CONTROL_WORDS * 8);

/// Sends duplicates of `descriptors` in one message.
pub(super) fn send(socket: &UnixStream, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    assert!(descriptors.len() <= DESCRIPTORS_MAX);
    let bytes = size_of_val(descriptors) as u32;
    let mut control = [0_u64; CONTROL_WORDS];
    let mut payload = [0_u8];
    let mut part = io_vector(&mut payload);
    let mut message = header(&mut part, &mut control);
    // SAFETY: a computation.
    message.msg_controllen = unsafe { libc::CMSG_SPACE(bytes) } as _;
    // SAFETY: `control` is aligned and has room for a header and DESCRIPTORS_MAX descriptors, and
    // a `BorrowedFd` is a file descriptor in memory.
    unsafe {
        let first = libc::CMSG_FIRSTHDR(&raw const message);
        (*first).cmsg_level = libc::SOL_SOCKET;
        (*first).cmsg_type = libc::SCM_RIGHTS;
        (*first).cmsg_len = libc::CMSG_LEN(bytes) as _;
        std::ptr::copy_nonoverlapping(
            descriptors.as_ptr().cast(),
            libc::CMSG_DATA(first),
            bytes as usize,
        );
    }
    // SAFETY: `message` points to memory that outlives the call.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
    if sent < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Receives one message with exactly `N` descriptors; waits as long as the socket's timeout says.
pub(super) fn receive<const N: usize>(socket: &UnixStream) -> io::Result<[OwnedFd; N]> {
    const { assert!(N <= DESCRIPTORS_MAX) };
    let mut control = [0_u64; CONTROL_WORDS];
    let mut payload = [0_u8];
    let mut part = io_vector(&mut payload);
    let mut message = header(&mut part, &mut control);
    message.msg_controllen = CONTROL_BYTES as _;
    // SAFETY: `message` points to memory that outlives the call.
    let received =
        unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) };
    if received < 0 {
        return Err(io::Error::last_os_error());
    }
    // All are owned before any is judged, so that none leaks.
    let descriptors = owned(&message);
    if received == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    descriptors
        .try_into()
        .map_err(|_| io::Error::other("another number of file descriptors came"))
}

/// The descriptors that came with a message.
fn owned(message: &libc::msghdr) -> Vec<OwnedFd> {
    let mut descriptors = Vec::with_capacity(DESCRIPTORS_MAX);
    // SAFETY: the kernel filled in `message` and its control memory, which is aligned.
    unsafe {
        let mut next = libc::CMSG_FIRSTHDR(message);
        while let Some(control) = next.as_ref() {
            if (control.cmsg_level, control.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let bytes = (control.cmsg_len - libc::CMSG_LEN(0) as usize) as usize;
                let first = libc::CMSG_DATA(next).cast::<RawFd>();
                for index in 0..bytes / size_of::<RawFd>() {
                    let fd = first.add(index).read_unaligned();
                    descriptors.push(OwnedFd::from_raw_fd(fd));
                }
            }
            next = libc::CMSG_NXTHDR(message, next);
        }
    }
    descriptors
}

/// Whether the process at the other end runs as the same user.
pub(super) fn is_same_user(socket: &UnixStream) -> io::Result<bool> {
    let mut credentials = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: writes at most `length` bytes to `credentials`.
    let returned = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut length,
        )
    };
    if returned < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call takes no pointers.
    Ok(credentials.uid == unsafe { libc::geteuid() })
}

fn io_vector(payload: &mut [u8]) -> libc::iovec {
    libc::iovec {
        iov_base: payload.as_mut_ptr().cast(),
        iov_len: payload.len(),
    }
}

fn header(part: &mut libc::iovec, control: &mut [u64; CONTROL_WORDS]) -> libc::msghdr {
    // SAFETY: all zeros is an empty message; musl has private padding, hence no literal.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message
}
