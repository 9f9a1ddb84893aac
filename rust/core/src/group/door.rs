//! The listening port of a rank while its group forms: lets members in, turns strangers away.

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs as _};
use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::group::rendezvous::receivers;
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
    closing: Arc<(AtomicBool, WakeUp)>,
}

/// Whom to let in.
#[derive(Clone)]
pub(crate) struct Admission {
    pub rank: usize,
    pub world_size: usize,
    /// Of each pipe.
    pub streams: usize,
    pub token: Vec<u8>,
}

impl Door {
    /// Listens at `host:port`.
    pub(crate) fn open(address: &str, admission: Admission) -> Result<Self> {
        let cannot = |error: std::io::Error| {
            let rank = admission.rank;
            Error::rendezvous(format!("rank {rank} cannot listen on {address}: {error}"))
        };
        let addresses: Vec<SocketAddr> = address.to_socket_addrs().map_err(cannot)?.collect();
        let listener = TcpListener::bind(&addresses[..]).map_err(cannot)?;
        listener.set_nonblocking(true).map_err(cannot)?;
        let address = listener.local_addr().map_err(cannot)?;
        let closing = Arc::new((AtomicBool::new(false), WakeUp::new().map_err(cannot)?));
        let (sender, callers) = channel();
        std::thread::Builder::new()
            .name("gradring-door".into())
            .spawn({
                let closing = Arc::clone(&closing);
                move || serve(&listener, &admission, &sender, &closing)
            })
            .map_err(|error| Error::rendezvous(format!("no thread to listen with: {error}")))?;
        Ok(Self {
            address,
            callers,
            closing,
        })
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.closing.0.store(true, Ordering::Release);
        self.closing.1.wake();
    }
}

fn serve(
    listener: &TcpListener,
    admission: &Admission,
    sender: &Sender<Caller>,
    closing: &(AtomicBool, WakeUp),
) {
    let admitted: Arc<Mutex<BTreeSet<(usize, usize)>>> = Arc::default();
    let inside = Arc::new(AtomicUsize::new(0));
    while !closing.0.load(Ordering::Acquire) {
        let Ok((stream, from)) = listener.accept() else {
            let sockets = std::iter::once(Interested::readable(listener.as_raw_fd()));
            poll::wait(sockets, &closing.1, Duration::from_secs(1));
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
                let caller = greet(stream, from, &admission, &admitted);
                // Nobody listens any more once the group has formed or failed.
                let _ = sender.send(caller);
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
) -> Caller {
    let configured = stream
        .set_nonblocking(false)
        .and_then(|()| stream.set_read_timeout(Some(HANDSHAKE_LIMIT)))
        .and_then(|()| stream.set_write_timeout(Some(HANDSHAKE_LIMIT)))
        .and_then(|()| stream.set_nodelay(true));
    if let Err(error) = configured {
        return Caller::TurnedAway(format!("{from}: {error}"));
    }
    let mut name = from.to_string();
    let answered = handshake::answer(&mut stream, &admission.token, |hello| {
        name = format!("rank {} at {from}", hello.rank);
        admission.judge(hello)?;
        let entrance = (hello.rank, hello.purpose.number());
        let mut admitted = admitted.lock().unwrap_or_else(PoisonError::into_inner);
        if admitted.insert(entrance) {
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
    match answered {
        Ok(hello) => Caller::Member(hello, stream),
        Err(error) => Caller::TurnedAway(format!("{name}: {error}")),
    }
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
