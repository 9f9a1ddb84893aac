//! The listening port of a rank: lets members in while the group forms, tells those who know the
//! token how the rank is, and turns strangers away.
//!
//! Everybody is greeted in a thread of their own and has a few seconds in all. There are places for
//! so many; when all are taken, those who have stayed longer than a member needs must go. So
//! neither slow nor many strangers keep members out for long, and they
//! cost a bounded number of threads and file descriptors.
//!
//! A process may form one group after the other at the same address, also before it has closed the
//! one before: the door of a formed group gives way to a new one, and asks callers who want to join
//! to come again.

use std::collections::BTreeSet;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs as _};
use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, Result};
use crate::group::rendezvous::receivers;
use crate::group::watched::Watched;
use crate::link::connection::Connection;
use crate::link::poll::{self, Interested, WakeUp};
use crate::link::tls::{self, Tls};
use crate::wire::handshake::{self, Hello, Purpose};

/// A caller that does not finish its handshake in this time is dropped.
pub(crate) const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);
/// Callers in their handshake at the same time. Each takes two file descriptors, of which a process
/// often has 1024.
const CALLERS_MAX: usize = 128;
/// How long a caller is left in peace when others wait: a handshake takes milliseconds.
const PEACE: Duration = Duration::from_millis(250);
/// How often to look for a free place.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);
/// A caller's thread needs little stack, even to check certificates.
const CALLER_STACK_BYTES: usize = 512 << 10;

/// Somebody who called.
pub(crate) enum Caller {
    /// A member that proved to be one.
    Member(Hello, Connection),
    /// Somebody who was turned away, and why; for error messages.
    TurnedAway(String),
}

/// An open door. Closes when dropped.
pub(crate) struct Door {
    pub(crate) address: SocketAddr,
    pub(crate) callers: Receiver<Caller>,
    open: Arc<Open>,
}

/// What ends a door.
struct Open {
    address: SocketAddr,
    watched: Arc<Watched>,
    closing: AtomicBool,
    wake_up: WakeUp,
    thread: Mutex<Option<JoinHandle<TcpListener>>>,
}

/// The doors of this process.
static DOORS: Mutex<Vec<Weak<Open>>> = Mutex::new(Vec::new());

/// The answer of a door whose group has formed to a process that would join.
const BUSY: &str = "its group has formed already and has not ended";

/// Whether it is worth to come again: the door of an earlier group was there, or was just closing.
pub(crate) fn is_busy(error: &Error) -> bool {
    handshake::is_broken(error)
        || matches!(&error.kind, ErrorKind::Rendezvous { problem } if problem == BUSY)
}

/// Whom to let in.
#[derive(Clone)]
pub(crate) struct Admission {
    pub rank: usize,
    pub world_size: usize,
    /// Of each pipe.
    pub streams: usize,
    pub token: Vec<u8>,
    pub tls: Option<Tls>,
    pub watched: Arc<Watched>,
}

impl Door {
    /// Listens at `host:port`.
    pub(crate) fn open(address: &str, admission: Admission) -> Result<Self> {
        let cannot = |error: std::io::Error| {
            let rank = admission.rank;
            Error::rendezvous(format!("rank {rank} cannot listen on {address}: {error}"))
        };
        let addresses: Vec<SocketAddr> = address.to_socket_addrs().map_err(cannot)?.collect();
        let listener = match taken_over(&addresses) {
            Some(listener) => listener,
            None => TcpListener::bind(&addresses[..]).map_err(cannot)?,
        };
        listener.set_nonblocking(true).map_err(cannot)?;
        let address = listener.local_addr().map_err(cannot)?;
        let open = Arc::new(Open {
            address,
            watched: Arc::clone(&admission.watched),
            closing: AtomicBool::new(false),
            wake_up: WakeUp::new().map_err(cannot)?,
            thread: Mutex::default(),
        });
        let (sender, callers) = channel();
        let thread = std::thread::Builder::new()
            .name("gradring-door".into())
            .spawn({
                let open = Arc::clone(&open);
                move || {
                    serve(&listener, &admission, &sender, &open);
                    listener
                }
            })
            .map_err(|error| Error::rendezvous(format!("no thread to listen with: {error}")))?;
        *lock(&open.thread) = Some(thread);
        lock(&DOORS).push(Arc::downgrade(&open));
        Ok(Self {
            address,
            callers,
            open,
        })
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        drop(self.open.close());
        let this = Arc::as_ptr(&self.open);
        lock(&DOORS).retain(|door| !std::ptr::eq(door.as_ptr(), this));
    }
}

