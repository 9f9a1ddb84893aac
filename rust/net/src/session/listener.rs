//! The listener of a process: a port at which others connect. It lets those in who prove to belong to
//! the job, and hands each connection to the service of its purpose.
//!
//! Everybody is greeted in a thread of their own and has a few seconds in all. There are slots for
//! so many; when all are taken, those who have stayed longer than a member needs must go. So
//! neither slow nor many strangers keep members out for long, and they cost a bounded number of
//! threads and file descriptors. How many slots there are, and whether a flood of strangers is let in
//! slowly, is a policy of who listens.
//!
//! A process may listen at an address where an earlier listener of it still is: that one gives way, if
//! its policy says so, and leaves those who have connected meanwhile.

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

/// The time that an initiator has at least, also when others wait: a handshake takes milliseconds.
const MIN_HANDSHAKE_TIME: Duration = Duration::from_millis(250);
/// How long the system may refuse to let anybody in: less than initiators wait for an answer.
const TROUBLE_LIMIT: Duration = Duration::from_secs(2);
/// How often to look for a free slot.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);
/// An initiator's thread needs little stack, even to check certificates.
const HANDSHAKE_STACK_BYTES: usize = 512 << 10;

/// What connections of a purpose are for.
pub trait Service: Send + Sync {
    /// Whether it is for this purpose.
    fn serves(&self, purpose: &Purpose) -> bool;

    /// Whether an initiator that knows the token has business here. There is time until the deadline.
    fn admit(&self, hello: &Hello, deadline: Instant) -> Result<()>;

    /// Forgets one that was admitted: it does not know, and may connect again.
    fn forget(&self, _hello: &Hello) {}

    /// Whether a connection that was admitted takes no slot any more, so that nobody ends it to let
    /// others in.
    fn is_of_members(&self) -> bool {
        false
    }

    /// Takes over a connection that was admitted, or answers what is said there until the deadline.
    fn serve(&self, hello: Hello, connection: Connection, deadline: Instant) -> Result<()>;
}

/// What a listener lets happen, at a time.
#[derive(Clone, Copy)]
pub struct Limits {
    /// Connections in their handshake at the same time. Each takes two file descriptors, of which a
    /// process often has 1024.
    pub slots: usize,
    /// How long a handshake may take, with what a service does then.
    pub handshake: Duration,
    /// Pause after a stranger.
    pub pause: Duration,
}

impl Limits {
    /// Those of a listener whose initiators may all come at the same time.
    pub const USUAL: Self = Self {
        slots: 128,
        handshake: Duration::from_secs(5),
        pause: Duration::ZERO,
    };
}

/// How a listener treats those who connect.
pub trait AccessPolicy: Send + Sync {
    /// From now on.
    fn limits(&self) -> Limits {
        Limits::USUAL
    }

    /// Whether the next listener of the process at this address may take its place.
    fn gives_way(&self) -> bool {
        false
    }

    /// Somebody was turned away.
    fn turned_away(&self, _initiator: &Initiator, _error: &Error) {}

    /// The listener closes: what waits on its threads needs to wait no more.
    fn closes(&self) {}
}

/// Who listens, and for whom.
pub struct ListenOptions {
    /// The index by which this process answers.
    pub index: usize,
    /// What proves that a process belongs to the job.
    pub credentials: Arc<Credentials>,
    /// Who is let in.
    pub policy: Arc<dyn AccessPolicy>,
    /// What connections are for.
    pub services: Vec<Arc<dyn Service>>,
    /// What those hear for whose purpose there is no service.
    pub no_service: NotServed,
}

/// A process that has connected.
pub struct Initiator {
    /// Where it comes from.
    pub address: IpAddr,
    /// Whether it has come through TLS, where there is any.
    pub is_connected: bool,
    /// The rank it says it is, once it has proved to know the token.
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

/// The open listening port. Closes when dropped.
pub struct Listener {
    /// Where it listens.
    pub address: SocketAddr,
    shared: Arc<Shared>,
}

/// What the thread of a listener and its owner share.
struct Shared {
    address: SocketAddr,
    socket: TcpListener,
    /// Also those of who is greeted, who may take a moment longer than the socket is open.
    options: Arc<ListenOptions>,
    closing: AtomicBool,
    wake_up: WakeUp,
    /// Since when it cannot let anybody in, and why.
    trouble: Mutex<Option<(Instant, Error)>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// The listeners of this process.
static LISTENERS: PerProcess<Vec<Weak<Shared>>> = PerProcess::new();

/// The socket of a listener at `host:port`, and where it is.
pub fn bind(
    address: &str,
    resolved: io::Result<Vec<SocketAddr>>,
    index: usize,
) -> Result<(TcpListener, SocketAddr)> {
    let listen =
        |addresses: Vec<_>| taken_over(&addresses).map_or_else(|| tcp::listen(&addresses), Ok);
    bound(resolved.and_then(listen), address, index)
}

/// A socket at one of these ports of `ip`, whatever else this process listens at; and where it is.
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
    /// Listens where this process listens already; what listened there before gives way.
    pub fn reopen(socket: &TcpListener, options: ListenOptions) -> Result<Self> {
        let cannot = |error| cannot_listen(&error, "its own address", options.index);
        let address = socket.local_addr().map_err(cannot)?;
        drop(taken_over(&[address]));
        let socket = socket.try_clone().map_err(cannot)?;
        Self::on(socket, &address.to_string(), options)
    }

