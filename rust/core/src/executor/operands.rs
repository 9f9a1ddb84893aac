//! Operands of one collective: the buffer, and memory beside it for values that are not final.

use std::ops::Range;
use std::sync::Arc;

use gradring_proto::buffer::{Buffer, reserve};
use gradring_proto::dtype::{DType, ReduceOp};
use gradring_proto::error::Result;
use gradring_proto::kernel;
use gradring_proto::schedule::{Action, Contents, Turn};

use super::plan::{Offsets, Plan};

/// Bytes widened at a time, into memory that stays in L1 cache.
const WIDE_BYTES: usize = 16 << 10;
const HAS_MEMORY: &str = "what is kept beside the buffer has memory";

/// Reusable memory for values beside the buffer.
#[derive(Default)]
pub(super) struct BesideMemory {
    /// Memory for folds and for values set aside; grows to the largest need of a call.
    beside: Vec<u64>,
    /// Grows to the largest accumulator.
    partials: Vec<u64>,
    widened: Vec<u64>,
}

impl BesideMemory {
    /// Returns memory for the results of a fold, and the memory that `fold` needs.
    pub(super) fn for_fold(&mut self) -> (&mut Vec<u64>, &mut Vec<u64>) {
        self.widened.resize(WIDE_BYTES / size_of::<u64>(), 0);
        (&mut self.beside, &mut self.widened)
    }
}

/// The memory of one collective.
pub(super) struct Operands<'a> {
    buffer: &'a mut Buffer,
    op: Option<ReduceOp>,
    world_size: usize,
    /// Memory of partial results, if the buffer does not hold them.
    accumulator: Option<Buffer>,
    /// Memory of folds or of partial results set aside, if the schedule has any.
    beside: Option<Beside>,
    widened: &'a mut Vec<u64>,
}

struct Beside {
    results: Buffer,
    offsets: Arc<Offsets>,
}

impl<'a> Operands<'a> {
    pub(super) fn new(
        buffer: &'a mut Buffer,
        op: Option<ReduceOp>,
        world_size: usize,
        plan: &Plan,
        memory: &'a mut BesideMemory,
    ) -> Result<Self> {
        let accumulator = match op.filter(|_| plan.keeps_partials) {
            // SAFETY: the memory is borrowed for as long as these operands live; nothing else
            // refers to it.
            Some(op) => unsafe { buffer.accumulator(op, &mut memory.partials)? },
            None => None,
        };
        let beside = match op.filter(|_| plan.offsets.count() > 0) {
            Some(op) => {
                let (dtype, count) = (buffer.dtype().accumulator(op), plan.offsets.count());
                reserve(&mut memory.beside, count * dtype.size_bytes(), "results")?;
                Some(Beside {
                    // SAFETY: the memory is borrowed for as long as these operands live, and holds
                    // `count` elements; nothing else refers to it.
                    results: unsafe {
                        Buffer::contiguous(dtype, memory.beside.as_mut_ptr().cast(), count)
                    },
                    offsets: Arc::clone(&plan.offsets),
                })
            }
            None => None,
        };
        memory.widened.resize(WIDE_BYTES / size_of::<u64>(), 0);
        Ok(Self {
            buffer,
            op,
            world_size,
            accumulator,
            beside,
            widened: &mut memory.widened,
        })
    }

    /// Buffer of values that are received in place.
    pub(super) fn buffer_mut(&mut self) -> &mut Buffer {
        self.buffer
    }

    /// Buffer from which these contents are sent.
    pub(super) fn source(&self, contents: Contents) -> &Buffer {
        match contents {
            Contents::Partial => self.accumulator.as_ref().unwrap_or(self.buffer),
            Contents::Final | Contents::Contribution => self.buffer,
        }
    }

