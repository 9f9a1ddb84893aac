//! How a rank reaches the listener of another one.

use std::net::{SocketAddr, TcpStream, ToSocketAddrs as _};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use super::{Forming, socket_fails};
use crate::caller::INTERRUPT_INTERVAL;
use crate::error::{Error, NotFormed, Result, Text};
use crate::forming::listener::is_worth_another_try;
use crate::forming::roster::Roster;
use crate::link::tcp::connection::Connection;
use crate::link::tcp::deadline_stream::DeadlineStream;
use crate::link::tcp::{self, tls};
use crate::wire::handshake::{self, Hello, Purpose};

/// Pause between two attempts to reach a rank that does not listen yet, at most.
pub(crate) const RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// The same while the group has waited for less than eight times as long.
const FIRST_RETRY_INTERVAL: Duration = Duration::from_millis(5);
/// Bound on one attempt to connect, so that a lost packet costs seconds and not minutes.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// What is known of a name whose look-up takes longer than there is time.
pub(crate) const LOOK_UP_GOES_ON: &str = "its name is still being looked up";

/// How the addresses of a `host:port` are found.
pub(crate) type Resolve = fn(&str) -> std::io::Result<Vec<SocketAddr>>;

impl Forming<'_> {
    /// Connects to a rank for one purpose.
    pub(in crate::forming) fn connect_to(
        &mut self,
        roster: &Roster,
        rank: usize,
        purpose: &Purpose,
    ) -> Result<Connection> {
        let member = &roster.members()[rank];
        self.meet(rank, &member.host, &member.address, |_, _| {
            Ok(purpose.clone())
        })
    }

    /// Connects to a rank and proves to be a member, trying again until the deadline: the other
    /// side may start later, or be besieged by strangers.
    pub(super) fn meet(
        &mut self,
        rank: usize,
        host: &str,
        address: &str,
        mut purpose: impl FnMut(&mut Self, &TcpStream) -> Result<Purpose>,
    ) -> Result<Connection> {
        loop {
            let tcp = self.reach(rank, host, address)?;
            let purpose = purpose(self, &tcp)?;
            let error = match self.greet(tcp, rank, address, purpose) {
                Ok(stream) => return Ok(stream),
                Err(error) => error,
            };
            // What ended the group is also what ended this conversation.
            self.check()?;
            // One that is silent is stopped, or cut off: to try again would only tell later.
            if !is_worth_another_try(&error) || Instant::now() + RETRY_INTERVAL >= self.deadline {
                return Err(error.blaming(rank, host));
            }
            std::thread::sleep(self.pause());
        }
    }

    /// Opens a connection, trying again until the deadline.
    fn reach(&mut self, rank: usize, host: &str, address: &str) -> Result<TcpStream> {
        let mut known = None;
        loop {
            let reason = match self.attempt(address)? {
                Ok(stream) => return Ok(stream),
                Err(error) if Error::out_of_resources(&error, "").is_some() => {
                    return Err(socket_fails(&error));
                }
                // An attempt that the deadline cut short knows less than the one before it.
                Err(error) if Instant::now() >= self.deadline => known.take().unwrap_or(error),
                Err(error) => error,
            };
            self.check()?;
            let is_refused = reason.kind() == std::io::ErrorKind::ConnectionRefused;
            let is_over = is_refused && self.started.elapsed() >= self.refused_at_most;
            if is_over || Instant::now() + RETRY_INTERVAL >= self.deadline {
                let fact = NotFormed::Unreachable {
                    initiator: self.config.rank,
                    address: address.into(),
                    error: Text::of(reason),
                };
                return Err(Error::from(fact).blaming(rank, host));
            }
            known = Some(reason);
            std::thread::sleep(self.pause());
        }
    }

    /// How long until the next attempt: a part of the time that has gone by already.
    fn pause(&self) -> Duration {
        (self.started.elapsed() / 8).clamp(FIRST_RETRY_INTERVAL, RETRY_INTERVAL)
    }

    /// One attempt to connect.
    fn attempt(&mut self, address: &str) -> Result<std::io::Result<TcpStream>> {
        let addresses = match self.addresses_of(address)? {
            Ok(addresses) => addresses,
            Err(error) => return Ok(Err(error)),
        };
        let deadline = self.deadline;
        let connect = move || connect(&addresses, deadline);
        in_time(deadline, "no answer in time", &mut || self.check(), connect)
    }

    /// Looks up a `host:port`.
    pub(super) fn addresses_of(
        &mut self,
        address: &str,
    ) -> Result<std::io::Result<Vec<SocketAddr>>> {
        if let Ok(number) = address.parse() {
            return Ok(Ok(vec![number]));
        }
        let (resolve, address) = (self.resolve, address.to_owned());
        let look_up = move || resolve(&address);
        in_time(
            self.deadline,
            LOOK_UP_GOES_ON,
            &mut || self.check(),
            look_up,
        )
    }

    /// The initiator's side of all handshakes.
    fn greet(
        &mut self,
        tcp: TcpStream,
        responder: usize,
        address: &str,
        purpose: Purpose,
    ) -> Result<Connection> {
        tcp.set_nodelay(true)
            .map_err(|error| socket_fails(&error))?;
        let (config, group) = (self.config, self.group);
        let credentials = Arc::clone(&self.credentials);
        let deadline = Instant::now() + config.conversation_limit();
        let mut go_on = || self.check().is_ok();
        let mut connection =
            tls::connect(tcp, credentials.tls.as_ref(), address, deadline, &mut go_on)?;
        let hello = Hello::new((config.rank, responder), config.world_size, purpose)?;
        let hello = hello.within(group, config.generation);
        let mut stream = DeadlineStream::cancellable(&mut connection, deadline, &mut go_on);
        handshake::initiate(&mut stream, hello, &credentials.token)?;
        Ok(connection)
    }
}

