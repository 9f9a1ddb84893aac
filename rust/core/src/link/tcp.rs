//! Links over TCP: one connection per direction, non-blocking, with one `poll` to wait in.

use std::io::{ErrorKind, IoSlice, IoSliceMut, Read as _};
use std::net::TcpStream;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::Arc;
use std::time::Duration;

use socket2::SockRef;

use super::poll::{self, Interested, WakeUp};
use super::{Broken, Direction, Interest, Transport};

/// Congestion control of connections inside a host, where no packet is lost or late: BBR, the
/// default of many systems, paces them, which costs a third of their bandwidth. Reno is the one
/// that every kernel has.
const LOOPBACK_CONGESTION: &str = "reno";

/// One rank's connections.
pub struct TcpTransport {
    /// Indexed by rank: the connection this rank sends on.
    outgoing: Vec<Option<TcpStream>>,
    /// Indexed by rank: the connection this rank receives on.
    incoming: Vec<Option<TcpStream>>,
    wake_up: Arc<WakeUp>,
}

impl TcpTransport {
    /// A transport without connections in a group of `world_size` ranks.
    ///
    /// # Errors
    /// When the system has no file descriptor left.
    pub fn new(world_size: usize) -> std::io::Result<Self> {
        Ok(Self {
            outgoing: (0..world_size).map(|_| None).collect(),
            incoming: (0..world_size).map(|_| None).collect(),
            wake_up: Arc::new(WakeUp::new()?),
        })
    }

    /// Adds a connection to `peer`, used in one direction only.
    ///
    /// # Errors
    /// When the socket cannot be configured.
    pub fn add(
        &mut self,
        peer: usize,
        direction: Direction,
        stream: TcpStream,
    ) -> std::io::Result<()> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        if stream.local_addr()?.ip() == stream.peer_addr()?.ip() {
            // Where the kernel does not allow it, the system's choice works as well, if slower.
            let _ = SockRef::from(&stream).set_tcp_congestion(LOOPBACK_CONGESTION.as_bytes());
        }
        let links = match direction {
            Direction::Send => &mut self.outgoing,
            Direction::Receive => &mut self.incoming,
        };
        links[peer] = Some(stream);
        Ok(())
    }

    fn stream(&self, peer: usize, direction: Direction) -> Result<&TcpStream, Broken> {
        let links = match direction {
            Direction::Send => &self.outgoing,
            Direction::Receive => &self.incoming,
        };
        links[peer].as_ref().ok_or_else(|| Broken {
            reason: "does not exist".into(),
        })
    }
}

impl Transport for TcpTransport {
    fn try_send(&mut self, peer: usize, parts: &[IoSlice<'_>]) -> Result<Option<usize>, Broken> {
        let socket = SockRef::from(self.stream(peer, Direction::Send)?);
        match socket.send_vectored_with_flags(parts, libc::MSG_NOSIGNAL) {
            Ok(sent) => Ok(Some(sent)),
            Err(error) => later_or_broken(&error),
        }
    }

    fn try_receive(
        &mut self,
        peer: usize,
        parts: &mut [IoSliceMut<'_>],
    ) -> Result<Option<usize>, Broken> {
        let mut stream = self.stream(peer, Direction::Receive)?;
        match stream.read_vectored(parts) {
            Ok(0) => Err(Broken {
                reason: "was closed by the other side".into(),
            }),
            Ok(received) => Ok(Some(received)),
            Err(error) => later_or_broken(&error),
        }
    }

    fn wait(&mut self, interests: &[Interest], timeout: Duration) {
        let sockets = interests.iter().filter_map(|interest| {
            let stream = self.stream(interest.peer, interest.direction).ok()?;
            Some(match interest.direction {
                Direction::Send => Interested::writable(stream.as_fd().as_raw_fd()),
                Direction::Receive => Interested::readable(stream.as_fd().as_raw_fd()),
            })
        });
        poll::wait(sockets, &self.wake_up, timeout);
    }

    fn waker(&self) -> Box<dyn Fn() + Send + Sync> {
        let wake_up = Arc::clone(&self.wake_up);
        Box::new(move || wake_up.wake())
    }

    fn close(&mut self) {
        self.outgoing.fill_with(|| None);
        self.incoming.fill_with(|| None);
    }

    fn name(&self) -> &'static str {
        "tcp"
    }
}

fn later_or_broken(error: &std::io::Error) -> Result<Option<usize>, Broken> {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::Interrupted => Ok(None),
        _ => Err(Broken {
            reason: format!("broke: {error}"),
        }),
    }
}
