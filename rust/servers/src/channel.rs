//! Message channel between a worker and a server, or between two servers; it never blocks.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::time::{Duration, Instant};

use super::link::PeerLink;
use super::message::{Incoming, Message, Outgoing};
use gradring_net::link::poll::{self, PollFd, WakeUp};
use gradring_net::link::{Direction, Link};
use gradring_proto::error::{Error, Lost, Result};

/// Messages in the outbox at which a channel stops receiving. Back-pressure: a peer that does not
/// read is not read either.
const OUTBOX_MAX: usize = 32;
/// Slices in one system call; Linux takes at most 1024.
const PARTS_MAX: usize = 64;
/// Bytes received from one channel in a turn, so that the other channels get their turn.
const TURN_BYTES: usize = 8 << 20;

/// A link with its partly received message and its queue of messages to send.
pub(crate) struct MessageChannel {
    link: Box<dyn Link>,
    /// Kind of the link, by name.
    pub(crate) transport: &'static str,
    incoming: Incoming,
    outbox: VecDeque<Outgoing>,
    /// Bytes sent of the first message in the outbox.
    sent: usize,
    /// Time of the last bytes received, and of the last message queued.
    last_received: Instant,
    last_sent: Instant,
    /// True if the turn ended early, so that bytes may be left in the link.
    has_more: bool,
    checks_values: bool,
    /// Limit of a received message's values, in bytes; longer messages are refused.
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

    /// Appends a message to the outbox; `flush` sends it.
    ///
    /// # Errors
    /// `Protocol` if the message cannot be encoded.
    pub(crate) fn send(&mut self, message: Message, now: Instant) -> Result<()> {
        self.outbox
            .push_back(Outgoing::new(message, self.checks_values)?);
        self.last_sent = now;
        Ok(())
    }

    /// Queues a [`Message::Alive`] if nothing was queued for `interval`.
    pub(crate) fn keep_alive(&mut self, now: Instant, interval: Duration) -> Result<()> {
        if self.outbox.is_empty() && now >= self.last_sent + interval {
            self.send(Message::Alive, now)?;
        }
        Ok(())
    }

    /// Time since bytes were received last.
    pub(crate) fn silence(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.last_received)
    }

    /// Returns whether the outbox is empty.
    pub(crate) fn is_flushed(&self) -> bool {
        self.outbox.is_empty()
    }

    /// Sends as many bytes as the link takes without blocking.
    ///
    /// # Errors
    /// `PeerLost` if the link is broken.
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

    /// Returns the next message once it is complete. `turn` counts the bytes received in this turn.
    ///
    /// # Errors
    /// `PeerLost` if the link has ended; `Protocol` for bytes that no correct peer sends.
    pub(crate) fn recv(&mut self, turn: &mut usize, now: Instant) -> Result<Option<Message>> {
        loop {
            if *turn >= TURN_BYTES || !self.receives() {
                self.has_more = true;
                return Ok(None);
            }
            self.has_more = false;
            let spare = self.incoming.spare_capacity();
            let received = self.link.try_receive(&mut [IoSliceMut::new(spare)]);
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

    /// Returns whether another long message may be queued, so that the channel still receives.
    pub(crate) fn has_room(&self) -> bool {
        self.outbox.len() < OUTBOX_MAX / 2
    }

    /// Returns whether this channel receives: not while the peer leaves too many messages unread.
    fn receives(&self) -> bool {
        self.outbox.len() < OUTBOX_MAX
    }

    /// Announces to the link that this side will sleep; `false` if there is something to do first.
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

/// Waits until a channel can make progress, `wake_up` is woken, or `limit` has passed. Links in
/// shared memory wake `wake_up`, so the caller must reset `wake_up` before it polls them again.
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
    // Polls with a limit of zero as well, to notice links that have ended.
    poll::wait(awaited, if sleeps { limit } else { Duration::ZERO });
    for channel in channels {
        channel.link.awake(true);
    }
}

/// Interval of keep-alive messages, and of repeated requests without an answer.
pub(crate) const BEAT: Duration = Duration::from_millis(250);

/// The error for a channel whose silence is `too_long`; `None` for any other channel.
pub(crate) fn is_silent(
    channel: &MessageChannel,
    too_long: Duration,
    now: Instant,
) -> Option<Error> {
    let silence = channel.silence(now);
    (silence >= too_long).then(|| Lost::Silent { silence }.into())
}
