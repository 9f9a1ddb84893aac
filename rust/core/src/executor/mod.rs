//! Performs one schedule over links: the only place where bytes of buffers meet bytes of pipes.
//!
//! Idea: a schedule is a list of operations (sends and receives) in program order. An operation
//! may be at most as far along as the earlier operations that touch the same elements allow (its
//! *watermark*), and operations of one pipe keep their order. Within these two rules everything
//! proceeds as the links allow, so a segment is sent on as soon as its bytes are final.
//!
//! Contributions and partial results are received into a tile that stays in cache and combined at
//! once; final values are received straight into place.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;
use std::time::Instant;

use crate::buffer::Buffer;
use crate::dtype::ReduceOp;
use crate::link::{Broken, Direction, Interest, Transport};
use crate::schedule::{Access, Action, Contents, Schedule};
use crate::wire::contract::{HEADER_BYTES, Header};

mod operands;

use operands::{FoldMemory, Operands};

/// Bytes received before they are combined: source and target of the kernel stay in L2 cache.
const TILE_BYTES: usize = 256 << 10;
/// Bytes offered to a pipe at a time, so that receiving gets its turn.
const SEGMENT_BYTES: usize = 1 << 20;
/// Slices in one system call; buckets of more slices take several calls.
const PARTS: usize = 64;

/// Reusable memory of an executor.
pub(crate) struct Scratch {
    tile: Vec<u64>,
    fold: FoldMemory,
}

impl Scratch {
    pub(crate) fn new() -> Self {
        Self {
            tile: vec![0; TILE_BYTES / size_of::<u64>()],
            fold: FoldMemory::default(),
        }
    }
}

fn bytes_of(tile: &mut [u64]) -> &mut [u8] {
    // SAFETY: a u64 is eight initialised bytes.
    unsafe { std::slice::from_raw_parts_mut(tile.as_mut_ptr().cast(), size_of_val(tile)) }
}

/// Why a collective cannot go on, as seen from here.
#[derive(Debug)]
pub(crate) enum Fault {
    /// A pipe broke.
    Link { peer: usize, broken: Broken },
    /// A peer started another collective than this rank did.
    Header { peer: usize, received: Box<Header> },
}

/// What became of an attempt to go on.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The collective has ended on this rank.
    Done,
    /// Something moved; try again.
    Moved,
    /// Nothing can move before one of `interests` is served.
    Blocked,
}

/// One collective under way.
pub(crate) struct Execution<'a> {
    operands: Operands<'a>,
    header: Header,
    operations: Vec<Operation>,
    outgoing: Vec<Outgoing>,
    incoming: Vec<Incoming>,
    /// Folds of this rank's own contribution.
    own: VecDeque<usize>,
    tile: &'a mut [u64],
    interests: Vec<Interest>,
    /// When the last of the peers' headers arrived: from then on nobody was late.
    pub(crate) everyone_entered: Option<Instant>,
    /// Bytes of payload sent so far.
    pub(crate) bytes_sent: u64,
}

struct Operation {
    range: Range<usize>,
    element_bytes: usize,
    moved_bytes: usize,
    action: Option<Action>,
    contents: Contents,
    access: Access,
    /// Earlier operations that conflict on some of the same elements, and which elements.
    conflicts: Vec<(usize, Range<usize>)>,
}

struct Outgoing {
    peer: usize,
    header_sent: usize,
    queue: VecDeque<usize>,
}

struct Incoming {
    peer: usize,
    header: Header,
    header_received: usize,
    queue: VecDeque<usize>,
    /// The first bytes of an element whose rest has not arrived.
    carry: [u8; 8],
    carried: usize,
}

