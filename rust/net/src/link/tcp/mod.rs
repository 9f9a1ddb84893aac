//! Links over TCP, between any hosts: one lane for each connection.

use std::io::{ErrorKind, IoSlice, IoSliceMut};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use rustix::event::PollFd;
use socket2::{Domain, SockRef, Socket, Type};

use self::connection::Connection;
use super::kind::{Introduction, Kind, Lanes};
use super::{Broken, Direction, Link, forks, poll};
use gradring_proto::error::{Breakage, Text};

pub mod connection;
pub mod deadline_stream;
mod session;
mod socket;
pub mod tls;

/// Congestion control of connections inside a host, where no packet is lost or late. BBR, the
/// default of many systems, would pace these connections and cost a third of their bandwidth. Every
/// kernel has Reno.
const LOOPBACK_CONGESTION: &str = "reno";

/// Environment variable with another congestion control, also for connections between hosts.
/// `system` leaves the choice to the kernel.
const CONGESTION_VARIABLE: &str = "GRADRING_TCP_CONGESTION";

/// File in which Linux lists its congestion controls.
const KNOWN_CONGESTION: &str = "/proc/sys/net/ipv4/tcp_available_congestion_control";

/// Links over the connections that ranks have made already.
pub const KIND: Kind = Kind {
    name: "tcp",
    link: |introduction: &mut Introduction<'_>| {
        let connections = std::mem::take(&mut introduction.connections).into_iter();
        let lanes: Lanes = connections.map(|lane| Box::new(lane) as _).collect();
        Ok(Ok(lanes))
    },
};

/// Opens a connection. The congestion control is set first, because Linux continues to pace a
/// connection that began with BBR even after a change.
///
/// # Errors
/// When nobody accepts it within `limit`.
pub(crate) fn connect(to: SocketAddr, limit: Duration) -> std::io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
    choose_congestion(SockRef::from(&socket), is_own(to.ip()));
    socket.connect_timeout(&to.into(), limit)?;
    Ok(socket.into())
}

/// Listens at the first address that can be bound. Accepted connections begin with the congestion
/// control for connections inside a host; `configure` corrects it for others.
///
/// # Errors
/// When no address can be bound.
pub(crate) fn listen(addresses: &[SocketAddr]) -> std::io::Result<TcpListener> {
    let listener = TcpListener::bind(addresses)?;
    choose_congestion(SockRef::from(&listener), true);
    forks::note(&listener);
    Ok(listener)
}

/// Prepares a connection for payload: sets its options, and registers it to be closed in forks.
pub fn configure(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    forks::note(stream);
    choose_congestion(SockRef::from(stream), is_inside_host(stream)?);
    Ok(())
}

/// Sets the congestion control of a socket. Errors are ignored: the system's default works as well,
/// but may be slower.
fn choose_congestion(socket: SockRef<'_>, inside_host: bool) {
    let chosen = match wished_congestion(inside_host) {
        (Some(wish), _) => Ok(wish.into_bytes()),
        (None, _) => system_congestion(),
    };
    let _ = chosen.and_then(|chosen| socket.set_tcp_congestion(&chosen));
}

/// Returns a warning if the kernel refuses the value of `GRADRING_TCP_CONGESTION`.
pub fn ignored_congestion() -> Option<String> {
    let wish = std::env::var(CONGESTION_VARIABLE).ok()?;
    if wish.is_empty() || wish == "system" {
        return None;
    }
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).ok()?;
    let refusal = socket.set_tcp_congestion(wish.as_bytes()).err()?;
    let known = std::fs::read_to_string(KNOWN_CONGESTION).unwrap_or_default();
    Some(format!(
        "{CONGESTION_VARIABLE}={wish:?} is ignored, because the kernel refuses it ({refusal}); it has {}",
        known.trim().replace(' ', ", ")
    ))
}

fn system_congestion() -> std::io::Result<Vec<u8>> {
    Socket::new(Domain::IPV4, Type::STREAM, None)?.tcp_congestion()
}

/// Returns `true` for an address of this host. A socket cannot be bound to any other.
fn is_own(address: IpAddr) -> bool {
    UdpSocket::bind((address, 0)).is_ok()
}

fn is_inside_host(stream: &TcpStream) -> std::io::Result<bool> {
    Ok(stream.local_addr()?.ip() == stream.peer_addr()?.ip())
}

/// Returns the congestion control of a configured connection, and the reason for it.
pub(super) fn congestion(stream: &TcpStream) -> std::io::Result<(String, String)> {
    let name = SockRef::from(stream).tcp_congestion()?;
    let name = String::from_utf8_lossy(&name);
    let name = name.trim_end_matches('\0');
    let why = match wished_congestion(is_inside_host(stream)?) {
        (Some(wish), _) if wish != name => format!("the system's, which does not allow {wish}"),
        (_, why) => why.into(),
    };
    Ok((name.into(), why))
}

