//! Links of a rank over the simulated network: the engine's transport and the monitor's
//! connections.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use crate::world::pipes::{End, PipeId, Pipes};
use gradring_net::link::{Broken, Direction, Interest, Transport};
use gradring_proto::error::{BadSegment, Breakage};
use gradring_proto::lock::lock;

/// The network, shared by all ranks.
#[derive(Clone)]
pub(super) struct SharedPipes(Arc<Mutex<Pipes>>);

impl SharedPipes {
    pub(super) fn new(network: Pipes) -> Self {
        Self(Arc::new(Mutex::new(network)))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Pipes> {
        lock(&self.0)
    }
}

/// The links of one rank.
pub(super) struct SimulatedLinks {
    rank: usize,
    network: SharedPipes,
    /// Shared memory with each peer; `None` for a peer without it.
    memory: Vec<Option<Memory>>,
}

/// Bytes that have arrived in shared memory, and the number of consumed ones.
#[derive(Clone, Default)]
struct Memory {
    bytes: Vec<u8>,
    consumed: usize,
}

impl Memory {
    fn left(&self) -> &[u8] {
        &self.bytes[self.consumed..]
    }
}

impl SimulatedLinks {
    /// Makes the links of a rank, which shares memory with the peers for which `shares` is true.
    pub(super) fn new(rank: usize, network: SharedPipes, shares: &[bool]) -> Self {
        let memory = |&shares: &bool| shares.then(Memory::default);
        Self {
            rank,
            network,
            memory: shares.iter().map(memory).collect(),
        }
    }

    const fn from(&self, peer: usize) -> PipeId {
        PipeId::Data {
            from: peer,
            to: self.rank,
        }
    }

    const fn to(&self, peer: usize) -> PipeId {
        PipeId::Data {
            from: self.rank,
            to: peer,
        }
    }

    /// Changes the byte that follows the next `after` bytes to `peer`.
    pub(super) fn garble(&self, peer: usize, after: usize) {
        self.network.lock().garble(self.to(peer), after);
    }

    /// Records that this rank has ended its next collective.
    pub(super) fn note_end(&self) {
        self.network.lock().note_end(self.rank);
    }

    /// Returns whether all other ranks have ended the collective `number`, and all their bytes have
    /// arrived here.
    pub(super) fn everything_has_arrived(&self, number: usize) -> bool {
        let mut network = self.network.lock();
        network.everything_has_arrived(self.rank, number)
    }

    /// Returns whether a wait for `interest` would end at once.
    pub(super) fn is_ready(&self, interest: Interest) -> bool {
        let Interest { peer, direction } = interest;
        let left = |memory: &Memory| !memory.left().is_empty();
        match direction {
            Direction::Send => self.network.lock().has_capacity(self.to(peer)),
            Direction::Receive => {
                self.memory[peer].as_ref().is_some_and(left)
                    || self.network.lock().has_arrived(self.from(peer))
            }
        }
    }
}

fn broken(end: End) -> Broken {
    match end {
        End::Closed => Broken::closed(),
        End::Reset => Broken::failed("reset"),
        End::Corrupted => {
            let problem = BadSegment::Announcement;
            let sequence = 0;
            Breakage::Segment { sequence, problem }.into()
        }
    }
}

impl Transport for SimulatedLinks {
    fn try_send(&mut self, peer: usize, parts: &[IoSlice<'_>]) -> Result<Option<usize>, Broken> {
        self.network
            .lock()
            .send(self.to(peer), parts)
            .map_err(broken)
    }

    fn try_receive(
        &mut self,
        peer: usize,
        parts: &mut [IoSliceMut<'_>],
    ) -> Result<Option<usize>, Broken> {
        let id = self.from(peer);
        if let Some(memory) = &mut self.memory[peer] {
            let mut received = 0;
            for part in &mut *parts {
                let length = part.len().min(memory.left().len());
                part[..length].copy_from_slice(&memory.left()[..length]);
                memory.consumed += length;
                received += length;
            }
            if received > 0 {
                return Ok(Some(received));
            }
        }
        self.network.lock().receive(id, parts).map_err(broken)
    }

    fn readable(&mut self, peer: usize) -> Result<Option<&[u8]>, Broken> {
        let id = self.from(peer);
        let Some(memory) = &mut self.memory[peer] else {
            return Ok(None);
        };
        if memory.left().is_empty() {
            memory.bytes.resize(4096, 0);
            memory.consumed = 0;
            let parts = &mut [IoSliceMut::new(&mut memory.bytes)];
            let received = self.network.lock().receive(id, parts);
            memory.bytes.truncate(match received {
                Ok(received) => received.unwrap_or(0),
                Err(_) => 0,
            });
            received.map_err(broken)?;
        }
        Ok(Some(memory.left()))
    }

    fn consume(&mut self, peer: usize, count: usize) {
        if let Some(memory) = &mut self.memory[peer] {
            memory.consumed += count;
        }
    }

    fn wait(&mut self, _interests: &[Interest], _timeout: Duration) {
        unreachable!("simulated ranks wait in virtual time");
    }

    fn waker(&self) -> Box<dyn Fn() + Send + Sync> {
        Box::new(|| ())
    }
}

impl Drop for SimulatedLinks {
    fn drop(&mut self) {
        let mut network = self.network.lock();
        for peer in (0..self.memory.len()).filter(|&peer| peer != self.rank) {
            network.end_by_sender(self.to(peer), End::Closed);
            network.end_by_receiver(self.from(peer));
        }
    }
}

/// One rank's end of a control connection.
pub(super) struct ControlEnd {
    network: SharedPipes,
    incoming: PipeId,
    outgoing: PipeId,
}

impl ControlEnd {
    /// Makes an end of the connection between `first` and its successor: the successor's end if
    /// `last`.
    pub(super) const fn new(network: SharedPipes, first: usize, last: bool) -> Self {
        Self {
            network,
            incoming: PipeId::Control { first, back: !last },
            outgoing: PipeId::Control { first, back: last },
        }
    }
}

impl Read for ControlEnd {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let parts = &mut [IoSliceMut::new(bytes)];
        let received = self.network.lock().receive(self.incoming, parts);
        match received {
            Ok(Some(count)) => Ok(count),
            Ok(None) => Err(ErrorKind::WouldBlock.into()),
            Err(End::Closed) => Ok(0),
            Err(_) => Err(ErrorKind::ConnectionReset.into()),
        }
    }
}

impl Write for ControlEnd {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let parts = &[IoSlice::new(bytes)];
        let sent = self.network.lock().send(self.outgoing, parts);
        match sent {
            Ok(Some(count)) => Ok(count),
            Ok(None) => Err(ErrorKind::WouldBlock.into()),
            Err(_) => Err(ErrorKind::BrokenPipe.into()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for ControlEnd {
    fn drop(&mut self) {
        let mut network = self.network.lock();
        network.end_by_sender(self.outgoing, End::Closed);
        network.end_by_receiver(self.incoming);
    }
}
