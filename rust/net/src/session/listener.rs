//! Listener of a process: a port to which other processes connect. It admits those that prove to
//! belong to the job, and hands each connection to the service for its purpose.
//!
//! Each handshake runs in a thread of its own and has a few seconds in all. The number of
//! concurrent handshakes (slots) is bounded. When all slots are taken, handshakes that have lasted
//! longer than a member needs are ended. So neither slow nor many strangers keep members out for
//! long, and their threads and file descriptors are bounded. The listener's policy sets the number
//! of slots, and may slow down a flood of strangers.
//!
//! A process may listen at an address where an earlier listener of its own is still open. If its
//! policy allows, the earlier listener closes, and connections that wait in its socket pass to the
//! new one.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::credentials::Credentials;
use super::pending::{Pending, Slot};
use crate::host::host_name;
use crate::link::forks::PerProcess;
use crate::link::poll::{self, WakeUp};
use crate::link::tcp;
use crate::link::tcp::connection::Connection;
use crate::link::tcp::deadline_stream::DeadlineStream;
use crate::link::tcp::tls;
use gradring_proto::error::{Error, NotFormed, NotServed, Result, Text, Unusable};
use gradring_proto::lock::{self, lock};
pub use gradring_proto::wire::handshake::{self, Hello, Purpose};

/// Time that each initiator has even if others wait for a slot. A handshake takes milliseconds.
const MIN_HANDSHAKE_TIME: Duration = Duration::from_millis(250);
/// Time after which it is an error that the system refuses new connections. Initiators wait longer
/// than that for a reply.
const TROUBLE_LIMIT: Duration = Duration::from_secs(2);
/// Interval between two checks for a free slot.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Stack of a handshake thread, which needs little even to check certificates.
const HANDSHAKE_STACK_BYTES: usize = 512 << 10;

/// Handler of connections of certain purposes.
pub trait Service: Send + Sync {
    /// Returns `true` for connections of this purpose.
    fn serves(&self, purpose: &Purpose) -> bool;

    /// Admits or refuses an initiator that knows the token; returns before the deadline.
    fn admit(&self, hello: &Hello, deadline: Instant) -> Result<()>;

    /// Revokes an admission that the initiator did not receive; it may connect again.
    fn forget(&self, _hello: &Hello) {}

    /// Returns `true` if admitted connections free their slot, so that they are never ended in
    /// favour of others.
    fn is_of_members(&self) -> bool {
        false
    }

    /// Takes over an admitted connection, or replies to its requests until the deadline.
    fn serve(&self, hello: Hello, connection: Connection, deadline: Instant) -> Result<()>;
}

/// Limits of a listener.
#[derive(Clone, Copy)]
pub struct Limits {
    /// Largest number of concurrent handshakes. Each takes two file descriptors, and a process
    /// often has only 1024.
    pub slots: usize,
    /// Time limit of a handshake, including the service's part.
    pub handshake: Duration,
    /// Pause after a failed handshake.
    pub pause: Duration,
}

impl Limits {
    /// Limits of a listener to which all initiators may connect at the same time.
    pub const USUAL: Self = Self {
        slots: 128,
        handshake: Duration::from_secs(5),
        pause: Duration::ZERO,
    };
}

/// Policy of a listener for its initiators.
pub trait AccessPolicy: Send + Sync {
    /// Returns the limits for the next connections.
    fn limits(&self) -> Limits {
        Limits::USUAL
    }

    /// Returns `true` if a new listener of this process may take over the address.
    fn yields_socket(&self) -> bool {
        false
    }

    /// Called after an initiator has been turned away.
    fn turned_away(&self, _initiator: &Initiator, _error: &Error) {}

    /// Called when the listener closes, to end waits on its threads.
    fn closes(&self) {}
}

/// Options of a listener.
pub struct ListenOptions {
    /// Index of this process in its replies.
    pub index: usize,
    /// Credentials of this process, which initiators must match.
    pub credentials: Arc<Credentials>,
    /// Policy for initiators.
    pub policy: Arc<dyn AccessPolicy>,
    /// Services to which connections are handed.
    pub services: Vec<Arc<dyn Service>>,
    /// Reply to initiators whose purpose no service handles.
    pub no_service: NotServed,
}

/// A process that has connected to a listener.
pub struct Initiator {
    /// Source address of its connection.
    pub address: IpAddr,
    /// `true` once the connection is set up, including TLS if it is used.
    pub is_connected: bool,
    /// Rank that it claims, once it has proved that it knows the token.
    pub proved_rank: Option<usize>,
}

impl std::fmt::Display for Initiator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(rank) = self.proved_rank {
            write!(f, "rank {rank} at ")?;
        }
        write!(f, "{}", self.address)
    }
}

/// An open listening port; closes when dropped.
pub struct Listener {
    /// Address at which it listens.
    pub address: SocketAddr,
    shared: Arc<ListenerState>,
}

