//! All links of one rank: over shared memory to ranks of its host, over TCP to others.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::poll::{self, WakeUp};
use super::shm::{self, ShmLink};
use super::streams::{Incoming, Outgoing};
use super::tcp::connection::Connection;
use super::tcp::patient::GoOn;
use super::{Broken, Direction, Interest, Transport, tcp};
use rustix::event::PollFd;

/// The links of one rank.
pub struct Links {
    /// Indexed by rank.
    peers: Vec<Peer>,
    /// Woken by this process.
    wake_up: Arc<WakeUp>,
    /// Woken by peers that share memory.
    doorbell: WakeUp,
    name: &'static str,
}

/// What leads to one peer: connections or, where there is some, shared memory, for both directions.
#[derive(Default)]
struct Peer {
    connections: Vec<Connection>,
    outgoing: Outgoing,
    incoming: Incoming,
    memory: Option<ShmLink>,
    /// Whether the connection to a peer that shares memory has ended: with its process.
    ended: bool,
}

impl Links {
    /// The links of a rank in a group of `world_size`, from its connections: to each peer with which
    /// it has something to do at least one, in the order of their indices.
    ///
    /// # Errors
    /// When a socket cannot be configured, or the system has no file descriptor left.
    pub fn new(
        world_size: usize,
        connections: BTreeMap<usize, Vec<Connection>>,
    ) -> std::io::Result<Self> {
        let mut all = connections.values().flatten();
        all.try_for_each(|connection| tcp::configure(connection.tcp()))?;
        let mut peers: Vec<Peer> = (0..world_size).map(|_| Peer::default()).collect();
        for (peer, connections) in connections {
            peers[peer] = Peer {
                outgoing: Outgoing::new(connections.len()),
                incoming: Incoming::new(connections.len()),
                connections,
                ..Peer::default()
            };
        }
        Ok(Self {
            peers,
            wake_up: Arc::new(WakeUp::new()?),
            doorbell: WakeUp::new()?,
            name: "tcp",
        })
    }

    /// Tries to share memory with those `peers` that a connection leads to, which try the same at
    /// the same time; returns with whom it could not, and why. It asks now and then whether to go on.
    ///
    /// One after the other: rank `a` and rank `b` meet in round `a + b` modulo the number of ranks.
    /// In every round each rank has at most one to meet, so the pairs of the earliest round that is
    /// not over can always go on. All at once would be as many threads as there are pairs.
    ///
    /// # Errors
    /// When a connection fails, or is not done by `deadline`: the peer at its other end as well.
    pub fn share_memory(
        &mut self,
        rank: usize,
        peers: &[usize],
        deadline: Instant,
        go_on: GoOn<'_>,
    ) -> Result<BTreeMap<usize, String>, (usize, std::io::Error)> {
        let mut in_rounds = peers.to_vec();
        in_rounds.sort_unstable_by_key(|peer| (rank + peer) % self.peers.len());
        let mut refused = BTreeMap::new();
        for peer in in_rounds {
            let Some(stream) = self.peers[peer].connections.first_mut() else {
                continue;
            };
            let paired = shm::pair(stream, rank < peer, &self.doorbell, deadline, &mut *go_on);
            match paired.map_err(|error| (peer, error))? {
                Ok(memory) => self.peers[peer].share(memory),
                Err(reason) => drop(refused.insert(peer, reason)),
            }
        }
        let shared = self.peers.iter().filter(|p| p.memory.is_some()).count();
        let linked = |p: &&Peer| !p.connections.is_empty();
        self.name = match shared {
            0 => "tcp",
            _ if shared == self.peers.iter().filter(linked).count() => "shm",
            _ => "shm+tcp",
        };
        Ok(refused)
    }

    /// The TCP congestion controls of connections that carry payload, and why they do.
    ///
    /// # Errors
    /// When a socket cannot be asked.
    pub fn congestion(&self) -> std::io::Result<BTreeMap<String, BTreeSet<String>>> {
        let over_tcp = self.peers.iter().filter(|peer| peer.memory.is_none());
        let mut reasons = BTreeMap::<_, BTreeSet<_>>::new();
        for connection in over_tcp.filter_map(|peer| peer.connections.first()) {
            let (name, reason) = tcp::congestion(connection.tcp())?;
            reasons.entry(name).or_default().insert(reason);
        }
        Ok(reasons)
    }
}

