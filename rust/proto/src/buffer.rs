//! Memory that a collective reads and writes: one bucket, made of one or several slices.

use std::any::Any;
use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;

use smallvec::SmallVec;

use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};
use crate::kernel;

/// One contiguous, element-aligned piece of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slice {
    /// First byte.
    pub start: *mut u8,
    /// Length in elements.
    pub count: usize,
}

/// A slice of a buffer, and the position of its first element in the buffer.
struct Placed {
    slice: Slice,
    first: usize,
}

// SAFETY: a Slice is an address and a length; `Buffer::new` makes its caller answer for access.
unsafe impl Send for Slice {}
// SAFETY: as above.
unsafe impl Sync for Slice {}

/// Slices of one element type, with the owner of their memory.
///
/// Fusing gradients costs no copy: the slices stay where they are, and a schedule's element
/// ranges run over their concatenation.
pub struct Buffer {
    dtype: DType,
    /// Most buffers have one slice, and so need no heap memory for the list.
    slices: SmallVec<[Placed; 1]>,
    count: usize,
    /// Dropped when the collective has ended, before its work is reported as done.
    _keepalive: Box<dyn Any + Send>,
}

impl Buffer {
    /// A buffer over `slices`; `keepalive` owns their memory.
    ///
    /// # Safety
    /// Every slice must stay valid for reads and writes of `count * dtype.size_bytes()` bytes until
    /// the buffer is dropped, and be aligned to its element. It must overlap no other slice, and
    /// nobody else may access it.
    #[must_use]
    pub unsafe fn new(
        dtype: DType,
        slices: impl IntoIterator<Item = Slice>,
        keepalive: Box<dyn Any + Send>,
    ) -> Self {
        let mut count = 0;
        let place = |slice: Slice| {
            debug_assert!(slice.start.addr().is_multiple_of(dtype.size_bytes()));
            let first = count;
            count += slice.count;
            Placed { slice, first }
        };
        Self {
            dtype,
            slices: slices.into_iter().map(place).collect(),
            count,
            _keepalive: keepalive,
        }
    }

