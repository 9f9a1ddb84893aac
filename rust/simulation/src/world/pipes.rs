//! Pipes of bytes with delays, bounds and faults, on virtual time.
//!
//! A pipe is one direction of a TCP connection as programs see it. It keeps the order of bytes,
//! accepts and delivers a random number at a time, and has random delays. Bytes sent during a
//! temporary cut arrive afterwards; only a permanent cut loses them.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut, Read as _};

use super::network::Cuts;
use super::random::Random;
use super::time::{Clock, MICROSECOND, MILLISECOND, Moment, NEVER};

/// All pipes of a group.
pub(crate) struct Pipes {
    world_size: usize,
    clock: Clock,
    random: Random,
    pipes: Vec<Pipe>,
    /// Events for sleeping threads, each with the moment from which it holds.
    events: Vec<(Moment, Event)>,
}

/// An event that may end a thread's sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// The receiver can read bytes, or see the end.
    Arrival(PipeId),
    /// The sender can write bytes, or see the end.
    Capacity(PipeId),
}

/// One direction of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PipeId {
    Data {
        from: usize,
        to: usize,
    },
    /// Connection between `first` and its successor on the ring.
    Control {
        first: usize,
        back: bool,
    },
}

impl PipeId {
    /// The ranks at both ends, in the direction of the bytes.
    pub(crate) const fn ends(self, world_size: usize) -> (usize, usize) {
        match self {
            Self::Data { from, to } => (from, to),
            Self::Control { first, back } => {
                let successor = (first + 1) % world_size;
                if back {
                    (successor, first)
                } else {
                    (first, successor)
                }
            }
        }
    }
}

/// End of a pipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Closed,
    Reset,
    /// The receiver's link has detected that bytes changed on their way.
    Corrupted,
}

struct Pipe {
    capacity: usize,
    /// Bytes on their way, and their time of arrival.
    flying: VecDeque<(Moment, Vec<u8>)>,
    arrived: VecDeque<u8>,
    /// Number of bytes that are on their way or not yet received.
    held: usize,
    delay: (Moment, Moment),
    last_arrival: Moment,
    /// End that the receiver sees after the last byte, and the moment from which it does.
    end: Option<(Moment, End)>,
    /// Moment from which the sender sees that nobody receives.
    refused: Option<Moment>,
    /// Periods in which the pipe passes nothing.
    cuts: Cuts,
    /// Ordinal of a byte that changes on its way.
    garbled: Option<usize>,
    sent: usize,
    /// Bytes sent by the end of each of the sender's collectives, in order.
    sent_by_end: Vec<usize>,
}

impl Pipe {
    /// Moves the bytes that have arrived by now to the receiver's buffer.
    fn settle(&mut self, now: Moment) {
        if self.cuts.contain(now) {
            return;
        }
        let count = self.flying.iter().take_while(|(at, _)| *at <= now).count();
        for (_, bytes) in self.flying.drain(..count) {
            self.arrived.extend(bytes);
        }
    }

    /// The end of the pipe, if the receiver sees it now.
    fn ended(&self, now: Moment) -> Option<End> {
        let (at, end) = self.end?;
        let through = self.flying.is_empty() || end != End::Closed;
        (at <= now && through && !self.cuts.contain(now)).then_some(end)
    }

    fn refuses(&self, now: Moment) -> bool {
        self.refused.is_some_and(|at| at <= now) && !self.cuts.contain(now)
    }
}

