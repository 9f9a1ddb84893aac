//! Links between ranks of a formed group that connect lazily, at their first use.
//!
//! Both ranks want the link at the same place of their programs, sooner or later. One of them
//! connects (`peers::initiates`), and the other's listener accepts, whatever its program is doing.
//! So the first may continue until it needs an answer; the second finds the connection in
//! `accepted`.
//!
//! A collective of many ranks may need a link with each rank. One thread connects to one rank after
//! the other, over TCP alone, which does not need both programs at the same time. Calls of two
//! ranks (`communicator/channels.rs`) may use shared memory. The two ranks agree on it once both
//! want the link, in a thread for each channel.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::accepted::AcceptedConnections;
use super::inquiry::{check, inquire_while};
use super::peers::initiates;
use super::roster::Roster;
use crate::drive::Supervisor;
use gradring_net::abort::{AbortSwitch, Waker};
use gradring_net::caller::INTERRUPT_INTERVAL;
use gradring_net::config::Config;
use gradring_net::link::Link;
use gradring_net::link::kind::{GroupSlots, Introduction, Kind};
use gradring_net::link::mesh::LinkConnector;
use gradring_net::link::negotiation::{best, pairs_of_a_host};
use gradring_net::link::poll::WakeUp;
use gradring_net::link::tcp;
use gradring_net::link::tcp::connection::Connection;
use gradring_net::link::tcp::deadline_stream::{DeadlineStream, GoOn};
pub(crate) use gradring_net::session::connect::{Connector, Failure, Retry};
use gradring_net::session::credentials::Credentials;
use gradring_proto::error::{Breakage, Error, ErrorKind, Result, Suspicion, Text, Unusable};
use gradring_proto::wire::handshake::{GroupId, Hello, Purpose, Traffic};
use gradring_proto::wire::state::Phase;

mod connectors;

use connectors::{ForCollectives, ForTwo};

/// Time limit of a listener to let a rank in. Neighbours notice earlier that a rank is dead.
const CONNECTION_LIMIT: Duration = Duration::from_secs(60);
/// Longest time for which a refused connection is retried: the listener is open by then, and closes
/// only at the end.
const REFUSED_AT_MOST: Duration = Duration::from_millis(500);
/// Time limit for two ranks to agree on a link, once both want it.
const AGREEMENT_LIMIT: Duration = Duration::from_secs(30);
/// Time until an expected rank is probed, and the longest interval between later probes.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);
const PROBE_INTERVAL_MAX: Duration = Duration::from_secs(30);
/// Time limit of the answer to a probe: as long as a neighbour may be silent.
const PROBE_LIMIT: Duration = Duration::from_secs(10);

/// Connects this rank with others of its group.
pub(crate) struct PeerConnector {
    pub config: Config,
    pub kinds: Vec<Kind>,
    pub credentials: Arc<Credentials>,
    pub group: GroupId,
    pub roster: Roster,
    pub accepted: Arc<AcceptedConnections>,
    /// The group's abort switch.
    pub abort: Arc<AbortSwitch>,
    pub supervisor: Arc<dyn Supervisor + Send + Sync>,
}

impl PeerConnector {
    /// Makes links for collectives of all ranks.
    pub(crate) fn for_collectives(self: &Arc<Self>, waker: Waker) -> Box<dyn LinkConnector> {
        let waker = Arc::new(waker);
        self.accepted.wake_with(Arc::clone(&waker));
        Box::new(ForCollectives::new(Arc::clone(self), waker))
    }

    /// Makes the link on which this rank sends to `peer`, or receives from it unless it `sends`.
    /// The peer may ring `doorbell`.
    pub(crate) fn for_two(
        self: &Arc<Self>,
        peer: usize,
        sends: bool,
        doorbell: Arc<WakeUp>,
        waker: Waker,
    ) -> Box<dyn LinkConnector> {
        Box::new(ForTwo::new(Arc::clone(self), peer, sends, doorbell, waker))
    }

    const fn initiates(&self, peer: usize) -> bool {
        initiates(self.config.rank, peer, self.config.world_size)
    }

    /// Connects to a rank once for each stream.
    fn connect(
        &self,
        peer: usize,
        traffic: Traffic,
        continues: Continues<'_>,
    ) -> Result<Vec<Connection>, Trouble> {
        let (config, address) = (&self.config, &self.roster.members()[peer].address);
        let again = |failure: &Failure, elapsed| match failure {
            Failure::Unreachable(error, _) => {
                let is_refused = error.kind() == std::io::ErrorKind::ConnectionRefused;
                failure.shortage().is_none() && !(is_refused && elapsed >= REFUSED_AT_MOST)
            }
            _ => failure.is_passing(),
        };
        let connect = |stream| {
            let retry = Retry {
                conversation: Some(config.conversation_limit()),
                ..Retry::until(Instant::now() + CONNECTION_LIMIT, &again)
            };
            let connector = Connector::new(address, &self.credentials, retry);
            let hello = |_: &mut _, _: &TcpStream| {
                let purpose = Purpose::OnDemand { traffic, stream };
                let hello = Hello::new((config.rank, peer), config.world_size, purpose)?;
                Ok(hello.within(self.group, config.generation))
            };
            let connected = connector.connect(&mut || check(continues), hello, |_| Ok(()));
            connected
                .map(|(connection, ())| connection)
                .map_err(|failure| unreachable(&failure, address))
        };
        (0..config.settings.streams).map(connect).collect()
    }

