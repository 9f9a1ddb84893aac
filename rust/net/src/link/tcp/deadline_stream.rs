//! Blocking reads and writes with a deadline, for handshakes and negotiations before payload
//! travels.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::Shutdown;
use std::time::{Duration, Instant};

use rustix::event::PollFd;

use super::connection::Connection;
use super::socket::is_later;
use crate::caller::INTERRUPT_INTERVAL;
use crate::link::poll;

/// Time for a refused peer to read the reason.
const DISMISSAL_LIMIT: Duration = Duration::from_secs(1);

/// Polled during waits; `false` cancels the wait.
pub type GoOn<'a> = &'a mut dyn FnMut() -> bool;

/// Blocking stream over a connection. One deadline bounds all reads and writes together, so a peer
/// that sends a byte now and then gains no time.
pub struct DeadlineStream<'a> {
    connection: &'a mut Connection,
    deadline: Instant,
    /// Polled during waits; `false` ends them with an error before the deadline, even in the middle
    /// of a TLS record.
    go_on: Option<GoOn<'a>>,
}

impl<'a> DeadlineStream<'a> {
    /// Creates a stream that waits until `deadline`.
    pub fn new(connection: &'a mut Connection, deadline: Instant) -> Self {
        Self {
            connection,
            deadline,
            go_on: None,
        }
    }

    /// Creates a stream that waits until `deadline`, or until `go_on` returns `false`.
    pub fn cancellable(connection: &'a mut Connection, deadline: Instant, go_on: GoOn<'a>) -> Self {
        Self {
            connection,
            deadline,
            go_on: Some(go_on),
        }
    }

    /// Ends the connection so that the peer can read the bytes sent to it. Closing a socket with
    /// unread input would reset the connection, and the peer would lose the reply.
    pub(super) fn dismiss(mut self) {
        self.deadline = self.deadline.min(Instant::now() + DISMISSAL_LIMIT);
        // The connection ends even if this fails.
        let _ = self.connection.tcp().shutdown(Shutdown::Write);
        let mut unread = [0; 1024];
        while self.read(&mut unread).is_ok_and(|count| count > 0) {}
    }

    /// Repeats `body` until it no longer blocks, and waits in between.
    fn attend(
        &mut self,
        awaited: fn(&Connection) -> PollFd<'_>,
        mut body: impl FnMut(&mut Connection) -> io::Result<usize>,
    ) -> io::Result<usize> {
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ErrorKind::TimedOut.into());
            }
            match body(self.connection) {
                Err(error) if is_later(error.kind()) => {}
                outcome => return outcome,
            }
            let limit = match self.go_on {
                Some(_) => left.min(INTERRUPT_INTERVAL),
                None => left,
            };
            poll::wait([awaited(self.connection)], limit);
            if !self.go_on.as_mut().is_none_or(|go_on| go_on()) {
                return Err(gave_up());
            }
        }
    }
}

impl Read for DeadlineStream<'_> {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        self.attend(poll::readable, |connection| connection.read(target))
    }
}

impl Write for DeadlineStream<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    /// Sends all parts in one call, because rustls makes only one to send the alert that ends a
    /// handshake.
    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.attend(poll::writable, |connection| connection.send(parts))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns the error of a cancelled wait.
pub(crate) fn gave_up() -> io::Error {
    io::Error::other("this rank gave up")
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::sync::Arc;

    use rustls::crypto::ring;
    use rustls::{ClientConfig, ClientConnection, RootCertStore};

    use super::*;
    use crate::link::tcp::tls::shake_hands;

    /// Returns a connection, and its other end, which stays silent.
    fn to_the_silent() -> (Connection, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let tcp = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let connection = Connection::new(tcp).unwrap();
        (connection, listener.accept().unwrap().0)
    }

    /// Returns the outcome of `body` on a silent connection with a `go_on` that cancels at its
    /// fourth call.
    fn asked_three_times<T>(
        body: impl FnOnce(&mut DeadlineStream<'_>) -> io::Result<T>,
    ) -> io::Result<T> {
        let (mut connection, _silent) = to_the_silent();
        let deadline = Instant::now() + Duration::from_secs(600);
        let mut asked = 0;
        let mut go_on = || {
            asked += 1;
            asked <= 3
        };
        body(&mut DeadlineStream::cancellable(
            &mut connection,
            deadline,
            &mut go_on,
        ))
    }

    #[test]
    fn a_reason_to_give_up_ends_reading() {
        let read = asked_three_times(|stream| stream.read(&mut [0]));
        assert_eq!(read.unwrap_err().kind(), ErrorKind::Other);
    }

    #[test]
    fn a_reason_to_give_up_ends_writing() {
        let endless = vec![0; 64 << 20];
        let written = asked_three_times(|stream| stream.write_all(&endless));
        assert_eq!(written.unwrap_err().kind(), ErrorKind::Other);
    }

    #[test]
    fn a_reason_to_give_up_ends_a_handshake_of_tls() {
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(RootCertStore::empty())
            .with_no_client_auth();
        let name = "127.0.0.1".try_into().unwrap();
        let tls = ClientConnection::new(Arc::new(config), name).unwrap();
        let shaken = asked_three_times(|stream| shake_hands(stream, tls.into()));
        let error = shaken.err().expect("nobody answers");
        assert_eq!(error.kind(), ErrorKind::Other);
    }

    #[test]
    fn bytes_that_drip_gain_no_time() {
        let (mut connection, mut other) = to_the_silent();
        let deadline = Instant::now() + Duration::from_millis(200);
        let dripping = std::thread::spawn(move || while other.write_all(b"x").is_ok() {});
        let read = DeadlineStream::new(&mut connection, deadline).read_exact(&mut vec![0; 1 << 30]);
        assert_eq!(read.unwrap_err().kind(), ErrorKind::TimedOut);
        drop(connection);
        dripping.join().unwrap();
    }
}
