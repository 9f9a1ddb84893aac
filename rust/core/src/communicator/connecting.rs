//! Connecting: a rank meets the others, starts its monitor, agrees on links, and starts an engine.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use super::channels::Channels;
use super::{Communicator, NEXT_ID, OPEN};
use crate::calibration::{self, Shared};
use crate::engine::{Engine, Parts, SpinPolicy};
use crate::failure::Monitor;
use crate::forming::listener::GroupListener;
use crate::forming::on_demand::PeerConnector;
use crate::forming::rendezvous::{self, Formed};
use crate::forming::roster::{Roster, this_member};
use crate::observe::flight_recorder::FlightRecorder;
use crate::observe::journal::Journal;
use crate::observe::own_state::OwnState;
use gradring_net::abort::AbortSwitch;
use gradring_net::caller::Interrupt;
use gradring_net::config::Config;
use gradring_net::host::host_name;
use gradring_net::link::kind::Kind;
use gradring_net::link::mesh::Mesh;
use gradring_net::link::negotiation::{self, Agreed, Failed};
use gradring_net::link::tcp::connection::Connection;
use gradring_net::link::{shm, tcp};
use gradring_net::session::credentials::Credentials;
use gradring_proto::error::{Error, NotFormed, Result, Text, Unusable};
use gradring_proto::kernel;
use gradring_proto::schedule::choice::Policy;
use gradring_proto::wire::handshake::GroupId;

/// Smaller buffers are not narrowed: half the bytes save no time, and losses, counts and statistics
/// would be rounded.
const NARROWED_FROM_BYTES: usize = 64 << 10;

impl Communicator {
    /// Connects like `connect`, over links of these kinds whatever the settings say.
    ///
    /// # Errors
    /// As for `connect`.
    pub fn connect_over(
        kinds: &[Kind],
        config: &Config,
        interrupt: Interrupt<'_>,
    ) -> Result<Arc<Self>> {
        config.validate()?;
        [kernel::ignored_override(), tcp::ignored_congestion()]
            .into_iter()
            .flatten()
            .for_each(config.on_warning);
        let started = Instant::now();
        let (roster, connections, met) = meet(kinds, config, interrupt)?;
        let group = MonitoredGroup::start(kinds, config, roster, connections.control)?;
        let agreed = group.agree(connections.data, started, interrupt)?;
        let tcp_congestion = agreed.mesh.congestion();
        let connector = met.as_ref().map(|met| Arc::new(group.connector(met)));
        let spin_policy = group.spin_policy();
        let mut heap = agreed.mesh.heap().map(Arc::clone);
        let shared = Shared {
            has_slots: agreed.mesh.has_slots(),
            has_heap: heap.is_some(),
        };
        let engine = group.engine(agreed.mesh, connector.as_ref(), spin_policy)?;
        let listener = met.map(|met| group.has_formed(met));
        if config.world_size > 1 && engine.policy().is_mesh() {
            calibration::measure(&engine, shared, interrupt)?;
        }
        if let Some(heap) = heap.take_if(|_| !engine.policy().has_heaps) {
            heap.close();
        }
        let recorder = Arc::clone(&group.journal.recorder);
        let communicator = Arc::new(Self {
            id: config
                .id
                .unwrap_or_else(|| NEXT_ID.fetch_add(1, Ordering::Relaxed)),
            generation: config.generation,
            rank: config.rank,
            roster: group.roster,
            streams: config.settings.streams,
            checksum: config.settings.checksum,
            transport_name: agreed.name,
            memory_not_shared: agreed.refused,
            tcp_congestion,
            engine,
            channels: Channels::new(connector, spin_policy, recorder),
            monitor: group.monitor,
            listener: Mutex::new(listener),
            journal: group.journal,
            abort: group.abort,
            traced_since_ns: Mutex::default(),
            heap: Mutex::new(heap),
        });
        OPEN.lock()
            .insert(communicator.id, Arc::downgrade(&communicator));
        Ok(communicator)
    }
}

