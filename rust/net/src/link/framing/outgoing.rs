//! The sending end of a pipe.

use std::io::IoSlice;
use std::ops::Range;

use super::{SLICES, on_lane};
use crate::link::{Broken, Link, STREAMS_MAX, parts};
use gradring_proto::wire::frame::{
    CHECKED_BYTES_MAX, FRAME_BYTES_MAX, Frame, FrameHeader, checksum,
};

/// The sending end of a pipe over one or more lanes; the caller owns the lanes.
pub(super) struct Outgoing {
    checked: bool,
    /// Rest of the frame that a lane has sent in part, by lane.
    unsent: Vec<Option<Unsent>>,
    /// Next frame, of which no lane has taken a byte.
    ready: Option<Unsent>,
    /// Sequence number of the frame to cut next.
    sequence: u32,
    /// Bytes at the start of the next offer that are already cut into frames.
    framed: usize,
    /// Lane to try next.
    turn: usize,
    /// `true` if bytes are left for lanes that have no frame of their own.
    needs_capacity: bool,
}

/// Unsent rest of a frame.
struct Unsent {
    header: FrameHeader,
    header_sent: usize,
    /// Range of the unsent payload in the next offer.
    payload: Range<usize>,
}

impl Outgoing {
    /// Creates the sending end of a pipe over `lanes` lanes, at least one.
    pub(super) fn new(lanes: usize, checked: bool) -> Self {
        assert!((1..=STREAMS_MAX).contains(&lanes));
        Self {
            checked,
            unsent: (0..lanes).map(|_| None).collect(),
            ready: None,
            sequence: 0,
            framed: 0,
            turn: 0,
            needs_capacity: false,
        }
    }

    /// Returns `true` if the lane has bytes to send, so that it is worth waiting for after
    /// `try_send` returned `None`.
    pub(super) fn awaits(&self, lane: usize) -> bool {
        self.needs_capacity || self.unsent[lane].is_some()
    }

    /// Sends a prefix of `offer`; returns its length, or `None` if the pipe is full.
    pub(super) fn try_send(
        &mut self,
        lanes: &mut [Box<dyn Link>],
        offer: &[IoSlice<'_>],
    ) -> Result<Option<usize>, Broken> {
        let offered = parts::length(offer);
        assert!(self.framed <= offered, "an offer repeats what was not sent");
        let mut full = [false; STREAMS_MAX];
        let mut in_vain = 0;
        while in_vain < lanes.len() {
            let index = self.turn;
            self.turn = (index + 1) % lanes.len();
            full[index] = full[index] || !self.push(index, &mut *lanes[index], offer, offered)?;
            in_vain = if full[index] { in_vain + 1 } else { 0 };
        }
        self.needs_capacity = self.framed < offered || self.ready.is_some();

        let waiting = || self.unsent.iter().chain([&self.ready]).flatten();
        let sent = waiting().map(|u| u.payload.start).min();
        let sent = sent.unwrap_or(self.framed);
        self.framed -= sent;
        let waiting = self.unsent.iter_mut().chain([&mut self.ready]);
        for Unsent { payload, .. } in waiting.flatten() {
            *payload = payload.start - sent..payload.end - sent;
        }
        Ok((sent > 0).then_some(sent))
    }

    /// Continues a lane's frame, or begins the next one. Returns `true` if the lane may take more.
    fn push(
        &mut self,
        index: usize,
        lane: &mut dyn Link,
        offer: &[IoSlice<'_>],
        offered: usize,
    ) -> Result<bool, Broken> {
        let lanes = self.unsent.len();
        let fresh = self.unsent[index].is_none();
        if fresh && self.ready.is_none() && self.framed < offered {
            self.ready = Some(self.announce(offer, offered));
        }
        let slot = match fresh {
            true => &mut self.ready,
            false => &mut self.unsent[index],
        };
        let Some(unsent) = slot else { return Ok(false) };
        let mut slices = [IoSlice::new(&[]); SLICES];
        slices[0] = IoSlice::new(&unsent.header[unsent.header_sent..]);
        let filled = 1 + parts::select(offer, unsent.payload.clone(), &mut slices[1..]);
        let wanted = parts::length(&slices[..filled]);
        let sent = lane.try_send(&slices[..filled]);
        // A lane that took nothing has not begun the frame, so another lane may.
        let Some(sent) = sent.map_err(on_lane(index, lanes))? else {
            return Ok(false);
        };
        let begun = slot.take().map(|unsent| unsent.after(sent));
        self.unsent[index] = begun.filter(|unsent| !unsent.payload.is_empty());
        Ok(sent == wanted)
    }

    /// Cuts the next frame, with a checksum if the pipe has them. Frames are small enough that an
    /// offer has frames for all lanes, and more for fast lanes while slow ones are full.
    fn announce(&mut self, offer: &[IoSlice<'_>], offered: usize) -> Unsent {
        let share = 2 * FRAME_BYTES_MAX / self.unsent.len();
        let bytes_max = share.min(if self.checked {
            CHECKED_BYTES_MAX
        } else {
            FRAME_BYTES_MAX
        });
        let payload = self.framed..offered.min(self.framed + bytes_max);
        let checksum = match self.checked {
            true => checksum(parts::within(offer, payload.clone())),
            false => 0,
        };
        let frame = Frame {
            sequence: self.sequence,
            length: payload.len(),
            checksum,
        };
        self.sequence = self.sequence.wrapping_add(1);
        self.framed = payload.end;
        Unsent {
            header: frame.encode(),
            header_sent: 0,
            payload,
        }
    }
}

impl Unsent {
    /// Returns the rest after `sent` more bytes.
    fn after(mut self, sent: usize) -> Self {
        let of_header = sent.min(self.header.len() - self.header_sent);
        self.header_sent += of_header;
        self.payload.start += sent - of_header;
        self
    }
}
