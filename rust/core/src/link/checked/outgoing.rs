//! The sending end of a pipe whose bytes are checked.

use std::collections::VecDeque;
use std::io::IoSlice;

use crate::link::{Broken, parts};
use crate::wire::segment::{SEGMENT_BYTES_MAX, Segment, SegmentHeader, checksum};

/// Slices that are offered to a link at a time: all segments of what an executor offers, and more.
const SLICES: usize = 128;

/// The sending end of a pipe.
///
/// Nothing is copied: a segment that is not sent in full is remembered as a range of what was
/// offered, as frames are (see `streams`), and asks the same of the caller.
#[derive(Default)]
pub(super) struct Outgoing {
    /// Segments whose checksums are made, and which are not sent in full; in order.
    begun: VecDeque<Begun>,
    /// Bytes from the start of the next offer on that belong to them.
    covered: usize,
    /// Of the segment to begin next.
    number: u32,
}

struct Begun {
    header: SegmentHeader,
    header_sent: usize,
    /// Bytes of payload that are not sent.
    left: usize,
}

impl Outgoing {
    /// Sends a prefix of `offer`; returns its length, or `None` if the pipe is full.
    pub(super) fn try_send(
        &mut self,
        offer: &[IoSlice<'_>],
        mut send: impl FnMut(&[IoSlice<'_>]) -> Result<Option<usize>, Broken>,
    ) -> Result<Option<usize>, Broken> {
        let offered = parts::length(offer);
        assert!(
            self.covered <= offered,
            "an offer repeats what was not sent"
        );
        let mut sent = 0;
        loop {
            // One at a time, so that the other side has something to do while this one goes on.
            if self.begun.is_empty() && self.covered < offered {
                self.begin(offer, offered);
            }
            if self.begun.is_empty() {
                break;
            }
            let mut slices = [IoSlice::new(&[]); SLICES];
            let filled = self.select(offer, sent, &mut slices);
            let wanted = parts::length(&slices[..filled]);
            let taken = send(&slices[..filled])?.unwrap_or(0);
            sent += self.advance(taken);
            if taken < wanted {
                // What is left of an offer may grow with the next one, and then is worth more.
                if self.covered + SEGMENT_BYTES_MAX > offered {
                    break;
                }
                // A pipe of several streams may have room for what comes later.
                while self.covered + SEGMENT_BYTES_MAX <= offered {
                    self.begin(offer, offered);
                }
            }
        }
        self.covered -= sent;
        Ok((sent > 0).then_some(sent))
    }

    fn begin(&mut self, offer: &[IoSlice<'_>], offered: usize) {
        let payload = self.covered..offered.min(self.covered + SEGMENT_BYTES_MAX);
        let length = payload.len();
        self.covered = payload.end;
        let segment = Segment {
            number: self.number,
            length,
            checksum: checksum(parts::within(offer, payload)),
        };
        self.number = self.number.wrapping_add(1);
        self.begun.push_back(Begun {
            header: segment.encode(),
            header_sent: 0,
            left: length,
        });
    }

    /// Fills `slices` with what is left of begun segments, whose payload goes on at `position` of
    /// the offer; returns how many it filled.
    fn select<'a>(
        &'a self,
        offer: &'a [IoSlice<'_>],
        mut position: usize,
        slices: &mut [IoSlice<'a>],
    ) -> usize {
        let mut filled = 0;
        for segment in &self.begun {
            if filled == slices.len() {
                break;
            }
            slices[filled] = IoSlice::new(&segment.header[segment.header_sent..]);
            filled += 1;
            let payload = position..position + segment.left;
            position = payload.end;
            filled += parts::select(offer, payload, &mut slices[filled..]);
        }
        filled
    }

    /// Takes note that `taken` bytes of what was selected have been sent; returns how many of them
    /// were payload.
    fn advance(&mut self, mut taken: usize) -> usize {
        let mut payload = 0;
        while let Some(segment) = self.begun.front_mut() {
            let of_header = taken.min(segment.header.len() - segment.header_sent);
            segment.header_sent += of_header;
            let of_payload = (taken - of_header).min(segment.left);
            segment.left -= of_payload;
            payload += of_payload;
            taken -= of_header + of_payload;
            if segment.left > 0 {
                break;
            }
            self.begun.pop_front();
        }
        payload
    }
}
