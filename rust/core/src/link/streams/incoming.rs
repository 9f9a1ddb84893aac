//! The receiving end of a pipe.

use std::io::IoSliceMut;
use std::time::{Duration, Instant};

use super::{SLICES, Stream, on_stream};
use crate::link::{Broken, STREAMS_MAX};
use crate::wire::frame::{FRAME_HEADER_BYTES, Frame, FrameHeader};

/// Once a stream has ended, this much time without a byte means that its pipe is broken, and not
/// that a peer has left whose last bytes are under way: more than several retransmissions.
pub(super) const LAST_BYTES_LIMIT: Duration = Duration::from_secs(5);

/// The receiving end of a pipe of one or more streams.
pub(in crate::link) struct Incoming<S> {
    inlets: Vec<Inlet<S>>,
    /// Sequence of the frame to deliver next.
    next: u64,
    /// The stream that has it, if the sender's streams all had room.
    turn: usize,
    /// Since when nothing has come although a stream has ended.
    silent_since: Option<Instant>,
}

struct Inlet<S> {
    stream: S,
    header: FrameHeader,
    header_received: usize,
    /// The announced frame, with what is left of its length.
    frame: Option<Frame>,
    ended: bool,
}

impl<S: Stream> Incoming<S> {
    /// A pipe over `streams`, at least one.
    pub(in crate::link) fn new(streams: Vec<S>) -> Self {
        assert!((1..=STREAMS_MAX).contains(&streams.len()));
        let inlet = |stream| Inlet {
            stream,
            header: [0; FRAME_HEADER_BYTES],
            header_received: 0,
            frame: None,
            ended: false,
        };
        Self {
            inlets: streams.into_iter().map(inlet).collect(),
            next: 0,
            turn: 0,
            silent_since: None,
        }
    }

    /// The first stream.
    pub(in crate::link) fn first(&self) -> &S {
        &self.inlets[0].stream
    }

    pub(in crate::link) fn first_mut(&mut self) -> &mut S {
        &mut self.inlets[0].stream
    }

    /// Closes all streams but the first, before anything is received.
    pub(in crate::link) fn keep_first(&mut self) {
        self.inlets.truncate(1);
    }

    /// The streams for which to wait after `try_receive` found nothing: those that could have the
    /// next frame.
    pub(in crate::link) fn awaited(&self) -> impl Iterator<Item = &S> {
        let known = self.inlet_of_next();
        let awaited = move |(index, inlet): &(usize, &Inlet<S>)| match known {
            Some(known) => *index == known,
            None => inlet.may_announce(),
        };
        let inlets = self.inlets.iter().enumerate();
        inlets.filter(awaited).map(|(_, inlet)| &inlet.stream)
    }

