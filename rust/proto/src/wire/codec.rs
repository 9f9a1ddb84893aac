//! The serializer of every message but those that move the values of collectives, on sockets and disks.
//!
//! On a stream a message has its length in front, a little-endian u32.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Breach, Error, Result, Text};

/// A message as bytes, at most so many.
///
/// # Errors
/// `Protocol` when there would be more.
pub fn encode(message: &impl Serialize, bytes_max: usize) -> Result<Vec<u8>> {
    let bytes = postcard::to_stdvec(message).map_err(|error| {
        let error = Text::of(error);
        Error::from(Breach::NotEncoded { error })
    })?;
    if bytes.len() > bytes_max {
        return Err(Breach::TooLongToSend.into());
    }
    Ok(bytes)
}

/// The message that these bytes are.
///
/// # Errors
/// `Protocol` when they are none.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    postcard::from_bytes(bytes).map_err(|error| {
        let error = Text::of(error);
        Breach::NotDecoded { error }.into()
    })
}

/// A message as it travels on a stream.
///
/// # Errors
/// As for [`encode`].
pub(crate) fn with_length(message: &impl Serialize, bytes_max: usize) -> Result<Vec<u8>> {
    let bytes = encode(message, bytes_max)?;
    Ok([&(bytes.len() as u32).to_le_bytes()[..], &bytes].concat())
}

/// How long a message on a stream will be; to be asked before memory is taken for it.
///
/// # Errors
/// `Protocol` when it is longer than `bytes_max`.
pub(crate) fn length(in_front: [u8; 4], bytes_max: usize) -> Result<usize> {
    let bytes = u32::from_le_bytes(in_front) as usize;
    if bytes > bytes_max {
        let most = bytes_max;
        return Err(Breach::TooLong { bytes, most }.into());
    }
    Ok(bytes)
}
