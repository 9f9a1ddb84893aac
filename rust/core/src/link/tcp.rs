//! A link over TCP: one connection per direction, non-blocking.

use std::io::{ErrorKind, IoSlice, IoSliceMut};

use socket2::SockRef;

use super::Broken;
use super::stream::Stream;

/// Congestion control of connections inside a host, where no packet is lost or late: BBR, the
/// default of many systems, paces them, which costs a third of their bandwidth. Reno is the one
/// that every kernel has.
const LOOPBACK_CONGESTION: &str = "reno";

/// Environment variable that names another one, for connections between hosts too, or is `system`
/// to leave the choice to the kernel.
const CONGESTION_VARIABLE: &str = "GRADRING_TCP_CONGESTION";

/// Makes a connection fit for payload.
pub(super) fn configure(stream: &mut Stream) -> std::io::Result<()> {
    stream.be_nonblocking()?;
    let stream = stream.tcp();
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

pub(super) fn try_send(
    stream: &mut Stream,
    parts: &[IoSlice<'_>],
) -> Result<Option<usize>, Broken> {
    match stream.send(parts) {
        Ok(sent) => Ok(Some(sent)),
        Err(error) => later_or_broken(&error),
    }
}

pub(super) fn try_receive(
    stream: &mut Stream,
    parts: &mut [IoSliceMut<'_>],
) -> Result<Option<usize>, Broken> {
    match stream.receive(parts) {
        Ok(0) => Err(Broken {
            reason: "was closed by the other side".into(),
        }),
        Ok(received) => Ok(Some(received)),
        Err(error) => later_or_broken(&error),
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
