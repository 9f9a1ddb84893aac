//! The header of a frame: it announces a part of a pipe's bytes.
//!
//! Layout, little-endian, 16 bytes: checksum u32, length u32, sequence u32, checksum of the payload
//! u32 (0 where payloads are not checked). The payload follows. The first checksum covers a magic
//! word and the other fields. Without it, one wrong bit could make the receiver wait for a frame
//! that never comes. Checksums are CRC-32C, which detects every change of up to three bits in a
//! frame, and every change within 32 consecutive bits.

/// Length of an encoded header in bytes.
pub const FRAME_HEADER_BYTES: usize = 16;
/// Bound on the payload of a frame.
pub const FRAME_BYTES_MAX: usize = 256 << 10;
/// Bound on the payload of a checked frame, in bytes. It stays in the L1 or L2 cache while the
/// checksum is computed and the contents are used.
pub const CHECKED_BYTES_MAX: usize = 64 << 10;

const MAGIC: &[u8] = b"GRF3";

/// An encoded header.
pub type FrameHeader = [u8; FRAME_HEADER_BYTES];

/// A part of a pipe's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame {
    /// Position of the frame in the pipe, from 0; starts again after 2^32 frames.
    pub sequence: u32,
    /// Bytes of payload, at least 1.
    pub length: usize,
    /// Checksum of the payload, where payloads are checked.
    pub checksum: u32,
}

impl Frame {
    /// Encodes the header.
    #[must_use]
    #[inline]
    pub fn encode(self) -> FrameHeader {
        let mut header = [0; FRAME_HEADER_BYTES];
        header[4..8].copy_from_slice(&(self.length as u32).to_le_bytes());
        header[8..12].copy_from_slice(&self.sequence.to_le_bytes());
        header[12..16].copy_from_slice(&self.checksum.to_le_bytes());
        let own = checksum([MAGIC, &header[4..]]);
        header[0..4].copy_from_slice(&own.to_le_bytes());
        header
    }

    /// Decodes a header. Returns `None` for bytes that no sender writes.
    #[inline]
    pub fn decode(header: &FrameHeader) -> Option<Self> {
        let (own, covered) = header.split_first_chunk()?;
        let (length, rest) = covered.split_first_chunk()?;
        let (sequence, expected) = rest.split_first_chunk()?;
        let length = u32::from_le_bytes(*length) as usize;
        let right = u32::from_le_bytes(*own) == checksum([MAGIC, covered])
            && (1..=FRAME_BYTES_MAX).contains(&length);
        right.then_some(Self {
            sequence: u32::from_le_bytes(*sequence),
            length,
            checksum: u32::from_le_bytes(*expected.first_chunk()?),
        })
    }
}

/// The CRC-32C of all `parts` together.
#[inline]
pub fn checksum<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u32 {
    let mut parts = parts.into_iter().peekable();
    match (parts.next(), parts.peek()) {
        (Some(only), None) => crc_fast::crc32_iscsi(only),
        (first, _) => {
            let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
            first
                .into_iter()
                .chain(parts)
                .for_each(|part| digest.update(part));
            digest.finalize() as u32
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: Frame = Frame {
        sequence: 7,
        length: 4096,
        checksum: 0xe306_9283,
    };

    #[test]
    fn a_frame_survives_its_encoding() {
        for (sequence, length) in [(0, 1), (7, 4096), (u32::MAX, FRAME_BYTES_MAX)] {
            let frame = Frame {
                sequence,
                length,
                ..SAMPLE
            };
            assert_eq!(Frame::decode(&frame.encode()), Some(frame));
        }
    }

    #[test]
    fn an_empty_and_a_giant_frame_are_refused() {
        for length in [0, FRAME_BYTES_MAX + 1, u32::MAX as usize] {
            let impossible = Frame { length, ..SAMPLE };
            assert_eq!(Frame::decode(&impossible.encode()), None);
        }
    }

    #[test]
    fn any_three_turned_bits_of_a_header_are_seen() {
        let bits = 8 * FRAME_HEADER_BYTES;
        let turn = |header: &mut FrameHeader, bit: usize| header[bit / 8] ^= 1 << (bit % 8);
        let mut header = SAMPLE.encode();
        for first in 0..bits {
            for second in first..bits {
                for third in [second, (first * 31 + second * 17) % bits] {
                    [first, second, third]
                        .into_iter()
                        .for_each(|bit| turn(&mut header, bit));
                    if header != SAMPLE.encode() {
                        assert_eq!(Frame::decode(&header), None, "{first} {second} {third}");
                    }
                    header = SAMPLE.encode();
                }
            }
        }
    }

    #[test]
    fn the_checksum_is_that_of_rfc_3720_however_the_bytes_are_cut() {
        // RFC 3720, appendix B.4: ascending bytes.
        let ascending: Vec<u8> = (0..32).collect();
        for cut in 0..=ascending.len() {
            let (head, tail) = ascending.split_at(cut);
            assert_eq!(checksum([head, tail]), 0x46dd_794e);
        }
        assert_eq!(checksum([&ascending[..]]), 0x46dd_794e);
        assert_eq!(checksum([]), 0);
    }
}
