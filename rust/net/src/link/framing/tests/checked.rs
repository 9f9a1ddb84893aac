//! Pipes with checksums over links of every kind, some of which corrupt bytes.

use std::io::{IoSlice, IoSliceMut};
use std::thread;
use std::time::Duration;

use super::{Incoming, Outgoing, Random, Wire, interest, lanes, mesh_with, payload, sockets};
use crate::link::framing::over;
use crate::link::kind::Lanes;
use crate::link::poll::PollFd;
use crate::link::shm::ShmLink;
use crate::link::shm::tests::link;
use crate::link::{Broken, Direction, Link, Transport, memory};
use gradring_proto::wire::frame::{CHECKED_BYTES_MAX, FRAME_HEADER_BYTES};

const PATIENCE: Duration = Duration::from_secs(1);

/// Sends as an executor does: each offer begins behind the sent bytes, and reaches at least as far
/// as the one before.
struct Sender<'a> {
    bytes: &'a [u8],
    position: usize,
    end: usize,
    random: Random,
}

impl<'a> Sender<'a> {
    const fn new(bytes: &'a [u8], seed: u64) -> Self {
        Self {
            bytes,
            position: 0,
            end: 0,
            random: Random(seed),
        }
    }

    const fn is_done(&self) -> bool {
        self.position == self.bytes.len()
    }

    /// Sends once; returns `true` if bytes were taken.
    fn go_on(&mut self, transport: &mut impl Transport) -> bool {
        let reach = self.position + 1 + self.random.below(1 << 20);
        self.end = self.bytes.len().min(self.end.max(reach));
        let offer = &self.bytes[self.position..self.end];
        let (head, tail) = offer.split_at(self.random.below(offer.len() + 1).min(100));
        let sent = transport.try_send(
            1,
            &[IoSlice::new(head), IoSlice::new(&[]), IoSlice::new(tail)],
        );
        let sent = sent.expect("nothing breaks the pipe");
        assert_ne!(sent, Some(0));
        self.position += sent.unwrap_or(0);
        sent.is_some()
    }
}

/// Receives as an executor does: where the bytes lie, or into memory.
fn receive(transport: &mut impl Transport, random: &mut Random, received: &mut Vec<u8>) -> bool {
    if random.below(2) == 0 {
        let mut memory = vec![0; 1 + random.below(100_000)];
        let (head, tail) = memory.split_at_mut(random.below(100).min(1));
        let parts = &mut [IoSliceMut::new(head), IoSliceMut::new(tail)];
        let count = transport.try_receive(0, parts).expect("nothing is wrong");
        received.extend(&memory[..count.unwrap_or(0)]);
        return count.is_some();
    }
    let readable = transport.readable(0).expect("nothing is wrong");
    let readable = readable.expect("what was checked lies in memory");
    let count = random.below(readable.len() + 1);
    received.extend(&readable[..count]);
    transport.consume(0, count);
    count > 0
}

#[test]
fn bytes_keep_their_order_through_pipes_that_take_little() {
    for seed in 0..60 {
        let mut random = Random(seed);
        let capacity = [1, 15, 17, 1_000, 70_000, 5_000_000][random.below(6)];
        let ranks = memory::mesh_of(2, capacity, |_, _, lane| over(vec![Box::new(lane)], true));
        let [mut a, mut b] = ranks.try_into().ok().unwrap();
        let sent = payload(1 + random.below((2_000 * capacity).min(3_000_000)), seed);
        let (mut sender, mut received) = (Sender::new(&sent, seed), Vec::new());
        while received.len() < sent.len() {
            if !sender.is_done() {
                sender.go_on(&mut a);
            }
            receive(&mut b, &mut random, &mut received);
        }
        assert!(received == sent, "seed {seed}: pipes of {capacity} bytes");
    }
}

#[test]
fn bytes_keep_their_order_over_sockets_with_short_writes() {
    for streams in [1, 2, 3, 16] {
        let (senders, receivers) = sockets(streams);
        let sent = payload(3_000_000, streams as u64);
        let sending = thread::spawn({
            let sent = sent.clone();
            let mut links = mesh_with(1, senders, true);
            move || {
                let mut sender = Sender::new(&sent, 7);
                while !sender.is_done() {
                    if !sender.go_on(&mut links) {
                        links.wait(&[interest(1, Direction::Send)], PATIENCE);
                    }
                }
            }
        });
        let mut links = mesh_with(0, receivers, true);
        let (mut random, mut received) = (Random(8), Vec::new());
        while received.len() < sent.len() {
            let before = received.len();
            if !receive(&mut links, &mut random, &mut received) && received.len() == before {
                links.wait(&[interest(0, Direction::Receive)], Duration::from_millis(1));
            }
        }
        sending.join().unwrap();
        assert!(received == sent, "{streams} streams");
    }
}

/// Returns the bytes that a pipe carries for these payloads.
fn carried(payloads: &[&[u8]]) -> Vec<u8> {
    let (mut outgoing, wires) = (Outgoing::new(1, true), [Wire::default()]);
    wires[0].state().capacity = usize::MAX;
    for payload in payloads {
        let sent = outgoing.try_send(&mut lanes(&wires), &[IoSlice::new(payload)]);
        assert_eq!(sent, Ok(Some(payload.len())));
    }
    wires[0].state().under_way.iter().copied().collect()
}

