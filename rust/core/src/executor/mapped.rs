//! An all-reduce of buffers that lie in the heaps of their ranks (`gradring_net::link::Heap`), where
//! all ranks read them. No bytes travel.
//!
//! In the first turn of the slots, each rank publishes where its buffer begins. Each following turn
//! is one section of the buffers: a rank folds its own chunk of the section over all ranks, in
//! their order, into its own buffer. It publishes the turn, and copies the chunks of the others as
//! they publish theirs. A section is so short that these are still in a cache. After the last turn
//! no rank reads any more, so all may write into their buffers again.
//!
//! The results have the bits of the direct algorithm. A rank writes only into its own memory, so
//! one that comes late, after the group has failed, changes nothing of another. It may read what a
//! program has written after the failure. So a rank that fails says so first, and one that has read
//! all looks for that before it ends.

use std::ops::Range;

use super::meeting::{Meeting, slots_of};
use super::operands::fold;
use super::{Fault, Part, Progress, Scratch};
use gradring_net::link::{Slots, Transport};
use gradring_proto::buffer::{Buffer, reserve};
use gradring_proto::dtype::ReduceOp;
use gradring_proto::error::Error;
use gradring_proto::schedule::{Turn, chunk};

/// Bytes of the accumulator: it stays in L1 cache, with what is folded into it.
const BLOCK_BYTES: usize = 16 << 10;

/// Bytes that a rank folds or copies at a time, before it looks whether the group has failed.
const SLICE_BYTES: usize = 256 << 10;

/// Bytes that each rank folds in a section: more than a turn costs, and less than a cache holds.
const CHUNK_BYTES: usize = 256 << 10;

/// Bytes of a message: the offset of a buffer in its heap.
const MESSAGE_BYTES: usize = size_of::<u64>();

/// One all-reduce under way.
pub(crate) struct Mapped<'a> {
    buffer: &'a mut Buffer,
    pub(super) meeting: Meeting<'a>,
    op: ReduceOp,
    /// The fold of a block, if the buffer does not hold it.
    block: Buffer,
    widened: &'a mut Vec<u64>,
    stage: Stage,
    /// Offset of each rank's buffer in its heap. A copy, because peers might change the original
    /// after the check.
    offsets: &'a mut Vec<usize>,
    /// Elements of the section.
    section: Range<usize>,
    /// Elements of it that are still to be folded, or copied from the rank whose turn it is.
    left: Range<usize>,
    /// Number of ranks that had published the turn, when this rank last looked.
    arrived: usize,
    /// Bytes of payload that peers have read or may read.
    pub(super) bytes_sent: u64,
}

/// Stages of the collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Nothing is published.
    Entering,
    /// The place of the buffer is published.
    Meeting,
    /// All places are known, and this rank folds its chunk of the section.
    Folding,
    /// The chunk is published, and this rank copies the chunk of another one.
    Copying(usize),
    /// This rank reads nothing any more.
    Leaving,
}

impl<'a> Mapped<'a> {
    /// Prepares a rank's part in a call over `buffer`.
    ///
    /// # Errors
    /// `Exhausted` when there is no memory for it.
    pub(super) fn new(
        buffer: &'a mut Buffer,
        part: Part<'a>,
        scratch: &'a mut Scratch,
    ) -> Result<Self, Error> {
        let op = part.call.collective.op().expect("all-reduces are mapped");
        let (memory, widened) = scratch.beside.for_fold();
        reserve(memory, BLOCK_BYTES, "results")?;
        let dtype = buffer.dtype().accumulator(op);
        let start = memory.as_mut_ptr().cast();
        // SAFETY: the memory is borrowed for as long as this collective, and holds these elements;
        // nothing else refers to it.
        let block = unsafe { Buffer::contiguous(dtype, start, BLOCK_BYTES / dtype.size_bytes()) };
        let meeting = Meeting::new(&part, &mut scratch.interests);
        Ok(Self {
            section: 0..0,
            left: 0..0,
            buffer,
            meeting,
            op,
            block,
            widened,
            stage: Stage::Entering,
            offsets: &mut scratch.offsets,
            arrived: 0,
            bytes_sent: 0,
        })
    }

