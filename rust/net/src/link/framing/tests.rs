//! Pipes over simulated streams, whose readiness the tests decide, and over real sockets.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use socket2::SockRef;

use super::incoming::{Incoming, LAST_BYTES_LIMIT};
use super::outgoing::Outgoing;
use super::over;
use crate::link::kind::Lanes;
use crate::link::mesh::Mesh;
use crate::link::poll::{PollFd, WakeUp};
use crate::link::tcp::connection::Connection;
use crate::link::{Broken, Direction, Interest, Link, Transport};
use gradring_proto::wire::frame::Frame;

/// Repeatable random numbers: SplitMix64 of G. Steele, D. Lea and C. Flood.
pub(in crate::link) struct Random(pub(in crate::link) u64);

impl Random {
    pub(in crate::link) fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % bound as u64) as usize
    }
}

pub(in crate::link) fn payload(length: usize, seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    (0..length).map(|_| random.below(256) as u8).collect()
}

/// Cuts `bytes` into slices of random lengths, some of them empty.
fn slices<'a>(mut bytes: &'a [u8], random: &mut Random) -> Vec<IoSlice<'a>> {
    let mut slices = Vec::new();
    while !bytes.is_empty() {
        let (slice, rest) = bytes.split_at(random.below(bytes.len() + 1));
        slices.push(IoSlice::new(slice));
        bytes = rest;
    }
    slices
}

/// A simulated connection. The test decides how many bytes it takes and delivers.
#[derive(Clone, Default)]
struct Wire(Arc<Mutex<WireState>>);

#[derive(Default)]
struct WireState {
    /// Bytes that it takes before it is full.
    capacity: usize,
    under_way: VecDeque<u8>,
    arrived: VecDeque<u8>,
    ended: bool,
}

impl Wire {
    fn state(&self) -> MutexGuard<'_, WireState> {
        self.0.lock().unwrap()
    }

    fn arrive(&self, count: usize) {
        let mut state = self.state();
        let count = count.min(state.under_way.len());
        let arriving: Vec<u8> = state.under_way.drain(..count).collect();
        state.arrived.extend(arriving);
    }

    fn carry(&self, bytes: &[u8]) {
        self.state().arrived.extend(bytes);
    }

    fn end(&self) {
        self.state().ended = true;
    }

    fn is_readable(&self) -> bool {
        let state = self.state();
        state.ended || !state.arrived.is_empty()
    }
}

impl Link for Wire {
    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> Result<Option<usize>, Broken> {
        let mut state = self.state();
        let bytes = parts.iter().flat_map(|part| part.iter());
        let before = state.under_way.len();
        let capacity = state.capacity;
        state.under_way.extend(bytes.take(capacity));
        let sent = state.under_way.len() - before;
        state.capacity -= sent;
        Ok((sent > 0).then_some(sent))
    }

    fn try_receive(&mut self, parts: &mut [IoSliceMut<'_>]) -> Result<Option<usize>, Broken> {
        let mut state = self.state();
        if state.arrived.is_empty() {
            return match state.ended {
                true => Err(Broken::closed()),
                false => Ok(None),
            };
        }
        let mut received = 0;
        for slot in parts.iter_mut().flat_map(|part| part.iter_mut()) {
            let Some(byte) = state.arrived.pop_front() else {
                break;
            };
            *slot = byte;
            received += 1;
        }
        Ok(Some(received))
    }

    fn may_sleep(&mut self, _direction: Direction) -> bool {
        true
    }

    fn awaited<'a>(&'a self, _direction: Direction, _awaited: &mut Vec<PollFd<'a>>) {}
}

/// The same connections as links.
fn lanes(wires: &[Wire]) -> Lanes {
    wires
        .iter()
        .map(|wire| Box::new(wire.clone()) as _)
        .collect()
}

fn is(one: &Wire, other: &Wire) -> bool {
    Arc::ptr_eq(&one.0, &other.0)
}

/// Returns the streams for which a pipe waits.
fn awaited<'a>(
    wires: &'a [Wire],
    awaits: impl Fn(usize) -> bool + 'a,
) -> impl Iterator<Item = &'a Wire> {
    let wires = wires.iter().enumerate();
    wires.filter_map(move |(lane, wire)| awaits(lane).then_some(wire))
}

