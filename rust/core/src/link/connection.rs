//! One TCP connection, plain or inside TLS: whoever reads or writes it need not know which.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use socket2::SockRef;

use super::parts;
use super::tls::session::Session;
use crate::work::INTERRUPT_INTERVAL;

/// What is rather copied than sent or received in several parts: the system's calls for one part
/// are the cheaper ones.
const PACKET_BYTES: usize = 256;

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

/// Says whether to go on with waiting.
pub type GoOn<'a> = &'a mut dyn FnMut() -> bool;

/// A patient connection that asks now and then whether to go on with waiting.
pub(crate) struct Attentive<'a> {
    stream: &'a mut Connection,
    go_on: GoOn<'a>,
}

/// The bytes on the wire.
struct Socket {
    tcp: TcpStream,
    /// `None`: non-blocking.
    deadline: Option<Instant>,
}

/// A socket in use.
pub(super) struct Line<'a> {
    socket: &'a mut Socket,
    /// Asked now and then while a patient socket waits.
    go_on: Option<GoOn<'a>>,
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

    /// The same connection, for one who may have a reason to give up before the deadline. What
    /// waits then fails; inside TLS, too, in the middle of a record.
    pub(crate) fn attentive<'a>(&'a mut self, go_on: GoOn<'a>) -> Attentive<'a> {
        Attentive {
            stream: self,
            go_on,
        }
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
            .line(None)
            .attended(|tcp| SockRef::from(&*tcp).recv_with_flags(&mut bytes, flags))?;
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
        go_on: Option<GoOn<'_>>,
    ) -> Result<Self, (io::Error, Self)> {
        assert!(self.tls.is_none(), "one layer of TLS is enough");
        let mut line = self.socket.line(go_on);
        while connection.is_handshaking() || connection.wants_write() {
            if let Err(error) = connection.complete_io(&mut line) {
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
        while self
            .socket
            .line(None)
            .read(&mut unread)
            .is_ok_and(|count| count > 0)
        {}
    }

    /// Sends a prefix of `parts` and returns its length. Inside TLS a single byte may be on its way
    /// although there was `WouldBlock`: the same bytes must be offered again. Of more, all but one
    /// count as sent.
    pub(super) fn send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.send_while(None, parts)
    }

    /// Receives into a prefix of `parts` and returns its length, 0 at the end.
    pub(super) fn receive(&mut self, parts: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.receive_while(None, parts)
    }

    fn send_while(&mut self, go_on: Option<GoOn<'_>>, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut line = self.socket.line(go_on);
        match &mut self.tls {
            None => line.write_vectored(parts),
            Some(tls) => tls.send(&mut line, parts),
        }
    }

    fn receive_while(
        &mut self,
        go_on: Option<GoOn<'_>>,
        parts: &mut [IoSliceMut<'_>],
    ) -> io::Result<usize> {
        let mut line = self.socket.line(go_on);
        match &mut self.tls {
            None => line.read_vectored(parts),
            Some(tls) => tls.receive(&mut line, parts),
        }
    }
}

/// A plain, non-blocking connection, once it is made so.
impl From<TcpStream> for Connection {
    fn from(tcp: TcpStream) -> Self {
        let socket = Socket {
            tcp,
            deadline: None,
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

impl Read for Attentive<'_> {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        let parts = &mut [IoSliceMut::new(target)];
        self.stream.receive_while(Some(&mut *self.go_on), parts)
    }
}

impl Write for Attentive<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let parts = &[IoSlice::new(bytes)];
        self.stream.send_while(Some(&mut *self.go_on), parts)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Socket {
    fn line<'a, 'g: 'a>(&'a mut self, go_on: Option<GoOn<'g>>) -> Line<'a> {
        Line {
            socket: self,
            go_on: go_on.map(|go_on| go_on as GoOn<'a>),
        }
    }
}

impl Line<'_> {
    /// Gives the next call the time that is left, or that until the next question.
    fn be_ready(&self) -> io::Result<()> {
        let Some(deadline) = self.socket.deadline else {
            return Ok(());
        };
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        let limit = match self.go_on {
            Some(_) => left.min(INTERRUPT_INTERVAL),
            None => left,
        };
        self.socket.tcp.set_read_timeout(Some(limit))?;
        self.socket.tcp.set_write_timeout(Some(limit))
    }

    fn goes_on(&mut self) -> bool {
        self.go_on.as_mut().is_none_or(|go_on| go_on())
    }

    /// Calls `body` with the time that is left. A patient socket is not interrupted by signals.
    fn attended(
        &mut self,
        mut body: impl FnMut(&mut TcpStream) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let patient = self.socket.deadline.is_some();
        loop {
            let outcome = self.be_ready().and_then(|()| body(&mut self.socket.tcp));
            match outcome {
                Err(error) if patient && is_later(error.kind()) => {}
                outcome => return outcome,
            }
            // `be_ready` tells when the time is over.
            if !self.goes_on() {
                return Err(gave_up());
            }
        }
    }
}

impl Read for Line<'_> {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        self.attended(|tcp| tcp.read(target))
    }

    fn read_vectored(&mut self, parts: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let wanted = parts.iter().map(|part| part.len()).sum();
        if wanted > PACKET_BYTES {
            return self.attended(|tcp| tcp.read_vectored(parts));
        }
        let mut packet = [0; PACKET_BYTES];
        let received = self.read(&mut packet[..wanted])?;
        let mut left = &packet[..received];
        for part in parts {
            let (now, later) = left.split_at(left.len().min(part.len()));
            part[..now.len()].copy_from_slice(now);
            left = later;
        }
        Ok(received)
    }
}

