//! The listening port of a rank: lets members in while the group forms, tells those who know the
//! token how the rank is, and turns strangers away.
//!
//! Everybody is greeted in a thread of their own and has a few seconds in all. There are slots for
//! so many; when all are taken, those who have stayed longer than a member needs must go. So
//! neither slow nor many strangers keep members out for long, and they cost a bounded number of
//! threads and file descriptors. A job that runs has few slots, and takes its time after a
//! stranger, so a flood costs it next to nothing.
//!
//! A process may form one group after the other at the same address, also before it has closed the
//! one before: the listener of a formed group gives way to a new one, and asks initiators who want to join
//! to come again.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::config::Config;
use crate::error::{Breach, Error, NotFormed, NotServed, Result, Text, Unusable};
use crate::forming::lobby::Lobby;
use crate::forming::members;
use crate::forming::peers::initiates;
use crate::forming::turned_away::{Initiator, TurnedAway};
use crate::host::host_name;
use crate::link::forks::PerProcess;
use crate::link::poll::{self, WakeUp};
use crate::link::tcp;
use crate::link::tcp::connection::Connection;
use crate::link::tcp::deadline_stream::DeadlineStream;
use crate::link::tcp::tls;
use crate::lock::lock;
use crate::observe::own_state::OwnState;
use crate::session::credentials::Credentials;
use crate::wire::handshake::{self, Hello, Purpose};

pub(crate) mod pending;

use pending::{Pending, Slot};

/// An initiator of a formed group that does not finish its handshake in this time is dropped.
const INQUIRY_LIMIT: Duration = Duration::from_secs(5);
/// Connections in their handshake at the same time, while the group forms. Each takes two file
/// descriptors, of which a process often has 1024.
const PENDING_MAX: usize = 128;
/// The same for a group that has formed, where people ask and a few members connect at a time.
const INQUIRERS_MAX: usize = 16;
/// Pause of a formed group after a stranger: their handshakes, with TLS up to a millisecond of
/// computing each, take little of what the job could use.
const INQUIRY_PAUSE: Duration = Duration::from_millis(20);
/// How long an initiator is left in peace when others wait: a handshake takes milliseconds.
const PEACE: Duration = Duration::from_millis(250);
/// How long the system may refuse to let anybody in: less than initiators wait for an answer.
const TROUBLE_LIMIT: Duration = Duration::from_secs(2);
/// How often to look for a free slot.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);
/// An initiator's thread needs little stack, even to check certificates.
const HANDSHAKE_STACK_BYTES: usize = 512 << 10;

/// An initiator that is a member, and what it said.
type Member = (Hello, Connection);

/// The open listening port. Closes when dropped.
pub(crate) struct Listener {
    pub(crate) address: SocketAddr,
    /// Members that proved to be such.
    pub(crate) members: Receiver<Member>,
    /// All others, while the group forms.
    pub(crate) turned_away: Arc<TurnedAway>,
    /// Members that connect later.
    pub(crate) lobby: Arc<Lobby>,
    shared: Arc<Shared>,
}

/// What the thread of a listener and its owner share.
struct Shared {
    address: SocketAddr,
    socket: TcpListener,
    own_state: Arc<OwnState>,
    closing: AtomicBool,
    wake_up: WakeUp,
    /// Since when it cannot let anybody in, and why.
    trouble: Mutex<Option<(Instant, Error)>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// The listeners of this process.
static LISTENERS: PerProcess<Vec<Weak<Shared>>> = PerProcess::new();

/// Whom to let in.
pub(crate) struct Admission {
    pub config: Config,
    pub credentials: Arc<Credentials>,
    pub own_state: Arc<OwnState>,
    pub lobby: Arc<Lobby>,
}

impl Listener {
    /// Listens at `host:port`, with what was found for its name.
    pub(crate) fn open(
        address: &str,
        resolved: io::Result<Vec<SocketAddr>>,
        admission: Arc<Admission>,
    ) -> Result<Self> {
        let (socket, _) = Self::bind(address, resolved, admission.config.rank)?;
        Self::on(socket, address, admission)
    }

