use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};

use super::*;
use crate::link::poll::{self, WakeUp};
use crate::link::tcp::on_each_core;
use gradring_proto::schedule::partners;
use gradring_proto::schedule::topology::Topology;

const PATIENCE: Duration = Duration::from_secs(20);

/// Both ends of a link in this process, each with its own mapping, and their doorbells.
pub(in crate::link) fn link(capacity: usize) -> [(ShmLink, WakeUp); 2] {
    let bells = [WakeUp::new().unwrap(), WakeUp::new().unwrap()];
    let copies: Vec<OwnedFd> = bells
        .iter()
        .map(|bell| bell.as_fd().try_clone_to_owned().unwrap())
        .collect();
    let [copy_0, copy_1] = copies.try_into().unwrap();
    let (arena, file) = Arena::create(capacity).unwrap();
    let other = Arena::open(file, capacity).unwrap();
    let [bell_0, bell_1] = bells;
    [
        (ShmLink::new(arena, 0, copy_1), bell_0),
        (ShmLink::new(other, 1, copy_0), bell_1),
    ]
}

const SMALL: usize = 64 << 10;

fn send(link: &mut ShmLink, bytes: &[u8]) -> Result<Option<usize>, Broken> {
    link.try_send(&[IoSlice::new(bytes)])
}

fn receive(link: &mut ShmLink, bytes: &mut [u8]) -> Result<Option<usize>, Broken> {
    link.try_receive(&mut [IoSliceMut::new(bytes)])
}

/// Sleeps until one of `directions` is ready, as a transport would.
pub(super) fn sleep(link: &ShmLink, bell: &WakeUp, directions: &[Direction]) {
    for &direction in directions {
        link.announce_sleep(direction);
    }
    if !directions.iter().any(|&direction| link.ready(direction)) {
        poll::wait([bell.awaited()], PATIENCE);
        assert!(bell.reset() > 0, "a wake-up was lost");
    }
    link.awake();
}

#[test]
fn each_side_knows_from_which_core_the_other_published_last() {
    let [(mut sender, _), (receiver, _)] = link(SMALL);
    assert_eq!(receiver.core_of_peer(), None);
    on_each_core(|core| {
        send(&mut sender, b"x").unwrap();
        assert_eq!(receiver.core_of_peer(), Some(core));
    });
}

/// A small generator (xorshift), so that failures repeat.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }
}

impl ShmLink {
    /// Changes the byte at a position of what this side has sent, as faulty memory would.
    pub(in crate::link) fn damage(&mut self, position: usize) {
        // SAFETY: nobody reads or writes there meanwhile; the tests see to that.
        unsafe {
            let byte = self.arena.read(self.number, position, 1)[0];
            self.arena.write(self.number, position, &[byte ^ 1]);
        }
    }
}

/// The byte at a position of the stream that the tests send.
fn expected(position: usize) -> u8 {
    (position ^ (position >> 8) ^ (position >> 16)) as u8
}

#[test]
fn a_ring_is_full_at_its_capacity_and_then_empty() {
    let [(mut a, _bell_a), (mut b, _bell_b)] = link(SMALL);
    let bytes = vec![7; SMALL + 1];
    assert_eq!(receive(&mut b, &mut [0]), Ok(None));
    assert_eq!(b.readable(), Ok(&[][..]));
    assert!(a.ready(Direction::Send) && !b.ready(Direction::Receive));
    assert_eq!(send(&mut a, &bytes), Ok(Some(SMALL)));
    assert_eq!(send(&mut a, &bytes), Ok(None));
    assert!(!a.ready(Direction::Send) && b.ready(Direction::Receive));
    assert_eq!(b.readable().unwrap().len(), SMALL);
    b.consume(SMALL);
    assert_eq!(receive(&mut b, &mut [0]), Ok(None));
    assert_eq!(send(&mut a, &bytes), Ok(Some(SMALL)));
}

#[test]
fn readable_bytes_have_no_seam() {
    let [(mut a, _bell_a), (mut b, _bell_b)] = link(SMALL);
    let first = vec![0; SMALL - 3];
    assert_eq!(send(&mut a, &first), Ok(Some(first.len())));
    b.readable().unwrap();
    b.consume(first.len());
    let parts = [IoSlice::new(b"over "), IoSlice::new(b"the seam")];
    assert_eq!(a.try_send(&parts), Ok(Some(13)));
    assert_eq!(b.readable(), Ok(&b"over the seam"[..]));
    b.consume(5);
    assert_eq!(b.readable(), Ok(&b"the seam"[..]));
}

#[test]
#[should_panic(expected = "count as u64 <=")]
fn to_consume_what_is_not_there_is_a_mistake() {
    let [(mut a, _bell_a), (mut b, _bell_b)] = link(SMALL);
    send(&mut a, b"ab").unwrap();
    b.readable().unwrap();
    b.consume(3);
}

#[test]
fn bytes_keep_their_order_both_ways_in_any_chunks_with_sleeps() {
    let [(a, bell_a), (b, bell_b)] = link(SMALL);
    std::thread::scope(|scope| {
        scope.spawn(move || exchange(a, &bell_a, 1));
        exchange(b, &bell_b, 2);
    });
}

