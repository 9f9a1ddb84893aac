//! A schedule performed over links.
//!
//! Idea: a schedule is a list of operations (sends and receives) in program order. An operation
//! may be at most as far along as the earlier operations that touch the same elements allow (its
//! *watermark*), and operations of one pipe keep their order. Within these two rules everything
//! proceeds as the links allow, so a segment is sent on as soon as its bytes are final.
//!
//! Contributions and partial results are received into a tile that stays in cache and combined at
//! once; final values are received straight into place.

use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;

use super::operands::Operands;
use super::plan::{Operation, Plan};
use super::{Fault, Part, Progress, Scratch, bytes_of};
use gradring_net::link::{Direction, Interest, Transport};
use gradring_proto::buffer::Buffer;
use gradring_proto::collective::Call;
use gradring_proto::error::Error;
use gradring_proto::schedule::Action;
use gradring_proto::wire::signature::{self, HEADER_BYTES, Header};

/// Bytes received before they are combined: source and target of the kernel stay in L2 cache.
pub(super) const TILE_BYTES: usize = 256 << 10;
/// Bytes offered to a pipe at a time, so that receiving gets its turn.
const SEGMENT_BYTES: usize = 1 << 20;
/// Largest payload to reduce that is received in one call with its header. At this size, a system
/// call costs more than a copy.
const ALONG_BYTES_MAX: usize = 4 << 10;
/// Slices in one system call; buckets of more slices take several calls.
const PARTS: usize = 64;

/// One collective under way.
pub(crate) struct Piped<'a> {
    operands: Operands<'a>,
    rank: usize,
    call: &'a Call,
    /// Header without sender and receiver, which [`signature::between`] adds.
    header: Header,
    /// Text behind the header, in collectives of two ranks.
    texts: Option<Box<Texts>>,
    plan: &'a mut Plan,
    /// Bytes of header and text sent so far, by outgoing pipe.
    headers_sent: &'a mut Vec<usize>,
    /// Headers and incomplete elements received so far, by incoming pipe.
    arrivals: &'a mut Vec<Arrival>,
    tile: &'a mut [u64],
    interests: &'a mut Vec<Interest>,
    /// Peer whose header arrived last, once all headers have arrived.
    pub(super) last_to_enter: Option<usize>,
    /// Bytes of payload sent so far.
    pub(super) bytes_sent: u64,
}

/// Descriptions of a call of two ranks: the own one and the peer's.
struct Texts {
    own: Vec<u8>,
    received: Vec<u8>,
}

impl Texts {
    fn of(call: &Call) -> Option<Box<Self>> {
        let own = signature::text_of(call)?;
        let received = vec![0; own.len()];
        Some(Box::new(Self { own, received }))
    }
}

/// Bytes received through a pipe that are no whole elements.
#[derive(Clone)]
pub(super) struct Arrival {
    header: Header,
    /// Bytes of header and text not yet received.
    header_left: usize,
    /// The first bytes of an element whose rest has not arrived.
    carry: [u8; 8],
    carried: usize,
}

impl Arrival {
    /// State before the first byte, with `header_left` bytes ahead of the payload.
    const fn nothing(header_left: usize) -> Self {
        Self {
            header: [0; HEADER_BYTES],
            header_left,
            carry: [0; 8],
            carried: 0,
        }
    }

    /// Returns `true` once the peer has entered this collective.
    const fn has_header(&self) -> bool {
        self.header_left == 0
    }
}

impl<'a> Piped<'a> {
    /// Prepares a rank's part in a call over `buffer`.
    ///
    /// # Errors
    /// `Exhausted` when there is no memory for it.
    pub(super) fn new(
        buffer: &'a mut Buffer,
        part: Part<'a>,
        scratch: &'a mut Scratch,
    ) -> Result<Self, Error> {
        let Part {
            call,
            algorithm,
            rank,
            topology,
            header,
            ..
        } = part;
        let Scratch {
            tile,
            beside,
            plans,
            headers_sent,
            arrivals,
            interests,
            ..
        } = scratch;
        let plan = plans.get(call, buffer.dtype(), algorithm, rank, topology);
        let texts = Texts::of(call);
        let text_bytes = texts.as_ref().map_or(0, |texts| texts.own.len());
        headers_sent.clear();
        headers_sent.resize(plan.outgoing.len(), 0);
        arrivals.clear();
        let nothing = Arrival::nothing(HEADER_BYTES + text_bytes);
        arrivals.resize(plan.incoming.len(), nothing);
        let (op, world_size) = (call.collective.op(), topology.world_size());
        Ok(Self {
            operands: Operands::new(buffer, op, world_size, plan, beside)?,
            rank,
            call,
            header,
            texts,
            plan,
            headers_sent,
            arrivals,
            tile,
            interests,
            last_to_enter: None,
            bytes_sent: 0,
        })
    }