/// Connections of a rank to the others, once all have met.
#[derive(Default)]
struct Connections {
    data: BTreeMap<usize, Vec<Connection>>,
    control: Vec<(usize, Connection)>,
}

/// Other state of a rank that has met the others.
struct Met {
    listener: GroupListener,
    own_state: Arc<OwnState>,
    group: GroupId,
    credentials: Arc<Credentials>,
}

/// Meets the other ranks, if there are any.
fn meet(
    kinds: &[Kind],
    config: &Config,
    interrupt: Interrupt<'_>,
) -> Result<(Roster, Connections, Option<Met>)> {
    if config.world_size == 1 {
        let roster = Roster::new(vec![this_member(String::new(), None, config, kinds)]);
        return Ok((roster, Connections::default(), None));
    }
    let Formed {
        roster,
        group,
        credentials,
        data,
        control,
        listener,
        own_state,
    } = rendezvous::form(config, kinds, interrupt)?;
    let met = Met {
        listener,
        own_state,
        group,
        credentials,
    };
    Ok((roster, Connections { data, control }, Some(met)))
}

/// A group under failure monitoring.
struct MonitoredGroup<'a> {
    kinds: &'a [Kind],
    config: &'a Config,
    roster: Roster,
    abort: Arc<AbortSwitch>,
    journal: Arc<Journal>,
    monitor: Arc<Monitor>,
}

impl<'a> MonitoredGroup<'a> {
    fn start(
        kinds: &'a [Kind],
        config: &'a Config,
        roster: Roster,
        neighbours: Vec<(usize, Connection)>,
    ) -> Result<Self> {
        let abort = Arc::new(AbortSwitch::of(config.part.clone()));
        let recorder = Arc::new(FlightRecorder::new(config.generation));
        let hosts = (0..config.world_size).map(|rank| roster.host(rank).to_owned());
        let journal = Arc::new(Journal::new(config.rank, hosts.collect(), recorder));
        let monitor = Monitor::start(
            Arc::clone(&journal),
            neighbours,
            Arc::clone(&abort),
            config.timing,
            config.on_warning,
        );
        let monitor = Arc::new(monitor.map_err(|error| not_connected(config, &error))?);
        Ok(Self {
            kinds,
            config,
            roster,
            abort,
            journal,
            monitor,
        })
    }

    /// Agrees on links with the other ranks.
    fn agree(
        &self,
        connections: BTreeMap<usize, Vec<Connection>>,
        started: Instant,
        interrupt: Interrupt<'_>,
    ) -> Result<Agreed> {
        let config = self.config;
        let conversation_ends = Instant::now() + config.conversation_limit();
        let deadline = (started + config.settings.timeout).max(conversation_ends);
        let mut interrupted = false;
        let mut go_on = || {
            interrupted |= interrupt.interrupts();
            !interrupted && self.abort.cause().is_none()
        };
        let members = self.roster.members().iter();
        let offers: Vec<_> = members.map(|member| member.transports.clone()).collect();
        let agreed = negotiation::agree(
            (config.rank, &self.roster.topology()),
            self.kinds,
            &offers,
            connections,
            config.settings.checksum,
            deadline,
            &mut go_on,
        );
        let agreed =
            agreed.map_err(|error| self.monitor.first_cause(not_connected(config, &error)))?;
        let mut agreed = agreed.map_err(|failed| {
            let error = match interrupted {
                true => rendezvous::interrupted(config.rank),
                false => without_link(config, &self.roster, &failed),
            };
            self.monitor.first_cause(error).after(started.elapsed())
        })?;
        // Ranks on different hosts have no memory to share, so they need no reason.
        let refused = &mut agreed.refused;
        refused.retain(|&peer, _| self.roster.same_host(config.rank, peer));
        Ok(agreed)
    }

