//! The receiving end of a pipe whose bytes are checked.

use std::ops::Range;

use crate::link::Broken;
use crate::wire::segment::{SEGMENT_BYTES_MAX, SEGMENT_HEADER_BYTES, Segment, checksum};

/// A segment with its header, and the header of the next, which comes along.
const MEMORY_BYTES: usize = SEGMENT_BYTES_MAX + 2 * SEGMENT_HEADER_BYTES;

/// The receiving end of a pipe.
#[derive(Default)]
pub(super) struct Incoming {
    /// Allocated when the pipe is first used.
    memory: Box<[u8]>,
    /// Which part of it has been received and not handed out.
    held: Range<usize>,
    /// How much of that, from its start, is the payload of a segment that was right.
    verified: usize,
    /// Of the segment after that.
    number: u32,
}

impl Incoming {
    /// What is right of the segment that comes next, as far as it was not consumed; nothing if it
    /// has not arrived in full.
    pub(super) fn look(
        &mut self,
        mut receive: impl FnMut(&mut [u8]) -> Result<Option<usize>, Broken>,
    ) -> Result<&[u8], Broken> {
        if self.memory.is_empty() {
            self.memory = vec![0; MEMORY_BYTES].into();
        }
        while self.verified == 0 {
            let wanted = self.verify()?;
            if self.verified > 0 {
                break;
            }
            // Small: a segment's announcement comes with the end of the one before.
            self.memory.copy_within(self.held.clone(), 0);
            self.held = 0..self.held.len();
            match receive(&mut self.memory[self.held.end..wanted])? {
                Some(received) => self.held.end += received,
                None => break,
            }
        }
        Ok(&self.memory[self.held.start..][..self.verified])
    }

    /// Hands out the first `count` bytes of those that were right.
    pub(super) fn consume(&mut self, count: usize) {
        assert!(count <= self.verified, "what is consumed has been seen");
        self.verified -= count;
        self.held.start += count;
    }

    /// Checks the next segment if all of it is held; otherwise returns up to where the memory is
    /// to be filled, counted from the start of what is held.
    fn verify(&mut self) -> Result<usize, Broken> {
        let held = &self.memory[self.held.clone()];
        let Some((header, rest)) = held.split_first_chunk() else {
            return Ok(MEMORY_BYTES);
        };
        let Some(segment) = Segment::decode(header) else {
            let problem = "the announcement is not what its checksum says";
            return Err(corrupted(self.number, problem));
        };
        if segment.number != self.number {
            let problem = format!("segment {} came instead", segment.number);
            return Err(corrupted(self.number, &problem));
        }
        let Some(payload) = rest.get(..segment.length) else {
            return Ok(segment.length + 2 * SEGMENT_HEADER_BYTES);
        };
        let found = checksum([payload]);
        if found != segment.checksum {
            let problem = format!(
                "{} bytes have the checksum {found:08x}, and were sent with {:08x}",
                segment.length, segment.checksum
            );
            return Err(corrupted(self.number, &problem));
        }
        self.held.start += SEGMENT_HEADER_BYTES;
        self.verified = segment.length;
        self.number = self.number.wrapping_add(1);
        Ok(0)
    }
}

fn corrupted(number: u32, problem: &str) -> Broken {
    Broken::corrupted(format!("corrupted segment {number}: {problem}"))
}
