//! Messages between two ranks over TCP while they set up shared memory (see `link::shm`).

use std::io::{self, ErrorKind, Read};

use crate::wire::codec;

/// Contents for the next step, or the reason why the ranks will not share memory.
pub(crate) type Message = Result<Vec<u8>, String>;

/// Bound on contents and reasons, in bytes.
const BYTES_MAX: usize = u8::MAX as usize;
/// Bound on a message, in bytes: contents or reason, with its tag and length.
const MESSAGE_BYTES_MAX: usize = BYTES_MAX + 3;

/// A message as it travels.
///
/// # Panics
/// When contents or reason are longer than 255 bytes.
pub fn encode(message: &Message) -> Vec<u8> {
    codec::with_length(message, MESSAGE_BYTES_MAX).expect("contents are short")
}

/// Cuts a reason to the bound, between two characters.
pub fn cut(mut reason: String) -> String {
    let mut ends = (0..=BYTES_MAX.min(reason.len())).rev();
    let end = ends.find(|&end| reason.is_char_boundary(end));
    reason.truncate(end.unwrap_or(0));
    reason
}

/// Reads the other side's next message.
pub fn read(stream: &mut impl Read) -> io::Result<Message> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let invalid = |_| io::Error::from(ErrorKind::InvalidData);
    let mut body = vec![0; codec::length(length, MESSAGE_BYTES_MAX).map_err(invalid)?];
    stream.read_exact(&mut body)?;
    codec::decode(&body).map_err(invalid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_and_reasons_of_any_length_that_is_sent_arrive_and_longer_ones_are_refused() {
        for bytes in [0, 1, 127, 128, BYTES_MAX] {
            for message in [Ok(vec![7; bytes]), Err("x".repeat(bytes))] {
                let sent = encode(&message);
                assert_eq!(read(&mut &sent[..]).unwrap(), message);
            }
        }
        for (bytes, kind) in [
            (MESSAGE_BYTES_MAX, ErrorKind::UnexpectedEof),
            (MESSAGE_BYTES_MAX + 1, ErrorKind::InvalidData),
        ] {
            let length = (bytes as u32).to_le_bytes();
            assert_eq!(read(&mut &length[..]).unwrap_err().kind(), kind);
        }
        assert_eq!(MESSAGE_BYTES_MAX, encode(&Ok(vec![7; BYTES_MAX])).len() - 4);
    }

    #[test]
    fn a_long_reason_is_cut_between_characters() {
        assert_eq!(cut("short".into()), "short");
        assert_eq!(cut("x".repeat(BYTES_MAX + 1)), "x".repeat(BYTES_MAX));
        assert_eq!(cut("\u{e9}".repeat(200)), "\u{e9}".repeat(BYTES_MAX / 2));
    }
}
