//! The sending end of a pipe.

use std::io::IoSlice;
use std::ops::Range;

use super::{SLICES, Stream, on_stream};
use crate::link::{Broken, STREAMS_MAX, parts};
use crate::wire::frame::{FRAME_BYTES_MAX, Frame, FrameHeader};

/// The sending end of a pipe of one or more streams, which the caller owns.
#[derive(Default)]
pub(in crate::link) struct Outgoing {
    /// By stream: what is left of a frame that it has taken in part.
    unsent: Vec<Option<Unsent>>,
    /// Of the frame to begin next.
    sequence: u64,
    /// Bytes from the start of the next offer on that belong to begun frames.
    framed: usize,
    /// The stream to begin that frame, if it has room.
    turn: usize,
    /// Whether streams without a begun frame would have had more to do.
    wants_room: bool,
}

/// What is left of a frame that its stream has taken in part.
#[derive(Clone)]
struct Unsent {
    header: FrameHeader,
    header_sent: usize,
    /// Where the rest lies in the next offer.
    payload: Range<usize>,
}

impl Outgoing {
    /// A pipe over so many streams, at least one.
    pub(in crate::link) fn new(streams: usize) -> Self {
        assert!((1..=STREAMS_MAX).contains(&streams));
        Self {
            unsent: vec![None; streams],
            ..Self::default()
        }
    }

    /// Those of its `streams` for which to wait after `try_send` found no room: any of them may go
    /// on.
    pub(in crate::link) fn awaited<'a, S>(
        &'a self,
        streams: &'a [S],
    ) -> impl Iterator<Item = &'a S> {
        let all = self.unsent.len() == 1 || self.wants_room;
        let awaited = streams.iter().zip(&self.unsent);
        awaited.filter_map(move |(stream, unsent)| (all || unsent.is_some()).then_some(stream))
    }

    /// Sends a prefix of `offer`; returns its length, or `None` if the pipe is full.
    pub(in crate::link) fn try_send<S: Stream>(
        &mut self,
        streams: &mut [S],
        offer: &[IoSlice<'_>],
    ) -> Result<Option<usize>, Broken> {
        if let [only] = streams {
            return only.try_send(offer);
        }
        let offered = parts::length(offer);
        assert!(self.framed <= offered, "an offer repeats what was not sent");
        let mut full = [false; STREAMS_MAX];
        let mut in_vain = 0;
        while in_vain < streams.len() {
            let index = self.turn;
            self.turn = (index + 1) % streams.len();
            full[index] = full[index] || !self.push(index, &mut streams[index], offer, offered)?;
            in_vain = if full[index] { in_vain + 1 } else { 0 };
        }
        self.wants_room = self.framed < offered;

        let begun = self.unsent.iter().flatten();
        let sent = begun.map(|u| u.payload.start).min().unwrap_or(self.framed);
        self.framed -= sent;
        for Unsent { payload, .. } in self.unsent.iter_mut().flatten() {
            *payload = payload.start - sent..payload.end - sent;
        }
        Ok((sent > 0).then_some(sent))
    }

    /// Goes on with a stream's frame, or begins the next one; whether there may be room for more.
    fn push<S: Stream>(
        &mut self,
        index: usize,
        stream: &mut S,
        offer: &[IoSlice<'_>],
        offered: usize,
    ) -> Result<bool, Broken> {
        let frame_bytes = self.frame_bytes();
        let fresh = self.unsent[index].is_none();
        let mut unsent = match &self.unsent[index] {
            Some(unsent) => unsent.clone(),
            None if self.framed == offered => return Ok(false),
            None => {
                let payload = self.framed..offered.min(self.framed + frame_bytes);
                Unsent::new(self.sequence, payload)
            }
        };
        let mut slices = [IoSlice::new(&[]); SLICES];
        slices[0] = IoSlice::new(&unsent.header[unsent.header_sent..]);
        let filled = 1 + parts::select(offer, unsent.payload.clone(), &mut slices[1..]);
        let wanted: usize = slices[..filled].iter().map(|slice| slice.len()).sum();
        let sent = stream.try_send(&slices[..filled]);
        // A stream that took nothing has not begun a frame: another may.
        let Some(sent) = sent.map_err(on_stream(index))? else {
            return Ok(false);
        };
        if fresh {
            self.sequence += 1;
            self.framed = unsent.payload.end;
        }
        unsent.advance(sent);
        self.unsent[index] = (!unsent.payload.is_empty()).then_some(unsent);
        Ok(sent == wanted)
    }

    /// Small enough that an offer has frames for all streams, and again while some wait.
    fn frame_bytes(&self) -> usize {
        2 * FRAME_BYTES_MAX / self.unsent.len()
    }
}

impl Unsent {
    fn new(sequence: u64, payload: Range<usize>) -> Self {
        let length = payload.len();
        Self {
            header: Frame { sequence, length }.encode(),
            header_sent: 0,
            payload,
        }
    }

    fn advance(&mut self, sent: usize) {
        let of_header = sent.min(self.header.len() - self.header_sent);
        self.header_sent += of_header;
        self.payload.start += sent - of_header;
    }
}
