//! A link over several lanes, or with checksums, or both.
//!
//! A single lane without checksums is used as it is: nothing is added to its bytes. Otherwise the
//! bytes of each pipe are cut into *frames*. A header announces a frame's sequence number and
//! length, and with checksums the checksum of its payload (`wire::frame`). Each frame travels on
//! one lane. Several lanes are for networks that limit each connection; shared memory has one.
//!
//! *Sending.* Any lane with capacity begins the next frame, so a slow lane carries fewer. Nothing
//! is copied. If a lane takes only part of a frame, the rest is remembered as a range of the offer,
//! and the lane continues with the next offer. Meanwhile other lanes send later frames. The bytes
//! that count as sent are the prefix of the pipe that lanes have taken without a gap. The sender
//! keeps bytes beyond that prefix unchanged, like all unsent bytes. An offer must begin at the end
//! of that prefix and reach at least as far as the previous offer; a sender that sends buffers in
//! order always does so.
//!
//! *Receiving.* The lane with the pipe's next frame is read straight into the caller's memory; the
//! bytes of other lanes wait where they are. Each lane carries its frames in rising order. So the
//! pipe's next frame is always the next frame of some lane, and nothing can deadlock. The header of
//! a lane's next frame is received with the last bytes of the previous frame.
//!
//! *Checksums.* The next frame is received into memory of the pipe, and handed out when all of it
//! has arrived and its checksum is right. A corrupted frame is neither reduced nor passed on to
//! other ranks, so no rank can end a collective with it; it ends the pipe. The cost is one more
//! pass over the bytes on both sides, and one copy inside the cache on the receiving side. A
//! reduction takes its operand from the memory where the frame was checked.
//!
//! *End.* A peer that leaves ends all lanes at once, but their last bytes do not arrive at once. So
//! a lane that has ended between two frames is only left out. If the next frame does not come, the
//! pipe is broken: at once if no lane is left that could carry it, otherwise after
//! `LAST_BYTES_LIMIT` without a byte.

use std::io::{IoSlice, IoSliceMut};

use rustix::event::PollFd;

use super::kind::Lanes;
use super::{Broken, Direction, Link};

mod incoming;
mod outgoing;
#[cfg(all(test, not(loom)))]
pub(super) mod tests;

use incoming::Incoming;
use outgoing::Outgoing;

/// Largest number of slices in one system call, including the header; more slices take several
/// calls.
const SLICES: usize = 66;

/// Combines one or more `lanes` into a link, with checksums if `checked`.
#[must_use]
pub fn over(mut lanes: Lanes, checked: bool) -> Box<dyn Link> {
    match lanes.len() {
        1 if !checked => lanes.remove(0),
        _ => Box::new(Framed::new(lanes, checked)),
    }
}

/// A link whose bytes travel in frames.
struct Framed {
    lanes: Lanes,
    outgoing: Outgoing,
    incoming: Incoming,
}

impl Framed {
    fn new(lanes: Lanes, checked: bool) -> Self {
        Self {
            outgoing: Outgoing::new(lanes.len(), checked),
            incoming: Incoming::new(lanes.len(), checked),
            lanes,
        }
    }

    fn awaits(&self, direction: Direction, lane: usize) -> bool {
        match direction {
            Direction::Send => self.outgoing.awaits(lane),
            Direction::Receive => self.incoming.awaits(lane),
        }
    }
}

impl Link for Framed {
    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> Result<Option<usize>, Broken> {
        self.outgoing.try_send(&mut self.lanes, parts)
    }

    fn try_receive(&mut self, parts: &mut [IoSliceMut<'_>]) -> Result<Option<usize>, Broken> {
        self.incoming.try_receive(&mut self.lanes, parts)
    }

    fn readable(&mut self) -> Result<Option<&[u8]>, Broken> {
        self.incoming.readable(&mut self.lanes)
    }

    fn consume(&mut self, count: usize) {
        self.incoming.consume(count);
    }

    fn may_sleep(&mut self, direction: Direction) -> bool {
        if direction == Direction::Receive && self.incoming.has_buffered() {
            return false;
        }
        let mut lanes = 0..self.lanes.len();
        lanes.all(|lane| !self.awaits(direction, lane) || self.lanes[lane].may_sleep(direction))
    }

    fn awaited<'a>(&'a self, direction: Direction, awaited: &mut Vec<PollFd<'a>>) {
        for (lane, link) in self.lanes.iter().enumerate() {
            if self.awaits(direction, lane) {
                link.awaited(direction, awaited);
            }
        }
    }

    fn awake(&mut self, slept: bool) {
        self.lanes.iter_mut().for_each(|lane| lane.awake(slept));
    }

    fn core_of_peer(&self) -> Option<usize> {
        self.lanes[0].core_of_peer()
    }

    fn congestion(&self) -> Option<(String, String)> {
        self.lanes[0].congestion()
    }
}

/// Adds the number of the broken lane to an error, if there are several lanes.
fn on_lane(lane: usize, lanes: usize) -> impl Fn(Broken) -> Broken {
    move |broken| match lanes {
        1 => broken,
        _ => Broken {
            stream: Some(lane),
            ..broken
        },
    }
}
