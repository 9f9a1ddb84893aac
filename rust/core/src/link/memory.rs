//! Links inside one process, for tests of everything above them.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut, Read as _};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use super::{Broken, Direction, Interest, Transport};
use crate::lock::lock;

/// One rank's end of a mesh of in-process pipes.
pub struct MemoryTransport {
    rank: usize,
    mesh: Arc<Mesh>,
}

struct Mesh {
    world_size: usize,
    /// Bytes a pipe holds before it is full; small values exercise partial transfers.
    capacity_bytes: usize,
    /// The pipe from a to b is number a * world_size + b.
    pipes: Mutex<Vec<Pipe>>,
    changed: Condvar,
}

#[derive(Default)]
struct Pipe {
    bytes: VecDeque<u8>,
    closed: bool,
}

/// The transports of `world_size` ranks whose pipes hold `capacity_bytes` each.
#[must_use]
pub fn mesh(world_size: usize, capacity_bytes: usize) -> Vec<MemoryTransport> {
    let mesh = Arc::new(Mesh {
        world_size,
        capacity_bytes,
        pipes: Mutex::new(
            (0..world_size * world_size)
                .map(|_| Pipe::default())
                .collect(),
        ),
        changed: Condvar::new(),
    });
    (0..world_size)
        .map(|rank| MemoryTransport {
            rank,
            mesh: Arc::clone(&mesh),
        })
        .collect()
}

impl MemoryTransport {
    fn pipe(&self, peer: usize, direction: Direction) -> usize {
        match direction {
            Direction::Send => self.rank * self.mesh.world_size + peer,
            Direction::Receive => peer * self.mesh.world_size + self.rank,
        }
    }
}

impl Transport for MemoryTransport {
    fn try_send(&mut self, peer: usize, parts: &[IoSlice<'_>]) -> Result<Option<usize>, Broken> {
        let mut pipes = lock(&self.mesh.pipes);
        let pipe = &mut pipes[self.pipe(peer, Direction::Send)];
        if pipe.closed {
            return Err(closed());
        }
        let mut sent = 0;
        for part in parts {
            let length = part.len().min(self.mesh.capacity_bytes - pipe.bytes.len());
            pipe.bytes.extend(&part[..length]);
            sent += length;
        }
        self.mesh.changed.notify_all();
        Ok((sent > 0).then_some(sent))
    }

    fn try_receive(
        &mut self,
        peer: usize,
        parts: &mut [IoSliceMut<'_>],
    ) -> Result<Option<usize>, Broken> {
        let mut pipes = lock(&self.mesh.pipes);
        let pipe = &mut pipes[self.pipe(peer, Direction::Receive)];
        if pipe.bytes.is_empty() {
            return if pipe.closed { Err(closed()) } else { Ok(None) };
        }
        let mut received = 0;
        for part in parts {
            // VecDeque's Read stops at the seam of its ring, hence the loop.
            while !part.is_empty() && !pipe.bytes.is_empty() {
                let length = pipe.bytes.read(part).unwrap_or(0);
                part.advance(length);
                received += length;
            }
        }
        self.mesh.changed.notify_all();
        Ok(Some(received))
    }

    fn wait(&mut self, interests: &[Interest], timeout: Duration) {
        let pipes = lock(&self.mesh.pipes);
        let ready = interests.iter().any(|interest| {
            let pipe = &pipes[self.pipe(interest.peer, interest.direction)];
            pipe.closed
                || match interest.direction {
                    Direction::Send => pipe.bytes.len() < self.mesh.capacity_bytes,
                    Direction::Receive => !pipe.bytes.is_empty(),
                }
        });
        if !ready {
            drop(self.mesh.changed.wait_timeout(pipes, timeout));
        }
    }

    fn waker(&self) -> Box<dyn Fn() + Send + Sync> {
        let mesh = Arc::clone(&self.mesh);
        Box::new(move || {
            mesh.changed.notify_all();
        })
    }

    fn name(&self) -> &'static str {
        "memory"
    }
}

impl Drop for MemoryTransport {
    /// Peers see the ends of their pipes.
    fn drop(&mut self) {
        let mut pipes = lock(&self.mesh.pipes);
        for peer in 0..self.mesh.world_size {
            pipes[self.pipe(peer, Direction::Send)].closed = true;
            pipes[self.pipe(peer, Direction::Receive)].closed = true;
        }
        self.mesh.changed.notify_all();
    }
}

fn closed() -> Broken {
    Broken::ended("was closed by the other side")
}