/// Returns the congestion control to set, `None` for the system's, and the reason.
fn wished_congestion(inside_host: bool) -> (Option<String>, &'static str) {
    match std::env::var(CONGESTION_VARIABLE).unwrap_or_default() {
        wish if wish == "system" => (None, CONGESTION_VARIABLE),
        wish if !wish.is_empty() => (Some(wish), CONGESTION_VARIABLE),
        _ if inside_host => (Some(LOOPBACK_CONGESTION.into()), "same host"),
        _ => (None, "the system's, between hosts"),
    }
}

/// A connection that carries payload.
impl Link for Connection {
    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> Result<Option<usize>, Broken> {
        let sent = self.send(parts);
        sent.map_or_else(|error| later_or_broken(&error), |sent| Ok(Some(sent)))
    }

    fn try_receive(&mut self, parts: &mut [IoSliceMut<'_>]) -> Result<Option<usize>, Broken> {
        match self.receive(parts) {
            Ok(0) => Err(Broken::closed()),
            Ok(received) => Ok(Some(received)),
            Err(error) => later_or_broken(&error),
        }
    }

    fn may_sleep(&mut self, direction: Direction) -> bool {
        direction == Direction::Send || !self.has_buffered()
    }

    fn awaited<'a>(&'a self, direction: Direction, awaited: &mut Vec<PollFd<'a>>) {
        awaited.push(match direction {
            Direction::Send => poll::writable(self),
            Direction::Receive => poll::readable(self),
        });
    }

    fn core_of_peer(&self) -> Option<usize> {
        self.socket.core_of_sender()
    }

    fn congestion(&self) -> Option<(String, String)> {
        congestion(self.tcp()).ok()
    }
}

fn later_or_broken(error: &std::io::Error) -> Result<Option<usize>, Broken> {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::Interrupted => Ok(None),
        // Only TLS inspects the data.
        ErrorKind::InvalidData => {
            let error = Text::of(error);
            Err(Breakage::Undecipherable { error }.into())
        }
        _ => Err(Broken::failed(error)),
    }
}

/// Calls `act` on each core that this thread may use, with its number.
#[cfg(test)]
pub(super) fn on_each_core(mut act: impl FnMut(usize)) {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    let all = sched_getaffinity(None).unwrap();
    for core in (0..CpuSet::MAX_CPU).filter(|&core| all.is_set(core)) {
        let mut only = CpuSet::new();
        only.set(core);
        sched_setaffinity(None, &only).unwrap();
        act(core);
    }
    sched_setaffinity(None, &all).unwrap();
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn both_ends_of_a_connection_inside_a_host_begin_with_reno() {
        let listener = listen(&[(Ipv4Addr::LOCALHOST, 0).into()]).unwrap();
        let connected = connect(listener.local_addr().unwrap(), Duration::from_secs(5)).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        for end in [connected, accepted] {
            assert_eq!(
                congestion(&end).unwrap(),
                ("reno".into(), "same host".into())
            );
        }
    }

    #[test]
    fn a_connection_inside_a_host_knows_from_which_core_its_peer_sent_last() {
        let listener = listen(&[(Ipv4Addr::LOCALHOST, 0).into()]).unwrap();
        let sender = connect(listener.local_addr().unwrap(), Duration::from_secs(5)).unwrap();
        let mut sender = Connection::new(sender).unwrap();
        let mut receiver = Connection::new(listener.accept().unwrap().0).unwrap();
        on_each_core(|core| {
            sender.send(&[IoSlice::new(b"x")]).unwrap();
            poll::wait([poll::readable(&receiver)], Duration::from_secs(5));
            let received = receiver.try_receive(&mut [IoSliceMut::new(&mut [0])]);
            assert_eq!(received, Ok(Some(1)));
            assert_eq!(receiver.core_of_peer(), Some(core));
        });
    }

    #[test]
    fn what_is_not_inside_a_host_gets_the_choice_of_the_system_back() {
        let listener = listen(&[(Ipv4Addr::LOCALHOST, 0).into()]).unwrap();
        let before = SockRef::from(&listener).tcp_congestion().unwrap();
        choose_congestion(SockRef::from(&listener), false);
        let after = SockRef::from(&listener).tcp_congestion().unwrap();
        assert!(before.starts_with(b"reno"));
        assert_eq!(after, system_congestion().unwrap());
    }

    #[test]
    fn addresses_of_other_hosts_are_not_ours() {
        assert!(is_own(Ipv4Addr::LOCALHOST.into()));
        // For documentation only (RFC 5737).
        assert!(!is_own(Ipv4Addr::new(192, 0, 2, 1).into()));
    }
}
