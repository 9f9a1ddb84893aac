//! The receiving end of a pipe.

use std::io::IoSliceMut;
use std::time::{Duration, Instant};

use super::{SLICES, Stream, on_stream};
use crate::link::{Broken, STREAMS_MAX};
use crate::wire::frame::{FRAME_HEADER_BYTES, Frame, FrameHeader};

/// Once a stream has ended, this much time without a byte means that its pipe is broken, and not
/// that a peer has left whose last bytes are under way: more than several retransmissions.
pub(super) const LAST_BYTES_LIMIT: Duration = Duration::from_secs(5);

/// The receiving end of a pipe of one or more streams, which the caller owns.
#[derive(Default)]
pub(in crate::link) struct Incoming {
    /// By stream.
    inlets: Vec<Inlet>,
    /// Sequence of the frame to deliver next.
    next: u64,
    /// The stream that has it, if the sender's streams all had room.
    turn: usize,
    /// Since when nothing has come although a stream has ended.
    silent_since: Option<Instant>,
}

/// What a stream has brought of its next frame.
#[derive(Clone, Default)]
struct Inlet {
    header: FrameHeader,
    header_received: usize,
    /// The announced frame, with what is left of its length.
    frame: Option<Frame>,
    ended: bool,
}

impl Incoming {
    /// A pipe over so many streams, at least one.
    pub(in crate::link) fn new(streams: usize) -> Self {
        assert!((1..=STREAMS_MAX).contains(&streams));
        Self {
            inlets: vec![Inlet::default(); streams],
            ..Self::default()
        }
    }

    /// Those of its `streams` for which to wait after `try_receive` found nothing: those that could
    /// have the next frame.
    pub(in crate::link) fn awaited<'a, S>(
        &'a self,
        streams: &'a [S],
    ) -> impl Iterator<Item = &'a S> {
        let known = self.inlet_of_next();
        let awaited = move |(index, inlet): (usize, &Inlet)| match known {
            Some(known) => index == known,
            None => inlet.may_announce(),
        };
        let inlets = streams.iter().zip(self.inlets.iter().enumerate());
        inlets.filter_map(move |(stream, inlet)| awaited(inlet).then_some(stream))
    }

    /// Receives into a prefix of `parts`, which has room; returns its length, or `None` if nothing
    /// is there.
    pub(in crate::link) fn try_receive<S: Stream>(
        &mut self,
        streams: &mut [S],
        parts: &mut [IoSliceMut<'_>],
    ) -> Result<Option<usize>, Broken> {
        if let [only] = streams {
            return match only.try_receive(parts)? {
                Some(0) => Err(closed()),
                received => Ok(received),
            };
        }
        let Some(index) = self.find_next(streams)? else {
            return self.nothing_yet().map(|()| None);
        };
        let inlet = &mut self.inlets[index];
        let received = inlet.receive_payload(&mut streams[index], parts);
        let received = received.map_err(on_stream(index))?;
        if inlet.frame.is_none() {
            self.next += 1;
            self.turn = (index + 1) % self.inlets.len();
            self.admit(index)?;
        }
        self.silent_since = None;
        Ok(received)
    }

    fn inlet_of_next(&self) -> Option<usize> {
        let has_next = |i: &Inlet| i.frame.is_some_and(|frame| frame.sequence == self.next);
        self.inlets.iter().position(has_next)
    }

    /// The stream that has the next frame, as far as announcements have arrived.
    fn find_next<S: Stream>(&mut self, streams: &mut [S]) -> Result<Option<usize>, Broken> {
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
            let received = inlet.receive_header(&mut streams[index]);
            received.map_err(on_stream(index))?;
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

impl Inlet {
    /// Whether the stream could say now which frame is its next.
    const fn may_announce(&self) -> bool {
        self.frame.is_none() && !self.ended
    }

    fn receive_header(&mut self, stream: &mut impl Stream) -> Result<(), Broken> {
        let rest = &mut self.header[self.header_received..];
        match stream.try_receive(&mut [IoSliceMut::new(rest)])? {
            None => {}
            Some(0) if self.header_received > 0 => return Err(closed()),
            Some(0) => self.ended = true,
            Some(received) => self.header_received += received,
        }
        Ok(())
    }

    /// Receives payload of the announced frame, and with its last bytes what follows of the next
    /// announcement.
    fn receive_payload(
        &mut self,
        stream: &mut impl Stream,
        parts: &mut [IoSliceMut<'_>],
    ) -> Result<Option<usize>, Broken> {
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
        let Some(received) = stream.try_receive(&mut slices[..filled])? else {
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
