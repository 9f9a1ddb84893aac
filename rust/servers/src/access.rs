//! Access to a parameter server: admits workers and server 0 of the same job, and refuses all
//! others.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::gathering::Gathering;
use super::link::{Linker, PeerLink};
use super::model::Fingerprint;
use gradring_net::host::host_name;
use gradring_net::link::poll::WakeUp;
use gradring_net::link::tcp;
use gradring_net::link::tcp::connection::Connection;
use gradring_net::session::connect::resolve;
use gradring_net::session::credentials::Credentials;
use gradring_net::session::listener::{
    AccessPolicy, Initiator, ListenOptions, Listener, Service, bind,
};
use gradring_net::session::turned_away::TurnedAway;
use gradring_proto::error::{Breach, Error, NotServed, Result, Text};
use gradring_proto::lock::lock;
use gradring_proto::wire::handshake::{self, ClientKind, Hello, MODELS_MAX, Purpose};

/// State that the listener's threads share with the server's own thread.
pub(crate) struct ClientAccess {
    pub(crate) credentials: Arc<Credentials>,
    pub(crate) server: usize,
    pub(crate) workers: usize,
    /// Rules of this server as text; server 0 must have equal rules.
    pub(crate) rules: String,
    /// Connected workers of each model, by its number.
    pub(crate) present: Mutex<BTreeMap<usize, Present>>,
    /// New links that the server's thread has not taken yet.
    pub(crate) arrived: Mutex<Arrived>,
    /// Directories of the snapshots with which the server starts, and fingerprints of their models,
    /// by number of the model.
    pub(crate) kept: BTreeMap<usize, (Text, Fingerprint)>,
    /// Wakes the server's thread when a link has arrived.
    pub(crate) owner: Arc<WakeUp>,
    /// Clients refused before the first worker was admitted; an error lists them if no worker ever
    /// comes.
    pub(crate) turned_away: TurnedAway,
    pub(crate) on_warning: fn(String),
    pub(super) linker: Linker,
    /// Links of the whole job, at most; more links get smaller rings of shared memory.
    pub(super) pairs: usize,
}

/// Workers that are connected or connecting, and the model that all of them train.
#[derive(Default)]
pub(crate) struct Present {
    /// Process of each worker: a random number, the process id, and the host.
    workers: BTreeMap<usize, (u64, u32, String)>,
    /// Index and model of the worker that was admitted last; all workers must have an equal model.
    model: Option<(usize, Fingerprint)>,
    /// Connections of incomplete links.
    gathering: Gathering,
}

/// New links, each with the number of the model and the client at its other end.
pub(crate) type Arrived = VecDeque<(usize, ClientKind, PeerLink)>;

/// Admits clients during the whole job, because workers reconnect after a lost connection.
impl AccessPolicy for ClientAccess {
    fn turned_away(&self, initiator: &Initiator, error: &Error) {
        // Once a worker was admitted, the list is not needed: refused clients report their reason.
        let present = lock(&self.present);
        if present.values().any(|it| it.model.is_some()) {
            return;
        }
        drop(present);
        if let Some(message) = self.turned_away.note(initiator, error) {
            let (server, host) = (self.server, host_name());
            (self.on_warning)(format!("parameter server {server} on {host} {message}"));
        }
    }
}

impl Service for ClientAccess {
    fn serves(&self, purpose: &Purpose) -> bool {
        matches!(purpose, Purpose::Parameters { .. })
    }

    fn admit(&self, hello: &Hello, _deadline: Instant) -> Result<()> {
        let Purpose::Parameters {
            job,
            server,
            model,
            client,
            transports: _,
            stream,
            streams,
            attempt,
        } = &hello.purpose
        else {
            return Err(NotServed::OnlyParameters.into());
        };
        self.credentials.check_job(job, (hello.rank, self.server))?;
        if *server != self.server {
            let reached = self.server;
            return Err(NotServed::OtherServer { reached }.into());
        }
        if *model >= MODELS_MAX {
            let wanted = format!("a model below {MODELS_MAX}").into();
            return Err(Breach::Unexpected { wanted }.into());
        }
        let (number, theirs, ours) = (*model, *streams, self.linker.streams);
        if theirs != ours {
            let client = client.name().into();
            return Err(NotServed::StreamsDiffer {
                client,
                theirs,
                ours,
            }
            .into());
        }
        let now = Instant::now();
        let mut present = lock(&self.present);
        let present = present.entry(number).or_default();
        present.give_up(now);
        self.check(number, client, present)?;
        if *stream >= ours || !present.gathering.expect(client, *attempt, *stream, now) {
            let wanted = "a stream that its link lacks".into();
            return Err(Breach::Unexpected { wanted }.into());
        }
        if let ClientKind::Worker {
            index,
            process,
            model,
        } = client
        {
            present.model = Some((*index, *model));
            present.workers.insert(*index, process.clone());
        }
        Ok(())
    }

