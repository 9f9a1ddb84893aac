//! Passing of file descriptors over Unix sockets (SCM_RIGHTS), and the check of the peer's user.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg, sockopt,
};

/// Largest number of descriptors in one message.
const DESCRIPTORS_MAX: usize = 3;
const CONTROL_BYTES: usize = rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX));

/// Sends duplicates of `descriptors` in one message.
pub(super) fn send(socket: &UnixStream, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fits = control.push(SendAncillaryMessage::ScmRights(descriptors));
    assert!(fits, "a message has few descriptors");
    let payload = [IoSlice::new(&[0])];
    sendmsg(socket, &payload, &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives one message with exactly `N` descriptors; waits at most for the socket's timeout.
pub(super) fn receive<const N: usize>(socket: &UnixStream) -> io::Result<[OwnedFd; N]> {
    const { assert!(N <= DESCRIPTORS_MAX) };
    exactly(receive_all(socket)?)
}

/// Makes sure that there are exactly `N` descriptors.
pub(super) fn exactly<const N: usize>(descriptors: Vec<OwnedFd>) -> io::Result<[OwnedFd; N]> {
    descriptors
        .try_into()
        .map_err(|_| io::Error::other("another number of file descriptors came"))
}

/// Receives one message with its descriptors; waits at most for the socket's timeout.
pub(super) fn receive_all(socket: &UnixStream) -> io::Result<Vec<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut payload = [0];
    let payload = &mut [IoSliceMut::new(&mut payload)];
    let received = recvmsg(socket, payload, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    // All descriptors are owned before the checks, so that none leaks.
    let mut descriptors = Vec::with_capacity(DESCRIPTORS_MAX);
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = message {
            descriptors.extend(passed);
        }
    }
    if received.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        // The kernel drops descriptors that exceed the limit of this process.
        return Err(Errno::MFILE.into());
    }
    Ok(descriptors)
}

/// Returns `true` if the process at the other end runs as the same user.
pub(super) fn is_same_user(socket: &UnixStream) -> io::Result<bool> {
    Ok(sockopt::socket_peercred(socket)?.uid == rustix::process::geteuid())
}