impl<'a> Execution<'a> {
    /// Prepares `schedule` of `rank` over `buffer`. Headers are exchanged with the peers in the
    /// schedule and with the neighbours on the ring, even if no payload is.
    pub(crate) fn new(
        buffer: &'a mut Buffer,
        op: Option<ReduceOp>,
        rank: usize,
        world_size: usize,
        schedule: Schedule,
        header: Header,
        scratch: &'a mut Scratch,
    ) -> Self {
        let Scratch { tile, fold } = scratch;
        let mut execution = Self {
            operands: Operands::new(buffer, op, world_size, &schedule, fold),
            header,
            operations: Vec::with_capacity(2 * schedule.len()),
            outgoing: Vec::with_capacity(1),
            incoming: Vec::with_capacity(1),
            own: VecDeque::new(),
            tile,
            interests: Vec::with_capacity(2),
            everyone_entered: None,
            bytes_sent: 0,
        };
        execution.outgoing_to((rank + 1) % world_size);
        execution.incoming_from((rank + world_size - 1) % world_size);
        for step in schedule {
            // A step's send and receive touch different elements, so their order is free.
            if let Some(send) = step.send {
                let number = execution.add(send.range, None, send.contents, Access::SEND);
                execution.outgoing_to(send.peer).queue.extend(number);
            }
            if let Some(receive) = step.receive {
                let contents = receive.action.contents();
                let action = Some(receive.action);
                let access = Access::receive(rank, receive.peer, receive.action);
                let number = execution.add(receive.range, action, contents, access);
                if receive.peer == rank {
                    execution.own.extend(number);
                } else {
                    execution.incoming_from(receive.peer).queue.extend(number);
                }
            }
        }
        execution
    }

    fn outgoing_to(&mut self, peer: usize) -> &mut Outgoing {
        let known = self.outgoing.iter().position(|link| link.peer == peer);
        let index = known.unwrap_or_else(|| {
            self.outgoing.push(Outgoing {
                peer,
                header_sent: 0,
                queue: VecDeque::new(),
            });
            self.outgoing.len() - 1
        });
        &mut self.outgoing[index]
    }

    fn incoming_from(&mut self, peer: usize) -> &mut Incoming {
        let known = self.incoming.iter().position(|link| link.peer == peer);
        let index = known.unwrap_or_else(|| {
            self.incoming.push(Incoming {
                peer,
                header: [0; HEADER_BYTES],
                header_received: 0,
                queue: VecDeque::new(),
                carry: [0; 8],
                carried: 0,
            });
            self.incoming.len() - 1
        });
        &mut self.incoming[index]
    }

    /// Adds an operation after all others; `None` if it moves nothing.
    fn add(
        &mut self,
        range: Range<usize>,
        action: Option<Action>,
        contents: Contents,
        access: Access,
    ) -> Option<usize> {
        if range.is_empty() {
            return None;
        }
        let conflicts = self
            .operations
            .iter()
            .enumerate()
            .filter(|(_, earlier)| earlier.access.conflicts(access))
            .filter_map(|(number, earlier)| {
                let common = range.start.max(earlier.range.start)..range.end.min(earlier.range.end);
                (!common.is_empty()).then_some((number, common))
            })
            .collect();
        self.operations.push(Operation {
            range,
            element_bytes: self.operands.element_bytes(contents),
            moved_bytes: 0,
            action,
            contents,
            access,
            conflicts,
        });
        Some(self.operations.len() - 1)
    }

    /// What to wait for after `Progress::Blocked`.
    pub(crate) fn interests(&self) -> &[Interest] {
        &self.interests
    }

    /// The peers from which something is still expected.
    pub(crate) fn awaited(&self) -> impl Iterator<Item = usize> {
        self.incoming
            .iter()
            .filter(|link| link.header_received < HEADER_BYTES || !link.queue.is_empty())
            .map(|link| link.peer)
    }

    /// Moves what can be moved without waiting.
    pub(crate) fn advance(&mut self, transport: &mut dyn Transport) -> Result<Progress, Fault> {
        self.interests.clear();
        let mut moved = false;
        for link in 0..self.outgoing.len() {
            moved |= self.advance_outgoing(link, transport)?;
        }
        for link in 0..self.incoming.len() {
            moved |= self.advance_incoming(link, transport)?;
        }
        moved |= self.advance_own();
        let done = self
            .outgoing
            .iter()
            .all(|link| link.header_sent == HEADER_BYTES && link.queue.is_empty())
            && self.own.is_empty()
            && self.awaited().next().is_none();
        Ok(match (done, moved) {
            (true, _) => Progress::Done,
            (false, true) => Progress::Moved,
            (false, false) => Progress::Blocked,
        })
    }

