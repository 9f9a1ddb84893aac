//! All links of one rank: over shared memory to ranks of its host, over TCP to others.

use std::collections::BTreeMap;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::Arc;
use std::time::Duration;

use super::poll::{self, Interested, WakeUp};
use super::shm::{self, ShmLink};
use super::stream::Stream;
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
    outgoing: Option<Stream>,
    incoming: Option<Stream>,
    memory: Option<ShmLink>,
    /// Whether the connection to a peer that shares memory has ended: with its process.
    ended: bool,
}

impl Links {
    /// The links of a rank in a group of `world_size`, from the connections on which it sends and
    /// receives.
    ///
    /// # Errors
    /// When a socket cannot be configured, or the system has no file descriptor left.
    pub fn new(
        world_size: usize,
        outgoing: BTreeMap<usize, Stream>,
        incoming: BTreeMap<usize, Stream>,
    ) -> std::io::Result<Self> {
        let mut peers: Vec<Peer> = (0..world_size).map(|_| Peer::default()).collect();
        for (peer, mut stream) in outgoing {
            tcp::configure(&mut stream)?;
            peers[peer].outgoing = Some(stream);
        }
        for (peer, mut stream) in incoming {
            tcp::configure(&mut stream)?;
            peers[peer].incoming = Some(stream);
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
        let pair = |stream: &mut Stream, initiator| {
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
                Ok(memory) => self.peers[peer].memory = Some(memory),
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
}

impl Peer {
    /// The connection that both sides take: that on which the initiator sends, if there is one.
    fn stream_for_pairing(&mut self, initiator: bool) -> Option<&mut Stream> {
        let (first, second) = match initiator {
            true => (&mut self.outgoing, &mut self.incoming),
            false => (&mut self.incoming, &mut self.outgoing),
        };
        first.as_mut().or(second.as_mut())
    }

    /// Looks whether the process that shares memory still lives.
    fn check_alive(&mut self) {
        let stream = self.incoming.as_ref().or(self.outgoing.as_ref());
        // Nothing ever arrives on the connection but its end.
        self.ended = stream.is_none_or(Stream::is_readable);
    }

    /// What nothing means: to wait, unless the peer has ended.
    fn unless_ended<T>(&self, nothing: T) -> Result<T, Broken> {
        if self.ended {
            return Err(Broken {
                reason: "ended with the other side's process".into(),
            });
        }
        Ok(nothing)
    }

    const fn stream(&self, direction: Direction) -> Option<&Stream> {
        match direction {
            Direction::Send => self.outgoing.as_ref(),
            Direction::Receive => self.incoming.as_ref(),
        }
    }

    fn stream_mut(&mut self, direction: Direction) -> Result<&mut Stream, Broken> {
        let stream = match direction {
            Direction::Send => &mut self.outgoing,
            Direction::Receive => &mut self.incoming,
        };
        stream.as_mut().ok_or_else(|| Broken {
            reason: "does not exist".into(),
        })
    }

    /// Whether there is something to do without waiting for a socket.
    fn is_ready(&self, direction: Direction) -> bool {
        match &self.memory {
            Some(memory) => memory.ready(direction),
            None => {
                direction == Direction::Receive
                    && self.stream(direction).is_some_and(Stream::has_buffered)
            }
        }
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
            None => tcp::try_send(peer.stream_mut(Direction::Send)?, parts),
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
            None => tcp::try_receive(peer.stream_mut(Direction::Receive)?, parts),
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
            let sockets = interests.iter().filter_map(|interest| {
                let peer = &self.peers[interest.peer];
                let fd = peer.stream(interest.direction)?.as_fd().as_raw_fd();
                // Nothing arrives on the socket of a rank that shares memory, but its end.
                Some(match interest.direction {
                    Direction::Send if peer.memory.is_none() => Interested::writable(fd),
                    _ => Interested::readable(fd),
                })
            });
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

    fn close(&mut self) {
        self.peers.fill_with(Peer::default);
    }

    fn name(&self) -> &'static str {
        self.name
    }
}
