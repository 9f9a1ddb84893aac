//! The listening port of a parameter server: lets workers and server 0 in, and nobody else.
//!
//! As at a rank's port, everybody is greeted in a thread of their own and has a few seconds, and there
//! are slots for so many, so that strangers neither keep members out nor cost much.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Error, NotFormed, NotServed, Result, Text};
use crate::forming::listener::Listener;
use crate::forming::listener::pending::{Pending, Slot};
use crate::link::poll::{self, WakeUp};
use crate::link::tcp::connection::Connection;
use crate::link::tcp::deadline_stream::DeadlineStream;
use crate::link::tcp::{self, tls};
use crate::lock::lock;
use crate::session::connect::resolve;
use crate::session::credentials::Credentials;
use crate::wire::handshake::{self, Guest, Hello, Purpose};

/// Connections in their handshake at the same time.
const PENDING_MAX: usize = 128;
/// How long an initiator is left in peace when others wait.
const PEACE: Duration = Duration::from_millis(250);
/// How long a greeting may take.
const GREETING_LIMIT: Duration = Duration::from_secs(5);
/// How often to look for a free slot.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);
/// A greeting's thread needs little stack, even to check certificates.
const GREETING_STACK_BYTES: usize = 512 << 10;

/// What a server asks of those who connect.
pub(crate) struct Admission {
    pub(crate) credentials: Arc<Credentials>,
    pub(crate) server: usize,
    pub(crate) workers: usize,
    /// Its rules, as text.
    pub(crate) rules: String,
    /// Workers that are connected, and what all of them train.
    pub(crate) present: Mutex<Present>,
}

/// Who is there.
#[derive(Default)]
pub(crate) struct Present {
    /// By worker, its process: a random number, its id, and the host.
    workers: BTreeMap<usize, (u64, u32, String)>,
    /// What the first worker trains, and which it was.
    model: Option<(usize, [u8; 32])>,
}

/// Who was let in.
pub(crate) type Guests = VecDeque<(Guest, Connection)>;

/// The open port. Closes when dropped.
pub(crate) struct Entrance {
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    admission: Arc<Admission>,
    guests: Mutex<Guests>,
    /// Wakes the server.
    owner: Arc<WakeUp>,
    /// Wakes the listener.
    wake_up: WakeUp,
    closing: AtomicBool,
}

impl Entrance {
    /// Listens at `host:port`; wakes `owner` when somebody was let in.
    pub(crate) fn open(
        address: &str,
        admission: Arc<Admission>,
        owner: Arc<WakeUp>,
    ) -> Result<Self> {
        let resolved = resolve(address);
        let server = admission.server;
        let (socket, bound) = Listener::bind(address, resolved, server).map_err(|error| {
            let (address, error) = (address.into(), Box::new(error));
            Error::from(NotServed::Greeting {
                server,
                address,
                error,
            })
        })?;
        let cannot = |error: io::Error| {
            let (address, error) = (address.into(), Text::of(error));
            Error::from(NotFormed::CannotListen { address, error })
        };
        socket.set_nonblocking(true).map_err(cannot)?;
        let shared = Arc::new(Shared {
            admission,
            guests: Mutex::default(),
            owner,
            wake_up: WakeUp::new().map_err(|error| Error::no_wake_up(&error))?,
            closing: AtomicBool::new(false),
        });
        let thread = std::thread::Builder::new()
            .name("gradring-listener".into())
            .spawn({
                let shared = Arc::clone(&shared);
                move || accept(&socket, &shared)
            })
            .map_err(|error| Error::no_thread(&error))?;
        Ok(Self {
            address: bound,
            shared,
            thread: Some(thread),
        })
    }

    /// Those who were let in since.
    pub(crate) fn guests(&self) -> Guests {
        std::mem::take(&mut *lock(&self.shared.guests))
    }
}

impl Drop for Entrance {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        self.shared.wake_up.wake();
        if let Some(thread) = self.thread.take() {
            // A listener that panicked is closed as well.
            drop(thread.join());
        }
    }
}