    /// Receives into a prefix of `parts`, which has room; returns its length, or `None` if nothing
    /// is there.
    pub(in crate::link) fn try_receive(
        &mut self,
        parts: &mut [IoSliceMut<'_>],
    ) -> Result<Option<usize>, Broken> {
        if let [only] = &mut self.inlets[..] {
            return match only.stream.try_receive(parts)? {
                Some(0) => Err(closed()),
                received => Ok(received),
            };
        }
        let Some(index) = self.find_next()? else {
            return self.nothing_yet().map(|()| None);
        };
        let inlet = &mut self.inlets[index];
        let received = inlet.receive_payload(parts).map_err(on_stream(index))?;
        if inlet.frame.is_none() {
            self.next += 1;
            self.turn = (index + 1) % self.inlets.len();
            self.admit(index)?;
        }
        self.silent_since = None;
        Ok(received)
    }

    fn inlet_of_next(&self) -> Option<usize> {
        let has_next = |i: &Inlet<S>| i.frame.is_some_and(|frame| frame.sequence == self.next);
        self.inlets.iter().position(has_next)
    }

    /// The stream that has the next frame, as far as announcements have arrived.
    fn find_next(&mut self) -> Result<Option<usize>, Broken> {
        let known = self.inlet_of_next();
        if known.is_some() {
            return Ok(known);
        }
        for step in 0..self.inlets.len() {
            let index = (self.turn + step) % self.inlets.len();
            let inlet = &mut self.inlets[index];
            if !inlet.may_announce() {
                continue;
            }
            inlet.receive_header().map_err(on_stream(index))?;
            self.admit(index)?;
            if self.inlet_of_next() == Some(index) {
                return Ok(Some(index));
            }
        }
        Ok(None)
    }

    /// Takes note of a stream's next frame, if its announcement is complete.
    fn admit(&mut self, index: usize) -> Result<(), Broken> {
        let inlet = &self.inlets[index];
        if inlet.header_received < FRAME_HEADER_BYTES {
            return Ok(());
        }
        let announced = Frame::decode(&inlet.header).filter(|frame| {
            let mut others = self.inlets.iter().filter_map(|inlet| inlet.frame);
            frame.sequence >= self.next && others.all(|other| other.sequence != frame.sequence)
        });
        let Some(frame) = announced else {
            return Err(on_stream(index)(Broken::corrupted(
                "carried a frame out of place",
            )));
        };
        let inlet = &mut self.inlets[index];
        inlet.frame = Some(frame);
        inlet.header_received = 0;
        Ok(())
    }

    /// Whether the next frame can still come.
    fn nothing_yet(&mut self) -> Result<(), Broken> {
        let hopeless = !self.inlets.iter().any(Inlet::may_announce);
        let Some(ended) = self.inlets.iter().position(|inlet| inlet.ended) else {
            return if hopeless {
                Err(Broken::corrupted("lost a frame"))
            } else {
                Ok(())
            };
        };
        if self.inlets.iter().all(|inlet| inlet.ended) {
            return Err(closed());
        }
        let since = *self.silent_since.get_or_insert_with(Instant::now);
        if hopeless || since.elapsed() >= LAST_BYTES_LIMIT {
            return Err(on_stream(ended)(closed()));
        }
        Ok(())
    }
}

impl<S: Stream> Inlet<S> {
    /// Whether the stream could say now which frame is its next.
    const fn may_announce(&self) -> bool {
        self.frame.is_none() && !self.ended
    }

    fn receive_header(&mut self) -> Result<(), Broken> {
        let rest = &mut self.header[self.header_received..];
        match self.stream.try_receive(&mut [IoSliceMut::new(rest)])? {
            None => {}
            Some(0) if self.header_received > 0 => return Err(closed()),
            Some(0) => self.ended = true,
            Some(received) => self.header_received += received,
        }
        Ok(())
    }

    /// Receives payload of the announced frame, and with its last bytes what follows of the next
    /// announcement.
    fn receive_payload(&mut self, parts: &mut [IoSliceMut<'_>]) -> Result<Option<usize>, Broken> {
        let frame = self.frame.as_mut().expect("payload follows its frame");
        let mut slices: [IoSliceMut<'_>; SLICES] =
            std::array::from_fn(|_| IoSliceMut::new(&mut []));
        let (mut filled, mut room) = (0, 0);
        for part in parts.iter_mut().take(SLICES - 1) {
            let length = part.len().min(frame.length - room);
            slices[filled] = IoSliceMut::new(&mut part[..length]);
            filled += 1;
            room += length;
        }
        if room == frame.length {
            slices[filled] = IoSliceMut::new(&mut self.header);
            filled += 1;
        }
        let Some(received) = self.stream.try_receive(&mut slices[..filled])? else {
            return Ok(None);
        };
        if received == 0 {
            return Err(closed());
        }
        let payload = received.min(room);
        frame.length -= payload;
        if frame.length == 0 {
            self.frame = None;
            self.header_received = received - payload;
        }
        Ok(Some(payload))
    }
}

fn closed() -> Broken {
    Broken::ended("was closed by the other side")
}
