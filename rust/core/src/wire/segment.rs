//! What announces a part of a pipe's bytes where they are protected by checksums.
//!
//! Layout, little-endian, 16 bytes: length u32, checksum of the payload u32, number u32, checksum
//! of these twelve bytes u32. The payload follows. The checksum is CRC-32C, which sees every
//! change of up to three bits of a segment, and every one inside 32 bits in a row.

/// Length of an encoded announcement in bytes.
pub(crate) const SEGMENT_HEADER_BYTES: usize = 16;
/// Bound on the payload of a segment: both sides keep it in their L1 or L2 caches between looking
/// at it for the checksum and for its contents.
pub(crate) const SEGMENT_BYTES_MAX: usize = 64 << 10;

/// The bytes that the header's own checksum covers.
const COVERED_BYTES: usize = SEGMENT_HEADER_BYTES - size_of::<u32>();

/// An encoded announcement.
pub(crate) type SegmentHeader = [u8; SEGMENT_HEADER_BYTES];

/// A part of a pipe's bytes and what they must look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Segment {
    /// Its place in the pipe, from 0; it starts again after 2^32.
    pub number: u32,
    /// Bytes of payload, at least 1.
    pub length: usize,
    /// Of the payload.
    pub checksum: u32,
}

impl Segment {
    pub(crate) fn encode(self) -> SegmentHeader {
        let mut header = [0; SEGMENT_HEADER_BYTES];
        header[0..4].copy_from_slice(&(self.length as u32).to_le_bytes());
        header[4..8].copy_from_slice(&self.checksum.to_le_bytes());
        header[8..12].copy_from_slice(&self.number.to_le_bytes());
        let own = checksum([&header[..COVERED_BYTES]]);
        header[COVERED_BYTES..].copy_from_slice(&own.to_le_bytes());
        header
    }

    /// What was encoded, or `None` for bytes that no sender writes.
    pub(crate) fn decode(header: &SegmentHeader) -> Option<Self> {
        let (length, rest) = header.split_first_chunk()?;
        let (expected, rest) = rest.split_first_chunk()?;
        let (number, own) = rest.split_first_chunk()?;
        let length = u32::from_le_bytes(*length) as usize;
        let right = u32::from_le_bytes(*own.first_chunk()?) == checksum([&header[..COVERED_BYTES]])
            && (1..=SEGMENT_BYTES_MAX).contains(&length);
        right.then_some(Self {
            number: u32::from_le_bytes(*number),
            length,
            checksum: u32::from_le_bytes(*expected),
        })
    }
}

/// The CRC-32C of all `parts` together.
pub(crate) fn checksum<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u32 {
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

    const SAMPLE: Segment = Segment {
        number: 7,
        length: 4096,
        checksum: 0xe306_9283,
    };

    #[test]
    fn a_segment_survives_its_encoding() {
        for (number, length) in [(0, 1), (7, 4096), (u32::MAX, SEGMENT_BYTES_MAX)] {
            let segment = Segment {
                number,
                length,
                ..SAMPLE
            };
            assert_eq!(Segment::decode(&segment.encode()), Some(segment));
        }
    }

    #[test]
    fn an_empty_and_a_giant_segment_are_refused() {
        for length in [0, SEGMENT_BYTES_MAX + 1, u32::MAX as usize] {
            let impossible = Segment { length, ..SAMPLE };
            assert_eq!(Segment::decode(&impossible.encode()), None);
        }
    }

    #[test]
    fn any_three_turned_bits_of_a_header_are_seen() {
        let bits = 8 * SEGMENT_HEADER_BYTES;
        let turn = |header: &mut SegmentHeader, bit: usize| header[bit / 8] ^= 1 << (bit % 8);
        let mut header = SAMPLE.encode();
        for first in 0..bits {
            for second in first..bits {
                for third in [second, (first * 31 + second * 17) % bits] {
                    [first, second, third]
                        .into_iter()
                        .for_each(|bit| turn(&mut header, bit));
                    if header != SAMPLE.encode() {
                        assert_eq!(Segment::decode(&header), None, "{first} {second} {third}");
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
