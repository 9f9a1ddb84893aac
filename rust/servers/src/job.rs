//! All models of a server's process: one listener, and a [`ModelServer`] for each model, which is
//! made when a client connects for the model. A job has a model for each optimizer of its program.
//!
//! The first model decides about the life of the process. Server 0 ends the job when no worker of
//! any model is waited for. The other servers end when server 0 says so over the first model's
//! link, and fail when that link is missing for too long.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::access::ClientAccess;
use super::channel::{BEAT, MessageChannel};
use super::circles::Circles;
use super::connector::ServerConnector;
use super::disk::Store;
use super::link::Linker;
use super::liveness::WorkerLiveness;
use super::model_server::ModelServer;
use super::status::{ServerPlace, Stats};
use gradring_net::config::Config;
use gradring_net::host::host_name;
use gradring_net::link::poll::WakeUp;
use gradring_net::session::credentials::Credentials;
use gradring_net::session::listener::Listener;
use gradring_net::session::turned_away::TurnedAway;
use gradring_proto::error::{Error, Result, Text};
use gradring_proto::lock::lock;
use gradring_proto::parameters::keepers::Keepers;
use gradring_proto::parameters::rules::{Rules, Timing};
use gradring_proto::parameters::sequencer::Sequencer;
use gradring_proto::parameters::server::Server as Protocol;
use gradring_proto::wire::handshake::{ClientKind, MODELS_MAX, random};

/// Number of the model that every job has.
const FIRST: usize = 0;

/// The models of a server, and everything from which further ones are made.
pub(super) struct Job {
    place: ServerPlace,
    rules: Rules,
    config: Config,
    worker_timeout: Duration,
    credentials: Arc<Credentials>,
    access: Arc<ClientAccess>,
    listener: Listener,
    wake_up: Arc<WakeUp>,
    /// Directory of the first model; those of others are in it.
    directory: Option<PathBuf>,
    /// Directories of an earlier process, of models for which no client has connected yet.
    found: BTreeMap<usize, Store>,
    models: BTreeMap<usize, ModelServer>,
    /// In server 0, the time when nobody was waited for any more.
    ending: Option<Instant>,
    /// Workers that wait for each other in several models, and when they were looked for last.
    circles: (Circles, Instant),
    published: Arc<Mutex<Stats>>,
}