    /// Agrees on a link with `peer`, once both want it. Returns `None` if this rank no longer wants
    /// it.
    fn agree(
        &self,
        peer: usize,
        sends: bool,
        doorbell: &WakeUp,
        continues: Continues<'_>,
    ) -> Result<Option<Box<dyn Link>>, Trouble> {
        let initiator = self.initiates(peer);
        let traffic = match initiator == sends {
            true => Traffic::ToResponder,
            false => Traffic::ToInitiator,
        };
        let mut go_on = || continues();
        let mut connections = if initiator {
            self.connect(peer, traffic, continues)?
        } else {
            let streams = self.config.settings.streams;
            let mut probe = Probe::new(peer);
            loop {
                let limit = INTERRUPT_INTERVAL;
                if let Some(connections) = self.accepted.wait(peer, traffic, streams, limit) {
                    break connections;
                }
                if !continues() {
                    return Ok(None);
                }
                if probe.is_due() {
                    probe.poll(self, continues)?;
                }
            }
        };
        configure(&connections)?;
        meet(&mut connections[0], &mut go_on)?;
        let mut introduction = Introduction {
            connections,
            name: &format!("rank {}", self.config.rank),
            initiator,
            doorbell: doorbell.as_fd(),
            pairs: pairs_of_a_host(&self.roster.topology()),
            slots: &mut GroupSlots::default(),
            deadline: Instant::now() + AGREEMENT_LIMIT,
            go_on: &mut go_on,
        };
        let theirs = &self.roster.members()[peer].transports;
        let checked = self.config.settings.checksum;
        match best(&mut introduction, &self.kinds, theirs, checked)? {
            (Some((_, link)), _) => Ok(Some(link)),
            (None, reason) => Err(Trouble::Kinds(Text::from(reason.unwrap_or_default()))),
        }
    }

    /// Ends the group because this rank has no link with `peer`, unless nobody wants the link any
    /// more.
    fn report(&self, peer: usize, trouble: Trouble, continues: Continues<'_>) {
        if !continues() {
            return;
        }
        let (rank, host) = (self.config.rank, self.roster.host(peer));
        match trouble {
            Trouble::Own(error) => {
                self.supervisor
                    .abort(error.blaming(rank, self.roster.host(rank)));
            }
            Trouble::Kinds(reason) => {
                let error = Error::from(Unusable::NoLink { rank, reason });
                self.supervisor.abort(error.blaming(peer, host));
            }
            Trouble::Link(error) => {
                let broken = Breakage::Failed { error }.into();
                let suspicion = Suspicion::LinkBroken { peer, broken };
                self.supervisor.investigate(suspicion);
            }
        }
    }
}

/// Explains a failed connection to a rank of a formed group, whose listener should be open.
fn unreachable(failure: &Failure, address: &str) -> Trouble {
    if let Some(error) = failure.shortage() {
        return Trouble::Own(error);
    }
    match failure {
        Failure::Unreachable(error, _) => Trouble::Link(Text::of(format!(
            "at {address}, where the rank listened as long as it was in the group: {error}"
        ))),
        Failure::Handshake(error) if matches!(error.kind, ErrorKind::Authentication(_)) => {
            Trouble::Link("another job listens where the rank did".into())
        }
        Failure::Handshake(error) | Failure::Own(error) => Trouble::Link(Text::of(error)),
    }
}

/// Reason why a rank has no link.
enum Trouble {
    /// This rank lacks a resource.
    Own(Error),
    /// The connection failed or broke.
    Link(Text),
    /// No kind of link that both ranks offer works.
    Kinds(Text),
}

impl From<std::io::Error> for Trouble {
    fn from(error: std::io::Error) -> Self {
        match Error::out_of_resources(&error, "cannot make its connections") {
            Some(error) => Self::Own(error),
            None => Self::Link(Text::of(error)),
        }
    }
}

/// Returns `true` while the work of a thread is wanted.
type Continues<'a> = &'a dyn Fn() -> bool;

fn configure(connections: &[Connection]) -> std::io::Result<()> {
    let mut all = connections.iter();
    all.try_for_each(|connection| tcp::configure(connection.tcp()))
}

/// Returns when both ranks have called it.
fn meet(connection: &mut Connection, go_on: GoOn<'_>) -> std::io::Result<()> {
    // A living peer may take arbitrarily long; a dead one ends the group.
    let deadline = Instant::now() + Duration::from_secs(365 * 86_400);
    let mut stream = DeadlineStream::cancellable(connection, deadline, go_on);
    stream.write_all(&[1])?;
    stream.flush()?;
    stream.read_exact(&mut [0])
}

/// Periodic check that a rank that has to connect still exists. It may have left, which only its
/// neighbours learn, or be lost after its neighbours have left.
#[derive(Clone)]
struct Probe {
    peer: usize,
    next: Instant,
    interval: Duration,
}

impl Probe {
    fn new(peer: usize) -> Self {
        Self {
            peer,
            next: Instant::now() + PROBE_INTERVAL,
            interval: PROBE_INTERVAL,
        }
    }

    fn is_due(&self) -> bool {
        Instant::now() >= self.next
    }

    fn poll(&mut self, connector: &PeerConnector, continues: Continues<'_>) -> Result<(), Trouble> {
        let address = &connector.roster.members()[self.peer].address;
        let state = inquire_while(address, &connector.credentials, PROBE_LIMIT, continues)
            .map_err(|failure| unreachable(&failure, address))?;
        let is_elsewhere = match state.phase {
            Phase::Formed { group, .. } => group != connector.group,
            Phase::Forming { .. } => state.rank != self.peer,
            Phase::Between { .. } => true,
        };
        if is_elsewhere {
            let error = "ended with its group there".into();
            return Err(Trouble::Link(error));
        }
        self.interval = (2 * self.interval).min(PROBE_INTERVAL_MAX);
        self.next = Instant::now() + self.interval;
        Ok(())
    }
}