impl Pipes {
    /// Makes pipes from each rank to each, of one capacity, with random delays.
    pub(crate) fn new(
        world_size: usize,
        clock: Clock,
        mut random: Random,
        capacity: usize,
        delay_max: Moment,
    ) -> Self {
        let mut pipe = |capacity| {
            let longest = random.between(10 * MICROSECOND, delay_max);
            Pipe {
                capacity,
                flying: VecDeque::new(),
                arrived: VecDeque::new(),
                held: 0,
                delay: (random.between(5 * MICROSECOND, longest), longest),
                last_arrival: 0,
                end: None,
                refused: None,
                cuts: Cuts::default(),
                garbled: None,
                sent: 0,
                sent_by_end: Vec::new(),
            }
        };
        let mut pipes: Vec<Pipe> = (0..world_size * world_size)
            .map(|_| pipe(capacity))
            .collect();
        pipes.extend((0..2 * world_size).map(|_| pipe(64 << 10)));
        Self {
            world_size,
            clock,
            random,
            pipes,
            events: Vec::new(),
        }
    }

    pub(crate) fn take_events(&mut self) -> Vec<(Moment, Event)> {
        std::mem::take(&mut self.events)
    }

    /// Ids of all pipes.
    pub(crate) fn all(&self) -> impl Iterator<Item = PipeId> + use<> {
        let world_size = self.world_size;
        let data = (0..world_size * world_size).map(move |index| PipeId::Data {
            from: index / world_size,
            to: index % world_size,
        });
        let control = (0..2 * world_size).map(|index| PipeId::Control {
            first: index / 2,
            back: index % 2 == 1,
        });
        data.chain(control)
    }

    fn pipe(&mut self, id: PipeId) -> &mut Pipe {
        let data = self.world_size * self.world_size;
        let index = match id {
            PipeId::Data { from, to } => from * self.world_size + to,
            PipeId::Control { first, back } => data + 2 * first + usize::from(back),
        };
        &mut self.pipes[index]
    }

