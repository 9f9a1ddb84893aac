//! A collective of a small buffer through the slots of all ranks (`gradring_net::link::Slots`).
//!
//! In the first turn each rank publishes what it has for the others. In a reduction it folds the
//! contributions of all ranks in the order of ranks: all elements (one-shot), or those of its own
//! chunk (direct). In an all-reduce by chunks, it publishes its chunk in a second turn, and copies
//! those of the others. So the results have the bits of these algorithms over links.
//!
//! A rank that waits here does not see what others send over links, and those do not see its slot.
//! So a rank that waits long looks there, and finds peers that perform another collective.

use std::ops::Range;

use super::operands::{BesideMemory, fold};
use super::{Fault, Part, Progress, Scratch};
use gradring_net::link::{Direction, Interest, Slots, Transport};
use gradring_proto::buffer::{Buffer, reserve};
use gradring_proto::collective::Collective;
use gradring_proto::dtype::ReduceOp;
use gradring_proto::error::Error;
use gradring_proto::schedule::{Algorithm, Turn, chunk, chunks_of};
use gradring_proto::wire::signature::{self, HEADER_BYTES, Header};

/// One collective under way.
pub(crate) struct Slotted<'a> {
    buffer: &'a mut Buffer,
    rank: usize,
    world_size: usize,
    header: Header,
    /// Elements that this rank publishes first; they keep their places in its message.
    sent: [Range<usize>; 2],
    /// The fold, if this is a reduction.
    fold: Option<Folding<'a>>,
    /// Elements that this rank copies in the last turn, by the rank that has them.
    copied: Vec<Copied>,
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

/// A fold of the contributions of all ranks.
struct Folding<'a> {
    op: ReduceOp,
    /// Elements that this rank folds.
    range: Range<usize>,
    /// The fold so far, if the buffer does not hold it.
    wide: Option<Buffer>,
    widened: &'a mut Vec<u64>,
}

/// Elements of another rank's message, and the place of the first in this rank's buffer.
struct Copied {
    from: Range<usize>,
    to: usize,
}