    /// Rank that performs this part.
    pub(super) const fn rank(&self) -> usize {
        self.rank
    }

    /// Description of the call, if it follows the header.
    pub(super) fn text(&self) -> &[u8] {
        self.texts.as_ref().map_or(&[], |texts| &texts.own)
    }

    /// Pipes to wait for after `Progress::Blocked`.
    pub(super) fn interests(&self) -> &[Interest] {
        self.interests
    }

    /// Peers without which nothing can move after `Progress::Blocked`: first those that owe data,
    /// then those whose pipes are full.
    pub(super) fn awaited(&self) -> Vec<usize> {
        let mut interests = self.interests.clone();
        interests.sort_by_key(|interest| interest.direction == Direction::Send);
        let mut awaited = Vec::new();
        for Interest { peer, .. } in interests {
            if !awaited.contains(&peer) {
                awaited.push(peer);
            }
        }
        awaited
    }

    /// Peers that keep this collective waiting, and whether they have entered it. If some have not
    /// entered, only these are returned; otherwise, the peers that still owe something.
    pub(super) fn late(&self) -> (Vec<usize>, bool) {
        let pipes = self.plan.incoming.iter().zip(&*self.arrivals);
        let absent: Vec<usize> = pipes
            .filter(|(_, arrival)| !arrival.has_header())
            .map(|(pipe, _)| pipe.peer)
            .collect();
        if absent.is_empty() {
            (self.awaited(), true)
        } else {
            (absent, false)
        }
    }

    /// Bytes ahead of the payload.
    fn header_bytes(&self) -> usize {
        HEADER_BYTES + self.text().len()
    }

    fn wait_for(&mut self, peer: usize, direction: Direction) {
        self.interests.push(Interest { peer, direction });
    }

    pub(super) fn has_sent_all(&self) -> bool {
        let header_bytes = self.header_bytes();
        self.headers_sent.iter().all(|&sent| sent == header_bytes)
            && self.plan.outgoing.iter().all(|pipe| pipe.head().is_none())
    }

    fn has_received_all(&self) -> bool {
        let mut pipes = self.plan.incoming.iter().zip(&*self.arrivals);
        pipes.all(|(pipe, arrival)| arrival.has_header() && pipe.head().is_none())
    }

    /// Moves everything that can move without waiting.
    pub(super) fn advance(&mut self, transport: &mut dyn Transport) -> Result<Progress, Fault> {
        self.interests.clear();
        let mut moved = false;
        for pipe in 0..self.plan.outgoing.len() {
            moved |= self.advance_outgoing(pipe, transport)?;
        }
        // Own operations stand between: a fold begins with this rank's own part, or waits for it.
        moved |= self.advance_own();
        for pipe in 0..self.plan.incoming.len() {
            moved |= self.advance_incoming(pipe, transport)?;
        }
        let done = self.has_sent_all() && self.plan.own.head().is_none() && self.has_received_all();
        Ok(match (done, moved) {
            (true, _) => Progress::Done,
            (false, true) => Progress::Moved,
            (false, false) => Progress::Blocked,
        })
    }

    /// Looks whether an awaited peer performs another collective through its slot.
    pub(super) fn look_into_slots(&self, transport: &mut dyn Transport) -> Result<(), Fault> {
        let Some(slots) = transport.slots() else {
            return Ok(());
        };
        for &Interest { peer, .. } in &*self.interests {
            if let Some(found) = slots.foreign_header(peer, &self.header) {
                return Err(Fault::Header {
                    peer,
                    received: Box::new(signature::with_endpoints(found, peer, self.rank)),
                    text: Vec::new(),
                });
            }
        }
        Ok(())
    }

