//! A collective of a small buffer through the slots of all ranks (`gradring_net::link::Slots`).
//!
//! In the first turn each rank publishes its contribution, and folds those of all ranks in the order
//! of ranks: all of them (one-shot), or those to its own chunk (direct). Then it publishes the
//! finished chunk in a second turn, and copies those of the others. So the results have the bits of
//! these algorithms over links.
//!
//! A rank that waits here does not see what others send over links, and those do not see its slot.
//! So a rank that waits long looks there, and finds peers that perform another collective.

use std::ops::Range;

use super::operands::fold;
use super::{Fault, Part, Progress, Scratch};
use gradring_net::link::{Direction, Interest, Slots, Transport};
use gradring_proto::buffer::{Buffer, reserve};
use gradring_proto::dtype::ReduceOp;
use gradring_proto::error::Error;
use gradring_proto::schedule::{Algorithm, Turn, chunk};
use gradring_proto::wire::signature::{self, HEADER_BYTES, Header};

/// One collective under way.
pub(crate) struct Slotted<'a> {
    buffer: &'a mut Buffer,
    op: ReduceOp,
    rank: usize,
    world_size: usize,
    header: Header,
    /// `true` if each rank folds all elements, and so needs no second turn.
    in_one_turn: bool,
    /// Elements that this rank folds.
    range: Range<usize>,
    /// The fold of `range` so far, if the buffer does not hold it.
    wide: Option<Buffer>,
    widened: &'a mut Vec<u64>,
    stage: Stage,
    /// Ranks whose slots this rank has read in this stage.
    read: usize,
    /// First rank that has not published, when this rank last looked.
    awaited: Option<usize>,
    interests: &'a mut Vec<Interest>,
    /// Peer that entered last, once all have entered.
    pub(super) last_to_enter: Option<usize>,
    /// Bytes of payload published so far.
    pub(super) bytes_sent: u64,
}

/// Stages of a collective.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Nothing is published.
    Entering,
    /// The contribution is published, and those of others are folded.
    Folding,
    /// The finished chunk is published, and those of others are copied.
    Copying,
}

impl<'a> Slotted<'a> {
    /// Prepares a rank's part in a call over `buffer`.
    ///
    /// # Errors
    /// `Exhausted` when there is no memory for it.
    pub(super) fn new(
        buffer: &'a mut Buffer,
        part: Part<'a>,
        scratch: &'a mut Scratch,
    ) -> Result<Self, Error> {
        let world_size = part.topology.world_size();
        let op = part
            .call
            .collective
            .op()
            .expect("only reductions use slots");
        let in_one_turn = part.algorithm == Algorithm::OneShot;
        let range = match in_one_turn {
            true => 0..buffer.count(),
            false => chunk(buffer.count(), world_size, part.rank),
        };
        let (memory, widened) = scratch.beside.for_fold();
        let accumulator = buffer.dtype().accumulator(op);
        let wide = if accumulator == buffer.dtype() {
            None
        } else {
            let bytes = range.len() * accumulator.size_bytes();
            reserve(memory, bytes, "results")?;
            let start = memory.as_mut_ptr().cast();
            // SAFETY: the memory is borrowed for as long as this collective, and holds these
            // elements; nothing else refers to it.
            Some(unsafe { Buffer::contiguous(accumulator, start, range.len()) })
        };
        scratch.interests.clear();
        Ok(Self {
            buffer,
            op,
            rank: part.rank,
            world_size,
            in_one_turn,
            header: part.header,
            range,
            wide,
            widened,
            stage: Stage::Entering,
            read: 0,
            awaited: None,
            interests: &mut scratch.interests,
            last_to_enter: None,
            bytes_sent: 0,
        })
    }

    pub(super) const fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn interests(&self) -> &[Interest] {
        self.interests
    }

    pub(super) fn awaited(&self) -> Vec<usize> {
        self.interests
            .iter()
            .map(|interest| interest.peer)
            .collect()
    }

    pub(super) fn late(&self) -> (Vec<usize>, bool) {
        (self.awaited(), self.stage == Stage::Copying)
    }

    /// Returns whether this rank need not publish anything more.
    pub(super) fn has_sent_all(&self) -> bool {
        match self.stage {
            Stage::Entering => false,
            Stage::Folding => self.in_one_turn,
            Stage::Copying => true,
        }
    }

    /// Moves everything that can move without waiting.
    pub(super) fn advance(&mut self, transport: &mut dyn Transport) -> Result<Progress, Fault> {
        let entered = self.stage == Stage::Entering;
        if entered {
            self.enter(slots_of(transport));
            self.stage = Stage::Folding;
        }
        let before = self.read;
        let arrived = slots_of(transport).poll().map_err(|peer| {
            let received = slots_of(transport).header_of(peer);
            self.fault(peer, received)
        })?;
        if arrived == self.world_size {
            slots_of(transport).wake_sleepers();
        }
        self.read_slots(slots_of(transport), arrived);
        if arrived < self.world_size {
            self.wait_for(arrived, slots_of(transport));
            let moved = entered || self.read > before;
            return Ok(if moved {
                Progress::Moved
            } else {
                Progress::Blocked
            });
        }
        if self.stage == Stage::Copying {
            return Ok(Progress::Done);
        }
        self.last_to_enter = self.awaited.or(Some(self.any_peer()));
        let wide = self.wide.as_ref().map(|wide| (wide, 0));
        let range = self.range.clone();
        self.buffer
            .finish_from(wide, self.op, self.world_size, range);
        if self.has_sent_all() {
            return Ok(Progress::Done);
        }
        self.publish_results(slots_of(transport));
        (self.stage, self.read) = (Stage::Copying, 0);
        Ok(Progress::Moved)
    }

