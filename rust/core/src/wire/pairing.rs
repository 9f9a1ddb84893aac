//! What two ranks tell each other over TCP while they try to share memory (see `link::shm`).
//!
//! A message is a status byte, a length in one byte, and that many bytes: what is needed to go on,
//! or why it will not be.

use std::io::{self, ErrorKind, Read};

/// Bound on contents and reasons, in bytes.
const BYTES_MAX: usize = u8::MAX as usize;

const GO_ON: u8 = 0;
const REFUSED: u8 = 1;

/// What is needed to go on.
///
/// # Panics
/// When it is longer than 255 bytes.
pub(crate) fn go_on(content: &[u8]) -> Vec<u8> {
    message(GO_ON, content)
}

/// Why there will be no shared memory; returns it as it arrives too, because long ones are cut.
pub(crate) fn refusal(mut reason: String) -> (Vec<u8>, String) {
    let end = (0..=BYTES_MAX.min(reason.len()))
        .rev()
        .find(|&end| reason.is_char_boundary(end));
    reason.truncate(end.unwrap_or(0));
    (message(REFUSED, reason.as_bytes()), reason)
}

/// The other side's next message: its content, or why there is no more to say.
pub(crate) fn read(stream: &mut impl Read) -> io::Result<Result<Vec<u8>, String>> {
    let mut head = [0; 2];
    stream.read_exact(&mut head)?;
    let [status, length] = head;
    let mut content = vec![0; length.into()];
    stream.read_exact(&mut content)?;
    match status {
        GO_ON => Ok(Ok(content)),
        REFUSED => Ok(Err(String::from_utf8_lossy(&content).into_owned())),
        _ => Err(ErrorKind::InvalidData.into()),
    }
}

fn message(status: u8, content: &[u8]) -> Vec<u8> {
    let length = u8::try_from(content.len()).expect("contents are short");
    [&[status, length], content].concat()
}
