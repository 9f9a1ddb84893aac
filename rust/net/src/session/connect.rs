//! Connections to other processes of the job. An attempt looks up the name, connects with TCP and
//! TLS, does the handshake, and talks to the peer. Failed attempts are repeated as long as the
//! retry policy allows.

use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs as _};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use super::credentials::Credentials;
use crate::caller::INTERRUPT_INTERVAL;
use crate::link::tcp;
use crate::link::tcp::connection::Connection;
use crate::link::tcp::deadline_stream::{DeadlineStream, GoOn};
use crate::link::tcp::tls;
use gradring_proto::error::{Error, ErrorKind, NotFormed, Obstacle, Result, Text};
use gradring_proto::wire::handshake::{self, Hello};

/// Shortest and longest pause between two attempts. Meanwhile the peer starts, or moves from one
/// group to the next.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(50));
/// Elapsed time divided by the pause that follows it, so that a pause prolongs the attempts by
/// little.
const PAUSE_PART: u32 = 8;
/// Bound on one attempt to connect, so that a lost packet costs seconds and not minutes.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Error text for a name whose look-up has not ended by the deadline.
pub const STILL_RESOLVING: &str = "its name is still being looked up";

/// Function that finds the addresses of a `host:port`.
pub type Resolve = fn(&str) -> io::Result<Vec<SocketAddr>>;

/// Check by which the caller cancels a connection attempt. A closure implements it.
pub trait Cancellation {
    /// Called about ten times a second; an error cancels the attempt.
    fn check(&mut self) -> Result<()>;
}

impl<F: FnMut() -> Result<()>> Cancellation for F {
    fn check(&mut self) -> Result<()> {
        self()
    }
}

/// Reason for a failed connection attempt.
#[derive(Debug)]
pub enum Failure {
    /// No process accepts connections at the address. With a name, these are its addresses.
    Unreachable(io::Error, Vec<SocketAddr>),
    /// The peer refused the connection, broke it, or did not reply in time.
    Handshake(Error),
    /// This process cancelled the attempt, or lacks a resource.
    Own(Error),
}

impl Failure {
    /// Returns an error about the missing resource of the system, if that is the reason.
    pub fn shortage(&self) -> Option<Error> {
        match self {
            Self::Unreachable(error, _) => {
                Error::out_of_resources(error, "cannot make a connection")
            }
            Self::Handshake(error) | Self::Own(error) => {
                matches!(error.kind, ErrorKind::Exhausted { .. }).then(|| error.clone())
            }
        }
    }

    /// Returns the error for callers that know the peer only by `address`.
    pub fn error(&self, address: &str) -> Error {
        match self {
            Self::Unreachable(error, known) => {
                let (address, obstacle) = (address.into(), obstacle(error));
                let error = with_addresses(error, known);
                NotFormed::NobodyThere {
                    address,
                    error,
                    obstacle,
                }
                .into()
            }
            Self::Handshake(error) | Self::Own(error) => error.clone(),
        }
    }

    /// Returns `true` if another attempt may succeed. The peer's listener is closing or flooded by
    /// strangers, or its earlier group still exists.
    pub fn is_passing(&self) -> bool {
        let Self::Handshake(error) = self else {
            return false;
        };
        matches!(
            error.kind,
            ErrorKind::Rendezvous(NotFormed::HandshakeBroke { .. } | NotFormed::Busy)
        )
    }
}

/// Writes an error with the addresses of the name, which may have others on other hosts.
pub fn with_addresses(error: &io::Error, known: &[SocketAddr]) -> Text {
    let mut known: Vec<_> = known.iter().map(|it| it.ip().to_string()).collect();
    known.dedup();
    match known.as_slice() {
        [] => Text::of(error),
        known => format!("{error}; here the name stands for {}", known.join(", ")).into(),
    }
}

/// Classifies an error of a name look-up or of a connection attempt.
pub fn obstacle(error: &io::Error) -> Obstacle {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => Obstacle::NobodyListens,
        io::ErrorKind::TimedOut => Obstacle::NoWay,
        _ if error.raw_os_error().is_some() => Obstacle::NoWay,
        _ => Obstacle::NoAddress,
    }
}

/// Retry policy for connection attempts.
#[derive(Clone, Copy)]
pub struct Retry<'a> {
    /// Start of the first attempt.
    pub started: Instant,
    /// End of the attempts.
    pub deadline: Instant,
    /// Time limit of one conversation, from the first byte of TLS on; `None` for the deadline.
    pub conversation: Option<Duration>,
    /// Shortest and longest pause between two attempts.
    pub pauses: (Duration, Duration),
    /// Decides by the failure and the elapsed time whether another attempt may succeed.
    pub again: &'a dyn Fn(&Failure, Duration) -> bool,
}

impl<'a> Retry<'a> {
    /// Creates a policy that starts now and ends at `deadline`.
    pub fn until(deadline: Instant, again: &'a dyn Fn(&Failure, Duration) -> bool) -> Self {
        Self {
            started: Instant::now(),
            deadline,
            conversation: None,
            pauses: PAUSES,
            again,
        }
    }