/// State shared by the owner of a listener and its thread.
struct ListenerState {
    address: SocketAddr,
    socket: TcpListener,
    /// Shared with handshake threads, which can outlive the listening socket.
    options: Arc<ListenOptions>,
    closing: AtomicBool,
    wake_up: WakeUp,
    /// Time since which no connection can be accepted, and the reason.
    trouble: Mutex<Option<(Instant, Error)>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Open listeners of this process.
static LISTENERS: PerProcess<Vec<Weak<ListenerState>>> = PerProcess::new();

/// Binds a socket at `host:port`, or takes over that of an earlier listener of this process.
/// Returns the socket and its address.
pub fn bind(
    address: &str,
    resolved: io::Result<Vec<SocketAddr>>,
    index: usize,
) -> Result<(TcpListener, SocketAddr)> {
    let listen =
        |addresses: Vec<_>| taken_over(&addresses).map_or_else(|| tcp::listen(&addresses), Ok);
    bound(resolved.and_then(listen), address, index)
}

/// Binds a socket at the first free port of a range on `ip`, and takes over no earlier listener.
/// Returns the socket and its address.
pub fn bind_beside(
    ip: IpAddr,
    (first, last): (u16, u16),
    index: usize,
) -> Result<(TcpListener, SocketAddr)> {
    let addresses: Vec<_> = (first..=last)
        .map(|port| SocketAddr::new(ip, port))
        .collect();
    let words = format!("a port from {first} to {last} of {ip}");
    let socket = tcp::listen(&addresses);
    bound(socket, &words, index)
}

fn bound(
    socket: io::Result<TcpListener>,
    address: &str,
    index: usize,
) -> Result<(TcpListener, SocketAddr)> {
    let bound = socket.and_then(|socket| {
        let address = socket.local_addr()?;
        Ok((socket, address))
    });
    bound.map_err(|error| cannot_listen(&error, address, index))
}

impl Listener {
    /// Listens on a socket that this process has open already. An earlier listener on it closes if
    /// its policy allows.
    pub fn reopen(socket: &TcpListener, options: ListenOptions) -> Result<Self> {
        let cannot = |error| cannot_listen(&error, "its own address", options.index);
        let address = socket.local_addr().map_err(cannot)?;
        drop(taken_over(&[address]));
        let socket = socket.try_clone().map_err(cannot)?;
        Self::on(socket, &address.to_string(), options)
    }

    /// Listens on a socket that was bound to `address`, a `host:port`.
    pub fn on(socket: TcpListener, address: &str, options: ListenOptions) -> Result<Self> {
        let cannot = |error| cannot_listen(&error, address, options.index);
        socket.set_nonblocking(true).map_err(cannot)?;
        let address = socket.local_addr().map_err(cannot)?;
        let shared = Arc::new(ListenerState {
            address,
            socket,
            options: Arc::new(options),
            closing: AtomicBool::new(false),
            wake_up: WakeUp::new().map_err(|error| Error::no_wake_up(&error))?,
            trouble: Mutex::default(),
            thread: Mutex::default(),
        });
        let thread = std::thread::Builder::new()
            .name("gradring-listener".into())
            .spawn({
                let shared = Arc::clone(&shared);
                move || accept_each(&shared)
            })
            .map_err(|error| Error::no_thread(&error))?;
        *lock(&shared.thread) = Some(thread);
        LISTENERS.lock().push(Arc::downgrade(&shared));
        Ok(Self { address, shared })
    }

    /// Returns a duplicate of the socket. It stays open when the listener closes, and new
    /// connections wait in it.
    pub fn socket(&self) -> Result<TcpListener> {
        self.shared.socket.try_clone().map_err(|error| {
            let error = Text::of(error);
            NotFormed::Socket { error }.into()
        })
    }

    /// Checks that connections can be accepted.
    ///
    /// # Errors
    /// `Exhausted` if the system has refused connections for `TROUBLE_LIMIT`. Strangers hold
    /// resources for a much shorter time, so they are not the cause.
    pub fn check(&self) -> Result<()> {
        match &*lock(&self.shared.trouble) {
            Some((since, error)) if since.elapsed() >= TROUBLE_LIMIT => Err(error.clone()),
            _ => Ok(()),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.shared.close();
        let this = Arc::as_ptr(&self.shared);
        LISTENERS
            .lock()
            .retain(|listener| !std::ptr::eq(listener.as_ptr(), this));
    }
}

impl ListenerState {
    /// Records why no connection can be accepted; `None` clears the record.
    fn note_trouble(&self, trouble: Option<Error>) {
        let mut noted = lock(&self.trouble);
        let since = noted
            .as_ref()
            .map_or_else(Instant::now, |(since, _)| *since);
        *noted = trouble.map(|error| (since, error));
    }

