//! Point-to-point channels: of two ranks one sends and the other receives.
//!
//! A channel leads from one rank to another. It is a group of two inside of the group, with a link and
//! an engine of its own, so it has an order of its own: what goes to or comes from different ranks, and
//! both ways between two, goes on at the same time, and beside the collectives of all. The first use
//! makes it. Its failures are the group's: they raise the group's switch, and so do the group's its.
//!
//! In it the sender is rank 0 and the receiver rank 1. Each sends the header of what it does, as in a
//! collective, so a difference is an error on both, and a send ends no sooner than its `recv` has begun.
//! Each tells of the difference in the same words, since the other one may not be there any more.

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
    /// None in a world of one.
    connector: Option<Arc<PeerConnector>>,
    spin_policy: SpinPolicy,
    /// The group's, which knows those of the channels.
    recorder: Arc<FlightRecorder>,
    /// `None` once the communicator is closed.
    open: Mutex<Option<Engines>>,
}

/// By the other rank, and whether this one sends.
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

    /// The engine of the channel that a request is for.
    ///
    /// # Errors
    /// `Config` if its partner is not another rank; `Aborted` if the communicator is closed;
    /// `Exhausted` if there is no room for one more.
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
            // The partner may wait for this rank by now.
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

    /// Adds what went through the channels.
    pub(super) fn add_stats(&self, stats: &mut Stats) {
        for engine in lock(&self.open).iter().flat_map(Engines::values) {
            stats.add_beside(&engine.stats());
        }
    }

    /// Ends all channels, and lets no other begin.
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

/// Finds the causes of what goes wrong in a channel, for the whole group.
struct SupervisorOfTwo {
    connector: Arc<PeerConnector>,
    /// The sender and the receiver, as they are called in the group.
    ranks: [usize; 2],
    /// The group's.
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
                called,
                own,
            } => {
                // The lower one is taken to be right.
                let mut sides = [(self.own(), own), (ranks[peer], called)];
                sides.sort_by_key(|(rank, _)| *rank);
                let [(rank, own), (other, theirs)] = sides;
                let call = theirs.to_string();
                let others = format!("{own} (rank {rank})").into();
                let error = Error::new(ErrorKind::Mismatch { theirs, others });
                return self.blame(error.during(call, sequence), other);
            }
            // The partner may be kept by somebody else: all ranks are asked how far they are, by the
            // next place in their order.
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