    fn advance_outgoing(
        &mut self,
        pipe: usize,
        transport: &mut dyn Transport,
    ) -> Result<bool, Fault> {
        let (peer, header_sent) = (self.plan.outgoing[pipe].peer, self.headers_sent[pipe]);
        let head = self.plan.outgoing[pipe].head();
        let bytes = head.map_or(0..0, |number| self.sendable(number));
        let header_left = self.header_bytes() - header_sent;
        if head.is_none() && header_left == 0 {
            return Ok(false);
        }
        let header;
        let mut parts = [IoSlice::new(&[]); PARTS + 2];
        let mut filled = 0;
        if header_sent < HEADER_BYTES {
            header = signature::between(self.header, self.call, self.rank, self.rank, peer);
            parts[0] = IoSlice::new(&header[header_sent..]);
            filled = 1;
        }
        if header_left > 0
            && let Some(texts) = &self.texts
        {
            let text_sent = header_sent.saturating_sub(HEADER_BYTES);
            parts[filled] = IoSlice::new(&texts.own[text_sent..]);
            filled += 1;
        }
        if let Some(number) = head {
            let source = self.operands.source(self.plan.operations[number].contents);
            filled += source.gather(bytes.clone(), &mut parts[filled..filled + PARTS]);
        }
        if filled == 0 {
            return Ok(false);
        }
        let sent = transport
            .try_send(peer, &parts[..filled])
            .map_err(|broken| Fault::Link { peer, broken })?;
        let Some(sent) = sent else {
            self.wait_for(peer, Direction::Send);
            return Ok(false);
        };
        let header_bytes = sent.min(header_left);
        self.headers_sent[pipe] += header_bytes;
        if let Some(number) = head {
            self.bytes_sent += (sent - header_bytes) as u64;
            let operation = &mut self.plan.operations[number];
            operation.moved_bytes += sent - header_bytes;
            if operation.left_bytes() == 0 {
                self.plan.outgoing[pipe].advance();
            }
        }
        Ok(true)
    }

    fn advance_incoming(
        &mut self,
        pipe: usize,
        transport: &mut dyn Transport,
    ) -> Result<bool, Fault> {
        let peer = self.plan.incoming[pipe].peer;
        let mut moved = false;
        if !self.arrivals[pipe].has_header() {
            moved = self.receive_header(pipe, transport)?;
        }
        let received = if !self.arrivals[pipe].has_header() {
            moved
        } else {
            let Some(number) = self.plan.incoming[pipe].head() else {
                return Ok(moved);
            };
            let left = self.plan.watermark(number) - self.plan.operations[number].moved_bytes;
            if left == 0 {
                return Ok(moved);
            }
            match self.plan.operations[number].action {
                Some(Action::Copy) => self.receive_in_place(pipe, number, left, transport)?,
                _ => self.receive_and_reduce(pipe, number, left, transport)?,
            }
        };
        if !received {
            self.wait_for(peer, Direction::Receive);
        }
        Ok(moved || received)
    }

    /// Receives a header. Nothing is written to the buffer before the header has been checked.
    fn receive_header(
        &mut self,
        pipe: usize,
        transport: &mut dyn Transport,
    ) -> Result<bool, Fault> {
        let peer = self.plan.incoming[pipe].peer;
        let broken = |broken| Fault::Link { peer, broken };
        // Elements in shared memory are reduced in place, not through the tile.
        let along = match transport.readable(peer).map_err(broken)? {
            Some(_) => 0,
            None => self.receivable_along(pipe),
        };
        let Arrival {
            header,
            header_left,
            ..
        } = &mut self.arrivals[pipe];
        // Collectives of two ranks reduce nothing: behind their header comes the text.
        let (behind, text_bytes, text_left) = match &mut self.texts {
            None => (&mut bytes_of(self.tile)[..along], 0, 0),
            Some(texts) => {
                let text_bytes = texts.own.len();
                let text_left = (*header_left).min(text_bytes);
                let behind = &mut texts.received[text_bytes - text_left..];
                (behind, text_bytes, text_left)
            }
        };
        let header_received = HEADER_BYTES + text_left - *header_left;
        let mut parts = [
            IoSliceMut::new(&mut header[header_received..]),
            IoSliceMut::new(behind),
        ];
        let received = transport.try_receive(peer, &mut parts).map_err(broken)?;
        let of_header = received.unwrap_or(0).min(*header_left);
        *header_left -= of_header;
        if *header_left <= text_bytes
            && *header != signature::between(self.header, self.call, self.rank, peer, self.rank)
            && (*header_left == 0 || !signature::is_header(header))
        {
            return Err(Fault::Header {
                peer,
                received: Box::new(*header),
                text: (self.texts.as_ref()).map_or(Vec::new(), |texts| texts.received.clone()),
            });
        }
        if self.arrivals.iter().all(Arrival::has_header) {
            self.last_to_enter = Some(peer);
        }
        let came_along = received.unwrap_or(0) - of_header;
        if let Some(number) = self.plan.incoming[pipe].head().filter(|_| came_along > 0) {
            self.reduce_tile(pipe, number, came_along);
        }
        Ok(received.is_some())
    }

    /// Bytes of payload that a pipe may carry into the tile together with the header.
    fn receivable_along(&self, pipe: usize) -> usize {
        let Some(number) = self.plan.incoming[pipe].head() else {
            return 0;
        };
        let operation = &self.plan.operations[number];
        match operation.action {
            Some(Action::Copy) => 0,
            _ => self.plan.watermark(number).min(ALONG_BYTES_MAX),
        }
    }

