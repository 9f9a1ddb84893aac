//! All links of one rank: over shared memory to ranks of its host, over TCP to others.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::Arc;
use std::time::Duration;

use super::connection::Connection;
use super::poll::{self, Interested, WakeUp};
use super::shm::{self, ShmLink};
use super::streams::{Incoming, Outgoing};
use super::{Broken, Direction, Interest, Transport, tcp};

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

/// What leads to one peer. Shared memory, where there is some, carries both directions.
#[derive(Default)]
struct Peer {
    outgoing: Option<Outgoing<Connection>>,
    incoming: Option<Incoming<Connection>>,
    memory: Option<ShmLink>,
    /// Whether the connection to a peer that shares memory has ended: with its process.
    ended: bool,
}

impl Links {
    /// The links of a rank in a group of `world_size`, from the connections on which it sends and
    /// receives: for each peer at least one, in the order of their indices.
    ///
    /// # Errors
    /// When a socket cannot be configured, or the system has no file descriptor left.
    pub fn new(
        world_size: usize,
        mut outgoing: BTreeMap<usize, Vec<Connection>>,
        mut incoming: BTreeMap<usize, Vec<Connection>>,
    ) -> std::io::Result<Self> {
        let streams = outgoing.values_mut().chain(incoming.values_mut());
        streams.flatten().try_for_each(tcp::configure)?;
        let mut peers: Vec<Peer> = (0..world_size).map(|_| Peer::default()).collect();
        for (peer, streams) in outgoing {
            peers[peer].outgoing = Some(Outgoing::new(streams));
        }
        for (peer, streams) in incoming {
            peers[peer].incoming = Some(Incoming::new(streams));
        }
        Ok(Self {
            peers,
            wake_up: Arc::new(WakeUp::new()?),
            doorbell: WakeUp::new()?,
            name: "tcp",
        })
    }

    /// Tries to share memory with those `peers` that a connection leads to, which try the same at
    /// the same time; returns with whom it could not, and why.
    ///
    /// # Errors
    /// When a connection fails.
    pub fn share_memory(
        &mut self,
        rank: usize,
        peers: &[usize],
        patience: Duration,
    ) -> std::io::Result<BTreeMap<usize, String>> {
        let doorbell = &self.doorbell;
        let pair = |stream: &mut Connection, initiator| {
            let paired = shm::pair(stream, initiator, doorbell, patience)?;
            stream.be_nonblocking().map(|()| paired)
        };
        let pair = &pair;
        let paired: Vec<_> = std::thread::scope(|scope| {
            let willing = self.peers.iter_mut().enumerate();
            let pairings: Vec<_> = willing
                .filter(|(peer, _)| peers.contains(peer))
                .filter_map(|(peer, links)| {
                    let initiator = rank < peer;
                    let stream = links.stream_for_pairing(initiator)?;
                    Some((peer, scope.spawn(move || pair(stream, initiator))))
                })
                .collect();
            let join = |(peer, pairing): (usize, std::thread::ScopedJoinHandle<'_, _>)| {
                (peer, pairing.join().expect("pairing does not panic"))
            };
            pairings.into_iter().map(join).collect()
        });
        let mut refused = BTreeMap::new();
        for (peer, paired) in paired {
            match paired? {
                Ok(memory) => self.peers[peer].share(memory),
                Err(reason) => drop(refused.insert(peer, reason)),
            }
        }
        let shared = self.peers.iter().filter(|p| p.memory.is_some()).count();
        let linked = |p: &&Peer| p.outgoing.is_some() || p.incoming.is_some();
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
        for outgoing in over_tcp.flat_map(|peer| &peer.outgoing) {
            let (name, reason) = tcp::congestion(outgoing.first().tcp())?;
            reasons.entry(name).or_default().insert(reason);
        }
        Ok(reasons)
    }
}

impl Peer {
    /// The connection that both sides take: that on which the initiator sends, if there is one.
    fn stream_for_pairing(&mut self, initiator: bool) -> Option<&mut Connection> {
        let outgoing = self.outgoing.as_mut().map(Outgoing::first_mut);
        let incoming = self.incoming.as_mut().map(Incoming::first_mut);
        match initiator {
            true => outgoing.or(incoming),
            false => incoming.or(outgoing),
        }
    }

    /// Uses memory from now on; one connection stays in each direction, as a sign of life.
    fn share(&mut self, memory: ShmLink) {
        self.memory = Some(memory);
        self.outgoing.iter_mut().for_each(Outgoing::keep_first);
        self.incoming.iter_mut().for_each(Incoming::keep_first);
    }

    /// The connection that ends with the process of a peer that shares memory.
    fn sign_of_life(&self) -> Option<&Connection> {
        let incoming = self.incoming.as_ref().map(Incoming::first);
        incoming.or(self.outgoing.as_ref().map(Outgoing::first))
    }

    /// Looks whether the process that shares memory still lives.
    fn check_alive(&mut self) {
        // Nothing ever arrives on the connection but its end.
        self.ended = self.sign_of_life().is_none_or(Connection::is_readable);
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
        match (&self.memory, &self.incoming) {
            (Some(memory), _) => memory.ready(direction),
            (None, Some(incoming)) if direction == Direction::Receive => {
                incoming.awaited().any(Connection::has_buffered)
            }
            _ => false,
        }
    }

    /// What to poll before trying again.
    fn sockets(&self, direction: Direction) -> impl Iterator<Item = Interested> {
        let alone = self.memory.is_none();
        let outgoing = self.outgoing.as_ref();
        let incoming = self.incoming.as_ref();
        let to_send = outgoing.filter(|_| alone && direction == Direction::Send);
        let to_receive = incoming.filter(|_| alone && direction == Direction::Receive);
        let sending = to_send.into_iter().flat_map(Outgoing::awaited);
        let receiving = to_receive.into_iter().flat_map(Incoming::awaited);
        let living = self.sign_of_life().filter(|_| !alone);
        let readable = receiving.chain(living);
        sending
            .map(|stream| Interested::writable(stream.as_fd().as_raw_fd()))
            .chain(readable.map(|stream| Interested::readable(stream.as_fd().as_raw_fd())))
    }
}

fn no_pipe() -> Broken {
    Broken::ended("does not exist")
}

impl Transport for Links {
    fn try_send(&mut self, peer: usize, parts: &[IoSlice<'_>]) -> Result<Option<usize>, Broken> {
        let peer = &mut self.peers[peer];
        match &mut peer.memory {
            Some(memory) => match memory.try_send(parts)? {
                None => peer.unless_ended(None),
                sent => Ok(sent),
            },
            None => peer.outgoing.as_mut().ok_or_else(no_pipe)?.try_send(parts),
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
            None => peer
                .incoming
                .as_mut()
                .ok_or_else(no_pipe)?
                .try_receive(parts),
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
            let doorbell = Interested::readable(self.doorbell.as_fd().as_raw_fd());
            poll::wait(sockets.chain([doorbell]), &self.wake_up, timeout);
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
    }

    fn waker(&self) -> Box<dyn Fn() + Send + Sync> {
        let wake_up = Arc::clone(&self.wake_up);
        Box::new(move || wake_up.wake())
    }

    fn name(&self) -> &'static str {
        self.name
    }
}