    /// A buffer over one piece of memory that outlives it.
    ///
    /// # Safety
    /// The same as for [`Self::new`]; the caller keeps the memory alive.
    pub unsafe fn contiguous(dtype: DType, start: *mut u8, count: usize) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Self::new(dtype, [Slice { start, count }], Box::new(())) }
    }

    /// A buffer of `count` zeros that owns its memory.
    #[must_use]
    pub fn zeroed(dtype: DType, count: usize) -> Self {
        let words = (count * dtype.size_bytes()).div_ceil(size_of::<u64>());
        let mut memory = vec![0_u64; words];
        let slice = Slice {
            start: memory.as_mut_ptr().cast(),
            count,
        };
        // SAFETY: the slice covers `memory`, whose heap block the keepalive owns and nobody else
        // can reach; a u64 is aligned for every element type.
        unsafe { Self::new(dtype, [slice], Box::new(memory)) }
    }

    /// Element type of every slice.
    #[must_use]
    #[inline]
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of elements in all slices together.
    #[must_use]
    #[inline]
    pub const fn count(&self) -> usize {
        self.count
    }

    /// Fills `parts` with the memory of a byte range, as far as there are parts. Returns the number
    /// of filled parts.
    #[inline]
    pub fn gather<'a>(&'a self, bytes: Range<usize>, parts: &mut [IoSlice<'a>]) -> usize {
        let mut filled = 0;
        for (part, (start, length)) in parts.iter_mut().zip(self.pieces(bytes)) {
            // SAFETY: `pieces` yields memory inside the slices, exclusively ours (`Buffer::new`).
            *part = IoSlice::new(unsafe { std::slice::from_raw_parts(start, length) });
            filled += 1;
        }
        filled
    }

    /// Like [`Self::gather`], for writing.
    #[inline]
    pub fn scatter<'a>(&'a mut self, bytes: Range<usize>, parts: &mut [IoSliceMut<'a>]) -> usize {
        let mut filled = 0;
        for (part, (start, length)) in parts.iter_mut().zip(self.pieces(bytes)) {
            // SAFETY: `pieces` yields disjoint memory inside the slices, exclusively ours.
            *part = IoSliceMut::new(unsafe { std::slice::from_raw_parts_mut(start, length) });
            filled += 1;
        }
        filled
    }

    /// The memory of a range of elements, piece by piece.
    #[inline]
    pub fn elements(&self, range: Range<usize>) -> impl Iterator<Item = &[u8]> {
        let size = self.dtype.size_bytes();
        self.pieces(range.start * size..range.end * size)
            // SAFETY: `pieces` yields memory inside the slices, exclusively ours (`Buffer::new`).
            .map(|(start, length)| unsafe { std::slice::from_raw_parts(start, length) })
    }

    /// Overwrites the elements from `at` on with the elements of `source`, converted from `dtype`.
    pub fn widen_from(&mut self, at: usize, dtype: DType, source: &[u8]) {
        let (size, wide_size) = (dtype.size_bytes(), self.dtype.size_bytes());
        assert!(source.as_ptr().addr().is_multiple_of(size) && source.len().is_multiple_of(size));
        let end = at + source.len() / size;
        let mut consumed = 0;
        for (start, length) in self.pieces(at * wide_size..end * wide_size) {
            let count = length / wide_size;
            let source = &source[consumed..consumed + count * size];
            // SAFETY: `start` has capacity for `count` elements, `source` holds as many, aligned
            // and disjoint.
            unsafe { kernel::widen(dtype, self.dtype, start, source.as_ptr(), count) };
            consumed += source.len();
        }
    }

    /// A copy in a narrower float type, in `memory`, which grows if necessary.
    ///
    /// # Errors
    /// `Exhausted` when it cannot grow.
    ///
    /// # Safety
    /// `memory` must outlive the copy, and nothing else may use it meanwhile.
    pub unsafe fn narrowed(&self, dtype: DType, memory: &mut Vec<u64>) -> Result<Self> {
        debug_assert_eq!(dtype.accumulator(ReduceOp::Sum), self.dtype);
        reserve(
            memory,
            self.count() * dtype.size_bytes(),
            "a copy in 16 bits",
        )?;
        // SAFETY: the memory has capacity for as many elements; the rest is the caller's promise.
        let narrow = unsafe { Self::contiguous(dtype, memory.as_mut_ptr().cast(), self.count()) };
        for &Placed { slice, first } in &self.slices {
            // SAFETY: `narrow` has as many elements as all slices together, in their order.
            unsafe {
                let target = narrow.start().add(first * dtype.size_bytes());
                kernel::finish(dtype, ReduceOp::Sum, 1, target, slice.start, slice.count);
            }
        }
        Ok(narrow)
    }

    /// Overwrites all elements with those of a `narrowed` copy.
    pub fn widen_all_from(&mut self, narrow: &Self) {
        let mut at = 0;
        for elements in narrow.elements(0..narrow.count()) {
            self.widen_from(at, narrow.dtype, elements);
            at += elements.len() / narrow.dtype.size_bytes();
        }
    }

    /// Combines `source`, whole elements of this buffer's type, into the elements from `at` on.
    #[inline]
    pub fn reduce_from(&mut self, op: ReduceOp, at: usize, source: &[u8]) {
        let size = self.dtype.size_bytes();
        assert!(source.as_ptr().addr().is_multiple_of(size) && source.len().is_multiple_of(size));
        let mut consumed = 0;
        for (start, length) in self.pieces(at * size..at * size + source.len()) {
            let source = &source[consumed..consumed + length];
            // SAFETY: `start` and `source` are both `length` bytes long, aligned, and disjoint.
            unsafe { kernel::reduce(self.dtype, op, start, source.as_ptr(), length / size) };
            consumed += length;
        }
        assert_eq!(
            consumed,
            source.len(),
            "a reduction past the end of a buffer"
        );
    }

    /// An accumulator with this buffer's contributions to `op`, in `memory`, which grows if
    /// necessary. `None` if the buffer's own type is that of the accumulator.
    ///
    /// # Errors
    /// `Exhausted` when it cannot grow.
    ///
    /// # Safety
    /// The same as for [`Self::narrowed`].
    pub unsafe fn accumulator(&self, op: ReduceOp, memory: &mut Vec<u64>) -> Result<Option<Self>> {
        let accumulator = self.dtype.accumulator(op);
        if accumulator == self.dtype {
            return Ok(None);
        }
        reserve(
            memory,
            self.count() * accumulator.size_bytes(),
            "partial results",
        )?;
        // SAFETY: the memory has capacity for as many elements; the rest is the caller's promise.
        let wide =
            unsafe { Self::contiguous(accumulator, memory.as_mut_ptr().cast(), self.count()) };
        for &Placed { slice, first } in &self.slices {
            // SAFETY: `wide` has as many elements as all slices together, in their order.
            unsafe {
                let target = wide.start().add(first * accumulator.size_bytes());
                kernel::widen(self.dtype, accumulator, target, slice.start, slice.count);
            }
        }
        Ok(Some(wide))
    }

    /// Turns complete results in `range` into final values. They are read from an accumulator,
    /// beginning with the given element, or are changed in place.
    pub fn finish_from(
        &mut self,
        accumulator: Option<(&Self, usize)>,
        op: ReduceOp,
        world_size: usize,
        range: Range<usize>,
    ) {
        let size = self.dtype.size_bytes();
        if accumulator.is_none() && op != ReduceOp::Mean {
            return;
        }
        let mut done = 0;
        for (start, length) in self.pieces(range.start * size..range.end * size) {
            let count = length / size;
            let source = match accumulator {
                Some((wide, first)) => {
                    assert!(first + done + count <= wide.count());
                    let bytes = (first + done) * wide.dtype.size_bytes();
                    // SAFETY: in bounds of the accumulator's only slice.
                    unsafe { wide.start().add(bytes) }
                }
                None => start,
            };
            // SAFETY: `count` elements are valid on both sides; they are disjoint, or the same
            // memory and type, which `finish` allows.
            unsafe { kernel::finish(self.dtype, op, world_size, start, source, count) };
            done += count;
        }
        assert_eq!(done, range.len(), "finished past the end of a buffer");
    }

    /// Returns whether the buffer is one piece of memory, within these addresses.
    #[must_use]
    pub fn lies_in(&self, addresses: &Range<usize>) -> bool {
        let [Placed { slice, .. }] = &*self.slices else {
            return false;
        };
        let start = slice.start.addr();
        let end = start + slice.count * self.dtype.size_bytes();
        addresses.start <= start && end <= addresses.end
    }

    /// First byte of a buffer with one slice.
    ///
    /// # Panics
    /// When it has no slice.
    #[must_use]
    pub fn start(&self) -> *mut u8 {
        self.slices[0].slice.start
    }

    /// Pieces of memory that make up a byte range, in order.
    fn pieces(&self, bytes: Range<usize>) -> impl Iterator<Item = (*mut u8, usize)> {
        let size = self.dtype.size_bytes();
        assert!(
            bytes.end <= self.count() * size,
            "a range past the end of a buffer"
        );
        let ended = |placed: &Placed| (placed.first + placed.slice.count) * size <= bytes.start;
        let from_here = self.slices.partition_point(ended);
        let reached = self.slices[from_here..].iter().map_while(move |placed| {
            let slice_start = placed.first * size;
            let from = bytes.start.max(slice_start);
            let to = bytes.end.min(slice_start + placed.slice.count * size);
            // SAFETY: `from` lies between the slice's first byte and its end.
            let start = || unsafe { placed.slice.start.add(from - slice_start) };
            (slice_start < bytes.end).then(|| (start(), to - from))
        });
        reached.filter(|&(_, length)| length > 0)
    }
}