/// Returns the bytes that a pipe hands out for `carried`, and the error that ends it.
fn received_from(carried: &[u8]) -> (Vec<u8>, Option<Broken>) {
    let (mut incoming, wires, mut received) =
        (Incoming::new(1, true), [Wire::default()], Vec::new());
    wires[0].carry(carried);
    loop {
        let count = match incoming.readable(&mut lanes(&wires)) {
            Ok(None | Some([])) => return (received, None),
            Ok(Some(bytes)) => {
                received.extend(bytes);
                bytes.len()
            }
            Err(broken) => return (received, Some(broken)),
        };
        incoming.consume(count);
    }
}

#[test]
fn any_turned_bit_breaks_the_pipe_before_its_segment_is_handed_out() {
    let payloads: [&[u8]; 3] = [b"first", b"the second, which is longer", b"3"];
    let right = carried(&payloads);
    assert_eq!(received_from(&right), (payloads.concat(), None));
    let mut ends = Vec::new();
    for payload in payloads {
        ends.push(ends.last().unwrap_or(&0) + FRAME_HEADER_BYTES + payload.len());
    }
    assert_eq!(ends.last(), Some(&right.len()));
    for bit in 0..8 * right.len() {
        let mut wrong = right.clone();
        wrong[bit / 8] ^= 1 << (bit % 8);
        let (received, broken) = received_from(&wrong);
        let number = ends.iter().filter(|&&end| end <= bit / 8).count();
        assert_eq!(received, payloads[..number].concat(), "bit {bit}");
        let broken = broken.unwrap_or_else(|| panic!("bit {bit} was not seen"));
        assert!(broken.corrupted());
        let start = format!("corrupted segment {number}: ");
        assert!(broken.to_string().starts_with(&start), "{broken}");
    }
}

#[test]
fn a_segment_that_is_lost_repeated_or_exchanged_breaks_the_pipe() {
    let whole = carried(&[b"a", b"b", b"c"]);
    let [a, b, c] = [0, 1, 2].map(|n| &whole[n * whole.len() / 3..(n + 1) * whole.len() / 3]);
    for (arrives, reason) in [
        ([b, c, a], "corrupted segment 0: segment 1 came instead"),
        ([a, c, b], "corrupted segment 1: segment 2 came instead"),
        ([a, a, b], "corrupted segment 1: segment 0 came instead"),
    ] {
        let (_, broken) = received_from(&arrives.concat());
        let broken = broken.expect("the pipe is broken");
        assert!(broken.corrupted());
        assert_eq!(broken.to_string(), reason);
    }
}

#[test]
fn long_payloads_are_cut_into_segments_and_found_out_early() {
    let sent = payload(10 * CHECKED_BYTES_MAX + 1, 3);
    let mut wrong = carried(&[&sent]);
    assert_eq!(wrong.len(), sent.len() + 11 * FRAME_HEADER_BYTES);
    assert_eq!(received_from(&wrong), (sent.clone(), None));
    let in_the_fifth = 4 * (CHECKED_BYTES_MAX + FRAME_HEADER_BYTES) + 1000;
    wrong[in_the_fifth] ^= 0x10;
    let (received, broken) = received_from(&wrong);
    assert!(received == sent[..4 * CHECKED_BYTES_MAX]);
    assert!(
        broken
            .unwrap()
            .to_string()
            .starts_with("corrupted segment 4: 65536 bytes have the")
    );
}

#[test]
fn a_byte_that_changes_in_shared_memory_is_seen() {
    for at in [0, 5, 16, 40] {
        let [(mut a, _bell_a), (b, _bell_b)] = link(64 << 10);
        let frame = carried(&[&[7; 100]]);
        assert_eq!(a.try_send(&[IoSlice::new(&frame)]), Ok(Some(frame.len())));
        a.damage(at);
        let (mut incoming, mut lanes): (_, Lanes) = (Incoming::new(1, true), vec![Box::new(b)]);
        let read = incoming.readable(&mut lanes);
        assert!(read.unwrap_err().corrupted(), "byte {at}");
    }
}

#[test]
fn the_end_of_a_pipe_comes_after_what_was_right() {
    let (senders, receivers) = sockets(1);
    let mut links = mesh_with(1, senders, true);
    assert_eq!(links.try_send(1, &[IoSlice::new(b"last")]), Ok(Some(4)));
    drop(links);
    let mut links = mesh_with(0, receivers, true);
    while links.readable(0).unwrap() == Some(&[]) {
        links.wait(&[interest(0, Direction::Receive)], PATIENCE);
    }
    assert_eq!(links.readable(0), Ok(Some(&b"last"[..])));
    links.consume(0, 4);
    let broken = links.readable(0).unwrap_err();
    assert_eq!(broken, Broken::closed());
}

/// Shared memory without the connection that ends with the peer's process.
impl Link for ShmLink {
    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> Result<Option<usize>, Broken> {
        Self::try_send(self, parts)
    }

    fn try_receive(&mut self, parts: &mut [IoSliceMut<'_>]) -> Result<Option<usize>, Broken> {
        Self::try_receive(self, parts)
    }

    fn may_sleep(&mut self, direction: Direction) -> bool {
        !self.ready(direction)
    }

    fn awaited<'a>(&'a self, _direction: Direction, _awaited: &mut Vec<PollFd<'a>>) {}
}
