//! The serializer of all messages on sockets and disks, except for the values of collectives.
//!
//! On a stream, a little-endian u32 with its length precedes each message.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Breach, Error, Result, Text};

/// Encodes a message in at most `bytes_max` bytes.
///
/// # Errors
/// `Protocol` when the message is longer.
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

/// Decodes a message.
///
/// # Errors
/// `Protocol` when the bytes are not such a message.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    postcard::from_bytes(bytes).map_err(|error| {
        let error = Text::of(error);
        Breach::NotDecoded { error }.into()
    })
}

/// Encodes a message for a stream, preceded by its length.
///
/// # Errors
/// As for [`encode`].
pub(crate) fn with_length(message: &impl Serialize, bytes_max: usize) -> Result<Vec<u8>> {
    let bytes = encode(message, bytes_max)?;
    Ok([&(bytes.len() as u32).to_le_bytes()[..], &bytes].concat())
}

/// Decodes the length of a message on a stream. Call it before memory is allocated for the message.
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