impl Job {
    /// Listens, and loads terms and snapshots from the directory.
    ///
    /// # Errors
    /// Those of `Server::new`.
    pub(super) fn new(
        place: &ServerPlace,
        rules: &Rules,
        directory: Option<&Path>,
        worker_timeout: Duration,
        config: &Config,
    ) -> Result<Self> {
        let credentials = Credentials::of(config)?;
        let wake_up = WakeUp::new().map_err(|error| Error::no_wake_up(&error))?;
        let wake_up = Arc::new(wake_up);
        let servers = place.addresses.len();
        let mut found = BTreeMap::new();
        for number in 0..MODELS_MAX {
            let own = directory.map(|it| directory_of(it, number));
            if number == FIRST || own.as_ref().is_some_and(|it| it.is_dir()) {
                let (own, who) = (own.as_deref(), (place.server, servers));
                let store = Store::open(own, who, Arc::clone(&wake_up), config.on_warning)?;
                found.insert(number, store);
            }
        }
        let kept = found.iter().filter_map(|(number, store)| {
            let (model, directory) = (store.model()?, store.directory()?);
            Some((*number, (Text::of(directory.display()), model)))
        });
        let access = Arc::new(ClientAccess {
            credentials: Arc::clone(&credentials),
            server: place.server,
            workers: rules.workers as usize,
            rules: rules.compared(),
            kept: kept.collect(),
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
        let listener = access.listen(&place.addresses[place.server])?;
        let now = Instant::now();
        let mut job = Self {
            place: place.clone(),
            rules: rules.clone(),
            config: config.clone(),
            worker_timeout,
            credentials,
            access,
            listener,
            wake_up,
            directory: directory.map(Path::to_path_buf),
            found,
            models: BTreeMap::new(),
            ending: None,
            circles: (Circles::default(), now),
            published: Arc::default(),
        };
        let first = job.make(FIRST, now)?;
        job.models.insert(FIRST, first);
        Ok(job)
    }

    /// Address of the listening socket.
    pub(super) fn address(&self) -> String {
        self.listener.address.to_string()
    }

    /// Statistics, which each turn brings up to date.
    pub(super) fn published(&self) -> Arc<Mutex<Stats>> {
        Arc::clone(&self.published)
    }

    /// Wakes the thread that calls `turn`.
    pub(super) fn wake_up(&self) -> Arc<WakeUp> {
        Arc::clone(&self.wake_up)
    }

    fn make(&mut self, number: usize, now: Instant) -> Result<ModelServer> {
        let servers = self.place.addresses.len();
        let keepers = Keepers {
            servers,
            replicas: self.rules.replicas,
        };
        let mut stores = Vec::new();
        if let Some(found) = self.found.remove(&number) {
            stores.push(found);
        } else {
            let own = self.directory.as_ref().map(|it| directory_of(it, number));
            stores.push(self.open(own.as_deref())?);
        }
        for _ in 0..keepers.replicas {
            stores.push(self.open(None)?);
        }
        let copy = |(copy, store)| {
            let every = (copy == 0).then_some(self.rules.snapshot_every);
            Protocol::new(store, every, self.rules.compensates())
        };
        let timing = Timing {
            again: BEAT,
            silence: self.config.timing.silence,
            start: self.config.settings.timeout,
            snapshot_every: self.rules.snapshot_every,
        };
        let drawn = || random().map(u64::from_le_bytes);
        let sequencer = match self.place.server {
            0 => Some(Sequencer::new(
                self.rules.clone(),
                timing,
                keepers,
                drawn()?,
                now,
            )),
            _ => None,
        };
        let client = ClientKind::Sequencer {
            process: drawn()?,
            rules: self.rules.compared(),
        };
        // All workers begin with the first model, and perhaps not all with others.
        let workers = match number {
            FIRST => self.rules.workers,
            _ => 0,
        };
        let timeout = self.config.settings.timeout;
        Ok(ModelServer {
            number,
            connector: ServerConnector::new(
                Arc::clone(&self.credentials),
                (number, client),
                self.place.addresses.clone(),
                &self.config,
                Arc::clone(&self.wake_up),
            )?,
            keepers,
            copies: stores.into_iter().enumerate().map(copy).collect(),
            sequencer,
            orders: Default::default(),
            workers: BTreeMap::new(),
            upstream: None,
            downstream: (0..servers).map(|_| None).collect(),
            sent_rounds: BTreeMap::new(),
            liveness: WorkerLiveness::new(workers, self.worker_timeout, timeout, now),
            upstream_away: now,
            ending: self.ending,
            notified: vec![false; servers],
            is_over: false,
            statistics_sent: now,
            restored: 0,
            counted: (0, 0),
            place: self.place.clone(),
            access: Arc::clone(&self.access),
            config: self.config.clone(),
        })
    }

    fn open(&self, directory: Option<&Path>) -> Result<Store> {
        let who = (self.place.server, self.place.addresses.len());
        let wake_up = Arc::clone(&self.wake_up);
        Store::open(directory, who, wake_up, self.config.on_warning)
    }

    /// Begins to wait for workers and servers.
    pub(super) fn begin(&mut self) -> Result<()> {
        let now = Instant::now();
        let mut models = self.models.values_mut();
        models.try_for_each(|model| model.begin(now))
    }

    /// Does all that is due, and returns the longest time to wait; `None` at the end of the job.
    pub(super) fn turn(&mut self, now: Instant) -> Result<Option<Duration>> {
        for (number, client, link) in self.access.arrived(now) {
            if !self.models.contains_key(&number) {
                let mut model = self.make(number, now)?;
                model.begin(now)?;
                self.models.insert(number, model);
            }
            if let Some(model) = self.models.get_mut(&number) {
                model.accept(client, link, now)?;
            }
        }
        for model in self.models.values_mut() {
            model.turn(now)?;
        }
        self.break_circles(now)?;
        *lock(&self.published) = self.stats();
        if self.is_over(now)? {
            return Ok(None);
        }
        let wakes = self.models.values().map(|model| model.wake(now));
        let wake = wakes.min().unwrap_or(now);
        Ok(Some(wake.saturating_duration_since(Instant::now())))
    }

    /// Lets workers that wait for each other in several models go on.
    fn break_circles(&mut self, now: Instant) -> Result<()> {
        if self.models.len() < 2 || now < self.circles.1 + BEAT {
            return Ok(());
        }
        self.circles.1 = now;
        let waits = |(number, model): (&usize, &ModelServer)| Some((*number, model.waits()?));
        let waits = self.models.iter().filter_map(waits).collect();
        // A worker that is silent for so long counts as lost, too.
        let patience = self.config.timing.silence;
        let Some((number, awaited)) = self.circles.0.overdue(&waits, patience, now) else {
            return Ok(());
        };
        let (server, host) = (self.place.server, host_name());
        (self.config.on_warning)(format!(
            "parameter server {server} on {host} goes on with optimizer {number} (counted from 0) \
             without workers {awaited:?} until these push again: they wait with another optimizer \
             for the other workers. Do all workers train for the same number of steps, and use the \
             optimizers in one order?"
        ));
        let model = self.models.get_mut(&number);
        model.map_or(Ok(()), |model| model.go_on_without(&awaited, now))
    }

    fn is_over(&mut self, now: Instant) -> Result<bool> {
        let first = &self.models[&FIRST];
        if self.place.server != 0 {
            if !first.is_over {
                first.check_upstream(now)?;
            }
            return Ok(first.is_over);
        }
        if self.ending.is_none() {
            let mut all = self.models.values();
            if !all.all(|model| model.liveness.waits_for_nobody(now))
                || !first.liveness.is_over(0, &self.access.turned_away, now)?
            {
                return Ok(false);
            }
            self.ending = Some(now);
        }
        let mut have_ended = true;
        for model in self.models.values_mut() {
            model.ending = self.ending;
            have_ended &= model.has_ended(now)?;
        }
        Ok(have_ended)
    }

    fn stats(&self) -> Stats {
        let mut stats = self.models[&FIRST].stats();
        stats.models = self.models.len();
        for (_, model) in self.models.range(FIRST + 1..) {
            let other = model.stats();
            stats.staged += other.staged;
            stats.bytes_sent += other.bytes_sent;
            stats.bytes_received += other.bytes_received;
            stats.connections += other.connections;
            stats.counted.add(&other.counted);
        }
        stats
    }

    /// Channels of all models.
    pub(super) fn channels_mut(&mut self) -> impl Iterator<Item = &mut MessageChannel> {
        let models = self.models.values_mut();
        models.flat_map(ModelServer::channels_mut)
    }

    /// Returns whether a worker has left and no worker is connected.
    pub(super) fn has_nobody_to_wait_for(&self) -> bool {
        let has_left = !self.models[&FIRST].liveness.left.is_empty();
        has_left && self.models.values().all(|model| model.workers.is_empty())
    }

    /// Renames the directory of a job that has ended well.
    pub(super) fn finish(&mut self) {
        // Other models have their directories in that of the first, and complete their snapshots.
        self.found.clear();
        self.models.retain(|number, _| *number == FIRST);
        for model in self.models.values_mut() {
            model.finish();
        }
    }
}

/// Directory of a model's snapshots in that of the server.
fn directory_of(directory: &Path, number: usize) -> PathBuf {
    match number {
        FIRST => directory.to_path_buf(),
        _ => directory.join(format!("optimizer-{number}")),
    }
}
