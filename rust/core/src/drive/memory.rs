//! Memory that successive collectives reuse.

use super::Launched;
use crate::executor::Scratch;
use gradring_proto::buffer::Buffer;
use gradring_proto::error::Error;

/// Reusable memory for the collectives of one rank.
#[derive(Default)]
pub struct Memory {
    scratch: Scratch,
    /// Copies of elements that travel as another type.
    narrowed: Vec<u64>,
}

/// Buffers and scratch memory of one collective.
pub struct Operand<'m> {
    buffer: Buffer,
    /// Buffer that travels in place of `buffer`, if elements travel as another type.
    narrow: Option<Buffer>,
    scratch: &'m mut Scratch,
}

impl Memory {
    /// Prepares the buffer of a collective whose turn has come, narrowed if it travels as another
    /// type.
    ///
    /// # Errors
    /// `Exhausted` when there is no memory for it.
    #[inline]
    pub fn operand(&mut self, buffer: Buffer, launched: &Launched) -> Result<Operand<'_>, Error> {
        let Self { scratch, narrowed } = self;
        let narrow = launched.prepared.wire_dtype.map(|dtype| {
            // SAFETY: nothing else uses this memory while the operand exists.
            unsafe { buffer.narrowed(dtype, narrowed) }
        });
        Ok(Operand {
            narrow: narrow.transpose()?,
            buffer,
            scratch,
        })
    }
}

impl Operand<'_> {
    #[inline]
    pub(super) fn parts(&mut self) -> (&mut Buffer, &mut Scratch) {
        let buffer = self.narrow.as_mut().unwrap_or(&mut self.buffer);
        (buffer, self.scratch)
    }

    /// The caller's buffer with the result, once the collective has ended.
    #[inline]
    pub fn finish(&mut self) -> &Buffer {
        if let Some(narrow) = &self.narrow {
            self.buffer.widen_all_from(narrow);
        }
        &self.buffer
    }
}