impl Open {
    /// Lets nobody in any more; the port is free when what is returned is dropped.
    fn close(&self) -> Option<TcpListener> {
        self.closing.store(true, Ordering::Release);
        self.wake_up.wake();
        // A door that panicked is closed as well.
        lock(&self.thread).take()?.join().ok()
    }
}

/// The listener of an earlier group of this process at one of these addresses, with those who have
/// called there meanwhile.
fn taken_over(addresses: &[SocketAddr]) -> Option<TcpListener> {
    let doors: Vec<Arc<Open>> = lock(&DOORS).iter().filter_map(Weak::upgrade).collect();
    doors
        .into_iter()
        .find(|door| addresses.contains(&door.address) && door.watched.is_formed())?
        .close()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn serve(listener: &TcpListener, admission: &Admission, sender: &Sender<Caller>, open: &Open) {
    let admitted: Arc<Mutex<BTreeSet<(usize, usize)>>> = Arc::default();
    let hall = Arc::new(Hall::default());
    let listening = || std::iter::once(Interested::readable(listener.as_raw_fd()));
    while !open.closing.load(Ordering::Acquire) {
        if hall.is_full() {
            hall.send_away_who_stayed(PEACE);
            poll::wait(std::iter::empty(), &open.wake_up, LOOK_INTERVAL);
            continue;
        }
        let (tcp, from) = match listener.accept() {
            Ok(caller) => caller,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                poll::wait(listening(), &open.wake_up, Duration::from_secs(1));
                continue;
            }
            Err(_) => {
                // The caller has gone again, or file descriptors are scarce.
                hall.send_away_who_stayed(PEACE);
                poll::wait(std::iter::empty(), &open.wake_up, LOOK_INTERVAL);
                continue;
            }
        };
        let Ok(place) = hall.enter(&tcp) else {
            continue;
        };
        let greeting = {
            let (admission, sender) = (admission.clone(), sender.clone());
            let admitted = Arc::clone(&admitted);
            move || {
                let mut name = from.ip().to_string();
                let caller = match greet(tcp, &mut name, place, &admission, &admitted) {
                    Ok(caller) => caller,
                    Err(error) => Some(Caller::TurnedAway(format!("{name}: {error}"))),
                };
                // Only a forming group wants to know, and nobody listens once it has failed.
                if let Some(caller) = caller.filter(|_| !admission.watched.is_formed()) {
                    let _ = sender.send(caller);
                }
            }
        };
        // Without a thread the caller is sent away, and may call again.
        let _ = std::thread::Builder::new()
            .stack_size(CALLER_STACK_BYTES)
            .spawn(greeting);
    }
    hall.send_away_who_stayed(Duration::ZERO);
}

/// Where callers are while they are greeted.
#[derive(Default)]
struct Hall {
    /// In the order of their arrival.
    guests: Mutex<Vec<Guest>>,
}

struct Guest {
    number: u64,
    since: Instant,
    /// To end the conversation from outside.
    tcp: TcpStream,
}

/// A caller's place in the hall, given back when dropped.
struct Place {
    hall: Arc<Hall>,
    number: u64,
}

impl Hall {
    fn guests(&self) -> MutexGuard<'_, Vec<Guest>> {
        self.guests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_full(&self) -> bool {
        self.guests().len() >= CALLERS_MAX
    }

