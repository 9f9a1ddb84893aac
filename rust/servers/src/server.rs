//! A server's process: one thread receives from all workers and servers, and acts on their
//! messages.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::access::ClientAccess;
use super::channel::{self, BEAT};
use super::connector::ServerConnector;
use super::disk::Store;
use super::link::Linker;
use super::liveness::WorkerLiveness;
use super::message::Counted;
use super::model_server::ModelServer;
use gradring_core::forming::rendezvous::check_loopback;
use gradring_net::caller::{INTERRUPT_INTERVAL, Interrupt};
use gradring_net::config::Config;
use gradring_net::link::forks::Process;
use gradring_net::link::poll::WakeUp;
use gradring_net::session::credentials::Credentials;
use gradring_net::session::turned_away::TurnedAway;
use gradring_proto::error::{Abort, Error, NotServed, Result, Text};
use gradring_proto::lock::{self, lock};
use gradring_proto::parameters::floats::forget_kept;
use gradring_proto::parameters::identity::{Incarnation, Term, Version};
use gradring_proto::parameters::keepers::Keepers;
use gradring_proto::parameters::rules::{Rules, Timing};
use gradring_proto::parameters::sequencer::Sequencer;
use gradring_proto::parameters::server::Server as Protocol;
use gradring_proto::wire::handshake::{ClientKind, random};

/// Index of a server and the addresses of all servers.
#[derive(Debug, Clone)]
pub struct ServerPlace {
    /// Index of this server.
    pub server: usize,
    /// `host:port` of each server.
    pub addresses: Vec<String>,
}

/// Statistics of a server.
#[derive(Debug, Clone, Default)]
pub struct Stats {
    /// Number that grows whenever servers are restored.
    pub term: Term,
    /// Version of the weights: 1 for the initial ones, and 1 more for each update.
    pub version: Version,
    /// Hash of the applied log: equal for servers that have applied the same entries.
    pub history: u64,
    /// Last push in the log, by worker.
    pub applied: BTreeMap<u32, (Incarnation, u64)>,
    /// Version and history of each copy of another server's shard.
    pub replicas: Vec<(Version, u64)>,
    /// Gradients staged on this server.
    pub staged: usize,
    /// Bytes sent on all connections so far.
    pub bytes_sent: u64,
    /// Bytes received on all connections so far.
    pub bytes_received: u64,
    /// Open connections.
    pub connections: usize,
    /// Number of times that servers were restored.
    pub restored: u64,
    /// Workers that are members of the training.
    pub members: Vec<u32>,
    /// Workers that have left.
    pub left: Vec<u32>,
    /// Statistics of gradients since servers were restored; only in server 0.
    pub counted: Counted,
}

/// One server of a job.
pub struct Server {
    place: ServerPlace,
    address: String,
    core: Mutex<Option<Box<ModelServer>>>,
    published: Arc<Mutex<Stats>>,
    wake_up: Arc<WakeUp>,
    closing: AtomicBool,
    process: Process,
}

