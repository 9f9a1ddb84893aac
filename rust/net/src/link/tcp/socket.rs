//! The bytes of a TCP connection as they are on the wire, non-blocking.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::TcpStream;

use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags};

use crate::link::parts;

/// What is rather copied than sent or received in several parts: the system's calls for one part
/// are the cheaper ones.
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

    /// The core from which a sender on this host has sent last. Inside a host, the sender's core puts
    /// what is sent into the receiver's socket.
    pub(super) fn core_of_sender(&self) -> Option<usize> {
        if !self.inside_host {
            return None;
        }
        let core = rustix::net::sockopt::socket_incoming_cpu(&self.tcp);
        Some(core.ok()? as usize)
    }

    /// Whether reading would come to something now, be it an error.
    pub(super) fn is_readable(&self) -> bool {
        let looked = rustix::net::recv(&self.tcp, &mut [0_u8][..], RecvFlags::PEEK);
        looked.map_or_else(|error| !is_later(error.kind()), |_| true)
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

/// Whether the same call may come to something later.
pub(super) fn is_later(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::Interrupted)
}