    /// Returns whether this rank need not publish anything more.
    pub(super) fn has_sent_all(&self) -> bool {
        self.stage == Stage::Leaving
    }

    /// Tells the others, after a failure, that the buffer may change from now on.
    pub(super) fn abandon(&self, transport: &mut dyn Transport) {
        if self.stage != Stage::Entering {
            slots_of(transport).abandon();
        }
    }

    /// Looks whether a peer that `advance` does not see yet performs another collective.
    pub(super) fn look_at_all(&self, transport: &mut dyn Transport) -> Result<(), Fault> {
        self.meeting.look_at_all(self.arrived, transport)
    }

    /// Moves a slice, if that is possible without waiting.
    pub(super) fn advance(&mut self, transport: &mut dyn Transport) -> Result<Progress, Fault> {
        let slots = slots_of(transport);
        match self.stage {
            Stage::Entering => {
                self.enter(slots);
                return Ok(Progress::Moved);
            }
            Stage::Folding => {
                self.fold_slice(slots);
                return Ok(Progress::Moved);
            }
            Stage::Copying(rank) if rank < self.arrived => {
                self.copy_slice(rank, slots);
                return Ok(Progress::Moved);
            }
            Stage::Meeting | Stage::Copying(_) | Stage::Leaving => {}
        }
        let before = self.arrived;
        self.arrived = self.meeting.poll(slots)?;
        let all = self.arrived == self.meeting.world_size;
        match self.stage {
            Stage::Leaving if all => {
                return Ok(match slots.abandoned_by() {
                    None => Progress::Done,
                    // The values that this rank has read may be wrong. The peer knows why the group has failed.
                    Some(peer) => {
                        self.meeting.wait_for_news_of(peer);
                        Progress::Blocked
                    }
                });
            }
            Stage::Meeting if all => self.begin_fold(slots)?,
            Stage::Copying(_) if self.arrived > before => {}
            _ => {
                self.meeting.wait_for(self.arrived, slots);
                return Ok(match self.arrived > before {
                    true => Progress::Moved,
                    false => Progress::Blocked,
                });
            }
        }
        Ok(Progress::Moved)
    }

    /// Publishes where this rank's buffer is.
    fn enter(&mut self, slots: &mut Slots) {
        let heap = slots.heap().expect("the group agreed on heaps").addresses();
        let offset = (self.buffer.start().addr() - heap.start) as u64;
        let message = offset.to_ne_bytes();
        let parts = [(0, &message[..])].into_iter();
        slots.begin(&self.meeting.header, MESSAGE_BYTES, parts);
        self.publish(slots, Stage::Meeting);
        self.bytes_sent += self.bytes(self.buffer.count()) as u64;
    }

    fn publish(&mut self, slots: &mut Slots, next: Stage) {
        slots.publish();
        (self.stage, self.arrived) = (next, 0);
    }

    /// Begins the fold, once the places of all buffers are known.
    fn begin_fold(&mut self, slots: &Slots) -> Result<(), Fault> {
        let bytes = self.bytes(self.buffer.count());
        self.offsets.clear();
        for peer in 0..self.meeting.world_size {
            let offset = offset_of(slots, peer);
            let is_aligned = offset.is_multiple_of(self.buffer.dtype().size_bytes());
            if !is_aligned || !slots.heap_holds(offset, bytes) {
                return Err(Fault::OutsideHeap { peer });
            }
            self.offsets.push(offset);
        }
        self.meeting.all_have_entered();
        self.begin_section();
        Ok(())
    }

    /// Begins the fold of the section that follows.
    fn begin_section(&mut self) {
        let most = self.meeting.world_size * CHUNK_BYTES / self.buffer.dtype().size_bytes();
        let start = self.section.end;
        self.section = start..self.buffer.count().min(start + most);
        self.left = self.chunk_of(self.meeting.rank);
        self.stage = Stage::Folding;
    }