    /// Sends a prefix of `parts`; `None` if the pipe is full.
    ///
    /// # Errors
    /// When nobody receives any more.
    pub(crate) fn send(&mut self, id: PipeId, parts: &[IoSlice<'_>]) -> Result<Option<usize>, End> {
        let now = self.clock.now();
        let (part, fraction, wait) = (
            self.random.once_in(3),
            self.random.next() as usize,
            self.random.next(),
        );
        let pipe = self.pipe(id);
        if pipe.refuses(now) {
            return Err(End::Reset);
        }
        let all: usize = parts.iter().map(|part| part.len()).sum();
        let mut count = all.min(pipe.capacity - pipe.held);
        if count == 0 {
            return Ok(None);
        }
        if part {
            count = 1 + fraction % count;
        }
        let mut bytes: Vec<u8> = Vec::with_capacity(count);
        for part in parts {
            bytes.extend(&part[..part.len().min(count - bytes.len())]);
        }
        if let Some(byte) = pipe.garbled
            && let Some(byte) = byte.checked_sub(pipe.sent).and_then(|at| bytes.get_mut(at))
        {
            *byte ^= 0x55;
        }
        pipe.sent += count;
        pipe.held += count;
        let (least, most) = pipe.delay;
        let at = pipe
            .last_arrival
            .max(now + least + wait % (most - least + 1));
        pipe.last_arrival = at;
        pipe.flying.push_back((at, bytes));
        self.events.push((at, Event::Arrival(id)));
        Ok(Some(count))
    }

    /// Receives into a prefix of `parts`; `None` if no byte has arrived.
    ///
    /// # Errors
    /// When no byte will arrive any more.
    pub(crate) fn receive(
        &mut self,
        id: PipeId,
        parts: &mut [IoSliceMut<'_>],
    ) -> Result<Option<usize>, End> {
        let now = self.clock.now();
        let (part, fraction) = (self.random.once_in(3), self.random.next() as usize);
        let ack = now + self.random.between(5 * MICROSECOND, MILLISECOND);
        let pipe = self.pipe(id);
        pipe.settle(now);
        let capacity: usize = parts.iter().map(|part| part.len()).sum();
        let mut count = capacity.min(pipe.arrived.len());
        if count == 0 {
            return pipe.ended(now).map_or(Ok(None), Err);
        }
        if part {
            count = 1 + fraction % count;
        }
        let mut left = count;
        for part in parts {
            let length = part.len().min(left);
            let filled = pipe.arrived.read_exact(&mut part[..length]);
            filled.expect("as many bytes have arrived");
            left -= length;
        }
        pipe.held -= count;
        self.events.push((ack, Event::Capacity(id)));
        Ok(Some(count))
    }

    /// Returns whether the receiver can continue without waiting.
    pub(crate) fn has_arrived(&mut self, id: PipeId) -> bool {
        let now = self.clock.now();
        let pipe = self.pipe(id);
        pipe.settle(now);
        !pipe.arrived.is_empty() || pipe.ended(now).is_some()
    }

    /// Returns whether the sender can continue without waiting.
    pub(crate) fn has_capacity(&mut self, id: PipeId) -> bool {
        let now = self.clock.now();
        let pipe = self.pipe(id);
        pipe.held < pipe.capacity || pipe.refuses(now)
    }

    /// Records that `rank` has ended its next collective, and sends nothing more for it.
    pub(crate) fn note_end(&mut self, rank: usize) {
        for to in 0..self.world_size {
            let pipe = self.pipe(PipeId::Data { from: rank, to });
            pipe.sent_by_end.push(pipe.sent);
        }
    }

    /// Returns whether all other ranks have ended the collective at this position, counted from 0,
    /// and all their bytes for it have arrived at `rank` unchanged.
    pub(crate) fn everything_has_arrived(&mut self, rank: usize, number: usize) -> bool {
        let now = self.clock.now();
        let mut peers = (0..self.world_size).filter(|&peer| peer != rank);
        peers.all(|from| {
            let pipe = self.pipe(PipeId::Data { from, to: rank });
            pipe.settle(now);
            let flying: usize = pipe.flying.iter().map(|(_, bytes)| bytes.len()).sum();
            let arrived = pipe.sent - flying;
            let all = pipe.sent_by_end.get(number);
            pipe.garbled.is_none()
                && !pipe.cuts.contain(now)
                && all.is_some_and(|&all| all <= arrived)
        })
    }

    /// Closes the sender's end, by its program or because its process ends.
    pub(crate) fn end_by_sender(&mut self, id: PipeId, end: End) {
        let now = self.clock.now();
        let pipe = self.pipe(id);
        let at = pipe.last_arrival.max(now + pipe.delay.1);
        pipe.end.get_or_insert((at, end));
        self.events.push((at, Event::Arrival(id)));
    }

    /// Closes the receiver's end, by its program or because its process ends.
    pub(crate) fn end_by_receiver(&mut self, id: PipeId) {
        let now = self.clock.now();
        let pipe = self.pipe(id);
        let at = now + pipe.delay.1;
        pipe.refused.get_or_insert(at);
        self.events.push((at, Event::Capacity(id)));
    }

    /// Cuts the pipe from now to `until`.
    pub(crate) fn cut(&mut self, id: PipeId, until: Moment) {
        let now = self.clock.now();
        self.pipe(id).cuts.add(now, until);
        if until < NEVER {
            self.events.push((until, Event::Arrival(id)));
            self.events.push((until, Event::Capacity(id)));
        }
    }

    /// Sets the delay of all bytes sent from now on.
    pub(crate) fn slow_down(&mut self, id: PipeId, delay: Moment) {
        self.pipe(id).delay = (delay, delay);
    }

    /// Bytes that `rank` has sent to its successor in the collective at this position, counted from
    /// 0.
    pub(crate) fn sent_in(&mut self, rank: usize, number: usize) -> usize {
        let to = (rank + 1) % self.world_size;
        let pipe = self.pipe(PipeId::Data { from: rank, to });
        let before = number.checked_sub(1);
        let before = before.and_then(|before| pipe.sent_by_end.get(before));
        pipe.sent - before.copied().unwrap_or(0)
    }

    /// Changes the byte that follows the next `after` bytes.
    pub(crate) fn garble(&mut self, id: PipeId, after: usize) {
        let pipe = self.pipe(id);
        pipe.garbled = Some(pipe.sent + after);
    }
}