/// Sends and receives some megabytes, in chunks as `seed` says.
fn exchange(mut link: ShmLink, bell: &WakeUp, seed: u64) {
    const TOTAL: usize = 3 << 20;
    let mut random = Random(seed);
    let mut chunk = vec![0; 3 * SMALL];
    let (mut sent, mut received) = (0, 0);
    while sent < TOTAL || received < TOTAL {
        let mut blocked = Vec::new();
        if sent < TOTAL {
            let length = (1 + random.below(2 * SMALL)).min(TOTAL - sent);
            fill(&mut chunk[..length], sent);
            let (first, second) = chunk[..length].split_at(length / 3);
            let parts = [IoSlice::new(first), IoSlice::new(second)];
            match link.try_send(&parts).unwrap() {
                Some(count) => sent += count,
                None => blocked.push(Direction::Send),
            }
        }
        if received < TOTAL {
            let limit = 1 + random.below(2 * SMALL);
            let count = if random.below(2) == 0 {
                let (first, second) = chunk[..limit].split_at_mut(limit / 3);
                let mut parts = [IoSliceMut::new(first), IoSliceMut::new(second)];
                let count = link.try_receive(&mut parts).unwrap().unwrap_or(0);
                check(&chunk[..count], received, seed);
                count
            } else {
                let bytes = link.readable().unwrap();
                let count = bytes.len().min(limit);
                check(&bytes[..count], received, seed);
                link.consume(count);
                count
            };
            received += count;
            if count == 0 {
                blocked.push(Direction::Receive);
            }
        }
        if blocked.len() == 2 || (blocked.len() == 1 && (sent == TOTAL || received == TOTAL)) {
            sleep(&link, bell, &blocked);
        }
    }
}

fn fill(bytes: &mut [u8], position: usize) {
    for (offset, byte) in bytes.iter_mut().enumerate() {
        *byte = expected(position + offset);
    }
}

fn check(bytes: &[u8], position: usize, seed: u64) {
    let mut positions = position..;
    let wrong = bytes
        .iter()
        .zip(&mut positions)
        .find(|&(&byte, position)| byte != expected(position));
    assert_eq!(wrong, None, "seed {seed}");
}

#[test]
fn what_was_sent_before_the_end_arrives() {
    let [(mut a, _bell_a), (mut b, _bell_b)] = link(SMALL);
    send(&mut a, b"last words").unwrap();
    drop(a);
    assert!(b.ready(Direction::Receive) && b.ready(Direction::Send));
    let mut bytes = [0; 4];
    assert_eq!(receive(&mut b, &mut bytes), Ok(Some(4)));
    assert_eq!(b.readable(), Ok(&b" words"[..]));
    b.consume(6);
    let closed = Broken::closed();
    assert_eq!(b.readable(), Err(closed.clone()));
    assert_eq!(receive(&mut b, &mut bytes), Err(closed.clone()));
    assert_eq!(send(&mut b, b"x"), Err(closed));
}

#[test]
fn the_doorbell_rings_once_per_announcement_and_never_without() {
    let [(mut a, bell_a), (mut b, bell_b)] = link(SMALL);
    send(&mut a, b"x").unwrap();
    assert_eq!(bell_b.reset(), 0, "nobody slept");
    b.announce_sleep(Direction::Receive);
    send(&mut a, b"x").unwrap();
    assert_eq!(bell_b.reset(), 1);
    send(&mut a, b"x").unwrap();
    assert_eq!(bell_b.reset(), 0, "it was woken already");
    send(&mut a, &[0; SMALL - 3]).unwrap();
    a.announce_sleep(Direction::Send);
    assert_eq!(b.readable().map(<[u8]>::len), Ok(SMALL));
    b.consume(1);
    assert_eq!(bell_a.reset(), 0, "one byte is not worth the noise");
    b.consume(SMALL / 2 - 1);
    assert_eq!(bell_a.reset(), 1);
    a.announce_sleep(Direction::Send);
    a.awake();
    b.consume(SMALL / 2);
    assert_eq!(bell_a.reset(), 0, "it took its announcement back");
    a.announce_sleep(Direction::Receive);
    drop(b);
    assert_eq!(bell_a.reset(), 1);
}

#[test]
fn memory_that_could_shrink_or_has_another_size_is_refused() {
    let opened = |file: OwnedFd| {
        Arena::open(file, SMALL)
            .err()
            .map(|error| error.to_string())
    };
    let (_arena, file) = Arena::create(2 * SMALL).unwrap();
    assert!(rustix::fs::ftruncate(&file, 1).is_err(), "the seals hold");
    assert_eq!(opened(file).unwrap(), "the memory has another size");
    let unsealed = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
    assert_eq!(
        opened(unsealed.unwrap()).unwrap(),
        "the memory is not sealed"
    );
    let no_memory = WakeUp::new().unwrap().as_fd().try_clone_to_owned();
    assert!(opened(no_memory.unwrap()).is_some());
}

#[test]
fn the_rings_of_a_host_stay_within_its_bound_with_up_to_400_ranks() {
    for ranks in 2..=400 {
        let topology = Topology::one_host(ranks);
        let links = (0..ranks).map(|rank| partners(rank, &topology).len());
        let pairs = links.sum::<usize>() / 2;
        let ring = ring_bytes(pairs);
        assert!(ring.is_power_of_two());
        assert!(2 * pairs * ring <= HOST_BYTES_MAX, "{ranks} ranks");
        assert_eq!(ring == RING_BYTES_MAX, pairs <= 128, "{ranks} ranks");
    }
    // A parameter server may report any number.
    assert_eq!(ring_bytes(usize::MAX), RING_BYTES_MIN);
}