    /// The socket of a listener at `host:port`, and where it is.
    pub(crate) fn bind(
        address: &str,
        resolved: io::Result<Vec<SocketAddr>>,
        rank: usize,
    ) -> Result<(TcpListener, SocketAddr)> {
        let cannot = |error| cannot_listen(&error, address, rank);
        let addresses = resolved.map_err(cannot)?;
        let socket = match taken_over(&addresses) {
            Some(socket) => socket,
            None => tcp::listen(&addresses).map_err(cannot)?,
        };
        let bound = socket.local_addr().map_err(cannot)?;
        Ok((socket, bound))
    }

    /// A socket at one of these ports of `ip`, whatever else this process listens at; and where it is.
    pub(crate) fn bind_beside(
        ip: IpAddr,
        (first, last): (u16, u16),
        rank: usize,
    ) -> Result<(TcpListener, SocketAddr)> {
        let addresses: Vec<_> = (first..=last)
            .map(|port| SocketAddr::new(ip, port))
            .collect();
        let words = format!("a port from {first} to {last} of {ip}");
        let cannot = |error| cannot_listen(&error, &words, rank);
        let socket = tcp::listen(&addresses).map_err(cannot)?;
        let bound = socket.local_addr().map_err(cannot)?;
        Ok((socket, bound))
    }

    /// Listens where this process listens already; what listened there before gives way.
    pub(crate) fn reopen(socket: &TcpListener, admission: Arc<Admission>) -> Result<Self> {
        let rank = admission.config.rank;
        let cannot = |error| cannot_listen(&error, "its own address", rank);
        let address = socket.local_addr().map_err(cannot)?;
        drop(taken_over(&[address]));
        let socket = socket.try_clone().map_err(cannot)?;
        Self::on(socket, &address.to_string(), admission)
    }

    /// The socket, which stays open when the listener closes; connections wait there then.
    pub(crate) fn socket(&self) -> Result<TcpListener> {
        self.shared.socket.try_clone().map_err(|error| {
            let error = Text::of(error);
            NotFormed::Socket { error }.into()
        })
    }