    /// Makes the connector that opens further links on demand.
    fn connector(&self, met: &Met) -> PeerConnector {
        PeerConnector {
            config: self.config.clone(),
            kinds: self.kinds.to_vec(),
            credentials: Arc::clone(&met.credentials),
            group: met.group,
            roster: self.roster.clone(),
            accepted: Arc::clone(&met.listener.accepted),
            abort: Arc::clone(&self.abort),
            supervisor: Arc::clone(&self.monitor) as _,
        }
    }

    fn spin_policy(&self) -> SpinPolicy {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        SpinPolicy::of(self.roster.local_size(self.config.rank), cores)
    }

    /// Makes the engine over these links. If all ranks offer TCP, it opens further ones on demand.
    fn engine(
        &self,
        mesh: Mesh,
        connector: Option<&Arc<PeerConnector>>,
        spin_policy: SpinPolicy,
    ) -> Result<Engine> {
        let settings = &self.config.settings;
        let offers_tcp = |kinds: &[String]| kinds.iter().any(|it| it == tcp::KIND.name);
        let mut members = self.roster.members().iter();
        let connects_on_demand = members.all(|member| offers_tcp(&member.transports));
        let mesh = match connector {
            Some(connector) if connects_on_demand => {
                mesh.with_connector(|waker| connector.for_collectives(waker))
            }
            _ => mesh,
        };
        let engine = Engine::new(Parts {
            rank: self.config.rank,
            policy: Policy {
                rules: settings.algorithm.clone(),
                reproducible: settings.reproducible,
                wire_dtype: settings.wire_dtype,
                narrowed_from_bytes: NARROWED_FROM_BYTES,
                connects_on_demand,
                ..Policy::new(self.roster.topology())
            },
            transport: Box::new(mesh),
            supervisor: Arc::clone(&self.monitor) as _,
            abort: Arc::clone(&self.abort),
            recorder: Arc::clone(&self.journal.recorder),
            stall_timeout: settings.stall_timeout,
            stall_warning: settings.stall_warning,
            spin_policy,
        });
        engine.map_err(|error| self.monitor.first_cause(error))
    }

    /// Publishes to inquiries that the group has formed.
    fn has_formed(&self, met: Met) -> GroupListener {
        let members = self.roster.members().iter();
        let members = members.map(|member| (member.address.clone(), member.host.clone()));
        (met.own_state).has_formed(
            members.collect(),
            Arc::clone(&self.journal.recorder),
            Arc::clone(&self.abort),
        );
        met.listener
    }
}

/// The error of a rank to which the system gives no thread, socket or descriptor.
fn not_connected(config: &Config, error: &io::Error) -> Error {
    // EAGAIN comes only from the creation of a thread.
    let thread = (error.kind() == ErrorKind::WouldBlock).then(|| Error::no_thread(error));
    thread
        .or_else(|| Error::out_of_resources(error, "cannot make its connections"))
        .unwrap_or_else(|| {
            let error = Text::of(error);
            NotFormed::Socket { error }.into()
        })
        .blaming(config.rank, host_name())
}

/// The error of a rank that has no link to a peer.
fn without_link(config: &Config, roster: &Roster, failed: &Failed) -> Error {
    let rank = config.rank;
    let (peer, error) = match failed {
        Failed::Refused { peer, reason } => {
            let reason = reason.as_str().into();
            let fact = if config.settings.transport == shm::KIND.name {
                Unusable::NoSharedMemory { rank, reason }
            } else {
                Unusable::NoLink { rank, reason }
            };
            (peer, Error::from(fact))
        }
        Failed::Broken { peer, error } => {
            let fact = match error.kind() {
                ErrorKind::TimedOut => NotFormed::LinkSilent { rank },
                _ => NotFormed::LinkBroke {
                    rank,
                    error: Text::of(error),
                },
            };
            (peer, Error::from(fact))
        }
    };
    error.blaming(*peer, roster.host(*peer))
}