/// Makes `memory` hold at least `bytes` bytes of `what`. Its earlier contents are lost.
///
/// # Errors
/// `Exhausted` when the memory cannot be allocated.
pub fn reserve(memory: &mut Vec<u64>, bytes: usize, what: &str) -> Result<()> {
    let words = bytes.div_ceil(size_of::<u64>());
    if memory.len() < words {
        // The old and the new memory never exist at the same time.
        *memory = Vec::new();
        let reserved = memory.try_reserve_exact(words);
        reserved.map_err(|_| Error::no_memory(bytes, what))?;
        memory.resize(words, 0);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A buffer over three slices that hold 0, 1, 2, .. as f32, the middle one empty.
    fn three_slices() -> Buffer {
        let mut memory: Vec<Vec<f32>> = vec![vec![0., 1., 2.], vec![], vec![3., 4., 5., 6.]];
        let slices = memory
            .iter_mut()
            .map(|part| Slice {
                start: part.as_mut_ptr().cast(),
                count: part.len(),
            })
            .collect::<Vec<_>>();
        // SAFETY: the keepalive owns the memory.
        unsafe { Buffer::new(DType::F32, slices, Box::new(memory)) }
    }

    fn values(buffer: &Buffer) -> Vec<f32> {
        let mut parts = [IoSlice::new(&[]); 8];
        let filled = buffer.gather(0..buffer.count() * 4, &mut parts);
        let bytes: Vec<u8> = parts[..filled]
            .iter()
            .flat_map(|part| part.to_vec())
            .collect();
        bytes
            .chunks_exact(4)
            .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
            .collect()
    }

    #[test]
    fn slices_read_as_their_concatenation() {
        let buffer = three_slices();
        assert_eq!(values(&buffer), [0., 1., 2., 3., 4., 5., 6.]);
        let mut parts = [IoSlice::new(&[]); 8];
        let filled = buffer.gather(10..17, &mut parts);
        let lengths: Vec<usize> = parts[..filled].iter().map(|part| part.len()).collect();
        assert_eq!(lengths.iter().sum::<usize>(), 7);
        assert_eq!(buffer.gather(28..28, &mut parts), 0);
        assert_eq!(Buffer::zeroed(DType::U8, 0).gather(0..0, &mut parts), 0);
    }

    #[test]
    fn a_reduction_crosses_slices() {
        let mut buffer = three_slices();
        let source: Vec<u32> = [10_f32, 20., 30.].iter().map(|v| v.to_bits()).collect();
        // SAFETY: three f32 are twelve bytes.
        let bytes = unsafe { std::slice::from_raw_parts(source.as_ptr().cast(), 12) };
        buffer.reduce_from(ReduceOp::Sum, 2, bytes);
        assert_eq!(values(&buffer), [0., 1., 12., 23., 34., 5., 6.]);
        buffer.finish_from(None, ReduceOp::Mean, 2, 2..4);
        assert_eq!(values(&buffer), [0., 1., 6., 11.5, 34., 5., 6.]);
    }
}
