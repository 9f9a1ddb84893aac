//! A TCP connection as a stream of a pipe, non-blocking.

use std::io::{ErrorKind, IoSlice, IoSliceMut};
use std::net::TcpStream;

use socket2::SockRef;

use super::Broken;
use super::connection::Connection;
use super::streams::Stream;

/// Congestion control of connections inside a host, where no packet is lost or late: BBR, the
/// default of many systems, paces them, which costs a third of their bandwidth. Reno is the one
/// that every kernel has.
const LOOPBACK_CONGESTION: &str = "reno";

/// Environment variable that names another one, for connections between hosts too, or is `system`
/// to leave the choice to the kernel.
const CONGESTION_VARIABLE: &str = "GRADRING_TCP_CONGESTION";

/// Makes a connection fit for payload.
pub(super) fn configure(stream: &mut Connection) -> std::io::Result<()> {
    stream.be_nonblocking()?;
    let stream = stream.tcp();
    stream.set_nodelay(true)?;
    if let (Some(congestion), _) = wished_congestion(stream)? {
        // Where the kernel does not allow it, the system's choice works as well, if slower.
        let _ = SockRef::from(stream).set_tcp_congestion(congestion.as_bytes());
    }
    Ok(())
}

/// The congestion control that a configured connection uses, and why.
pub(super) fn congestion(stream: &TcpStream) -> std::io::Result<(String, String)> {
    let name = SockRef::from(stream).tcp_congestion()?;
    let name = String::from_utf8_lossy(&name);
    let name = name.trim_end_matches('\0');
    let why = match wished_congestion(stream)? {
        (Some(wish), _) if wish != name => format!("the system's, which does not allow {wish}"),
        (_, why) => why.into(),
    };
    Ok((name.into(), why))
}

/// The congestion control that a connection should use, if not the system's, and why.
fn wished_congestion(stream: &TcpStream) -> std::io::Result<(Option<String>, &'static str)> {
    let inside_host = stream.local_addr()?.ip() == stream.peer_addr()?.ip();
    Ok(match std::env::var(CONGESTION_VARIABLE) {
        Ok(wish) if wish == "system" => (None, CONGESTION_VARIABLE),
        Ok(wish) => (Some(wish), CONGESTION_VARIABLE),
        Err(_) if inside_host => (Some(LOOPBACK_CONGESTION.into()), "same host"),
        Err(_) => (None, "the system's, between hosts"),
    })
}

impl Stream for Connection {
    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> Result<Option<usize>, Broken> {
        let sent = self.send(parts);
        sent.map_or_else(|error| later_or_broken(&error), |sent| Ok(Some(sent)))
    }

    fn try_receive(&mut self, parts: &mut [IoSliceMut<'_>]) -> Result<Option<usize>, Broken> {
        let received = self.receive(parts);
        received.map_or_else(|error| later_or_broken(&error), |count| Ok(Some(count)))
    }
}

fn later_or_broken(error: &std::io::Error) -> Result<Option<usize>, Broken> {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::Interrupted => Ok(None),
        // Only TLS looks at the data.
        ErrorKind::InvalidData => Err(Broken::corrupted(format!("broke: {error}"))),
        _ => Err(Broken::ended(format!("broke: {error}"))),
    }
}