    /// Stops accepting connections, and joins the thread.
    fn close(&self) {
        self.closing.store(true, Ordering::Release);
        self.options.policy.closes();
        self.wake_up.wake();
        if let Some(thread) = lock::take(&self.thread) {
            // A listener whose thread panicked is closed as well.
            drop(thread.join());
        }
    }
}

/// Closes an earlier listener of this process at one of these addresses, if its policy allows.
/// Returns its socket, with the connections that wait in it.
fn taken_over(addresses: &[SocketAddr]) -> Option<TcpListener> {
    let listeners: Vec<Arc<ListenerState>> =
        LISTENERS.lock().iter().filter_map(Weak::upgrade).collect();
    let found = listeners.into_iter().find(|listener| {
        addresses.contains(&listener.address) && listener.options.policy.yields_socket()
    })?;
    found.close();
    found.socket.try_clone().ok()
}

/// Returns the error for an address at which this process cannot listen.
fn cannot_listen(error: &io::Error, address: &str, index: usize) -> Error {
    if let Some(error) = Error::out_of_resources(error, &format!("cannot listen on {address}")) {
        return error.blaming(index, host_name());
    }
    let (address, kind, error) = (address.into(), error.kind(), Text::of(error));
    let cause: Error = match kind {
        io::ErrorKind::AddrInUse => NotFormed::PortInUse { address, error }.into(),
        io::ErrorKind::AddrNotAvailable => {
            Unusable::NotAnAddressOfThisHost { address, error }.into()
        }
        io::ErrorKind::PermissionDenied => NotFormed::PortForbidden { address, error }.into(),
        _ => NotFormed::CannotListen { address, error }.into(),
    };
    cause.blaming(index, host_name())
}

fn accept_each(shared: &ListenerState) {
    let pending = Arc::new(Pending::default());
    // `true` if the last handshake failed; a policy may then slow down a flood of strangers.
    let stranger = Arc::new(AtomicBool::new(false));
    let pause = |limit| poll::wait([shared.wake_up.awaited()], limit);
    loop {
        // After any wake-up it sleeps again, unless the listener is closing.
        shared.wake_up.reset();
        if shared.closing.load(Ordering::Acquire) {
            break;
        }
        let limits = shared.options.policy.limits();
        if !pending.has_capacity(limits.slots) {
            pending.end_older_than(MIN_HANDSHAKE_TIME);
            pause(POLL_INTERVAL);
            continue;
        }
        let (tcp, from) = match shared.socket.accept() {
            Ok(initiator) => initiator,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let awaited = [poll::readable(&shared.socket), shared.wake_up.awaited()];
                poll::wait(awaited, Duration::from_secs(1));
                continue;
            }
            Err(error) => {
                // The initiator has disconnected, or file descriptors are scarce.
                shared.note_trouble(cannot_let_in(&error));
                pending.end_older_than(MIN_HANDSHAKE_TIME);
                pause(POLL_INTERVAL);
                continue;
            }
        };
        let slot = match pending.add(&tcp) {
            Ok(slot) => slot,
            Err(error) => {
                shared.note_trouble(cannot_let_in(&error));
                continue;
            }
        };
        let greeting = {
            let (options, stranger) = (Arc::clone(&shared.options), Arc::clone(&stranger));
            move || {
                let mut initiator = Initiator::new(from.ip());
                let greeted = greet(tcp, &mut initiator, slot, &options);
                stranger.store(greeted.is_err(), Ordering::Relaxed);
                if let Err(error) = greeted {
                    options.policy.turned_away(&initiator, &error);
                }
            }
        };
        // Without a thread the connection is closed; its initiator may try again.
        let greeted = std::thread::Builder::new()
            .stack_size(HANDSHAKE_STACK_BYTES)
            .spawn(greeting);
        shared.note_trouble(greeted.err().map(|error| Error::no_thread(&error)));
        if !limits.pause.is_zero() && stranger.load(Ordering::Relaxed) {
            pause(limits.pause);
        }
    }
    pending.end_older_than(Duration::ZERO);
}

fn cannot_let_in(error: &io::Error) -> Option<Error> {
    Error::out_of_resources(error, "cannot let the others in")
}

/// Does the handshake with an initiator, and hands its connection to a service. Records in
/// `initiator` how far it came.
fn greet(
    tcp: TcpStream,
    initiator: &mut Initiator,
    slot: Slot,
    options: &ListenOptions,
) -> Result<()> {
    tcp.set_nodelay(true)
        .map_err(|error| handshake::broken(&error))?;
    let deadline = Instant::now() + options.policy.limits().handshake;
    let ListenOptions {
        index, credentials, ..
    } = options;
    let mut connection = tls::accept(tcp, credentials.tls.as_ref(), deadline)?;
    let mut stream = DeadlineStream::new(&mut connection, deadline);
    initiator.is_connected = true;
    let mut slot = Some(slot);
    let mut admitted = None;
    let answered = handshake::respond(&mut stream, *index, &credentials.token, |hello| {
        if !hello.purpose.addresses_process() {
            initiator.proved_rank = Some(hello.rank);
        }
        let mut services = options.services.iter();
        let service = services
            .find(|service| service.serves(&hello.purpose))
            .ok_or_else(|| options.no_service.clone())?;
        service.admit(hello, deadline)?;
        admitted = Some((service, hello.clone()));
        if service.is_of_members() {
            slot = None;
        }
        Ok(())
    });
    match (answered, admitted) {
        (Ok(hello), Some((service, _))) => service.serve(hello, connection, deadline),
        (Err(error), Some((service, hello))) => {
            service.forget(&hello);
            Err(error)
        }
        (answered, None) => answered.map(|_| ()),
    }
}

impl Initiator {
    /// Creates an initiator that has proved nothing yet.
    #[must_use]
    pub const fn new(address: IpAddr) -> Self {
        Self {
            address,
            is_connected: false,
            proved_rank: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::connect::{Connector, Failure, Retry, resolve};
    use gradring_proto::error::ErrorKind;

    const LIMIT: Duration = Duration::from_secs(60);

    /// Replies to inquiries with a number.
    struct Number(u32);

    impl Service for Number {
        fn serves(&self, purpose: &Purpose) -> bool {
            *purpose == Purpose::Inquiry
        }

        fn admit(&self, _hello: &Hello, _deadline: Instant) -> Result<()> {
            Ok(())
        }

        fn serve(&self, _: Hello, mut connection: Connection, deadline: Instant) -> Result<()> {
            let mut stream = DeadlineStream::new(&mut connection, deadline);
            handshake::write_message(&mut stream, &self.0)
        }
    }

    /// A policy with one slot.
    struct Narrow {
        yields_socket: bool,
    }

    impl AccessPolicy for Narrow {
        fn limits(&self) -> Limits {
            Limits {
                slots: 1,
                ..Limits::USUAL
            }
        }

        fn yields_socket(&self) -> bool {
            self.yields_socket
        }
    }

    fn listen(address: &str, number: u32, yields_socket: bool) -> Result<Listener> {
        let (socket, _) = bind(address, resolve(address), 0)?;
        let options = ListenOptions {
            index: 0,
            credentials: Arc::new(Credentials::load(b"secret", None)?),
            policy: Arc::new(Narrow { yields_socket }),
            services: vec![Arc::new(Number(number))],
            no_service: NotServed::NotAServer,
        };
        Listener::on(socket, address, options)
    }

    fn ask(listener: &Listener, purpose: &Purpose) -> Result<u32, Failure> {
        let credentials = Credentials::load(b"secret", None).unwrap();
        let (address, retry) = (
            listener.address.to_string(),
            Retry::of_one_that_listens(LIMIT),
        );
        let asked = Connector::new(&address, &credentials, retry).connect(
            &mut || -> Result<()> { Ok(()) },
            |_, _| Hello::new((0, 0), 0, purpose.clone()),
            |stream| handshake::read_message(stream),
        );
        asked.map(|(_, number)| number)
    }

    #[test]
    fn connections_are_served_by_purpose_and_others_hear_that_nobody_serves_them() {
        let listener = listen("127.0.0.1:0", 7, false).unwrap();
        assert_eq!(ask(&listener, &Purpose::Inquiry).unwrap(), 7);
        let failure = ask(&listener, &Purpose::Control).unwrap_err();
        let Failure::Handshake(error) = failure else {
            panic!("{failure:?}");
        };
        assert_eq!(error.kind, ErrorKind::Parameters(NotServed::NotAServer));
    }

    #[test]
    fn who_says_nothing_loses_its_slot_to_one_who_waits() {
        let listener = listen("127.0.0.1:0", 7, false).unwrap();
        let _silent = TcpStream::connect(listener.address).unwrap();
        assert_eq!(ask(&listener, &Purpose::Inquiry).unwrap(), 7);
    }

    #[test]
    fn a_listener_yields_its_socket_to_the_next_one_if_its_policy_says_so() {
        for yields_socket in [true, false] {
            let first = listen("127.0.0.1:0", 1, yields_socket).unwrap();
            let second = listen(&first.address.to_string(), 2, false);
            if yields_socket {
                assert_eq!(ask(&second.unwrap(), &Purpose::Inquiry).unwrap(), 2);
                continue;
            }
            let error = second.err().expect("the port is taken");
            let in_use = matches!(
                error.kind,
                ErrorKind::Rendezvous(NotFormed::PortInUse { .. })
            );
            assert!(in_use, "{error}");
            assert_eq!(ask(&first, &Purpose::Inquiry).unwrap(), 1);
        }
    }
}