    fn advance_outgoing(
        &mut self,
        link: usize,
        transport: &mut dyn Transport,
    ) -> Result<bool, Fault> {
        let (peer, header_sent) = (self.outgoing[link].peer, self.outgoing[link].header_sent);
        let head = self.outgoing[link].queue.front().copied();
        let bytes = head.map_or(0..0, |number| self.sendable(number));
        let mut parts = [IoSlice::new(&[]); PARTS + 1];
        let mut filled = 0;
        if header_sent < HEADER_BYTES {
            parts[0] = IoSlice::new(&self.header[header_sent..]);
            filled = 1;
        }
        if let Some(number) = head {
            let source = self.operands.source(self.operations[number].contents);
            filled += source.gather(bytes.clone(), &mut parts[filled..filled + PARTS]);
        }
        if filled == 0 {
            return Ok(false);
        }
        let sent = transport
            .try_send(peer, &parts[..filled])
            .map_err(|broken| Fault::Link { peer, broken })?;
        let Some(sent) = sent else {
            self.interests.push(Interest {
                peer,
                direction: Direction::Send,
            });
            return Ok(false);
        };
        let header_bytes = sent.min(HEADER_BYTES - header_sent);
        self.outgoing[link].header_sent += header_bytes;
        if let Some(number) = head {
            self.bytes_sent += (sent - header_bytes) as u64;
            let operation = &mut self.operations[number];
            operation.moved_bytes += sent - header_bytes;
            if operation.left_bytes() == 0 {
                self.outgoing[link].queue.pop_front();
            }
        }
        Ok(true)
    }

    fn advance_incoming(
        &mut self,
        link: usize,
        transport: &mut dyn Transport,
    ) -> Result<bool, Fault> {
        let peer = self.incoming[link].peer;
        let received = if self.incoming[link].header_received < HEADER_BYTES {
            self.receive_header(link, transport)?
        } else {
            let Some(&number) = self.incoming[link].queue.front() else {
                return Ok(false);
            };
            let left = self.watermark(number) - self.operations[number].moved_bytes;
            if left == 0 {
                return Ok(false);
            }
            let received = match self.operations[number].action {
                Some(Action::Copy) => self.receive_in_place(number, left, peer, transport)?,
                _ => self.receive_and_reduce(link, number, left, transport)?,
            };
            if self.operations[number].left_bytes() == 0 {
                self.incoming[link].queue.pop_front();
            }
            received
        };
        if !received {
            self.interests.push(Interest {
                peer,
                direction: Direction::Receive,
            });
        }
        Ok(received)
    }

    /// Nothing is written to the buffer before the peer's header has been seen to be right.
    fn receive_header(
        &mut self,
        link: usize,
        transport: &mut dyn Transport,
    ) -> Result<bool, Fault> {
        let Incoming {
            peer,
            header,
            header_received,
            ..
        } = &mut self.incoming[link];
        let mut part = [IoSliceMut::new(&mut header[*header_received..])];
        let received = transport
            .try_receive(*peer, &mut part)
            .map_err(|broken| Fault::Link {
                peer: *peer,
                broken,
            })?;
        *header_received += received.unwrap_or(0);
        if *header_received == HEADER_BYTES && *header != self.header {
            return Err(Fault::Header {
                peer: *peer,
                received: Box::new(*header),
            });
        }
        if self
            .incoming
            .iter()
            .all(|link| link.header_received == HEADER_BYTES)
        {
            self.everyone_entered = Some(Instant::now());
        }
        Ok(received.is_some())
    }

