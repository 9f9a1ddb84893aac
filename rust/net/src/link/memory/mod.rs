//! Links inside one process, for tests of everything above them.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut, Read as _};
use std::sync::{Arc, Mutex};

use rustix::event::PollFd;

use super::mesh::Mesh;
use super::poll::WakeUp;
use super::{Broken, Direction, Link};
use gradring_proto::lock::lock;

/// One end of two in-process pipes.
pub struct MemoryLink {
    /// Indexed by the end that sends.
    pipes: Arc<Mutex<[Pipe; 2]>>,
    /// 0 or 1.
    number: usize,
    /// Bytes a pipe holds before it is full; small values exercise partial transfers.
    capacity_bytes: usize,
    /// Wakes the thread that waits at the other end.
    other_doorbell: Arc<WakeUp>,
}

#[derive(Default)]
struct Pipe {
    bytes: VecDeque<u8>,
    closed: bool,
}

/// Returns the meshes of `world_size` ranks, with pipes of `capacity_bytes` each.
#[must_use]
pub fn mesh(world_size: usize, capacity_bytes: usize) -> Vec<Mesh> {
    mesh_of(world_size, capacity_bytes, |_, _, link| Box::new(link))
}

/// Returns the same meshes with each link wrapped. `wrap` gets the rank, its peer and the link.
///
/// # Panics
/// When the system has no file descriptor left.
pub fn mesh_of(
    world_size: usize,
    capacity_bytes: usize,
    mut wrap: impl FnMut(usize, usize, MemoryLink) -> Box<dyn Link>,
) -> Vec<Mesh> {
    let doorbell = |_| Arc::new(WakeUp::new().expect("a test has file descriptors"));
    let doorbells: Vec<Arc<WakeUp>> = (0..world_size).map(doorbell).collect();
    let mut links: Vec<Vec<Option<Box<dyn Link>>>> = (0..world_size)
        .map(|_| (0..world_size).map(|_| None).collect())
        .collect();
    for low in 0..world_size {
        for high in low + 1..world_size {
            let pipes = Arc::<Mutex<[Pipe; 2]>>::default();
            for (number, rank, peer) in [(0, low, high), (1, high, low)] {
                let link = MemoryLink {
                    pipes: Arc::clone(&pipes),
                    number,
                    capacity_bytes,
                    other_doorbell: Arc::clone(&doorbells[peer]),
                };
                links[rank][peer] = Some(wrap(rank, peer, link));
            }
        }
    }
    let meshes = links.into_iter().zip(doorbells);
    meshes
        .map(|(links, doorbell)| Mesh::new(links, doorbell).expect("a test has file descriptors"))
        .collect()
}

impl Link for MemoryLink {
    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> Result<Option<usize>, Broken> {
        let mut pipes = lock(&self.pipes);
        let pipe = &mut pipes[self.number];
        if pipe.closed {
            return Err(Broken::closed());
        }
        let mut sent = 0;
        for part in parts {
            let length = part.len().min(self.capacity_bytes - pipe.bytes.len());
            pipe.bytes.extend(&part[..length]);
            sent += length;
        }
        self.other_doorbell.wake();
        Ok((sent > 0).then_some(sent))
    }

    fn try_receive(&mut self, parts: &mut [IoSliceMut<'_>]) -> Result<Option<usize>, Broken> {
        let mut pipes = lock(&self.pipes);
        let pipe = &mut pipes[1 - self.number];
        if pipe.bytes.is_empty() {
            return if pipe.closed {
                Err(Broken::closed())
            } else {
                Ok(None)
            };
        }
        let mut received = 0;
        for part in parts {
            // VecDeque's Read stops at the seam of its ring, hence the loop.
            let mut spare = &mut part[..];
            while !spare.is_empty() && !pipe.bytes.is_empty() {
                let length = pipe.bytes.read(spare).unwrap_or(0);
                spare = &mut spare[length..];
                received += length;
            }
        }
        self.other_doorbell.wake();
        Ok(Some(received))
    }

    fn may_sleep(&mut self, direction: Direction) -> bool {
        let pipes = lock(&self.pipes);
        match direction {
            Direction::Send => {
                let pipe = &pipes[self.number];
                !pipe.closed && pipe.bytes.len() == self.capacity_bytes
            }
            Direction::Receive => {
                let pipe = &pipes[1 - self.number];
                !pipe.closed && pipe.bytes.is_empty()
            }
        }
    }

    fn awaited<'a>(&'a self, _direction: Direction, _awaited: &mut Vec<PollFd<'a>>) {}
}

impl Drop for MemoryLink {
    /// Closes both pipes, and wakes the other end.
    fn drop(&mut self) {
        lock(&self.pipes)
            .iter_mut()
            .for_each(|pipe| pipe.closed = true);
        self.other_doorbell.wake();
    }
}
