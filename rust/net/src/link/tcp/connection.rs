//! A non-blocking TCP connection, plain or inside TLS, behind one interface.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};

use super::session::Session;
use super::socket::Socket;

/// A connection to a peer.
pub struct Connection {
    pub(super) socket: Socket,
    tls: Option<Box<Session>>,
}

impl Connection {
    /// Creates a plain connection.
    ///
    /// # Errors
    /// When the socket cannot be configured.
    pub fn new(tcp: TcpStream) -> io::Result<Self> {
        let socket = Socket::new(tcp)?;
        Ok(Self { socket, tls: None })
    }

    /// Encrypts all further bytes with TLS.
    pub(super) fn enter(&mut self, session: Session) {
        assert!(self.tls.is_none(), "one layer of TLS is enough");
        self.tls = Some(Box::new(session));
    }

    /// Returns the TCP socket, for its addresses and options.
    #[must_use]
    pub const fn tcp(&self) -> &TcpStream {
        self.socket.tcp()
    }

    /// Returns `true` if bytes are buffered in this process, where `poll` does not see them.
    #[must_use]
    pub fn has_buffered(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.has_buffered())
    }

    /// Returns `true` if a read would not block: it gives bytes, the end or an error.
    #[must_use]
    pub fn is_readable(&self) -> bool {
        self.has_buffered() || self.socket.is_readable()
    }

    /// Sends a prefix of `parts` and returns its length. If TLS has encrypted bytes that the socket
    /// does not take in full, all but the last count as sent. If that leaves none, the result is
    /// `WouldBlock`. The same bytes must then be offered again, since their ciphertext is already
    /// queued.
    pub(super) fn send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        match &mut self.tls {
            None => self.socket.write_vectored(parts),
            Some(tls) => tls.send(&mut self.socket, parts),
        }
    }

    /// Receives into a prefix of `parts` and returns its length; 0 at the end of the connection.
    pub(super) fn receive(&mut self, parts: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match &mut self.tls {
            None => self.socket.read_vectored(parts),
            Some(tls) => tls.receive(&mut self.socket, parts),
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.tcp().as_fd()
    }
}

impl Read for Connection {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        self.receive(&mut [IoSliceMut::new(target)])
    }
}

impl Write for Connection {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.send(&[IoSlice::new(bytes)])
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
