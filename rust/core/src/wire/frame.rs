//! What announces a part of a pipe's bytes on one of the pipe's streams.
//!
//! Layout, little-endian, 16 bytes: checksum u32, length u32, sequence u64. The payload follows. The
//! checksum is the CRC-32C of a magic word and the other fields: without it, one wrong bit could
//! make the receiver wait for a frame that never comes.

use super::segment::checksum;

/// Length of an encoded announcement in bytes.
pub(crate) const FRAME_HEADER_BYTES: usize = 16;
/// Bound on the payload of a frame.
pub(crate) const FRAME_BYTES_MAX: usize = 256 << 10;

const MAGIC: &[u8] = b"GRF2";

/// An encoded announcement.
pub(crate) type FrameHeader = [u8; FRAME_HEADER_BYTES];

/// A part of a pipe's bytes that travels on one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Frame {
    /// Its place in the pipe, from 0.
    pub sequence: u64,
    /// Bytes of payload, at least 1.
    pub length: usize,
}

impl Frame {
    pub(crate) fn encode(self) -> FrameHeader {
        let mut header = [0; FRAME_HEADER_BYTES];
        header[4..8].copy_from_slice(&(self.length as u32).to_le_bytes());
        header[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        let own = checksum([MAGIC, &header[4..]]);
        header[0..4].copy_from_slice(&own.to_le_bytes());
        header
    }

    /// What was encoded, or `None` for bytes that no sender writes.
    pub(crate) fn decode(header: &FrameHeader) -> Option<Self> {
        let (own, covered) = header.split_first_chunk()?;
        let (length, rest) = covered.split_first_chunk()?;
        let sequence = u64::from_le_bytes(*rest.first_chunk()?);
        let length = u32::from_le_bytes(*length) as usize;
        let right = u32::from_le_bytes(*own) == checksum([MAGIC, covered])
            && (1..=FRAME_BYTES_MAX).contains(&length);
        right.then_some(Self { sequence, length })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_survives_its_encoding() {
        for (sequence, length) in [(0, 1), (7, 4096), (u64::MAX, FRAME_BYTES_MAX)] {
            let frame = Frame { sequence, length };
            assert_eq!(Frame::decode(&frame.encode()), Some(frame));
        }
    }

    #[test]
    fn an_empty_a_giant_and_a_changed_frame_are_refused() {
        let good = Frame {
            sequence: 1,
            length: 1,
        };
        for length in [0, FRAME_BYTES_MAX + 1, u32::MAX as usize] {
            assert_eq!(Frame::decode(&Frame { length, ..good }.encode()), None);
        }
        for bit in 0..8 * FRAME_HEADER_BYTES {
            let mut changed = good.encode();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Frame::decode(&changed), None, "bit {bit}");
        }
    }
}