    fn on(socket: TcpListener, address: &str, admission: Arc<Admission>) -> Result<Self> {
        let cannot = |error| cannot_listen(&error, address, admission.config.rank);
        socket.set_nonblocking(true).map_err(cannot)?;
        let address = socket.local_addr().map_err(cannot)?;
        let shared = Arc::new(Shared {
            address,
            socket,
            own_state: Arc::clone(&admission.own_state),
            closing: AtomicBool::new(false),
            wake_up: WakeUp::new().map_err(|error| Error::no_wake_up(&error))?,
            trouble: Mutex::default(),
            thread: Mutex::default(),
        });
        let (sender, members) = channel();
        let turned_away: Arc<TurnedAway> = Arc::default();
        let lobby = Arc::clone(&admission.lobby);
        let thread = std::thread::Builder::new()
            .name("gradring-listener".into())
            .spawn({
                let (shared, turned_away) = (Arc::clone(&shared), Arc::clone(&turned_away));
                move || {
                    serve(&admission, &sender, &turned_away, &shared);
                }
            })
            .map_err(|error| Error::no_thread(&error))?;
        *lock(&shared.thread) = Some(thread);
        LISTENERS.lock().push(Arc::downgrade(&shared));
        Ok(Self {
            address,
            members,
            turned_away,
            lobby,
            shared,
        })
    }
}

/// What is wrong with this rank's own address, and what to do.
fn cannot_listen(error: &io::Error, address: &str, rank: usize) -> Error {
    if let Some(error) = Error::out_of_resources(error, &format!("cannot listen on {address}")) {
        return error.blaming(rank, host_name());
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
    cause.blaming(rank, host_name())
}

impl Listener {
    /// Whether initiators can be let in.
    ///
    /// # Errors
    /// `Exhausted` if the system has refused it for much longer than strangers are left in peace
    /// then, so that it is not they who take what there is.
    pub(crate) fn check(&self) -> Result<()> {
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
        self.own_state.gives_up();
        self.wake_up.wake();
        if let Some(thread) = lock(&self.thread).take() {
            // A listener that panicked is closed as well.
            drop(thread.join());
        }
    }
}

/// The listener of an earlier group of this process at one of these addresses, with those that have
/// connected there meanwhile.
fn taken_over(addresses: &[SocketAddr]) -> Option<TcpListener> {
    let listeners: Vec<Arc<Shared>> = LISTENERS.lock().iter().filter_map(Weak::upgrade).collect();
    let found = listeners
        .into_iter()
        .find(|listener| addresses.contains(&listener.address) && listener.own_state.is_formed())?;
    found.close();
    found.socket.try_clone().ok()
}

fn serve(
    admission: &Arc<Admission>,
    sender: &Sender<Member>,
    turned_away: &Arc<TurnedAway>,
    shared: &Shared,
) {
    let admitted: Arc<Mutex<BTreeSet<(usize, usize)>>> = Arc::default();
    let pending = Arc::new(Pending::default());
    // Whether the last who was greeted was a stranger: a flood of them is let in slowly.
    let stranger = Arc::new(AtomicBool::new(false));
    let pause = |limit| poll::wait([shared.wake_up.awaited()], limit);
    loop {
        // Whatever woke it, it sleeps again, unless it is to close.
        shared.wake_up.reset();
        if shared.closing.load(Ordering::Acquire) {
            break;
        }
        let formed = !admission.lets_members_in();
        if !pending.has_room(if formed { INQUIRERS_MAX } else { PENDING_MAX }) {
            pending.end_older_than(PEACE);
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
                pending.end_older_than(PEACE);
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
            let (admission, sender) = (Arc::clone(admission), sender.clone());
            let (admitted, turned_away) = (Arc::clone(&admitted), Arc::clone(turned_away));
            let stranger = Arc::clone(&stranger);
            move || {
                let mut initiator = Initiator::new(from.ip());
                let greeted = greet(tcp, &mut initiator, slot, &admission, &admitted);
                stranger.store(greeted.is_err(), Ordering::Relaxed);
                // Only a forming group reads this; once it has failed, nothing does.
                if !admission.lets_members_in() {
                    return;
                }
                match greeted {
                    Ok(None) => {}
                    Ok(Some(member)) => drop(sender.send(member)),
                    Err(error) => {
                        if let Some(said) = turned_away.note(&initiator, &error) {
                            let (config, host) = (&admission.config, host_name());
                            (config.on_warning)(format!("rank {} on {host} {said}", config.rank));
                        }
                    }
                }
            }
        };
        // Without a thread the connection is closed; its initiator may try again.
        let greeted = std::thread::Builder::new()
            .stack_size(HANDSHAKE_STACK_BYTES)
            .spawn(greeting);
        shared.note_trouble(greeted.err().map(|error| Error::no_thread(&error)));
        if formed && stranger.load(Ordering::Relaxed) {
            pause(INQUIRY_PAUSE);
        }
    }
    pending.end_older_than(Duration::ZERO);
}

fn cannot_let_in(error: &io::Error) -> Option<Error> {
    Error::out_of_resources(error, "cannot let the others in")
}

/// Notes in `initiator` what is known of it.
fn greet(
    tcp: TcpStream,
    initiator: &mut Initiator,
    slot: Slot,
    admission: &Admission,
    admitted: &Mutex<BTreeSet<(usize, usize)>>,
) -> Result<Option<Member>> {
    tcp.set_nodelay(true)
        .map_err(|error| handshake::broken(&error))?;
    let limit = match admission.lets_members_in() {
        false => INQUIRY_LIMIT,
        true => admission.config.conversation_limit(),
    };
    let (rank, deadline) = (admission.config.rank, Instant::now() + limit);
    let credentials = &admission.credentials;
    let mut connection = tls::accept(tcp, credentials.tls.as_ref(), deadline)?;
    let mut stream = DeadlineStream::new(&mut connection, deadline);
    initiator.is_connected = true;
    let (mut entrance, mut slot) = (None, Some(slot));
    let answered = handshake::respond(&mut stream, rank, &credentials.token, |hello| {
        if let Purpose::Membership { job } = &hello.purpose {
            return credentials.check_job(job, (hello.rank, rank));
        }
        if hello.purpose == Purpose::Inquiry {
            return Ok(());
        }
        if matches!(hello.purpose, Purpose::Parameters { .. }) {
            return Err(NotServed::NotAServer.into());
        }
        initiator.proved_rank = Some(hello.rank);
        admission.check_hello(hello, deadline)?;
        if matches!(hello.purpose, Purpose::OnDemand { .. }) {
            return Ok(());
        }
        if !lock(admitted).insert((hello.rank, hello.purpose.number())) {
            let rank = hello.rank;
            return Err(match hello.purpose {
                Purpose::Data { stream } => NotFormed::StreamTaken { rank, stream },
                _ => NotFormed::RankTaken { rank },
            }
            .into());
        }
        entrance = Some((hello.rank, hello.purpose.number()));
        // From here on it is a member, which is not disconnected for others.
        slot = None;
        Ok(())
    });
    if let (Err(_), Some(entrance)) = (&answered, entrance) {
        // It does not know that it was let in, and may connect again.
        lock(admitted).remove(&entrance);
    }
    let hello = answered?;
    if hello.purpose == Purpose::Inquiry {
        // The process that asked may have gone.
        let _ = handshake::write_message(&mut stream, &admission.own_state.state());
        drop(slot);
        return Ok(None);
    }
    if let Purpose::Membership { job } = &hello.purpose {
        members::answer(&mut stream, job)?;
        drop(slot);
        return Ok(None);
    }
    if let Purpose::OnDemand { traffic, stream } = hello.purpose {
        let lobby = &admission.lobby;
        lobby.enter(hello.rank, traffic, stream, connection);
        return Ok(None);
    }
    Ok(Some((hello, connection)))
}

impl Admission {
    /// Whether a group forms here.
    fn lets_members_in(&self) -> bool {
        !self.own_state.is_formed()
    }

    /// Whether an authenticated initiator that is no inquirer has business here.
    fn check_hello(&self, hello: &Hello, deadline: Instant) -> Result<()> {
        let Config {
            rank,
            world_size,
            ref settings,
            ..
        } = self.config;
        // Other ranks may be through with forming the group before this one is.
        let in_time = match hello.purpose {
            Purpose::OnDemand { .. } => !self.own_state.is_between_groups(),
            _ => self.lets_members_in(),
        };
        // One of a newer generation has heard sooner that this group has ended.
        if !in_time || hello.generation > self.config.generation {
            return Err(NotFormed::Busy.into());
        }
        if hello.generation < self.config.generation {
            return Err(NotFormed::OtherGeneration {
                initiator: hello.rank,
                theirs: hello.generation,
                responder: rank,
                ours: self.config.generation,
            }
            .into());
        }
        if hello.world_size != world_size {
            return Err(NotFormed::OtherWorldSize {
                initiator: hello.rank,
                theirs: hello.world_size,
                responder: rank,
                ours: world_size,
            }
            .into());
        }
        handshake::check_responder(hello.rank, hello.responder, rank)?;
        if hello.rank >= world_size || hello.rank == rank {
            return Err(NotFormed::NoSuchRank {
                initiator: hello.rank,
                responder: rank,
                world_size,
            }
            .into());
        }
        let welcome = match &hello.purpose {
            Purpose::Join(member) => {
                self.credentials
                    .check_job(&member.job, (hello.rank, rank))?;
                rank == 0
            }
            Purpose::Data { stream } => {
                *stream < settings.streams && initiates(hello.rank, rank, world_size)
            }
            Purpose::OnDemand { stream, .. } => {
                *stream < settings.streams && initiates(hello.rank, rank, world_size)
            }
            Purpose::Control => (hello.rank + 1) % world_size == rank,
            Purpose::Inquiry | Purpose::Membership { .. } | Purpose::Parameters { .. } => true,
        };
        if !welcome {
            let (initiator, responder) = (hello.rank, rank);
            return Err(Breach::NotExpected {
                initiator,
                responder,
            }
            .into());
        }
        if matches!(hello.purpose, Purpose::Join(_)) {
            return Ok(());
        }
        // Its roster may have overtaken that of this rank.
        let limit = deadline.saturating_duration_since(Instant::now());
        match self.own_state.group(limit) {
            Some(group) if group == hello.group => Ok(()),
            Some(_) => Err(NotFormed::OtherGroup {
                initiator: hello.rank,
                responder: rank,
            }
            .into()),
            None => Err(NotFormed::NoGroupYet { rank }.into()),
        }
    }
}
