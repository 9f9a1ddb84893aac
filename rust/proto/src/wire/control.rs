//! Control messages between neighbours, beside the data: heartbeats, questions and aborts.
//!
//! Every rank that receives a *flooded* message for the first time passes it on around the ring in
//! both directions. So one lost rank cannot keep the message from the others.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::wire::codec;
use crate::wire::gossip::{Gossip, Tick};

/// Bound on one message, in bytes. The longest has the description of a bucket.
pub const MESSAGE_BYTES_MAX: usize = 64 << 10;

/// A message between neighbours.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Message {
    /// The sender is alive.
    Heartbeat(Tick),
    /// Flooded: status of a rank.
    Gossip(Gossip),
    /// Flooded: a line for the log of rank 0.
    LogLine(LogLine),
    /// The sender leaves in good order.
    Goodbye,
    /// Flooded: a question about each rank's call at this position.
    Query {
        /// Ordinal of the collective.
        sequence: u64,
    },
    /// Flooded: a rank's answer to a query.
    Report(Report),
    /// Flooded: the data connection between two ranks has ended.
    LinkBroken {
        /// The rank that has noticed it first.
        rank: usize,
        /// The other end.
        peer: usize,
    },
    /// Flooded: the group has failed, with the cause.
    Abort(Error),
}

/// A line that a rank adds to the log of rank 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogLine {
    /// The rank that adds the line.
    pub rank: usize,
    /// Grows with every line of the rank.
    pub number: u64,
    /// Text of the line.
    pub text: String,
}

/// A rank's answer to a query.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The rank that answers.
    pub rank: usize,
    /// Ordinal of the collective in the query.
    pub sequence: u64,
    /// The collective that it entered at this position; `None` if it has entered none.
    pub entered: Option<Entered>,
    /// Peers for which it waits now, in this collective or an earlier one.
    pub waits: Option<Waits>,
}

/// Reason why a rank makes no progress.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waits {
    /// The ranks for which it waits.
    pub awaited: Vec<usize>,
    /// Time since it last made progress.
    pub idle: Duration,
    /// Exchange with one of these ranks alone that holds up the collective, if there is one.
    pub beside: Option<String>,
    /// True if the program began this collective in advance and now does something else.
    pub in_advance: bool,
}

/// A collective that a rank entered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entered {
    /// The signature header that it sent.
    pub header: Vec<u8>,
    /// Description of the call for people.
    pub call: String,
    /// The program's step at the call; 0 for none.
    pub step: u64,
    /// The step that the program left early last, and the cause.
    pub left: Option<(u64, String)>,
}

impl Entered {
    /// The call and its step, with the step that the program left before, if it left one.
    #[must_use]
    pub fn in_its_step(&self) -> String {
        let mut text = format!("{} in step {}", self.call, self.step);
        if let Some((step, by)) = &self.left {
            text.push_str(&format!(", after it left step {step} by {by}"));
        }
        text
    }
}

impl Message {
    /// An abort with this cause. Long texts are cut, so that all ranks accept the message.
    pub fn abort(cause: Error) -> Self {
        Self::Abort(cause.fit_to_travel())
    }
}

/// A message as bytes, preceded by its length.
///
/// # Errors
/// `Protocol` when it is longer than [`decode`] accepts.
pub fn encode(message: &Message) -> Result<Vec<u8>, Error> {
    codec::with_length(message, MESSAGE_BYTES_MAX)
}

/// Removes the first complete message from `bytes`, and returns it.
///
/// # Errors
/// `Protocol` when the bytes are no message or announce an excessive length.
pub fn decode(bytes: &mut Vec<u8>) -> Result<Option<Message>, Error> {
    let Some(length) = bytes.first_chunk() else {
        return Ok(None);
    };
    let end = 4 + codec::length(*length, MESSAGE_BYTES_MAX)?;
    let Some(body) = bytes.get(4..end) else {
        return Ok(None);
    };
    let message = codec::decode(body)?;
    bytes.drain(..end);
    Ok(Some(message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Breach;

    #[test]
    fn messages_survive_any_fragmentation() {
        let messages = [
            Message::Heartbeat(Tick {
                sent_ns: 5,
                lag_ns: Some(-3),
                to_first: None,
            }),
            Message::Query { sequence: 7 },
            Message::Abort(Error::aborted("why").blaming(3, "h")),
        ];
        let stream: Vec<u8> = messages.iter().flat_map(|it| encode(it).unwrap()).collect();
        let (mut arrived, mut decoded) = (Vec::new(), Vec::new());
        for byte in stream {
            arrived.push(byte);
            decoded.extend(decode(&mut arrived).unwrap());
        }
        assert_eq!(decoded, messages);
    }

    #[test]
    fn a_call_is_told_with_its_step_and_the_step_that_was_left() {
        let described = |left| {
            let (header, call, step) = (Vec::new(), "barrier".into(), 4);
            let entered = Entered {
                header,
                call,
                step,
                left,
            };
            entered.in_its_step()
        };
        assert_eq!(described(None), "barrier in step 4");
        assert_eq!(
            described(Some((3, "ValueError".into()))),
            "barrier in step 4, after it left step 3 by ValueError"
        );
    }

    #[test]
    fn an_abort_with_an_endless_reason_arrives() {
        let abort = Message::abort(Error::aborted(&"why ".repeat(100_000)));
        assert_eq!(decode(&mut encode(&abort).unwrap()), Ok(Some(abort)));
    }

    #[test]
    fn what_no_neighbour_would_take_is_not_sent() {
        let line = |bytes| {
            let (rank, number, text) = (0, 0, "x".repeat(bytes));
            encode(&Message::LogLine(LogLine { rank, number, text }))
        };
        let beside = line(0).unwrap().len() - 4 + 2;
        let mut longest = line(MESSAGE_BYTES_MAX - beside).unwrap();
        assert!(decode(&mut longest).unwrap().is_some());
        let error = line(MESSAGE_BYTES_MAX - beside + 1).unwrap_err();
        assert_eq!(error, Breach::TooLongToSend.into());
    }

    #[test]
    fn a_giant_length_is_refused() {
        assert!(decode(&mut u32::MAX.to_le_bytes().to_vec()).is_err());
        let longest = MESSAGE_BYTES_MAX as u32;
        assert_eq!(decode(&mut longest.to_le_bytes().to_vec()), Ok(None));
    }
}
