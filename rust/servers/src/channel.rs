//! A channel of messages between a worker and a server, or two servers, which never waits.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::time::{Duration, Instant};

use super::message::{Incoming, Message, Outgoing};
use gradring_net::link::Link as _;
use gradring_net::link::poll::{self, PollFd};
use gradring_net::link::tcp::connection::Connection;
use gradring_proto::error::{Error, Lost, Result};

/// Messages that may wait to be sent before no more are received. Back-pressure: stop reading when the
/// peer does not read.
const OUTBOX_MAX: usize = 32;
/// Parts that are handed to the system at once; it takes 1024 at most.
const PARTS_MAX: usize = 64;
/// Bytes that are received at once, so that others get their turn.
const TURN_BYTES: usize = 8 << 20;

/// A connection, what arrives on it, and what is to be sent.
pub(crate) struct MessageChannel {
    connection: Connection,
    incoming: Incoming,
    outbox: VecDeque<Outgoing>,
    /// Of the first message in the outbox.
    sent: usize,
    /// When something was received and sent last.
    last_received: Instant,
    last_sent: Instant,
    /// Whether there may be more to receive, though a turn has ended.
    has_more: bool,
    checks_values: bool,
    /// Values of longer messages are refused.
    pub(crate) values_max: u64,
    pub(crate) bytes_sent: u64,
    pub(crate) bytes_received: u64,
}

impl MessageChannel {
    /// Over a connection on which both have greeted each other.
    pub(crate) const fn new(connection: Connection, checks_values: bool, now: Instant) -> Self {
        Self {
            connection,
            incoming: Incoming::NEW,
            outbox: VecDeque::new(),
            sent: 0,
            last_received: now,
            last_sent: now,
            has_more: false,
            checks_values,
            values_max: u64::MAX,
            bytes_sent: 0,
            bytes_received: 0,
        }
    }

    /// Leaves a message to be sent.
    ///
    /// # Errors
    /// `Protocol` when it cannot be encoded.
    pub(crate) fn send(&mut self, message: Message, now: Instant) -> Result<()> {
        self.outbox
            .push_back(Outgoing::new(message, self.checks_values)?);
        self.last_sent = now;
        Ok(())
    }

    /// Tells the other side that this one lives, if it has received nothing for so long.
    pub(crate) fn keep_alive(&mut self, now: Instant, interval: Duration) -> Result<()> {
        if self.outbox.is_empty() && now >= self.last_sent + interval {
            self.send(Message::Alive, now)?;
        }
        Ok(())
    }

    /// For how long nothing was heard.
    pub(crate) fn silence(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.last_received)
    }

    /// Whether everything was sent.
    pub(crate) fn is_flushed(&self) -> bool {
        self.outbox.is_empty()
    }

    /// Whether receiving should go on without waiting.
    pub(crate) fn has_more(&self) -> bool {
        self.has_more && self.outbox.len() < OUTBOX_MAX
    }

    /// Sends what the connection takes.
    ///
    /// # Errors
    /// `PeerLost` when it is broken.
    pub(crate) fn flush(&mut self) -> Result<()> {
        while let Some(first) = self.outbox.front() {
            let mut skipped = self.sent;
            let mut parts = Vec::new();
            let mut left = 0;
            for slice in first.slices() {
                if skipped >= slice.len() {
                    skipped -= slice.len();
                } else {
                    if parts.len() < PARTS_MAX {
                        parts.push(IoSlice::new(&slice[skipped..]));
                    }
                    left += slice.len() - skipped;
                    skipped = 0;
                }
            }
            let sent = self.connection.try_send(&parts);
            let Some(count) = sent.map_err(|broken| Error::from(Lost::LinkEnded { broken }))?
            else {
                return Ok(());
            };
            self.sent += count;
            self.bytes_sent += count as u64;
            if count == left {
                self.outbox.pop_front();
                self.sent = 0;
            }
        }
        Ok(())
    }

    /// The next message, if it is there as a whole. `turn` counts what is received in this turn.
    ///
    /// # Errors
    /// `PeerLost` when the connection has ended; `Protocol` for what no correct peer sends.
    pub(crate) fn recv(&mut self, turn: &mut usize, now: Instant) -> Result<Option<Message>> {
        loop {
            if *turn >= TURN_BYTES || self.outbox.len() >= OUTBOX_MAX {
                self.has_more = true;
                return Ok(None);
            }
            self.has_more = false;
            let room = self.incoming.room();
            let received = self.connection.try_receive(&mut [IoSliceMut::new(room)]);
            let Some(count) = received.map_err(|broken| Error::from(Lost::LinkEnded { broken }))?
            else {
                return Ok(None);
            };
            *turn += count;
            self.last_received = now;
            self.bytes_received += count as u64;
            if let Some(message) = self.incoming.filled(count, self.values_max)? {
                return Ok(Some(message));
            }
        }
    }

    /// What to wait for.
    pub(crate) fn awaited(&self) -> impl Iterator<Item = PollFd<'_>> {
        let reads = self.outbox.len() < OUTBOX_MAX;
        let reading = reads.then(|| poll::readable(&self.connection));
        let writing = (!self.outbox.is_empty()).then(|| poll::writable(&self.connection));
        reading.into_iter().chain(writing)
    }
}

/// How often a process says that it lives, and says again what had no answer.
pub(crate) const BEAT: Duration = Duration::from_millis(250);

/// What is to be said of a connection on which nothing is heard for too long, if it is one.
pub(crate) fn is_silent(
    channel: &MessageChannel,
    too_long: Duration,
    now: Instant,
) -> Option<Error> {
    let silence = channel.silence(now);
    (silence >= too_long).then(|| Lost::Silent { silence }.into())
}
