//! Point-to-point channels, in which one rank sends and one receives.
//!
//! A channel leads from one rank to another, and its first use makes it. It is a group of two
//! inside the group, with a link, an engine and an order of its own. So transfers with different
//! ranks, and both directions between two ranks, run at the same time, also beside collectives of
//! all ranks. A failure of a channel raises the group's abort switch, and a failure of the group
//! ends its channels.
//!
//! Inside a channel the sender is rank 0 and the receiver rank 1. Both send the header of their
//! call, as in a collective, so a difference is an error on both. A send does not end before its
//! `recv` has begun. Both ranks report a difference in the same words, since the peer may already
//! be gone.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::drive::{Stall, Supervisor, Suspicion};
use crate::engine::{Engine, Parts, SpinPolicy};
use crate::forming::on_demand::PeerConnector;
use crate::observe::flight_recorder::FlightRecorder;
use crate::observe::stats::Stats;
use gradring_net::link::mesh::Mesh;
use gradring_net::link::poll::WakeUp;
use gradring_proto::collective::{Collective, Request};
use gradring_proto::error::{Abort, Error, ErrorKind, NotFormed, Result, Text, Unusable};
use gradring_proto::lock::lock;
use gradring_proto::schedule::choice::Policy;
use gradring_proto::schedule::topology::Topology;

/// The channels of one rank.
pub(super) struct Channels {
    /// `None` in a group of one rank.
    connector: Option<Arc<PeerConnector>>,
    spin_policy: SpinPolicy,
    /// The group's recorder, which lists those of the channels.
    recorder: Arc<FlightRecorder>,
    /// `None` once the communicator is closed.
    open: Mutex<Option<Engines>>,
}

/// Engines by peer and direction: `true` if this rank sends.
type Engines = BTreeMap<(usize, bool), Arc<Engine>>;

impl Channels {
    pub(super) const fn new(
        connector: Option<Arc<PeerConnector>>,
        spin_policy: SpinPolicy,
        recorder: Arc<FlightRecorder>,
    ) -> Self {
        Self {
            connector,
            spin_policy,
            recorder,
            open: Mutex::new(Some(Engines::new())),
        }
    }

    /// Returns the engine of the channel for a request.
    ///
    /// # Errors
    /// `Config` if its partner is not another rank; `Aborted` if the communicator is closed;
    /// `Exhausted` if the system has no thread or descriptor left.
    pub(super) fn of(&self, request: &Request) -> Result<Arc<Engine>> {
        let (peer, sends) = match request.collective {
            Collective::Send { to } => (to, true),
            Collective::Receive { from } => (from, false),
            _ => unreachable!("a collective of all ranks has no channel"),
        };
        let (rank, world_size) = match &self.connector {
            Some(connector) => (connector.config.rank, connector.config.world_size),
            None => (0, 1),
        };
        let connector = match &self.connector {
            Some(connector) if peer < world_size && peer != rank => connector,
            _ => {
                return Err(Unusable::NotAnother {
                    call: Text::from(request.collective.name()),
                    peer,
                    world_size,
                }
                .into());
            }
        };
        let mut open = lock(&self.open);
        let Some(engines) = &mut *open else {
            return Err(Abort::Closed.into());
        };
        if let Some(engine) = engines.get(&(peer, sends)) {
            return Ok(Arc::clone(engine));
        }
        let engine = self.make(connector, peer, sends).map_err(|error| {
            // The partner may already wait for this rank.
            let error = error.blaming(rank, connector.roster.host(rank));
            connector.supervisor.abort(error.clone());
            error
        })?;
        let engine = Arc::new(engine);
        engines.insert((peer, sends), Arc::clone(&engine));
        Ok(engine)
    }