    fn enter(self: &Arc<Self>, tcp: &TcpStream) -> std::io::Result<Place> {
        let tcp = tcp.try_clone()?;
        let mut guests = self.guests();
        let number = guests.last().map_or(0, |guest| guest.number + 1);
        guests.push(Guest {
            number,
            since: Instant::now(),
            tcp,
        });
        Ok(Place {
            hall: Arc::clone(self),
            number,
        })
    }

    /// Ends the conversations that began longer ago than `limit`; their threads notice.
    fn send_away_who_stayed(&self, limit: Duration) {
        for guest in self
            .guests()
            .iter()
            .filter(|guest| guest.since.elapsed() >= limit)
        {
            // One who has gone already needs not be sent away.
            let _ = guest.tcp.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.hall
            .guests()
            .retain(|guest| guest.number != self.number);
    }
}

/// `name`: what to call the caller, which is more once it has proved to be a member.
fn greet(
    tcp: TcpStream,
    name: &mut String,
    place: Place,
    admission: &Admission,
    admitted: &Mutex<BTreeSet<(usize, usize)>>,
) -> Result<Option<Caller>> {
    tcp.set_nodelay(true)
        .map_err(|error| handshake::broken(&error))?;
    let deadline = Instant::now() + HANDSHAKE_LIMIT;
    let mut stream = tls::answer(tcp, admission.tls.as_ref(), deadline)?;
    let mut entrance = None;
    let answered = handshake::answer(&mut stream, &admission.token, |hello| {
        *name = format!("rank {} at {name}", hello.rank);
        admission.judge(hello)?;
        if hello.purpose == Purpose::Inquiry {
            return Ok(());
        }
        if !lock(admitted).insert((hello.rank, hello.purpose.number())) {
            return Err(Error::rendezvous(match hello.purpose {
                Purpose::Data { stream } => format!(
                    "stream {stream} of rank {} has been connected already",
                    hello.rank
                ),
                _ => format!("another process has joined as rank {} already", hello.rank),
            }));
        }
        entrance = Some((hello.rank, hello.purpose.number()));
        // From here on it is a member, whom nobody sends away.
        drop(place);
        Ok(())
    });
    if let (Err(_), Some(entrance)) = (&answered, entrance) {
        // It does not know that it was let in, and may call again.
        lock(admitted).remove(&entrance);
    }
    let hello = answered?;
    if hello.purpose == Purpose::Inquiry {
        // Whoever asked may have gone.
        let _ = handshake::write_message(&mut stream, &admission.watched.state());
        return Ok(None);
    }
    Ok(Some(Caller::Member(hello, stream)))
}

impl Admission {
    /// Whether an authenticated caller has business here.
    fn judge(&self, hello: &Hello) -> Result<()> {
        let Self {
            rank,
            world_size,
            streams,
            ..
        } = *self;
        if hello.purpose == Purpose::Inquiry {
            return Ok(());
        }
        if self.watched.is_formed() {
            return Err(Error::rendezvous(BUSY));
        }
        if hello.world_size != world_size {
            return Err(Error::rendezvous(format!(
                "rank {} was started with world size {}, rank {rank} with {world_size}",
                hello.rank, hello.world_size
            )));
        }
        if hello.rank >= world_size || hello.rank == rank {
            return Err(Error::rendezvous(format!(
                "a process called rank {rank} as rank {} of {world_size}",
                hello.rank
            )));
        }
        let welcome = match hello.purpose {
            Purpose::Join(_) => rank == 0,
            Purpose::Data { stream } => {
                stream < streams && receivers(hello.rank, world_size).contains(&rank)
            }
            Purpose::Control => (hello.rank + 1) % world_size == rank,
            Purpose::Inquiry => true,
        };
        if welcome {
            return Ok(());
        }
        Err(Error::protocol(format!(
            "rank {} has no such business with rank {rank}",
            hello.rank
        )))
    }
}
