//! One TCP connection, plain or inside TLS: whoever reads or writes it need not know which.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use socket2::SockRef;

use super::tls::session::Session;

/// How long one who is sent away has to hear why.
const DISMISSAL_LIMIT: Duration = Duration::from_secs(1);

/// A connection to a peer.
///
/// It is non-blocking, or patient until a deadline that bounds everything together: a peer that
/// sends a byte now and then gains no time.
pub struct Connection {
    socket: Socket,
    tls: Option<Box<Session>>,
}

/// The bytes on the wire.
pub(super) struct Socket {
    tcp: TcpStream,
    /// `None`: non-blocking.
    deadline: Option<Instant>,
    /// Whether the connection has failed or ended, or the deadline has passed.
    ended: bool,
}

impl Connection {
    /// A plain connection that waits until `deadline`.
    ///
    /// # Errors
    /// When the socket cannot be configured.
    pub fn patient(tcp: TcpStream, deadline: Instant) -> io::Result<Self> {
        let mut stream = Self::from(tcp);
        stream.be_patient(deadline)?;
        Ok(stream)
    }

    /// Lets reading and writing wait, together until `deadline`; then they fail as timed out.
    ///
    /// # Errors
    /// When the socket cannot be configured.
    pub fn be_patient(&mut self, deadline: Instant) -> io::Result<()> {
        self.socket.deadline = Some(deadline);
        self.socket.tcp.set_nonblocking(false)
    }

    /// Lets reading and writing fail instead of waiting.
    ///
    /// # Errors
    /// When the socket cannot be configured.
    pub fn be_nonblocking(&mut self) -> io::Result<()> {
        self.socket.deadline = None;
        self.socket.tcp.set_nonblocking(true)
    }

    /// The connection under everything, for its addresses and options.
    #[must_use]
    pub const fn tcp(&self) -> &TcpStream {
        &self.socket.tcp
    }

    /// Whether the connection has failed or ended, or a deadline has passed; as opposed to an
    /// error in what was said.
    pub(crate) const fn has_ended(&self) -> bool {
        self.socket.ended
    }

    /// Whether bytes have arrived that need not be waited for: `poll` does not know of them.
    #[must_use]
    pub fn has_buffered(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.has_buffered())
    }

    /// Whether reading would come to something now, be it an error.
    pub(crate) fn is_readable(&self) -> bool {
        if self.has_buffered() {
            return true;
        }
        let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
        let looked =
            SockRef::from(&self.socket.tcp).recv_with_flags(&mut [MaybeUninit::uninit()], flags);
        looked.map_or_else(|error| !is_later(error.kind()), |_| true)
    }

    /// Whether the caller at the other end starts with TLS; waits for its first bytes.
    pub(super) fn begins_with_tls(&mut self) -> io::Result<bool> {
        /// A handshake record of TLS 1.0 or later, which all versions begin with. No length of a
        /// greeting looks like that.
        const BEGINNING: [u8; 2] = [22, 3];
        let mut bytes = [MaybeUninit::new(0); BEGINNING.len() + 1];
        let flags = libc::MSG_PEEK | libc::MSG_WAITALL;
        let count = self
            .socket
            .watched(|tcp| SockRef::from(&*tcp).recv_with_flags(&mut bytes, flags))?;
        if count < bytes.len() {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        // SAFETY: all of them are initialised above.
        let bytes = bytes.map(|byte| unsafe { byte.assume_init() });
        Ok(bytes[..2] == BEGINNING && bytes[2] > 0)
    }

    /// Puts everything from here on into TLS.
    pub(super) fn secure(
        mut self,
        mut connection: rustls::Connection,
    ) -> Result<Self, (io::Error, Self)> {
        assert!(self.tls.is_none(), "one layer of TLS is enough");
        while connection.is_handshaking() || connection.wants_write() {
            if let Err(error) = connection.complete_io(&mut self.socket) {
                return Err((error, self));
            }
        }
        self.tls = Some(Box::new(Session::new(connection)));
        Ok(self)
    }

    /// Ends the connection in a way that lets the other side read what it was told: to close while
    /// something is unread would take it back.
    pub(super) fn dismiss(mut self) {
        let patience = Instant::now() + DISMISSAL_LIMIT;
        let deadline = self.socket.deadline.unwrap_or(patience).min(patience);
        self.socket.deadline = Some(deadline);
        // Whatever fails here, the connection is over.
        let _ = self.socket.tcp.shutdown(Shutdown::Write);
        let mut unread = [0; 1024];
        while self.socket.read(&mut unread).is_ok_and(|count| count > 0) {}
    }

    /// Sends a prefix of `parts` and returns its length. Inside TLS a single byte may be on its way
    /// although there was `WouldBlock`: the same bytes must be offered again. Of more, all but one
    /// count as sent.
    pub(super) fn send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        match &mut self.tls {
            None => self.socket.write_vectored(parts),
            Some(tls) => tls.send(&mut self.socket, parts),
        }
    }

    /// Receives into a prefix of `parts` and returns its length, 0 at the end.
    pub(super) fn receive(&mut self, parts: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match &mut self.tls {
            None => self.socket.read_vectored(parts),
            Some(tls) => tls.receive(&mut self.socket, parts),
        }
    }
}

/// A plain, non-blocking connection, once it is made so.
impl From<TcpStream> for Connection {
    fn from(tcp: TcpStream) -> Self {
        let socket = Socket {
            tcp,
            deadline: None,
            ended: false,
        };
        Self { socket, tls: None }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.tcp.as_fd()
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

impl Socket {
    /// Gives the next call the time that is left.
    fn be_ready(&self) -> io::Result<()> {
        let Some(deadline) = self.deadline else {
            return Ok(());
        };
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        self.tcp.set_read_timeout(Some(left))?;
        self.tcp.set_write_timeout(Some(left))
    }

    /// Calls `body` with the time that is left, and notes how the connection ends. A patient socket
    /// is not interrupted by signals.
    fn watched(
        &mut self,
        mut body: impl FnMut(&mut TcpStream) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let patient = self.deadline.is_some();
        loop {
            let outcome = self.be_ready().and_then(|()| body(&mut self.tcp));
            let Err(error) = outcome else {
                self.ended |= matches!(outcome, Ok(0));
                return outcome;
            };
            match error.kind() {
                ErrorKind::Interrupted if patient => continue,
                ErrorKind::Interrupted => return Err(error),
                ErrorKind::WouldBlock if !patient => return Err(error),
                _ => self.ended = true,
            }
            // What a socket says when its time is over.
            return Err(match error.kind() {
                ErrorKind::WouldBlock => ErrorKind::TimedOut.into(),
                _ => error,
            });
        }
    }
}

impl Read for Socket {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        self.watched(|tcp| tcp.read(target))
    }

    fn read_vectored(&mut self, parts: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.watched(|tcp| tcp.read_vectored(parts))
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.watched(|tcp| SockRef::from(&*tcp).send_vectored_with_flags(parts, libc::MSG_NOSIGNAL))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

pub(super) fn is_later(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::Interrupted)
}