/// Sends `sent` over a pipe of simulated streams, which get capacity and deliver in random order.
/// Waits only for the streams that the pipe awaits, as an executor does.
fn transfer(
    (streams, checked): (usize, bool),
    sent: &[u8],
    step: usize,
    random: &mut Random,
) -> Vec<u8> {
    let wires: Vec<Wire> = (0..streams).map(|_| Wire::default()).collect();
    // Both ends use the same wires.
    let (mut inlets, mut outlets) = (lanes(&wires), lanes(&wires));
    let mut outgoing = Outgoing::new(streams, checked);
    let mut incoming = Incoming::new(streams, checked);
    let mut source = sent.to_vec();
    let (mut position, mut end) = (0, 0);
    let mut received = Vec::new();
    let (mut may_send, mut may_receive) = (true, true);
    while received.len() < sent.len() {
        if position < source.len() && may_send {
            // An offer reaches as far as the one before, or farther.
            end = end.max(source.len().min(position + 1 + random.below(1 << 20)));
            let offer = slices(&source[position..end], random);
            let accepted = outgoing.try_send(&mut outlets, &offer).unwrap();
            if accepted.is_none() {
                assert!(
                    awaited(&wires, |lane| outgoing.awaits(lane)).count() > 0,
                    "nothing to wait for"
                );
                let mut awaited = awaited(&wires, |lane| outgoing.awaits(lane));
                assert!(awaited.all(|wire| wire.state().capacity == 0));
                may_send = false;
            }
            // Accepted bytes arrive even if their buffer is overwritten.
            let accepted = accepted.unwrap_or(0);
            source[position..position + accepted].fill(0xaa);
            position += accepted;
        }
        if may_receive {
            let mut memory = vec![0; 4 + random.below(300_000)];
            let (one, other) = memory.split_at_mut(random.below(4));
            let mut parts = [IoSliceMut::new(one), IoSliceMut::new(other)];
            match incoming.try_receive(&mut inlets, &mut parts).unwrap() {
                Some(count) => received.extend(&memory[..count]),
                None => {
                    assert!(
                        awaited(&wires, |lane| incoming.awaits(lane)).count() > 0,
                        "nothing to wait for"
                    );
                    assert!(!awaited(&wires, |lane| incoming.awaits(lane)).any(Wire::is_readable));
                    may_receive = false;
                }
            }
        }
        let wire = &wires[random.below(streams)];
        wire.state().capacity += random.below(step + 1);
        wire.arrive(random.below(step + 1));
        let has_capacity = |wire: &&Wire| wire.state().capacity > 0;
        let mut may_take = awaited(&wires, |lane| outgoing.awaits(lane));
        may_send |= may_take.any(|w| is(w, wire) && has_capacity(&w));
        let mut may_bring = awaited(&wires, |lane| incoming.awaits(lane));
        may_receive |= may_bring.any(|w| is(w, wire) && w.is_readable());
    }
    received
}

#[test]
fn whatever_streams_are_ready_when_the_bytes_keep_their_order() {
    for seed in 0..200 {
        let mut random = Random(seed);
        let streams = 1 + random.below(16);
        // Bytes that wires take and deliver at a time. Small steps get less payload, to end in
        // time.
        let step = [1, 40, 5_000, 500_000][random.below(4)];
        let sent = payload(1 + random.below((2_000 * step).min(3_000_000)), seed);
        let checked = random.below(2) == 0;
        let received = transfer((streams, checked), &sent, step, &mut random);
        assert!(received == sent, "seed {seed}: {streams} streams");
    }
}

#[test]
fn a_stalled_stream_holds_up_its_own_frame_and_no_other() {
    let wires = [Wire::default(), Wire::default()];
    let mut outgoing = Outgoing::new(2, false);
    wires[0].state().capacity = 100;
    wires[1].state().capacity = usize::MAX;
    let sent = payload(1 << 20, 1);
    // The first stream takes the header of a frame and 84 bytes of its payload.
    let accepted = outgoing.try_send(&mut lanes(&wires), &[IoSlice::new(&sent)]);
    assert_eq!(accepted, Ok(Some(84)));
    let beyond = wires[1].state().under_way.len();
    assert_eq!(beyond, (1 << 20) - (256 << 10) + 3 * 16);
    // All frames are begun, so only the stalled stream can continue.
    let rest = [IoSlice::new(&sent[84..])];
    assert_eq!(outgoing.try_send(&mut lanes(&wires), &rest), Ok(None));
    assert!(awaited(&wires, |lane| outgoing.awaits(lane)).all(|wire| is(wire, &wires[0])));
    wires[0].state().capacity = usize::MAX;
    let accepted = outgoing.try_send(&mut lanes(&wires), &rest);
    assert_eq!(accepted, Ok(Some(sent.len() - 84)));
}

