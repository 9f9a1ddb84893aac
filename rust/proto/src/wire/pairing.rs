//! Messages of two ranks over TCP while they try to share memory (see `link::shm`).

use std::io::{self, ErrorKind, Read};

use crate::wire::codec;

/// What is needed to go on, or why there will be no shared memory.
pub(crate) type Message = Result<Vec<u8>, String>;

/// Bound on contents and reasons, in bytes.
const BYTES_MAX: usize = u8::MAX as usize;
/// Bound on a message: besides contents, which of the two they are, and their length.
const MESSAGE_BYTES_MAX: usize = BYTES_MAX + 3;

/// A message as it travels.
///
/// # Panics
/// When what is needed, or why not, is longer than 255 bytes.
pub fn encode(message: &Message) -> Vec<u8> {
    codec::with_length(message, MESSAGE_BYTES_MAX).expect("contents are short")
}

/// A reason as it travels: long ones are cut.
pub fn cut(mut reason: String) -> String {
    let mut ends = (0..=BYTES_MAX.min(reason.len())).rev();
    let end = ends.find(|&end| reason.is_char_boundary(end));
    reason.truncate(end.unwrap_or(0));
    reason
}

/// The other side's next message.
pub fn read(stream: &mut impl Read) -> io::Result<Message> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let invalid = |_| io::Error::from(ErrorKind::InvalidData);
    let mut body = vec![0; codec::length(length, MESSAGE_BYTES_MAX).map_err(invalid)?];
    stream.read_exact(&mut body)?;
    codec::decode(&body).map_err(invalid)
}
