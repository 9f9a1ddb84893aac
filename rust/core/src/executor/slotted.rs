//! A collective of a small buffer through the slots of all ranks (`gradring_net::link::Slots`).
//!
//! In the first turn each rank publishes what it has for the others. In a reduction it folds the
//! contributions of all ranks in the order of ranks: all elements (one-shot), or those of its own
//! chunk (direct). In an all-reduce by chunks, it publishes its chunk in a second turn, and copies
//! those of the others. So the results have the bits of these algorithms over links.

use std::ops::Range;

use super::meeting::{Meeting, slots_of};
use super::operands::{BesideMemory, fold};
use super::{Fault, Part, Progress, Scratch};
use gradring_net::link::{Slots, Transport};
use gradring_proto::buffer::{Buffer, reserve};
use gradring_proto::collective::Collective;
use gradring_proto::dtype::ReduceOp;
use gradring_proto::error::Error;
use gradring_proto::schedule::{Algorithm, Turn, chunk, chunks_of};

/// One collective under way.
pub(crate) struct Slotted<'a> {
    buffer: &'a mut Buffer,
    pub(super) meeting: Meeting<'a>,
    /// Elements that this rank publishes first; they keep their places in its message.
    sent: [Range<usize>; 2],
    /// The fold, if this is a reduction.
    fold: Option<Folding<'a>>,
    /// Elements that this rank copies in the last turn, by the rank that has them.
    copied: Vec<Copied>,
    stage: Stage,
    /// Ranks whose slots this rank has read in this stage.
    read: usize,
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
        Ok(Self {
            buffer,
            meeting: Meeting::new(&part, &mut scratch.interests),
            sent,
            fold,
            copied,
            stage: Stage::Entering,
            read: 0,
            bytes_sent: 0,
        })
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
        let arrived = self.meeting.poll(slots_of(transport))?;
        self.read_slots(slots_of(transport), arrived);
        if arrived < self.meeting.world_size {
            self.meeting.wait_for(arrived, slots_of(transport));
            let moved = enters || self.read > before;
            return Ok(if moved {
                Progress::Moved
            } else {
                Progress::Blocked
            });
        }
        self.meeting.all_have_entered();
        if self.stage == Stage::Folding
            && let Some(fold) = &self.fold
        {
            fold.finish(self.buffer, self.meeting.world_size);
        }
        if self.has_sent_all() {
            return Ok(Progress::Done);
        }
        self.publish_results(slots_of(transport));
        Ok(Progress::Moved)
    }

    /// Looks whether a peer that `advance` does not see yet performs another collective.
    pub(super) fn look_at_all(&self, transport: &mut dyn Transport) -> Result<(), Fault> {
        self.meeting.look_at_all(self.read, transport)
    }

    /// Publishes what this rank has at the start.
    fn enter(&mut self, slots: &mut Slots) {
        let element = self.buffer.dtype().size_bytes();
        self.bytes_sent += (self.sent.iter().map(Range::len).sum::<usize>() * element) as u64;
        let sent = self.sent.iter().cloned();
        let parts = sent.flat_map(|range| placed(self.buffer, range));
        slots.begin(&self.meeting.header, self.buffer.count() * element, parts);
        slots.publish();
        self.stage = match self.fold {
            Some(_) => Stage::Folding,
            None => Stage::Copying,
        };
    }

    /// Publishes this rank's finished chunk.
    fn publish_results(&mut self, slots: &mut Slots) {
        let element = self.buffer.dtype().size_bytes();
        let own = self.copied[self.meeting.rank].from.clone();
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
                    fold.add(
                        self.buffer,
                        (rank, self.meeting.rank, self.meeting.world_size),
                        source,
                    );
                }
                // This rank has its own elements.
                _ if rank == self.meeting.rank => {}
                _ => {
                    let Copied { from, to } = &self.copied[rank];
                    let source = slots.read(rank, whole, bytes(from));
                    self.buffer.widen_from(*to, dtype, source);
                }
            }
        }
        self.read = self.read.max(arrived);
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

/// The memory of a range of elements, piece by piece, each with its first byte in the buffer.
fn placed(buffer: &Buffer, range: Range<usize>) -> impl Iterator<Item = (usize, &[u8])> {
    let mut at = range.start * buffer.dtype().size_bytes();
    buffer.elements(range).map(move |piece| {
        let start = at;
        at += piece.len();
        (start, piece)
    })
}