    /// Creates a policy for a peer that is known to listen. Only passing failures are retried, as
    /// while the peer hands its listener to its next group.
    pub fn of_one_that_listens(limit: Duration) -> Self {
        Self::until(Instant::now() + limit, &|failure, _| failure.is_passing())
    }
}

/// Target of a connection, with credentials and retry policy.
pub struct Connector<'a> {
    /// `host:port` of the peer.
    pub address: &'a str,
    /// Credentials of this process.
    pub credentials: &'a Credentials,
    /// Resolver of names.
    pub resolve: Resolve,
    /// Retry policy.
    pub retry: Retry<'a>,
}

impl<'a> Connector<'a> {
    /// Creates a connector that uses the system's resolver.
    #[must_use]
    pub fn new(address: &'a str, credentials: &'a Credentials, retry: Retry<'a>) -> Self {
        Self {
            address,
            credentials,
            resolve,
            retry,
        }
    }

    /// Connects, sends the `hello`, and runs `talk`. Returns the connection and the result of
    /// `talk`.
    pub fn connect<O: Cancellation, T>(
        &self,
        cancellation: &mut O,
        hello: impl FnMut(&mut O, &TcpStream) -> Result<Hello>,
        mut talk: impl FnMut(&mut DeadlineStream<'_>) -> Result<T>,
    ) -> Result<(Connection, T), Failure> {
        self.connect_to(cancellation, hello, |mut connection, deadline, go_on| {
            let mut stream = DeadlineStream::cancellable(&mut connection, deadline, go_on);
            let response = talk(&mut stream)?;
            Ok((connection, response))
        })
    }

    /// Connects, sends the `hello`, and returns the result of `make` for the connection.
    pub fn connect_to<O: Cancellation, T>(
        &self,
        cancellation: &mut O,
        mut hello: impl FnMut(&mut O, &TcpStream) -> Result<Hello>,
        mut make: impl FnMut(Connection, Instant, GoOn<'_>) -> Result<T>,
    ) -> Result<T, Failure> {
        let retry = &self.retry;
        let mut known = None;
        loop {
            let failure = match self.attempt(cancellation, &mut hello, &mut make) {
                Ok(connected) => return Ok(connected),
                Err(failure) => failure,
            };
            // The caller's error comes first: its reason may also have ended the connection.
            cancellation.check().map_err(Failure::Own)?;
            let bounds_all =
                matches!(failure, Failure::Unreachable(..)) || retry.conversation.is_none();
            if bounds_all && Instant::now() >= retry.deadline {
                // The deadline cut this attempt short, so the failure before it is more
                // informative.
                return Err(known.unwrap_or(failure));
            }
            let elapsed = retry.started.elapsed();
            let (shortest, longest) = retry.pauses;
            if !(retry.again)(&failure, elapsed) || Instant::now() + longest >= retry.deadline {
                return Err(failure);
            }
            known = Some(failure);
            std::thread::sleep((elapsed / PAUSE_PART).clamp(shortest, longest));
        }
    }

    fn attempt<O: Cancellation, T>(
        &self,
        cancellation: &mut O,
        hello: &mut impl FnMut(&mut O, &TcpStream) -> Result<Hello>,
        make: &mut impl FnMut(Connection, Instant, GoOn<'_>) -> Result<T>,
    ) -> Result<T, Failure> {
        let (address, credentials, retry) = (self.address, self.credentials, &self.retry);
        let tcp = self.reach(cancellation)?;
        let hello = hello(cancellation, &tcp).map_err(Failure::Own)?;
        let deadline = retry
            .conversation
            .map_or(retry.deadline, |limit| Instant::now() + limit);
        let mut go_on = || cancellation.check().is_ok();
        let converse = || {
            tcp.set_nodelay(true)
                .map_err(|error| handshake::broken(&error))?;
            let tls = credentials.tls.as_ref();
            let mut connection = tls::connect(tcp, tls, address, deadline, &mut go_on)?;
            let mut stream = DeadlineStream::cancellable(&mut connection, deadline, &mut go_on);
            handshake::initiate(&mut stream, hello, &credentials.token)?;
            make(connection, deadline, &mut go_on)
        };
        converse().map_err(Failure::Handshake)
    }

    fn reach(&self, cancellation: &mut impl Cancellation) -> Result<TcpStream, Failure> {
        let deadline = self.retry.deadline;
        let addresses = look_up(self.address, self.resolve, deadline, cancellation)
            .map_err(Failure::Own)?
            .map_err(|error| Failure::Unreachable(error, Vec::new()))?;
        let is_name = self.address.parse::<SocketAddr>().is_err();
        let known = if is_name {
            addresses.clone()
        } else {
            Vec::new()
        };
        let connect = move || connect(&addresses, deadline);
        let late = io::Error::new(io::ErrorKind::TimedOut, "no answer in time");
        in_time(deadline, late, cancellation, connect)
            .map_err(Failure::Own)?
            .map_err(|error| Failure::Unreachable(error, known))
    }
}

/// Looks up the addresses of a `host:port`. The outer error is the caller's, the inner one the
/// look-up's.
pub fn look_up(
    address: &str,
    resolve: Resolve,
    deadline: Instant,
    cancellation: &mut impl Cancellation,
) -> Result<io::Result<Vec<SocketAddr>>> {
    if let Ok(number) = address.parse() {
        return Ok(Ok(vec![number]));
    }
    let address = address.to_owned();
    let late = io::Error::other(STILL_RESOLVING);
    in_time(deadline, late, cancellation, move || resolve(&address))
}

/// Runs `task` in a thread of its own, because system calls that look up names or connect cannot be
/// interrupted. Fails when the caller cancels. The inner result is `late` if the task has not ended
/// by the deadline.
fn in_time<T: Send + 'static>(
    deadline: Instant,
    late: io::Error,
    cancellation: &mut impl Cancellation,
    task: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<io::Result<T>> {
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
                return Ok(Err(io::Error::other("the attempt failed")));
            }
            Err(RecvTimeoutError::Timeout) => cancellation.check()?,
        }
        if Instant::now() >= deadline {
            return Ok(Err(late));
        }
    }
}