impl Write for Line<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.attended(|tcp| SockRef::from(&*tcp).send_with_flags(bytes, libc::MSG_NOSIGNAL))
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
        self.attended(|tcp| {
            SockRef::from(&*tcp).send_vectored_with_flags(parts, libc::MSG_NOSIGNAL)
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What a wait ends with that is asked not to go on.
pub(super) fn gave_up() -> io::Error {
    io::Error::other("this rank gave up")
}

pub(super) fn is_later(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::Arc;
    use std::time::Duration;

    use rustls::crypto::ring;
    use rustls::{ClientConfig, ClientConnection, RootCertStore};

    use super::*;

    /// A patient connection, and its other end, on which nobody says anything.
    fn to_the_silent() -> (Connection, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let tcp = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let deadline = Instant::now() + Duration::from_secs(600);
        let stream = Connection::patient(tcp, deadline).unwrap();
        (stream, listener.accept().unwrap().0)
    }

    /// Says three times to go on, and then no more.
    fn three_times() -> impl FnMut() -> bool {
        let mut asked = 0;
        move || {
            asked += 1;
            asked <= 3
        }
    }

    #[test]
    fn a_reason_to_give_up_ends_reading() {
        let (mut stream, _silent) = to_the_silent();
        let read = stream.attentive(&mut three_times()).read(&mut [0]);
        assert_eq!(read.unwrap_err().kind(), ErrorKind::Other);
    }

    #[test]
    fn a_reason_to_give_up_ends_writing() {
        let (mut stream, _silent) = to_the_silent();
        let endless = vec![0; 64 << 20];
        let written = stream.attentive(&mut three_times()).write_all(&endless);
        assert_eq!(written.unwrap_err().kind(), ErrorKind::Other);
    }

    #[test]
    fn a_reason_to_give_up_ends_a_handshake_of_tls() {
        let (stream, _silent) = to_the_silent();
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(RootCertStore::empty())
            .with_no_client_auth();
        let name = "127.0.0.1".try_into().unwrap();
        let connection = ClientConnection::new(Arc::new(config), name).unwrap();
        let secured = stream.secure(connection.into(), Some(&mut three_times()));
        let (error, _) = secured.err().expect("nobody answers");
        assert_eq!(error.kind(), ErrorKind::Other);
    }
}