    fn forget(&self, hello: &Hello) {
        if let Purpose::Parameters {
            model,
            client,
            attempt,
            ..
        } = &hello.purpose
            && let Some(present) = lock(&self.present).get_mut(model)
        {
            present.gathering.forget(client, *attempt);
            present.forget(client);
        }
    }

    fn serve(&self, hello: Hello, connection: Connection, deadline: Instant) -> Result<()> {
        let Purpose::Parameters {
            model,
            client,
            transports,
            stream,
            attempt,
            ..
        } = &hello.purpose
        else {
            return Ok(());
        };
        let linked = tcp::configure(connection.tcp())
            .map_err(|error| handshake::broken(&error))
            .and_then(|()| {
                let (theirs, which) = (transports.clone(), (*stream, self.linker.streams));
                let now = Instant::now();
                let mut present = lock(&self.present);
                let gathering = &mut present.entry(*model).or_default().gathering;
                let all = gathering.add(client, *attempt, which, connection, now);
                drop(present);
                // Rings of later models are smaller, so that those of all stay bounded.
                let pairs = self.pairs * (*model + 1);
                all.map(|connections| {
                    self.linker
                        .respond(connections, &client.name(), theirs, pairs, deadline)
                })
                .transpose()
            });
        if let Some(link) = linked.inspect_err(|_| self.forget(&hello))? {
            lock(&self.arrived).push_back((*model, client.clone(), link));
            self.owner.wake();
        }
        Ok(())
    }
}

impl ClientAccess {
    /// Refuses a client of a model whose rules, variables or index conflict with this server or
    /// with the workers in `present`.
    fn check(&self, number: usize, client: &ClientKind, present: &Present) -> Result<()> {
        match client {
            ClientKind::Sequencer { rules, .. } if *rules != self.rules => {
                Err(NotServed::RulesDiffer {
                    theirs: self.rules.as_str().into(),
                    ours: rules.as_str().into(),
                }
                .into())
            }
            ClientKind::Sequencer { .. } => Ok(()),
            ClientKind::Worker {
                index,
                process,
                model,
            } => {
                let (worker, workers) = (*index, self.workers);
                if worker >= workers {
                    return Err(NotServed::NoSuchWorker { worker, workers }.into());
                }
                if let Some((other, theirs)) = present.model
                    && theirs != *model
                {
                    return Err(NotServed::ModelsDiffer { worker, other }.into());
                }
                if let Some((directory, kept)) = self.kept.get(&number)
                    && kept != model
                {
                    let directory = directory.clone();
                    return Err(NotServed::OtherModel { directory, worker }.into());
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
                Ok(())
            }
        }
    }

    /// Listens at `host:port`, and admits clients from then on.
    pub(crate) fn listen(self: &Arc<Self>, address: &str) -> Result<Listener> {
        let server = self.server;
        let (socket, _) = bind(address, resolve(address), server).map_err(|error| {
            let (address, error) = (address.into(), Box::new(error));
            Error::from(NotServed::Greeting {
                server,
                address,
                error,
            })
        })?;
        let options = ListenOptions {
            index: server,
            credentials: Arc::clone(&self.credentials),
            policy: Arc::clone(self) as _,
            services: vec![Arc::clone(self) as _],
            no_service: NotServed::OnlyParameters,
        };
        Listener::on(socket, address, options)
    }

    /// Returns the links completed since the last call, and drops incomplete ones that have timed
    /// out.
    pub(crate) fn arrived(&self, now: Instant) -> Arrived {
        for present in lock(&self.present).values_mut() {
            present.give_up(now);
        }
        std::mem::take(&mut *lock(&self.arrived))
    }

    /// Frees the index of a model's worker whose connection has ended, so that another process can
    /// have it.
    pub(crate) fn gone(&self, model: usize, worker: usize, process: u64) {
        if let Some(present) = lock(&self.present).get_mut(&model) {
            present.gone(worker, process);
        }
    }
}

impl Present {
    fn forget(&mut self, client: &ClientKind) {
        if let ClientKind::Worker { index, process, .. } = client {
            self.gone(*index, process.0);
        }
    }

    fn gone(&mut self, worker: usize, process: u64) {
        if self.workers.get(&worker).is_some_and(|it| it.0 == process) {
            self.workers.remove(&worker);
        }
    }

    /// Frees the indices of workers whose incomplete links are dropped.
    fn give_up(&mut self, now: Instant) {
        for client in self.gathering.give_up(now) {
            self.forget(&client);
        }
    }
}