/// Stages of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Nothing is published.
    Entering,
    /// The contribution is published, and those of others are folded.
    Folding,
    /// All elements for others are published, and theirs are copied.
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
        let (rank, world_size) = (part.rank, part.topology.world_size());
        let count = buffer.count();
        let chunks = |count| (0..world_size).map(move |rank| chunk(count, world_size, rank));
        let in_place = |from: Range<usize>| Copied {
            to: from.start,
            from,
        };
        let whole = [0..count, 0..0];
        let (sent, folded, copied): (_, _, Vec<Copied>) = match &part.call.collective {
            Collective::AllGather { counts } => {
                let chunks = chunks_of(counts);
                let own = chunks[rank].clone();
                (
                    [own, 0..0],
                    None,
                    chunks.into_iter().map(in_place).collect(),
                )
            }
            Collective::AllToAll => {
                let own = chunk(count / 2, world_size, rank);
                let to = chunks(count / 2).map(|chunk| Copied {
                    from: own.clone(),
                    to: count / 2 + chunk.start,
                });
                // The chunk of this rank for itself stays where it is.
                let sent = [0..own.start, own.end..count / 2];
                (sent, None, to.collect())
            }
            Collective::ReduceScatter { counts, .. } => {
                let own = chunks_of(counts)[rank].clone();
                (whole, Some(own), Vec::new())
            }
            _ if part.algorithm == Algorithm::OneShot => (whole, Some(0..count), Vec::new()),
            _ => {
                let own = chunk(count, world_size, rank);
                (whole, Some(own), chunks(count).map(in_place).collect())
            }
        };
        let op = part.call.collective.op();
        let fold = match op.zip(folded) {
            Some((op, range)) => Some(Folding::new(buffer, op, range, &mut scratch.beside)?),
            None => None,
        };
        scratch.interests.clear();
        Ok(Self {
            buffer,
            rank,
            world_size,
            header: part.header,
            sent,
            fold,
            copied,
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
        (self.awaited(), self.last_to_enter.is_some())
    }

    /// Returns whether this rank need not publish anything more.
    pub(super) fn has_sent_all(&self) -> bool {
        match self.stage {
            Stage::Entering => false,
            Stage::Folding => self.copied.is_empty(),
            Stage::Copying => true,
        }
    }

    /// Moves everything that can move without waiting.
    pub(super) fn advance(&mut self, transport: &mut dyn Transport) -> Result<Progress, Fault> {
        let enters = self.stage == Stage::Entering;
        if enters {
            self.enter(slots_of(transport));
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
            let moved = enters || self.read > before;
            return Ok(if moved {
                Progress::Moved
            } else {
                Progress::Blocked
            });
        }
        if self.last_to_enter.is_none() {
            self.last_to_enter = self.awaited.or(Some(self.any_peer()));
        }
        if self.stage == Stage::Folding
            && let Some(fold) = &self.fold
        {
            fold.finish(self.buffer, self.world_size);
        }
        if self.has_sent_all() {
            return Ok(Progress::Done);
        }
        self.publish_results(slots_of(transport));
        Ok(Progress::Moved)
    }

    /// Looks whether a peer that `advance` does not see yet performs another collective: a peer
    /// behind the first that is missing, or one that sends something over its link.
    pub(super) fn look_at_all(&self, transport: &mut dyn Transport) -> Result<(), Fault> {
        for peer in (self.read..self.world_size).filter(|&peer| peer != self.rank) {
            let found = match transport.readable(peer) {
                Ok(bytes) => {
                    Ok(bytes.and_then(|bytes| bytes.first_chunk::<HEADER_BYTES>().copied()))
                }
                Err(broken) => Err(Fault::Link { peer, broken }),
            };
            // A peer publishes before it goes on, which may be the end of its link.
            let slots = slots_of(transport);
            if slots.has_published(peer) {
                if slots.differs(peer) {
                    return Err(self.fault(peer, slots.header_of(peer)));
                }
            } else if let Some(received) = found? {
                return Err(Fault::Header {
                    peer,
                    received: Box::new(received),
                    text: Vec::new(),
                });
            }
        }
        Ok(())
    }

    /// Publishes what this rank has at the start.
    fn enter(&mut self, slots: &mut Slots) {
        let element = self.buffer.dtype().size_bytes();
        self.bytes_sent += (self.sent.iter().map(Range::len).sum::<usize>() * element) as u64;
        let sent = self.sent.iter().cloned();
        let parts = sent.flat_map(|range| placed(self.buffer, range));
        slots.begin(&self.header, self.buffer.count() * element, parts);
        slots.publish();
        self.stage = match self.fold {
            Some(_) => Stage::Folding,
            None => Stage::Copying,
        };
    }

    /// Publishes this rank's finished chunk.
    fn publish_results(&mut self, slots: &mut Slots) {
        let element = self.buffer.dtype().size_bytes();
        let own = self.copied[self.rank].from.clone();
        self.bytes_sent += (own.len() * element) as u64;
        for (at, part) in placed(self.buffer, own) {
            slots.write(self.buffer.count() * element, at, part);
        }
        slots.publish();
        (self.stage, self.read) = (Stage::Copying, 0);
    }

    /// Reads the slots of the ranks up to `arrived`.
    fn read_slots(&mut self, slots: &Slots, arrived: usize) {
        let dtype = self.buffer.dtype();
        let element = dtype.size_bytes();
        let whole = self.buffer.count() * element;
        let bytes = |range: &Range<usize>| range.start * element..range.end * element;
        for rank in self.read..arrived {
            match &mut self.fold {
                Some(fold) if self.stage == Stage::Folding => {
                    let source = slots.read(rank, whole, bytes(&fold.range));
                    fold.add(self.buffer, (rank, self.rank, self.world_size), source);
                }
                // This rank has its own elements.
                _ if rank == self.rank => {}
                _ => {
                    let Copied { from, to } = &self.copied[rank];
                    let source = slots.read(rank, whole, bytes(from));
                    self.buffer.widen_from(*to, dtype, source);
                }
            }
        }
        self.read = self.read.max(arrived);
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

impl<'a> Folding<'a> {
    fn new(
        buffer: &Buffer,
        op: ReduceOp,
        range: Range<usize>,
        memory: &'a mut BesideMemory,
    ) -> Result<Self, Error> {
        let (memory, widened) = memory.for_fold();
        let accumulator = buffer.dtype().accumulator(op);
        let wide = if accumulator == buffer.dtype() {
            None
        } else {
            reserve(memory, range.len() * accumulator.size_bytes(), "results")?;
            let start = memory.as_mut_ptr().cast();
            // SAFETY: the memory is borrowed for as long as this fold, and holds these elements;
            // nothing else refers to it.
            Some(unsafe { Buffer::contiguous(accumulator, start, range.len()) })
        };
        Ok(Self {
            op,
            range,
            wide,
            widened,
        })
    }

    /// Folds the contribution of `rank`, after those of all ranks before it.
    fn add(
        &mut self,
        buffer: &mut Buffer,
        (rank, own, world_size): (usize, usize, usize),
        source: &[u8],
    ) {
        let (dtype, first) = (buffer.dtype(), self.range.start);
        let turn = match rank {
            0 => Turn::First,
            rank if rank + 1 == world_size => Turn::Last,
            _ => Turn::Middle,
        };
        match &mut self.wide {
            Some(wide) => fold(turn, self.op, wide, 0, dtype, source, self.widened),
            None if rank > 0 => buffer.reduce_from(self.op, first, source),
            // The buffer of rank 0 has its contribution.
            None if own == 0 => {}
            None => buffer.widen_from(first, dtype, source),
        }
    }

    /// Turns the complete fold into final values.
    fn finish(&self, buffer: &mut Buffer, world_size: usize) {
        let wide = self.wide.as_ref().map(|wide| (wide, 0));
        buffer.finish_from(wide, self.op, world_size, self.range.clone());
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