#[test]
fn a_header_and_the_first_payload_leave_in_one_call() {
    let wires = [Wire::default(), Wire::default()];
    wires[0].state().capacity = 1000;
    let mut outgoing = Outgoing::new(2, false);
    let parts = [IoSlice::new(&[1; 56]), IoSlice::new(&[2; 100])];
    assert_eq!(outgoing.try_send(&mut lanes(&wires), &parts), Ok(Some(156)));
    assert_eq!(wires[0].state().under_way.len(), 16 + 156);
}

/// A pipe of two streams which carry these bytes.
fn arriving(carried: [&[u8]; 2]) -> ([Wire; 2], Incoming) {
    let wires = [Wire::default(), Wire::default()];
    for (wire, bytes) in wires.iter().zip(carried) {
        wire.carry(bytes);
    }
    (wires, Incoming::new(2, false))
}

fn framed(sequence: u32, payload: &[u8]) -> Vec<u8> {
    let length = payload.len();
    let frame = Frame {
        sequence,
        length,
        checksum: 0,
    };
    [&frame.encode(), payload].concat()
}

fn receive(wires: &[Wire], incoming: &mut Incoming) -> Result<Option<usize>, Broken> {
    incoming.try_receive(&mut lanes(wires), &mut [IoSliceMut::new(&mut [0; 100])])
}

#[test]
fn frames_that_no_sender_sends_break_the_pipe() {
    let first = framed(0, b"abc");
    let again = [first.clone(), framed(0, b"d")].concat();
    let twice = framed(5, b"d");
    for (carried, reason) in [
        (
            [&b"0123456789abcdef"[..], b""],
            "corrupted segment 0: the announcement is not what its checksum says (stream 0)",
        ),
        (
            [&again, b""],
            "corrupted segment 1: segment 0 came instead (stream 0)",
        ),
        (
            [&twice, &twice],
            "corrupted segment 0: segment 5 came instead (stream 1)",
        ),
        (
            [&framed(1, b"a"), &framed(2, b"b")],
            "corrupted segment 0: it is lost: later ones came on all streams",
        ),
    ] {
        let (wires, mut incoming) = arriving(carried);
        let outcome = receive(&wires, &mut incoming).and_then(|_| receive(&wires, &mut incoming));
        assert_eq!(outcome.unwrap_err().to_string(), reason);
    }
}

#[test]
fn last_bytes_arrive_after_another_stream_has_ended() {
    let (wires, mut incoming) = arriving([b"", &framed(0, b"a")]);
    wires[1].end();
    assert_eq!(receive(&wires, &mut incoming), Ok(Some(1)));
    assert_eq!(receive(&wires, &mut incoming), Ok(None));
    assert!(awaited(&wires, |lane| incoming.awaits(lane)).all(|wire| is(wire, &wires[0])));
    wires[0].carry(&framed(1, b"bc"));
    wires[0].end();
    assert_eq!(receive(&wires, &mut incoming), Ok(Some(2)));
    let broken = receive(&wires, &mut incoming).unwrap_err();
    assert_eq!(broken.to_string(), "was closed by the other side");
}

#[test]
fn an_end_in_the_middle_of_a_frame_or_its_announcement_breaks_the_pipe() {
    let whole = framed(0, b"abc");
    for cut in [1, 15, 16, 18] {
        let (wires, mut incoming) = arriving([&whole[..cut], b""]);
        wires[0].end();
        let outcome = (0..3).find_map(|_| receive(&wires, &mut incoming).err());
        let reason = outcome.expect("the pipe is broken").to_string();
        assert_eq!(reason, "was closed by the other side (stream 0)", "{cut}");
    }
}

#[test]
fn silence_after_the_end_of_a_stream_breaks_the_pipe() {
    let (wires, mut incoming) = arriving([b"", b""]);
    wires[1].end();
    assert_eq!(receive(&wires, &mut incoming), Ok(None));
    thread::sleep(LAST_BYTES_LIMIT);
    let broken = receive(&wires, &mut incoming).unwrap_err();
    assert_eq!(
        broken.to_string(),
        "was closed by the other side (stream 1)"
    );
}

