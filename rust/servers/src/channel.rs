//! A channel of messages between a worker and a server, or two servers, which never waits.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::time::{Duration, Instant};

use super::link::PeerLink;
use super::message::{Incoming, Message, Outgoing};
use gradring_net::link::poll::{self, PollFd, WakeUp};
use gradring_net::link::{Direction, Link};
use gradring_proto::error::{Error, Lost, Result};

/// Messages that may wait to be sent before no more are received. Back-pressure: stop reading when the
/// peer does not read.
const OUTBOX_MAX: usize = 32;
/// Parts that are handed to the system at once; it takes 1024 at most.
const PARTS_MAX: usize = 64;
/// Bytes that are received at once, so that others get their turn.
const TURN_BYTES: usize = 8 << 20;

/// A link, what arrives on it, and what is to be sent.
pub(crate) struct MessageChannel {
    link: Box<dyn Link>,
    /// What the link is made of.
    pub(crate) transport: &'static str,
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
    pub(crate) fn new(link: PeerLink, checks_values: bool, now: Instant) -> Self {
        let PeerLink { link, transport } = link;
        Self {
            link,
            transport,
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

    /// Sends what the link takes.
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
            let sent = self.link.try_send(&parts);
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
    /// `PeerLost` when the link has ended; `Protocol` for what no correct peer sends.
    pub(crate) fn recv(&mut self, turn: &mut usize, now: Instant) -> Result<Option<Message>> {
        loop {
            if *turn >= TURN_BYTES || !self.receives() {
                self.has_more = true;
                return Ok(None);
            }
            self.has_more = false;
            let room = self.incoming.room();
            let received = self.link.try_receive(&mut [IoSliceMut::new(room)]);
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

    /// Whether the other side reads what it is sent.
    fn receives(&self) -> bool {
        self.outbox.len() < OUTBOX_MAX
    }

    /// Says that this side will sleep; `false` if there is something to do.
    fn may_sleep(&mut self) -> bool {
        let receives = self.receives();
        let rests = !receives || (!self.has_more && self.link.may_sleep(Direction::Receive));
        rests && (self.outbox.is_empty() || self.link.may_sleep(Direction::Send))
    }

    fn awaited<'a>(&'a self, awaited: &mut Vec<PollFd<'a>>) {
        if self.receives() {
            self.link.awaited(Direction::Receive, awaited);
        }
        if !self.outbox.is_empty() {
            self.link.awaited(Direction::Send, awaited);
        }
    }
}

/// Waits until one of these channels may go on, their owner is woken, or the time is over. Links that
/// share memory ring `wake_up`; so it must be reset before any of them is looked at again.
pub(crate) fn wait<'a>(
    channels: impl Iterator<Item = &'a mut MessageChannel>,
    wake_up: &WakeUp,
    limit: Duration,
) {
    let mut channels: Vec<_> = channels.collect();
    let sleeps = channels.iter_mut().all(|channel| channel.may_sleep());
    let mut awaited = vec![wake_up.awaited()];
    for channel in &channels {
        channel.awaited(&mut awaited);
    }
    // Without sleep, too, it is looked who has ended.
    poll::wait(awaited, if sleeps { limit } else { Duration::ZERO });
    for channel in channels {
        channel.link.awake(true);
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
