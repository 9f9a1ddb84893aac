//! Control connection to one neighbour: sends and receives messages, and never waits.

use std::io::{ErrorKind, Read, Write};

use gradring_proto::error::{Error, Lost, Text};
pub(super) use gradring_proto::wire::control::{self, Message};

/// A neighbour's control connection.
pub(super) struct Neighbour<S> {
    /// `None` once the connection has ended in both directions.
    stream: Option<S>,
    /// `true` once nothing more arrives. Messages about it are still sent, since the other
    /// direction may be open.
    ended: bool,
    inbox: Vec<u8>,
    outbox: Vec<u8>,
    /// `true` after an undecodable message. Later bytes mean nothing, but the neighbour still has
    /// to receive the cause.
    garbled: bool,
}

impl<S: Read + Write> Neighbour<S> {
    /// Makes a neighbour over a non-blocking stream.
    pub(super) const fn new(stream: S) -> Self {
        Self {
            stream: Some(stream),
            ended: false,
            inbox: Vec::new(),
            outbox: Vec::new(),
            garbled: false,
        }
    }

    /// The connection, if something may still arrive.
    pub(super) fn incoming(&self) -> Option<&S> {
        self.stream.as_ref().filter(|_| !self.ended)
    }

    /// The connection, if there is more to send.
    pub(super) fn outgoing(&self) -> Option<&S> {
        self.stream.as_ref().filter(|_| !self.outbox.is_empty())
    }

    /// Queues an encoded message for `flush`.
    pub(super) fn tell(&mut self, message: &[u8]) {
        if self.stream.is_some() {
            self.outbox.extend_from_slice(message);
        }
    }

    /// Sends as much as the connection takes. Drops the connection if nothing arrives any more and
    /// all is sent.
    pub(super) fn flush(&mut self) {
        while let (Some(stream), false) = (&mut self.stream, self.outbox.is_empty()) {
            match stream.write(&self.outbox) {
                Ok(written) => drop(self.outbox.drain(..written)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // The receiving side of this connection reports its end.
                Err(_) => self.outbox.clear(),
            }
        }
        if self.ended {
            self.stream = None;
        }
    }

    /// Reads everything that has arrived, and calls `on_arrival` for each part. Returns how the
    /// connection ended, if it did.
    pub(super) fn receive(&mut self, mut on_arrival: impl FnMut()) -> Option<Lost> {
        let mut bytes = [0; 4096];
        while let (Some(stream), false) = (&mut self.stream, self.ended) {
            let how = match stream.read(&mut bytes) {
                Ok(0) => Lost::ControlClosed,
                Ok(_) if self.garbled => continue,
                Ok(received) => {
                    self.inbox.extend_from_slice(&bytes[..received]);
                    on_arrival();
                    continue;
                }
                Err(error) => match error.kind() {
                    ErrorKind::Interrupted => continue,
                    ErrorKind::WouldBlock => return None,
                    ErrorKind::ConnectionReset => Lost::ControlReset,
                    _ => Lost::ControlBroke {
                        error: Text::of(error),
                    },
                },
            };
            self.ended = true;
            return Some(how);
        }
        None
    }

    /// Returns the next message that has arrived completely.
    ///
    /// # Errors
    /// `Protocol`, once, for an undecodable message.
    pub(super) fn next_message(&mut self) -> Result<Option<Message>, Error> {
        if self.garbled {
            return Ok(None);
        }
        control::decode(&mut self.inbox).inspect_err(|_| self.garbled = true)
    }
}