    /// Looks whether a peer that has not entered sends something over a link.
    pub(super) fn look_into_pipes(&self, transport: &mut dyn Transport) -> Result<(), Fault> {
        for &Interest { peer, .. } in &*self.interests {
            let broken = |broken| Fault::Link { peer, broken };
            let found = transport.readable(peer).map_err(broken)?;
            let found = found.and_then(|bytes| bytes.first_chunk::<HEADER_BYTES>().copied());
            // A peer publishes before it sends bytes of a later collective.
            if let Some(received) = found
                && !slots_of(transport).has_published(peer)
            {
                return Err(Fault::Header {
                    peer,
                    received: Box::new(received),
                    text: Vec::new(),
                });
            }
        }
        Ok(())
    }

    /// Publishes this rank's contribution.
    fn enter(&mut self, slots: &mut Slots) {
        let count = self.buffer.count();
        let bytes = count * self.buffer.dtype().size_bytes();
        self.bytes_sent += bytes as u64;
        slots.begin(&self.header, bytes, placed(self.buffer, 0..count));
        slots.publish();
    }

    /// Publishes this rank's finished chunk.
    fn publish_results(&mut self, slots: &mut Slots) {
        let element = self.buffer.dtype().size_bytes();
        self.bytes_sent += (self.range.len() * element) as u64;
        for (at, part) in placed(self.buffer, self.range.clone()) {
            slots.write(self.buffer.count() * element, at, part);
        }
        slots.publish();
    }

    /// Reads the slots of the ranks up to `arrived`.
    fn read_slots(&mut self, slots: &Slots, arrived: usize) {
        let count = self.buffer.count();
        for rank in self.read..arrived {
            let range = match self.stage {
                Stage::Copying => chunk(count, self.world_size, rank),
                Stage::Entering | Stage::Folding => self.range.clone(),
            };
            let element = self.buffer.dtype().size_bytes();
            let bytes = range.start * element..range.end * element;
            let source = slots.read(rank, count * element, bytes);
            match self.stage {
                Stage::Copying if rank == self.rank => {}
                Stage::Copying => {
                    let dtype = self.buffer.dtype();
                    self.buffer.widen_from(range.start, dtype, source);
                }
                Stage::Entering | Stage::Folding => self.fold(rank, source),
            }
        }
        self.read = self.read.max(arrived);
    }

    /// Folds a rank's contribution, after those of all ranks before it.
    fn fold(&mut self, rank: usize, source: &[u8]) {
        let (dtype, op, first) = (self.buffer.dtype(), self.op, self.range.start);
        let turn = self.turn(rank);
        match &mut self.wide {
            Some(wide) => fold(turn, op, wide, 0, dtype, source, self.widened),
            None if rank > 0 => self.buffer.reduce_from(op, first, source),
            // The buffer of rank 0 has its contribution.
            None if self.rank == 0 => {}
            None => self.buffer.widen_from(first, dtype, source),
        }
    }

    const fn turn(&self, rank: usize) -> Turn {
        match rank {
            0 => Turn::First,
            rank if rank + 1 == self.world_size => Turn::Last,
            _ => Turn::Middle,
        }
    }

    fn wait_for(&mut self, first: usize, slots: &Slots) {
        self.awaited = Some(first);
        self.interests.clear();
        let missing = (first..self.world_size).filter(|&rank| !slots.has_published(rank));
        self.interests.extend(missing.map(|peer| Interest {
            peer,
            direction: Direction::Receive,
        }));
    }

    const fn any_peer(&self) -> usize {
        match self.rank + 1 == self.world_size {
            true => self.rank - 1,
            false => self.world_size - 1,
        }
    }

    fn fault(&self, peer: usize, received: Header) -> Fault {
        Fault::Header {
            peer,
            received: Box::new(signature::with_endpoints(received, peer, self.rank)),
            text: Vec::new(),
        }
    }
}

fn slots_of(transport: &mut dyn Transport) -> &mut Slots {
    transport.slots().expect("the group agreed on slots")
}

/// The memory of a range of elements, piece by piece, each with its first byte in the buffer.
fn placed(buffer: &Buffer, range: Range<usize>) -> impl Iterator<Item = (usize, &[u8])> {
    let mut at = range.start * buffer.dtype().size_bytes();
    buffer.elements(range).map(move |piece| {
        let start = at;
        at += piece.len();
        (start, piece)
    })
}