    /// Folds a slice of this rank's chunk, and publishes the chunk when it is complete.
    fn fold_slice(&mut self, slots: &mut Slots) {
        let slice = self.next_slice();
        let elements = self.block.count();
        for first in slice.clone().step_by(elements) {
            self.fold_block(slots, first..slice.end.min(first + elements));
        }
        if self.left.is_empty() {
            let own = self.chunk_of(self.meeting.rank).len();
            self.bytes_sent += self.bytes(own) as u64;
            self.left = self.chunk_of(0);
            self.publish(slots, Stage::Copying(0));
        }
    }

    /// Folds a block over all ranks, in their order.
    fn fold_block(&mut self, slots: &Slots, range: Range<usize>) {
        let in_place = self.meeting.rank == 0 && self.block.dtype() == self.buffer.dtype();
        let folded = match in_place {
            true => {
                self.fold_in_place(slots, &range);
                None
            }
            false => {
                self.fold_beside(slots, &range);
                Some((&self.block, 0))
            }
        };
        let world_size = self.meeting.world_size;
        self.buffer.finish_from(folded, self.op, world_size, range);
    }

    /// Folds into the buffer, which has the contribution of rank 0.
    fn fold_in_place(&mut self, slots: &Slots, range: &Range<usize>) {
        for rank in 1..self.meeting.world_size {
            let source = slots.read_heap(rank, self.place(rank, range));
            self.buffer.reduce_from(self.op, range.start, source);
        }
    }

    /// Folds into the block.
    fn fold_beside(&mut self, slots: &Slots, range: &Range<usize>) {
        let (dtype, last) = (self.buffer.dtype(), self.meeting.world_size - 1);
        for rank in 0..=last {
            let source = match rank == self.meeting.rank {
                true => self.buffer.elements(range.clone()).next().unwrap_or(&[]),
                false => slots.read_heap(rank, self.place(rank, range)),
            };
            let turn = match rank {
                0 => Turn::First,
                rank if rank == last => Turn::Last,
                _ => Turn::Middle,
            };
            fold(
                turn,
                self.op,
                &mut self.block,
                0,
                dtype,
                source,
                self.widened,
            );
        }
    }

    /// Copies a slice of a rank's chunk. After the last chunk, turns to the next section, or tells
    /// that this rank reads no more.
    fn copy_slice(&mut self, rank: usize, slots: &mut Slots) {
        let slice = self.next_slice();
        if rank != self.meeting.rank {
            let source = slots.read_heap(rank, self.place(rank, &slice));
            let dtype = self.buffer.dtype();
            self.buffer.widen_from(slice.start, dtype, source);
        }
        if !self.left.is_empty() && rank != self.meeting.rank {
            return;
        }
        if rank + 1 < self.meeting.world_size {
            self.left = self.chunk_of(rank + 1);
            self.stage = Stage::Copying(rank + 1);
        } else if self.section.end < self.buffer.count() {
            self.begin_section();
        } else {
            self.publish(slots, Stage::Leaving);
        }
    }

    /// Takes the next slice from what is left.
    fn next_slice(&mut self) -> Range<usize> {
        let most = SLICE_BYTES / self.buffer.dtype().size_bytes();
        let first = self.left.start;
        let end = self.left.end.min(first + most);
        self.left.start = end;
        first..end
    }

    /// The chunk of a rank in the section.
    fn chunk_of(&self, rank: usize) -> Range<usize> {
        let start = self.section.start;
        let chunk = chunk(self.section.len(), self.meeting.world_size, rank);
        start + chunk.start..start + chunk.end
    }

    const fn bytes(&self, elements: usize) -> usize {
        elements * self.buffer.dtype().size_bytes()
    }

    /// Place in a rank's heap of these elements.
    fn place(&self, rank: usize, elements: &Range<usize>) -> Range<usize> {
        let buffer = self.offsets[rank];
        buffer + self.bytes(elements.start)..buffer + self.bytes(elements.end)
    }
}

/// Offset of a rank's buffer in its heap, which the rank has published.
fn offset_of(slots: &Slots, rank: usize) -> usize {
    let message = slots.read(rank, MESSAGE_BYTES, 0..MESSAGE_BYTES);
    u64::from_ne_bytes(message.try_into().expect("eight bytes")) as usize
}
