//! Memory that a collective reads and writes: one bucket, made of one or several slices.

use std::any::Any;

use crate::dtype::DType;

/// One contiguous, element-aligned piece of memory.
#[derive(Debug, Clone, Copy)]
pub struct Slice {
    /// First byte.
    pub start: *mut u8,
    /// Length in elements.
    pub count: usize,
}

// SAFETY: a Slice is an address and a length; `Buffer::new` makes its caller answer for access.
unsafe impl Send for Slice {}

/// A list of slices of one element type, and what keeps their memory alive.
///
/// Fusing gradients costs no copy: the slices stay where they are, and a schedule's element
/// ranges run over their concatenation.
pub struct Buffer {
    dtype: DType,
    slices: Vec<Slice>,
    /// Dropped when the collective has ended, before its work is reported as done.
    _keepalive: Box<dyn Any + Send>,
}

impl Buffer {
    /// A buffer over `slices`; `keepalive` owns their memory.
    ///
    /// # Safety
    /// Until the buffer is dropped, every slice must stay valid for reads and writes of
    /// `count * dtype.size_bytes()` bytes, be aligned to its element, overlap no other slice,
    /// and be accessed by nobody else.
    #[must_use]
    pub unsafe fn new(dtype: DType, slices: Vec<Slice>, keepalive: Box<dyn Any + Send>) -> Self {
        debug_assert!(
            slices
                .iter()
                .all(|slice| (slice.start as usize).is_multiple_of(dtype.size_bytes()))
        );
        Self {
            dtype,
            slices,
            _keepalive: keepalive,
        }
    }

    /// A buffer without elements, for collectives that move no data of the user's.
    #[must_use]
    pub fn empty() -> Self {
        // SAFETY: there is no slice.
        unsafe { Self::new(DType::U8, Vec::new(), Box::new(())) }
    }

    /// Element type of every slice.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// The slices, in order.
    #[must_use]
    pub fn slices(&self) -> &[Slice] {
        &self.slices
    }

    /// Number of elements in all slices together.
    #[must_use]
    pub fn count(&self) -> usize {
        self.slices.iter().map(|slice| slice.count).sum()
    }
}
