//! A TCP connection as a stream of a pipe, non-blocking.

use std::io::{ErrorKind, IoSlice, IoSliceMut, Read as _};
use std::net::TcpStream;

use socket2::SockRef;

use super::Broken;
use super::streams::Stream;

/// Congestion control of connections inside a host, where no packet is lost or late: BBR, the
/// default of many systems, paces them, which costs a third of their bandwidth. Reno is the one
/// that every kernel has.
const LOOPBACK_CONGESTION: &str = "reno";

/// Environment variable that names another one, for connections between hosts too, or is `system`
/// to leave the choice to the kernel.
const CONGESTION_VARIABLE: &str = "GRADRING_TCP_CONGESTION";

/// Makes a connection fit for payload.
pub(super) fn configure(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    let inside_host = stream.local_addr()?.ip() == stream.peer_addr()?.ip();
    let wish = std::env::var(CONGESTION_VARIABLE).ok();
    let congestion = match wish.as_deref() {
        Some("system") => None,
        None => inside_host.then_some(LOOPBACK_CONGESTION),
        wish => wish,
    };
    if let Some(congestion) = congestion {
        // Where the kernel does not allow it, the system's choice works as well, if slower.
        let _ = SockRef::from(stream).set_tcp_congestion(congestion.as_bytes());
    }
    Ok(())
}

impl Stream for TcpStream {
    fn try_send(&self, parts: &[IoSlice<'_>]) -> Result<Option<usize>, Broken> {
        let sent = SockRef::from(self).send_vectored_with_flags(parts, libc::MSG_NOSIGNAL);
        sent.map_or_else(|error| later_or_broken(&error), |sent| Ok(Some(sent)))
    }

    fn try_receive(&self, parts: &mut [IoSliceMut<'_>]) -> Result<Option<usize>, Broken> {
        let mut stream = self;
        let received = stream.read_vectored(parts);
        received.map_or_else(|error| later_or_broken(&error), |count| Ok(Some(count)))
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