    /// Combines received bytes, whole aligned elements, into the elements from `first` on.
    pub(super) fn combine(&mut self, action: Action, first: usize, received: &[u8]) {
        let op = self.op.expect("only reductions combine");
        let element_bytes = self.source(action.contents()).dtype().size_bytes();
        let range = first..first + received.len() / element_bytes;
        match action {
            Action::Copy => unreachable!("final values are received in place"),
            Action::Reduce | Action::ReduceAndFinish => {
                let target = self.accumulator.as_mut().unwrap_or(self.buffer);
                target.reduce_from(op, first, received);
                self.finish_reduction(action, op, range);
            }
            Action::SetAside => {
                let Beside { results, offsets } = self.beside.as_mut().expect(HAS_MEMORY);
                let dtype = results.dtype();
                results.widen_from(offsets.of(first), dtype, received);
            }
            Action::Fold(turn) => {
                let Beside { results, offsets } = self.beside.as_mut().expect(HAS_MEMORY);
                let dtype = self.buffer.dtype();
                fold(
                    turn,
                    op,
                    results,
                    offsets.of(first),
                    dtype,
                    received,
                    self.widened,
                );
                self.finish_fold(turn, op, range);
            }
        }
    }

    /// Folds this rank's own contribution to `range`.
    pub(super) fn fold_own(&mut self, turn: Turn, range: Range<usize>) {
        let op = self.op.expect("only reductions fold");
        let Beside { results, offsets } = self.beside.as_mut().expect(HAS_MEMORY);
        let dtype = self.buffer.dtype();
        let mut at = offsets.of(range.start);
        for piece in self.buffer.elements(range.clone()) {
            fold(turn, op, results, at, dtype, piece, self.widened);
            at += piece.len() / dtype.size_bytes();
        }
        self.finish_fold(turn, op, range);
    }

    /// Reduces the values that were set aside for `range`.
    pub(super) fn reduce_set_aside(&mut self, action: Action, range: Range<usize>) {
        let op = self.op.expect("only reductions set aside");
        let Beside { results, offsets } = self.beside.as_ref().expect(HAS_MEMORY);
        let first = offsets.of(range.start);
        let target = self.accumulator.as_mut().unwrap_or(self.buffer);
        let mut at = range.start;
        for piece in results.elements(first..first + range.len()) {
            target.reduce_from(op, at, piece);
            at += piece.len() / results.dtype().size_bytes();
        }
        self.finish_reduction(action, op, range);
    }

    fn finish_reduction(&mut self, action: Action, op: ReduceOp, range: Range<usize>) {
        if action == Action::ReduceAndFinish {
            let accumulator = self.accumulator.as_ref().map(|wide| (wide, range.start));
            self.buffer
                .finish_from(accumulator, op, self.world_size, range);
        }
    }

    fn finish_fold(&mut self, turn: Turn, op: ReduceOp, range: Range<usize>) {
        if turn == Turn::Last {
            let Beside { results, offsets } = self.beside.as_ref().expect(HAS_MEMORY);
            let first = offsets.of(range.start);
            self.buffer
                .finish_from(Some((results, first)), op, self.world_size, range);
        }
    }
}

/// Folds `contribution`, elements of `dtype`, into the results from `at` on.
pub(super) fn fold(
    turn: Turn,
    op: ReduceOp,
    results: &mut Buffer,
    at: usize,
    dtype: DType,
    contribution: &[u8],
    widened: &mut [u64],
) {
    let accumulator = results.dtype();
    if turn == Turn::First {
        results.widen_from(at, dtype, contribution);
    } else if accumulator == dtype {
        results.reduce_from(op, at, contribution);
    } else {
        let (size, wide_size) = (dtype.size_bytes(), accumulator.size_bytes());
        let block_count = size_of_val(widened) / wide_size;
        for (number, block) in contribution.chunks(block_count * size).enumerate() {
            let count = block.len() / size;
            let wide = widened.as_mut_ptr().cast::<u8>();
            // SAFETY: `widened` has memory for `block_count` elements of the accumulator; `block`
            // holds `count` aligned elements; they are disjoint.
            let wide = unsafe {
                kernel::widen(dtype, accumulator, wide, block.as_ptr(), count);
                std::slice::from_raw_parts(wide, count * wide_size)
            };
            results.reduce_from(op, at + number * block_count, wide);
        }
    }
}
