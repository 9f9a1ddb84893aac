//! Non-blocking reads and writes of the raw bytes of a TCP connection.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::TcpStream;

use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags};

use crate::link::parts;

/// Largest transfer that is copied into one buffer, because system calls for one part are cheaper
/// than those for several.
const PACKET_BYTES: usize = 256;

/// A socket that does not block.
pub(super) struct Socket {
    tcp: TcpStream,
    inside_host: bool,
}

impl Socket {
    pub(super) fn new(tcp: TcpStream) -> io::Result<Self> {
        tcp.set_nonblocking(true)?;
        let inside_host = super::is_inside_host(&tcp)?;
        Ok(Self { tcp, inside_host })
    }

    pub(super) const fn tcp(&self) -> &TcpStream {
        &self.tcp
    }

    /// Returns the CPU core from which a sender on this host sent last. Inside a host, the kernel
    /// puts bytes into the receiver's socket on the sender's core.
    pub(super) fn core_of_sender(&self) -> Option<usize> {
        if !self.inside_host {
            return None;
        }
        let core = rustix::net::sockopt::socket_incoming_cpu(&self.tcp);
        Some(core.ok()? as usize)
    }

    /// Returns `true` if a read would not block: it gives bytes, the end or an error.
    pub(super) fn is_readable(&self) -> bool {
        let peeked = rustix::net::recv(&self.tcp, &mut [0_u8][..], RecvFlags::PEEK);
        peeked.map_or_else(|error| !is_later(error.kind()), |_| true)
    }
}

impl Read for Socket {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        self.tcp.read(target)
    }

    fn read_vectored(&mut self, parts: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let wanted = parts.iter().map(|part| part.len()).sum();
        if wanted > PACKET_BYTES {
            return self.tcp.read_vectored(parts);
        }
        let mut packet = [0; PACKET_BYTES];
        let received = self.read(&mut packet[..wanted])?;
        parts::scatter(&packet[..received], parts);
        Ok(received)
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::net::send(&self.tcp, bytes, SendFlags::NOSIGNAL)?)
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let length = parts::length(parts);
        if length <= PACKET_BYTES {
            let mut packet = [0; PACKET_BYTES];
            let mut start = 0;
            for part in parts {
                packet[start..start + part.len()].copy_from_slice(part);
                start += part.len();
            }
            return self.write(&packet[..length]);
        }
        let mut nothing = SendAncillaryBuffer::default();
        let flags = SendFlags::NOSIGNAL;
        Ok(rustix::net::sendmsg(&self.tcp, parts, &mut nothing, flags)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns `true` if the same call may succeed later.
pub(super) fn is_later(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::Interrupted)
}