impl Server {
    /// Listens, and loads terms and snapshots from the directory.
    ///
    /// # Errors
    /// `Config` for unusable arguments or an unusable directory; `Rendezvous` for an address on
    /// which it cannot listen.
    pub fn new(
        place: ServerPlace,
        rules: &Rules,
        directory: Option<&Path>,
        worker_timeout: Duration,
        config: &Config,
    ) -> Result<Self> {
        rules.check(place.addresses.len())?;
        check_loopback(&place.addresses[place.server])?;
        let credentials = Credentials::of(config)?;
        let wake_up = WakeUp::new().map_err(|error| Error::no_wake_up(&error))?;
        let wake_up = Arc::new(wake_up);
        let servers = place.addresses.len();
        let replicas = rules.replicas;
        let keepers = Keepers { servers, replicas };
        let who = (place.server, servers);
        let store = Store::open(directory, who, Arc::clone(&wake_up), config.on_warning)?;
        let kept = store.model().zip(store.directory());
        let kept = kept.map(|(model, it)| (Text::of(it.display()), model));
        let mut stores = vec![store];
        for _ in 0..replicas {
            let wake_up = Arc::clone(&wake_up);
            stores.push(Store::open(None, who, wake_up, config.on_warning)?);
        }
        let copy = |(copy, store)| {
            let every = (copy == 0).then_some(rules.snapshot_every);
            Protocol::new(store, every, rules.compensates())
        };
        let copies = stores.into_iter().enumerate().map(copy).collect();
        let access = Arc::new(ClientAccess {
            credentials: Arc::clone(&credentials),
            server: place.server,
            workers: rules.workers as usize,
            rules: rules.compared(),
            kept,
            present: Mutex::default(),
            arrived: Mutex::default(),
            owner: Arc::clone(&wake_up),
            turned_away: TurnedAway::default(),
            on_warning: config.on_warning,
            linker: Linker::new(
                format!("parameter server {}", place.server),
                config,
                Arc::clone(&wake_up),
            )?,
            // Each worker has a link to each server, and server 0 one to each other server.
            pairs: (rules.workers as usize + 1) * servers - 1,
        });
        let address = &place.addresses[place.server];
        let listener = access.listen(address)?;
        let address = listener.address.to_string();
        let timing = Timing {
            again: BEAT,
            silence: config.timing.silence,
            start: config.settings.timeout,
            snapshot_every: rules.snapshot_every,
        };
        let now = Instant::now();
        let drawn = || random().map(u64::from_le_bytes);
        let sequencer = match place.server {
            0 => Some(Sequencer::new(
                rules.clone(),
                timing,
                keepers,
                drawn()?,
                now,
            )),
            _ => None,
        };
        let client = ClientKind::Sequencer {
            process: drawn()?,
            rules: rules.compared(),
        };
        let published = Arc::<Mutex<Stats>>::default();
        let core = ModelServer {
            connector: ServerConnector::new(
                credentials,
                client,
                place.addresses.clone(),
                config,
                Arc::clone(&wake_up),
            )?,
            keepers,
            copies,
            sequencer,
            orders: VecDeque::new(),
            workers: BTreeMap::new(),
            upstream: None,
            downstream: (0..servers).map(|_| None).collect(),
            sent_rounds: BTreeMap::new(),
            liveness: WorkerLiveness::new(
                rules.workers,
                worker_timeout,
                config.settings.timeout,
                now,
            ),
            upstream_away: now,
            ending: None,
            notified: vec![false; servers],
            is_over: false,
            statistics_sent: now,
            restored: 0,
            counted: (0, 0),
            place: place.clone(),
            published: Arc::clone(&published),
            _listener: listener,
            access,
            config: config.clone(),
        };
        Ok(Self {
            place,
            address,
            core: Mutex::new(Some(Box::new(core))),
            published,
            wake_up,
            closing: AtomicBool::new(false),
            process: Process::this(),
        })
    }

    /// Index of this server and all addresses.
    #[must_use]
    pub const fn place(&self) -> &ServerPlace {
        &self.place
    }

    /// Address of the listening socket.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Serves until all workers have left or are lost for good.
    ///
    /// # Errors
    /// When no worker connected, all workers were lost, server 0 was lost, or a disk failed; when
    /// the call is interrupted or the server closed.
    pub fn serve(&self, interrupt: Interrupt<'_>) -> Result<()> {
        self.check_process()?;
        let mut core = lock::take(&self.core).ok_or_else(closed)?;
        core.begin()?;
        let mut asked = Instant::now();
        loop {
            self.wake_up.reset();
            if self.closing.load(Ordering::Acquire) {
                return Err(closed());
            }
            let Some(limit) = core.turn(Instant::now())? else {
                core.finish();
                return Ok(());
            };
            let limit = limit.min(INTERRUPT_INTERVAL);
            channel::wait(core.channels_mut(), &self.wake_up, limit);
            if asked.elapsed() >= INTERRUPT_INTERVAL {
                asked = Instant::now();
                if interrupt.interrupts() {
                    if core.has_nobody_to_wait_for() {
                        core.finish();
                    }
                    return Err(Abort::Interrupted.into());
                }
            }
        }
    }

    /// Returns the statistics so far.
    ///
    /// # Errors
    /// In a fork.
    pub fn stats(&self) -> Result<Stats> {
        self.check_process()?;
        Ok(lock(&self.published).clone())
    }

    /// Ends `serve`, and releases the port and the directory.
    pub fn close(&self) {
        if self.process.is_this() {
            self.closing.store(true, Ordering::Release);
            self.wake_up.wake();
            drop(lock::take(&self.core));
            forget_kept();
        }
    }

    fn check_process(&self) -> Result<()> {
        if self.process.is_this() {
            return Ok(());
        }
        let what = "server".into();
        Err(NotServed::OfParent { what }.into())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if !self.process.is_this() {
            // Threads, sockets and the lock of the directory belong to the parent process.
            let core = self.core.get_mut().ok().and_then(Option::take);
            std::mem::forget(core);
        }
    }
}

fn closed() -> Error {
    let what = "server".into();
    NotServed::Closed { what }.into()
}