    fn make(&self, connector: &Arc<PeerConnector>, peer: usize, sends: bool) -> Result<Engine> {
        let settings = &connector.config.settings;
        let (own, other) = (connector.config.rank, peer);
        let ranks = match sends {
            true => [own, other],
            false => [other, own],
        };
        let cannot = |error: std::io::Error| {
            let other = || NotFormed::Socket {
                error: Text::of(&error),
            };
            Error::out_of_resources(&error, "cannot connect two ranks")
                .unwrap_or_else(|| other().into())
        };
        let doorbell = Arc::new(WakeUp::new().map_err(|error| Error::no_wake_up(&error))?);
        let mesh = Mesh::new(vec![None, None], Arc::clone(&doorbell))
            .map_err(cannot)?
            .with_connector(|waker| connector.for_two(peer, sends, doorbell, waker));
        let hosts = [true, connector.roster.same_host(own, other)];
        let recorder = Arc::new(FlightRecorder::new(connector.config.generation));
        self.recorder.add_beside(peer, Arc::clone(&recorder));
        Engine::new(Parts {
            rank: usize::from(!sends),
            policy: Policy::new(Topology::by_host(hosts.iter())),
            transport: Box::new(mesh),
            supervisor: Arc::new(SupervisorOfTwo {
                connector: Arc::clone(connector),
                ranks,
                recorder: Arc::clone(&self.recorder),
            }),
            abort: Arc::clone(&connector.abort),
            recorder,
            stall_timeout: settings.stall_timeout,
            stall_warning: settings.stall_warning,
            spin_policy: self.spin_policy,
        })
    }

    /// Adds the counters of all channels.
    pub(super) fn add_stats(&self, stats: &mut Stats) {
        for engine in lock(&self.open).iter().flat_map(Engines::values) {
            stats.add_beside(&engine.stats());
        }
    }

    /// Closes all channels; no new one can open.
    pub(super) fn close(&self) {
        let open = lock(&self.open).take();
        for engine in open.into_iter().flat_map(Engines::into_values) {
            engine.close();
        }
        if let Some(connector) = &self.connector {
            connector.accepted.close();
        }
    }
}

/// Supervisor of a channel: hands suspicions to the group's supervisor, by the group's ranks.
struct SupervisorOfTwo {
    connector: Arc<PeerConnector>,
    /// Ranks of the sender and of the receiver in the group.
    ranks: [usize; 2],
    /// The group's recorder.
    recorder: Arc<FlightRecorder>,
}

impl SupervisorOfTwo {
    fn own(&self) -> usize {
        self.connector.config.rank
    }

    fn blame(&self, error: Error, rank: usize) {
        let host = self.connector.roster.host(rank);
        self.connector.supervisor.abort(error.blaming(rank, host));
    }
}

impl Supervisor for SupervisorOfTwo {
    fn investigate(&self, suspicion: Suspicion) {
        let ranks = &self.ranks;
        let of_group = match suspicion {
            Suspicion::LinkBroken { peer, broken } => Suspicion::LinkBroken {
                peer: ranks[peer],
                broken,
            },
            Suspicion::Garbled { peer, how } => Suspicion::Garbled {
                peer: ranks[peer],
                how,
            },
            Suspicion::Corrupted {
                peer,
                broken,
                call,
                sequence,
            } => Suspicion::Corrupted {
                peer: ranks[peer],
                broken,
                call,
                sequence,
            },
            Suspicion::HeadersDiffer {
                peer,
                sequence,
                theirs,
                own,
            } => {
                // The call of the lower rank is taken to be right.
                let mut sides = [(self.own(), own), (ranks[peer], theirs)];
                sides.sort_by_key(|(rank, _)| *rank);
                let [(rank, own), (other, theirs)] = sides;
                let call = theirs.to_string();
                let others = format!("{own} (rank {rank})").into();
                let error = Error::new(ErrorKind::Mismatch { theirs, others });
                return self.blame(error.during(call, sequence), other);
            }
            // A third rank may keep the partner waiting. So all ranks are queried about the next
            // ordinal of the group.
            Suspicion::Stalled { awaited, idle, .. } => Suspicion::Stalled {
                awaited: awaited.iter().map(|&end| ranks[end]).collect(),
                sequence: self.recorder.next_sequence(),
                idle,
            },
        };
        self.connector.supervisor.investigate(of_group);
    }

    fn abort(&self, cause: Error) {
        self.connector.supervisor.abort(cause);
    }

    fn in_group(&self, rank: usize) -> usize {
        self.ranks[rank]
    }

    fn warn(&self, stall: &Stall<'_>) {
        let awaited = stall.awaited.iter().map(|&end| self.ranks[end]).collect();
        self.connector.supervisor.warn(&Stall { awaited, ..*stall });
    }
}
