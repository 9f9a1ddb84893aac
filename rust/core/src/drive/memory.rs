//! Memory that one collective after the other uses.

use super::Launched;
use crate::executor::Scratch;
use gradring_proto::buffer::Buffer;
use gradring_proto::error::Error;

/// Memory of the collectives of one rank.
#[derive(Default)]
pub struct Memory {
    scratch: Scratch,
    /// Elements that travel in another type than their own.
    narrowed: Vec<u64>,
}

/// What one collective works on.
pub struct Operand<'m> {
    buffer: Buffer,
    /// What travels in its place, if elements travel in another type than their own.
    narrow: Option<Buffer>,
    scratch: &'m mut Scratch,
}

impl Memory {
    /// The buffer of a collective whose turn has come, as it travels.
    ///
    /// # Errors
    /// `Exhausted` when there is no memory for it.
    #[inline]
    pub fn operand(&mut self, buffer: Buffer, launched: &Launched) -> Result<Operand<'_>, Error> {
        let Self { scratch, narrowed } = self;
        let narrow = launched.prepared.wire_dtype.map(|dtype| {
            // SAFETY: nobody else has this memory as long as the operand is there.
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
