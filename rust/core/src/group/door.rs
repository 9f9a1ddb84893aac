//! The listening port of a rank: lets members in while the group forms, tells those who know the
//! token how the rank is, and turns strangers away.
//!
//! A process may form one group after the other at the same address, also before it has closed the
//! one before: the door of a formed group gives way to a new one, and asks callers who want to join
//! to come again.

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs as _};
use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};
use crate::group::rendezvous::receivers;
use crate::group::watched::Watched;
use crate::link::poll::{self, Interested, WakeUp};
use crate::wire::handshake::{self, Hello, Purpose};

/// A caller that does not finish its handshake in this time is dropped.
pub(crate) const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);
/// Callers in their handshake at the same time; more are turned away and may call again.
const CALLERS_MAX: usize = 1024;
/// A caller's thread needs little stack.
const CALLER_STACK_BYTES: usize = 256 << 10;

/// Somebody who called.
pub(crate) enum Caller {
    /// A member that proved to be one.
    Member(Hello, TcpStream),
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
    let inside = Arc::new(AtomicUsize::new(0));
    while !open.closing.load(Ordering::Acquire) {
        let Ok((stream, from)) = listener.accept() else {
            let sockets = std::iter::once(Interested::readable(listener.as_raw_fd()));
            poll::wait(sockets, &open.wake_up, Duration::from_secs(1));
            continue;
        };
        if inside.fetch_add(1, Ordering::AcqRel) >= CALLERS_MAX {
            inside.fetch_sub(1, Ordering::AcqRel);
            continue;
        }
        let greeting = {
            let (admission, sender) = (admission.clone(), sender.clone());
            let (admitted, inside) = (Arc::clone(&admitted), Arc::clone(&inside));
            move || {
                if let Some(caller) = greet(stream, from, &admission, &admitted) {
                    // Nobody listens any more once the group has failed.
                    let _ = sender.send(caller);
                }
                inside.fetch_sub(1, Ordering::AcqRel);
            }
        };
        let spawned = std::thread::Builder::new()
            .stack_size(CALLER_STACK_BYTES)
            .spawn(greeting);
        if spawned.is_err() {
            inside.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

fn greet(
    mut stream: TcpStream,
    from: SocketAddr,
    admission: &Admission,
    admitted: &Mutex<BTreeSet<(usize, usize)>>,
) -> Option<Caller> {
    let configured = stream
        .set_nonblocking(false)
        .and_then(|()| stream.set_read_timeout(Some(HANDSHAKE_LIMIT)))
        .and_then(|()| stream.set_write_timeout(Some(HANDSHAKE_LIMIT)))
        .and_then(|()| stream.set_nodelay(true));
    if let Err(error) = configured {
        return Some(Caller::TurnedAway(format!("{from}: {error}")));
    }
    let mut name = from.to_string();
    let answered = handshake::answer(&mut stream, &admission.token, |hello| {
        name = format!("rank {} at {from}", hello.rank);
        admission.judge(hello)?;
        let entrance = (hello.rank, hello.purpose.number());
        if hello.purpose == Purpose::Inquiry || lock(admitted).insert(entrance) {
            return Ok(());
        }
        Err(Error::rendezvous(match hello.purpose {
            Purpose::Data { stream } => format!(
                "stream {stream} of rank {} has been connected already",
                hello.rank
            ),
            _ => format!("another process has joined as rank {} already", hello.rank),
        }))
    });
    let caller = match answered {
        Ok(hello) if hello.purpose == Purpose::Inquiry => {
            // Whoever asked may have gone.
            let _ = handshake::write_message(&mut stream, &admission.watched.state());
            return None;
        }
        Ok(hello) => Caller::Member(hello, stream),
        Err(error) => Caller::TurnedAway(format!("{name}: {error}")),
    };
    // Only a forming group wants to know.
    (!admission.watched.is_formed()).then_some(caller)
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