fn accept(socket: &TcpListener, shared: &Arc<Shared>) {
    let pending = Arc::new(Pending::default());
    let pause = |limit| poll::wait([shared.wake_up.awaited()], limit);
    while !shared.closing.load(Ordering::Acquire) {
        if !pending.has_room(PENDING_MAX) {
            pending.end_older_than(PEACE);
            pause(LOOK_INTERVAL);
            continue;
        }
        let slot = match socket.accept() {
            Ok((tcp, _)) => pending.add(&tcp).map(|slot| (tcp, slot)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let awaited = [poll::readable(socket), shared.wake_up.awaited()];
                poll::wait(awaited, Duration::from_secs(1));
                continue;
            }
            Err(error) => Err(error),
        };
        let Ok((tcp, slot)) = slot else {
            // The initiator has gone again, or file descriptors are scarce.
            pending.end_older_than(PEACE);
            pause(LOOK_INTERVAL);
            continue;
        };
        let shared = Arc::clone(shared);
        // Without a thread the connection is closed; its initiator tries again.
        drop(
            std::thread::Builder::new()
                .stack_size(GREETING_STACK_BYTES)
                .spawn(move || greet(tcp, slot, &shared)),
        );
    }
    pending.end_older_than(Duration::ZERO);
}

/// Lets one in, or tells it why not.
fn greet(tcp: TcpStream, slot: Slot, shared: &Shared) {
    let admission = &shared.admission;
    let credentials = &admission.credentials;
    let deadline = Instant::now() + GREETING_LIMIT;
    let converse = || {
        tcp::configure(&tcp).map_err(|error| handshake::broken(&error))?;
        let mut connection = tls::accept(tcp, credentials.tls.as_ref(), deadline)?;
        let mut stream = DeadlineStream::new(&mut connection, deadline);
        let mut entered = None;
        let hello =
            handshake::respond(&mut stream, admission.server, &credentials.token, |hello| {
                admission.check(hello)?;
                entered = Some(hello.purpose.clone());
                Ok(())
            });
        if hello.is_err()
            && let Some(Purpose::Parameters {
                guest: Guest::Worker { index, process, .. },
                ..
            }) = entered
        {
            // It does not know that it was let in.
            admission.gone(index, process.0);
        }
        Ok((hello?, connection))
    };
    // The initiator has been told why it was turned away.
    let greeted: Result<(Hello, Connection)> = converse();
    if let Ok((hello, connection)) = greeted
        && let Purpose::Parameters { guest, .. } = hello.purpose
    {
        lock(&shared.guests).push_back((guest, connection));
        shared.owner.wake();
    }
    drop(slot);
}

impl Admission {
    /// Whether an authenticated initiator has business here.
    fn check(&self, hello: &Hello) -> Result<()> {
        let Purpose::Parameters { job, server, guest } = &hello.purpose else {
            return Err(NotServed::OnlyParameters.into());
        };
        self.credentials.check_job(job, (hello.rank, self.server))?;
        if *server != self.server {
            let reached = self.server;
            return Err(NotServed::OtherServer { reached }.into());
        }
        match guest {
            Guest::Sequencer { rules, .. } if *rules != self.rules => Err(NotServed::RulesDiffer {
                theirs: self.rules.as_str().into(),
                ours: rules.as_str().into(),
            }
            .into()),
            Guest::Sequencer { .. } => Ok(()),
            Guest::Worker {
                index,
                process,
                model,
            } => {
                let (worker, workers) = (*index, self.workers);
                if worker >= workers {
                    return Err(NotServed::NoSuchWorker { worker, workers }.into());
                }
                let mut present = lock(&self.present);
                if let Some((other, theirs)) = present.model
                    && theirs != *model
                {
                    return Err(NotServed::ModelsDiffer { worker, other }.into());
                }
                let other = present.workers.get(&worker);
                if let Some((_, process, host)) = other.filter(|it| it.0 != process.0) {
                    let (process, host) = (*process, host.as_str().into());
                    return Err(NotServed::WorkerTaken {
                        worker,
                        process,
                        host,
                    }
                    .into());
                }
                present.model = Some((worker, *model));
                present.workers.insert(worker, process.clone());
                Ok(())
            }
        }
    }

    /// The connection of a worker's process has ended: another one may have the index now.
    pub(crate) fn gone(&self, worker: usize, process: u64) {
        let mut present = lock(&self.present);
        if present
            .workers
            .get(&worker)
            .is_some_and(|it| it.0 == process)
        {
            present.workers.remove(&worker);
        }
    }
}