/// Looks up a name with the system's resolver, which may block for long: see `look_up`.
pub fn resolve(address: &str) -> io::Result<Vec<SocketAddr>> {
    Ok(address.to_socket_addrs()?.collect())
}

/// Connects to the first of these addresses that accepts a connection.
pub fn connect(addresses: &[SocketAddr], deadline: Instant) -> io::Result<TcpStream> {
    let mut outcome = Err(io::Error::other("the name has no address"));
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
            outcome = Err(io::ErrorKind::ConnectionRefused.into());
        }
    }
    outcome
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use gradring_proto::error::Abort;
    use gradring_proto::wire::handshake::Purpose;

    const LIMIT: Duration = Duration::from_secs(60);

    fn listener() -> (TcpListener, String) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        (listener, address)
    }

    /// Returns the outcome of an inquiry.
    fn connect_to(
        address: &str,
        retry: Retry<'_>,
        cancellation: &mut impl Cancellation,
    ) -> Result<(), Failure> {
        let credentials = Credentials::load(b"", None).unwrap();
        let hello = |_: &mut _, _: &TcpStream| Hello::new((0, 0), 0, Purpose::Inquiry);
        Connector::new(address, &credentials, retry)
            .connect(cancellation, hello, |_| Ok(()))
            .map(|(_, ())| ())
    }

    fn continues() -> Result<()> {
        Ok(())
    }

    #[test]
    fn connections_that_end_are_made_again_until_nobody_listens() {
        let (listener, address) = listener();
        let other = std::thread::spawn(move || {
            for _ in 0..3 {
                drop(listener.accept().unwrap());
            }
        });
        let retry = Retry::of_one_that_listens(LIMIT);
        let failure = connect_to(&address, retry, &mut continues).unwrap_err();
        other.join().unwrap();
        let Failure::Unreachable(error, _) = failure else {
            panic!("{failure:?}");
        };
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn an_unreachable_name_is_shown_with_its_addresses() {
        let (listener, address) = listener();
        drop(listener);
        let named = address.replace("127.0.0.1", "localhost");
        for (address, is_name) in [(address, false), (named, true)] {
            let retry = Retry::of_one_that_listens(LIMIT);
            let failure = connect_to(&address, retry, &mut continues).unwrap_err();
            let error = failure.error(&address).to_string();
            let is_shown =
                error.contains("; here the name stands for ") && error.contains("127.0.0.1");
            assert_eq!(is_shown, is_name, "{error}");
        }
    }

    #[test]
    fn every_failure_is_shown_to_the_policy_which_ends_the_attempts() {
        let (listener, address) = listener();
        drop(listener);
        let seen = std::cell::Cell::new(0);
        let again = |failure: &Failure, _| {
            assert!(matches!(failure, Failure::Unreachable(..)), "{failure:?}");
            seen.set(seen.get() + 1);
            seen.get() < 4
        };
        let retry = Retry::until(Instant::now() + LIMIT, &again);
        connect_to(&address, retry, &mut continues).unwrap_err();
        assert_eq!(seen.get(), 4);
    }

    #[test]
    fn an_owner_that_gives_up_ends_a_conversation_and_is_the_reason() {
        let (_silent, address) = listener();
        let mut asked = 0;
        let mut cancellation = || {
            asked += 1;
            match asked {
                ..3 => Ok(()),
                _ => Err(Abort::Closed.into()),
            }
        };
        let retry = Retry::of_one_that_listens(LIMIT);
        let failure = connect_to(&address, retry, &mut cancellation).unwrap_err();
        assert!(matches!(failure, Failure::Own(_)), "{failure:?}");
    }

    #[test]
    fn an_attempt_that_the_deadline_cuts_short_leaves_the_reason_of_the_one_before() {
        let (listener, address) = listener();
        let other = std::thread::spawn(move || {
            drop(listener.accept());
            listener.accept().unwrap()
        });
        let retry = Retry::of_one_that_listens(Duration::from_secs(2));
        let failure = connect_to(&address, retry, &mut continues).unwrap_err();
        drop(other.join().unwrap());
        assert!(failure.is_passing(), "{failure:?}");
    }
}