/// Does something in a thread of its own, because the system does not let go of who looks up a name
/// or connects. Fails when `check` does; what is not done by the deadline fails with `late`.
pub(crate) fn in_time<T: Send + 'static>(
    deadline: Instant,
    late: &str,
    check: &mut dyn FnMut() -> Result<()>,
    task: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> Result<std::io::Result<T>> {
    let (sender, outcome) = channel();
    std::thread::Builder::new()
        .name("gradring-connect".into())
        .spawn(move || sender.send(task()))
        .map_err(|error| Error::no_thread(&error))?;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match outcome.recv_timeout(INTERRUPT_INTERVAL.min(left)) {
            Ok(outcome) => return Ok(outcome),
            Err(RecvTimeoutError::Disconnected) => {
                return Ok(Err(std::io::Error::other("the attempt failed")));
            }
            Err(RecvTimeoutError::Timeout) => check()?,
        }
        if Instant::now() >= deadline {
            return Ok(Err(std::io::Error::other(late)));
        }
    }
}

/// Asks the system, which may take longer than anybody wants to wait: see `in_time`.
pub(crate) fn resolve(address: &str) -> std::io::Result<Vec<SocketAddr>> {
    Ok(address.to_socket_addrs()?.collect())
}

/// Opens a connection to the first of these addresses that accepts one.
pub(crate) fn connect(addresses: &[SocketAddr], deadline: Instant) -> std::io::Result<TcpStream> {
    let mut outcome = Err(std::io::Error::other("the name has no address"));
    for &address in addresses {
        let limit = deadline
            .saturating_duration_since(Instant::now())
            .clamp(Duration::from_millis(10), CONNECT_LIMIT);
        outcome = tcp::connect(address, limit);
        if let Ok(stream) = &outcome {
            // A loopback port on which no process listens can connect to itself.
            if stream.local_addr()? != stream.peer_addr()? {
                return outcome;
            }
            outcome = Err(std::io::ErrorKind::ConnectionRefused.into());
        }
    }
    outcome
}