    fn receive_in_place(
        &mut self,
        pipe: usize,
        number: usize,
        left: usize,
        transport: &mut dyn Transport,
    ) -> Result<bool, Fault> {
        let peer = self.plan.incoming[pipe].peer;
        let operation = &mut self.plan.operations[number];
        let from = operation.position_bytes();
        let mut parts: [IoSliceMut<'_>; PARTS] = std::array::from_fn(|_| IoSliceMut::new(&mut []));
        let to = from + left.min(SEGMENT_BYTES);
        let filled = self.operands.buffer_mut().scatter(from..to, &mut parts);
        let received = transport
            .try_receive(peer, &mut parts[..filled])
            .map_err(|broken| Fault::Link { peer, broken })?;
        operation.moved_bytes += received.unwrap_or(0);
        self.plan.pass_received(pipe, number);
        Ok(received.is_some())
    }

    fn receive_and_reduce(
        &mut self,
        pipe: usize,
        number: usize,
        left: usize,
        transport: &mut dyn Transport,
    ) -> Result<bool, Fault> {
        let (peer, carried) = (self.plan.incoming[pipe].peer, self.arrivals[pipe].carried);
        let broken = |broken| Fault::Link { peer, broken };
        if carried == 0 {
            let size = self.plan.operations[number].element_bytes;
            if let Some(bytes) = transport.readable(peer).map_err(broken)? {
                let length = bytes.len().min(left).min(TILE_BYTES);
                let whole = length - length % size;
                // Unaligned or incomplete elements are received into the tile instead.
                if whole > 0 && bytes.as_ptr().addr().is_multiple_of(size) {
                    let operation = &self.plan.operations[number];
                    let (first, action) = (operation.reached(), action_of(operation));
                    self.plan.operations[number].moved_bytes += whole;
                    self.operands.combine(action, first, &bytes[..whole]);
                    transport.consume(peer, whole);
                    self.plan.pass_received(pipe, number);
                    return Ok(true);
                }
            }
        }
        let tile = bytes_of(self.tile);
        tile[..carried].copy_from_slice(&self.arrivals[pipe].carry[..carried]);
        let capacity = left.min(tile.len() - carried);
        let part = IoSliceMut::new(&mut tile[carried..carried + capacity]);
        let received = transport.try_receive(peer, &mut [part]).map_err(broken)?;
        if let Some(received) = received {
            self.reduce_tile(pipe, number, received);
        }
        Ok(received.is_some())
    }

    /// Reduces the elements in the tile: bytes carried over, then `received` new bytes.
    fn reduce_tile(&mut self, pipe: usize, number: usize, received: usize) {
        let arrival = &mut self.arrivals[pipe];
        let tile = bytes_of(self.tile);
        let operation = &mut self.plan.operations[number];
        let (first, action) = (operation.reached(), action_of(operation));
        operation.moved_bytes += received;
        let held = arrival.carried + received;
        let whole = held - held % operation.element_bytes;
        arrival.carried = held - whole;
        arrival.carry[..held - whole].copy_from_slice(&tile[whole..held]);

        self.operands.combine(action, first, &tile[..whole]);
        self.plan.pass_received(pipe, number);
    }

    /// Folds a tile of this rank's own contribution, or reduces one that was set aside, if its turn
    /// has come.
    fn advance_own(&mut self) -> bool {
        let Some(number) = self.plan.own.head() else {
            return false;
        };
        let ready = self.plan.watermark(number);
        let operation = &mut self.plan.operations[number];
        let bytes = (ready - operation.moved_bytes).min(TILE_BYTES);
        if bytes == 0 {
            return false;
        }
        let count = bytes / operation.element_bytes;
        let (first, action) = (operation.reached(), action_of(operation));
        operation.moved_bytes += bytes;
        if operation.left_bytes() == 0 {
            self.plan.own.advance();
        }
        let range = first..first + count;
        match action {
            Action::Fold(turn) => self.operands.fold_own(turn, range),
            _ => self.operands.reduce_set_aside(action, range),
        }
        true
    }

    /// Byte range that a send may offer now.
    fn sendable(&self, number: usize) -> Range<usize> {
        let operation = &self.plan.operations[number];
        let from = operation.position_bytes();
        let left = self.plan.watermark(number) - operation.moved_bytes;
        from..from + left.min(SEGMENT_BYTES)
    }
}

fn action_of(receive: &Operation) -> Action {
    receive.action.expect("a receive has an action")
}