/// Connected sockets with the smallest buffers there are, so that most writes are short.
pub(in crate::link) fn sockets(streams: usize) -> (Vec<Connection>, Vec<Connection>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    SockRef::from(&listener).set_recv_buffer_size(1).unwrap();
    (0..streams)
        .map(|_| {
            let sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            SockRef::from(&sender).set_send_buffer_size(1).unwrap();
            let receiver = listener.accept().unwrap().0;
            [sender, receiver]
                .map(|tcp| Connection::new(tcp).unwrap())
                .into()
        })
        .unzip()
}

const PATIENCE: Duration = Duration::from_secs(1);

/// The mesh of a rank with one peer, over these connections.
pub(in crate::link) fn mesh_with(peer: usize, lanes: Vec<Connection>, checked: bool) -> Mesh {
    let lanes = lanes.into_iter().map(|lane| Box::new(lane) as _).collect();
    let mut links = [None, None];
    links[peer] = Some(over(lanes, checked));
    Mesh::new(links.into(), Arc::new(WakeUp::new().unwrap())).unwrap()
}

fn send_all(mut links: Mesh, bytes: &[u8], random: &mut Random) {
    let (mut position, mut end) = (0, 0);
    while position < bytes.len() {
        end = bytes
            .len()
            .min(end.max(position + 1 + random.below(1 << 20)));
        let parts = slices(&bytes[position..end], random);
        match links.try_send(1, &parts).unwrap() {
            Some(sent) => position += sent,
            None => links.wait(&[interest(1, Direction::Send)], PATIENCE),
        }
    }
}

pub(in crate::link) const fn interest(peer: usize, direction: Direction) -> Interest {
    Interest { peer, direction }
}

#[test]
fn bytes_keep_their_order_over_sockets_with_short_writes() {
    for streams in [1, 2, 3, 4, 16] {
        let (senders, receivers) = sockets(streams);
        let sent = payload(4_000_000, streams as u64);
        let sending = thread::spawn({
            let sent = sent.clone();
            let links = mesh_with(1, senders, false);
            move || send_all(links, &sent, &mut Random(7))
        });
        let mut links = mesh_with(0, receivers, false);
        let mut random = Random(8);
        let mut received: Vec<u8> = Vec::new();
        while received.len() < sent.len() {
            let mut memory = vec![0; 1 + random.below(100_000)];
            match links
                .try_receive(0, &mut [IoSliceMut::new(&mut memory)])
                .unwrap()
            {
                Some(count) => received.extend(&memory[..count]),
                None => links.wait(&[interest(0, Direction::Receive)], PATIENCE),
            }
        }
        sending.join().unwrap();
        assert!(received == sent, "{streams} streams");
    }
}

#[test]
fn waiting_sleeps_while_no_stream_can_go_on() {
    let (senders, receivers) = sockets(3);
    let mut sending = mesh_with(1, senders, false);
    let sent = payload(4_000_000, 1);
    let mut position = 0;
    let mut turns = 0;
    let started = Instant::now();
    while started.elapsed() < 2 * PATIENCE {
        match sending
            .try_send(1, &[IoSlice::new(&sent[position..])])
            .unwrap()
        {
            Some(count) => position += count,
            None => sending.wait(&[interest(1, Direction::Send)], PATIENCE),
        }
        turns += 1;
    }
    // The kernels hold some bytes; then nothing moves, because nobody receives.
    assert!(position < sent.len());
    assert!(turns < 1000, "{turns} turns");
    drop(receivers);
}

#[test]
fn one_stream_adds_nothing_to_the_bytes() {
    let (senders, mut receivers) = sockets(1);
    let mut sender = mesh_with(1, senders, false);
    let parts = [IoSlice::new(b"abc"), IoSlice::new(b"d")];
    assert_eq!(sender.try_send(1, &parts), Ok(Some(4)));
    let mut received = [0; 4];
    receivers[0].tcp().set_nonblocking(false).unwrap();
    receivers[0].read_exact(&mut received).unwrap();
    assert_eq!(&received, b"abcd");

    receivers[0].write_all(b"efgh").unwrap();
    let parts = &mut [IoSliceMut::new(&mut received)];
    sender.wait(&[interest(1, Direction::Receive)], PATIENCE);
    assert_eq!(sender.try_receive(1, parts), Ok(Some(4)));
    assert_eq!(&received, b"efgh");
}

mod checked;
