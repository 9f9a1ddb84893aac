//! File descriptors over Unix sockets (SCM_RIGHTS), and who is at the other end.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg, sockopt,
};

/// Descriptors in one message.
const DESCRIPTORS_MAX: usize = 2;
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

/// Receives one message with exactly `N` descriptors; waits as long as the socket's timeout says.
pub(super) fn receive<const N: usize>(socket: &UnixStream) -> io::Result<[OwnedFd; N]> {
    const { assert!(N <= DESCRIPTORS_MAX) };
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut payload = [0];
    let payload = &mut [IoSliceMut::new(&mut payload)];
    let received = recvmsg(socket, payload, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    // All are owned before any is judged, so that none leaks.
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
        // The system drops descriptors for which this process has no room.
        return Err(Errno::MFILE.into());
    }
    descriptors
        .try_into()
        .map_err(|_| io::Error::other("another number of file descriptors came"))
}

/// Whether the process at the other end runs as the same user.
pub(super) fn is_same_user(socket: &UnixStream) -> io::Result<bool> {
    Ok(sockopt::socket_peercred(socket)?.uid == rustix::process::geteuid())
}