    fn receive_in_place(
        &mut self,
        number: usize,
        left: usize,
        peer: usize,
        transport: &mut dyn Transport,
    ) -> Result<bool, Fault> {
        let operation = &mut self.operations[number];
        let from = operation.position_bytes();
        let mut parts: [IoSliceMut<'_>; PARTS] = std::array::from_fn(|_| IoSliceMut::new(&mut []));
        let to = from + left.min(SEGMENT_BYTES);
        let filled = self.operands.buffer_mut().scatter(from..to, &mut parts);
        let received = transport
            .try_receive(peer, &mut parts[..filled])
            .map_err(|broken| Fault::Link { peer, broken })?;
        operation.moved_bytes += received.unwrap_or(0);
        Ok(received.is_some())
    }

    fn receive_and_reduce(
        &mut self,
        link: usize,
        number: usize,
        left: usize,
        transport: &mut dyn Transport,
    ) -> Result<bool, Fault> {
        let (peer, carried) = (self.incoming[link].peer, self.incoming[link].carried);
        let broken = |broken| Fault::Link { peer, broken };
        if carried == 0 {
            let size = self.operations[number].element_bytes;
            if let Some(bytes) = transport.readable(peer).map_err(broken)? {
                let length = bytes.len().min(left).min(TILE_BYTES);
                let whole = length - length % size;
                // An element may also lie askew, or have arrived in part: then it is received.
                if whole > 0 && bytes.as_ptr().addr().is_multiple_of(size) {
                    let (first, action) = self.operations[number].next();
                    self.operations[number].moved_bytes += whole;
                    self.operands.combine(action, first, &bytes[..whole]);
                    transport.consume(peer, whole);
                    return Ok(true);
                }
            }
        }
        let incoming = &mut self.incoming[link];
        let tile = bytes_of(self.tile);
        tile[..carried].copy_from_slice(&incoming.carry[..carried]);
        let room = left.min(tile.len() - carried);
        let received = transport
            .try_receive(
                peer,
                &mut [IoSliceMut::new(&mut tile[carried..carried + room])],
            )
            .map_err(broken)?;
        let Some(received) = received else {
            return Ok(false);
        };

        let operation = &mut self.operations[number];
        let (first, action) = operation.next();
        operation.moved_bytes += received;
        let held = carried + received;
        let whole = held - held % operation.element_bytes;
        incoming.carried = held - whole;
        incoming.carry[..held - whole].copy_from_slice(&tile[whole..held]);

        self.operands.combine(action, first, &tile[..whole]);
        Ok(true)
    }

    /// Folds a tile of this rank's own contribution, if its turn has come.
    fn advance_own(&mut self) -> bool {
        let Some(&number) = self.own.front() else {
            return false;
        };
        let ready = self.watermark(number);
        let operation = &mut self.operations[number];
        let bytes = (ready - operation.moved_bytes).min(TILE_BYTES);
        if bytes == 0 {
            return false;
        }
        let count = bytes / operation.element_bytes;
        let (first, action) = operation.next();
        operation.moved_bytes += bytes;
        if operation.left_bytes() == 0 {
            self.own.pop_front();
        }
        let Action::Fold(turn) = action else {
            unreachable!("only folds take this rank's own contribution");
        };
        self.operands.fold_own(turn, first..first + count);
        true
    }

    /// The bytes that a send may offer now.
    fn sendable(&self, number: usize) -> Range<usize> {
        let operation = &self.operations[number];
        let from = operation.position_bytes();
        let left = self.watermark(number) - operation.moved_bytes;
        from..from + left.min(SEGMENT_BYTES)
    }

    /// How many bytes of an operation may have moved, given how far earlier ones are.
    fn watermark(&self, number: usize) -> usize {
        let operation = &self.operations[number];
        let mut end = operation.range.end;
        for (earlier, common) in &operation.conflicts {
            let earlier = &self.operations[*earlier];
            let reached = earlier.range.start + earlier.moved_bytes / earlier.element_bytes;
            if reached < common.end {
                end = end.min(reached.max(common.start));
            }
        }
        let bytes = (end - operation.range.start) * operation.element_bytes;
        bytes.max(operation.moved_bytes)
    }
}

impl Operation {
    /// The first element that is not complete, and what is done with it; of a receive.
    fn next(&self) -> (usize, Action) {
        let element = self.range.start + self.moved_bytes / self.element_bytes;
        (element, self.action.expect("a receive has an action"))
    }

    fn position_bytes(&self) -> usize {
        self.range.start * self.element_bytes + self.moved_bytes
    }

    fn left_bytes(&self) -> usize {
        self.range.len() * self.element_bytes - self.moved_bytes
    }
}