    /// Listens on a socket that was bound to `host:port`.
    pub fn on(socket: TcpListener, address: &str, options: ListenOptions) -> Result<Self> {
        let cannot = |error| cannot_listen(&error, address, options.index);
        socket.set_nonblocking(true).map_err(cannot)?;
        let address = socket.local_addr().map_err(cannot)?;
        let shared = Arc::new(Shared {
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

    /// The socket, which stays open when the listener closes; connections wait there then.
    pub fn socket(&self) -> Result<TcpListener> {
        self.shared.socket.try_clone().map_err(|error| {
            let error = Text::of(error);
            NotFormed::Socket { error }.into()
        })
    }

    /// Whether initiators can be let in.
    ///
    /// # Errors
    /// `Exhausted` if the system has refused it for much longer than strangers may stay then, so
    /// that it is not they who take what there is.
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

impl Shared {
    /// Notes why no connection can be accepted, or that one could.
    fn note_trouble(&self, trouble: Option<Error>) {
        let mut noted = lock(&self.trouble);
        let since = noted
            .as_ref()
            .map_or_else(Instant::now, |(since, _)| *since);
        *noted = trouble.map(|error| (since, error));
    }

    /// Accepts no connection any more.
    fn close(&self) {
        self.closing.store(true, Ordering::Release);
        self.options.policy.closes();
        self.wake_up.wake();
        if let Some(thread) = lock::take(&self.thread) {
            // A listener that panicked is closed as well.
            drop(thread.join());
        }
    }
}

/// The earlier listener of this process at one of these addresses, with those that have connected
/// there meanwhile.
fn taken_over(addresses: &[SocketAddr]) -> Option<TcpListener> {
    let listeners: Vec<Arc<Shared>> = LISTENERS.lock().iter().filter_map(Weak::upgrade).collect();
    let found = listeners.into_iter().find(|listener| {
        addresses.contains(&listener.address) && listener.options.policy.gives_way()
    })?;
    found.close();
    found.socket.try_clone().ok()
}

/// What is wrong with this process's own address, and what to do.
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

fn accept_each(shared: &Shared) {
    let pending = Arc::new(Pending::default());
    // Whether the last who was greeted was a stranger: a flood of them may be let in slowly.
    let stranger = Arc::new(AtomicBool::new(false));
    let pause = |limit| poll::wait([shared.wake_up.awaited()], limit);
    loop {
        // Whatever woke it, it sleeps again, unless it is to close.
        shared.wake_up.reset();
        if shared.closing.load(Ordering::Acquire) {
            break;
        }
        let limits = shared.options.policy.limits();
        if !pending.has_room(limits.slots) {
            pending.end_older_than(MIN_HANDSHAKE_TIME);
            pause(LOOK_INTERVAL);
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
                // The initiator has gone again, or file descriptors are scarce.
                shared.note_trouble(cannot_let_in(&error));
                pending.end_older_than(MIN_HANDSHAKE_TIME);
                pause(LOOK_INTERVAL);
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

/// Has an initiator prove what it is, and served. Notes in `initiator` what is known of it.
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
        if !hello.purpose.is_of_no_rank() {
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
    /// One that has proved nothing.
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

    /// Answers inquiries with a number.
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

    /// One slot.
    struct Narrow {
        gives_way: bool,
    }

    impl AccessPolicy for Narrow {
        fn limits(&self) -> Limits {
            Limits {
                slots: 1,
                ..Limits::USUAL
            }
        }

        fn gives_way(&self) -> bool {
            self.gives_way
        }
    }

    fn listen(address: &str, number: u32, gives_way: bool) -> Result<Listener> {
        let (socket, _) = bind(address, resolve(address), 0)?;
        let options = ListenOptions {
            index: 0,
            credentials: Arc::new(Credentials::load(b"secret", None)?),
            policy: Arc::new(Narrow { gives_way }),
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
    fn a_listener_gives_way_to_the_next_one_if_its_policy_says_so() {
        for gives_way in [true, false] {
            let first = listen("127.0.0.1:0", 1, gives_way).unwrap();
            let second = listen(&first.address.to_string(), 2, false);
            if gives_way {
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