impl Peer {
    /// Uses memory from now on; one connection stays, which ends with the peer's process.
    fn share(&mut self, memory: ShmLink) {
        self.memory = Some(memory);
        self.connections.truncate(1);
    }

    /// Looks whether the process that shares memory still lives.
    fn check_alive(&mut self) {
        // Nothing ever arrives on the connection but its end.
        self.ended = self.connections.iter().any(Connection::is_readable);
    }

    /// What nothing means: to wait, unless the peer has ended.
    fn unless_ended<T>(&self, nothing: T) -> Result<T, Broken> {
        if self.ended {
            return Err(Broken::ended("ended with the other side's process"));
        }
        Ok(nothing)
    }

    /// Whether there is something to do without waiting for a socket.
    fn is_ready(&self, direction: Direction) -> bool {
        match (&self.memory, direction) {
            (Some(memory), _) => memory.ready(direction),
            (None, Direction::Send) => false,
            (None, Direction::Receive) => {
                let mut awaited = self.incoming.awaited(&self.connections);
                awaited.any(Connection::has_buffered)
            }
        }
    }

    /// What to poll before trying again.
    fn sockets(&self, direction: Direction) -> impl Iterator<Item = PollFd<'_>> {
        let (sending, receiving): (&[Connection], &[Connection]) = match (&self.memory, direction) {
            (Some(_), _) => (&[], &[]),
            (None, Direction::Send) => (&self.connections, &[]),
            (None, Direction::Receive) => (&[], &self.connections),
        };
        let living = self.memory.iter().flat_map(|_| &self.connections);
        let sending = self.outgoing.awaited(sending).map(poll::writable);
        let receiving = self
            .incoming
            .awaited(receiving)
            .chain(living)
            .map(poll::readable);
        sending.chain(receiving)
    }

    fn check_linked(&self) -> Result<(), Broken> {
        if self.connections.is_empty() {
            return Err(Broken::ended("does not exist"));
        }
        Ok(())
    }
}

impl Transport for Links {
    fn try_send(&mut self, peer: usize, parts: &[IoSlice<'_>]) -> Result<Option<usize>, Broken> {
        let peer = &mut self.peers[peer];
        match &mut peer.memory {
            Some(memory) => match memory.try_send(parts)? {
                None => peer.unless_ended(None),
                sent => Ok(sent),
            },
            None => {
                peer.check_linked()?;
                peer.outgoing.try_send(&mut peer.connections, parts)
            }
        }
    }

    fn try_receive(
        &mut self,
        peer: usize,
        parts: &mut [IoSliceMut<'_>],
    ) -> Result<Option<usize>, Broken> {
        let peer = &mut self.peers[peer];
        match &mut peer.memory {
            Some(memory) => match memory.try_receive(parts)? {
                None => peer.unless_ended(None),
                received => Ok(received),
            },
            None => {
                peer.check_linked()?;
                peer.incoming.try_receive(&mut peer.connections, parts)
            }
        }
    }

    fn readable(&mut self, peer: usize) -> Result<Option<&[u8]>, Broken> {
        let memory = self.peers[peer].memory.as_mut();
        memory.map(ShmLink::readable).transpose()
    }

    fn consume(&mut self, peer: usize, count: usize) {
        if let Some(memory) = &mut self.peers[peer].memory {
            memory.consume(count);
        }
    }

    fn wait(&mut self, interests: &[Interest], timeout: Duration) {
        for interest in interests {
            if let Some(memory) = &self.peers[interest.peer].memory {
                memory.announce_sleep(interest.direction);
            }
        }
        let ready = interests
            .iter()
            .any(|i| self.peers[i.peer].is_ready(i.direction));
        if !ready {
            let sockets = interests
                .iter()
                .flat_map(|interest| self.peers[interest.peer].sockets(interest.direction));
            let bells = [self.doorbell.awaited(), self.wake_up.awaited()];
            poll::wait(sockets.chain(bells), timeout);
        }
        for interest in interests {
            let peer = &mut self.peers[interest.peer];
            if let Some(memory) = &peer.memory {
                memory.awake();
                if !ready {
                    peer.check_alive();
                }
            }
        }
        self.doorbell.reset();
        // Whoever woke it for good has left word elsewhere.
        self.wake_up.reset();
    }

    fn waker(&self) -> Box<dyn Fn() + Send + Sync> {
        let wake_up = Arc::clone(&self.wake_up);
        Box::new(move || wake_up.wake())
    }

    fn name(&self) -> &'static str {
        self.name
    }
}
