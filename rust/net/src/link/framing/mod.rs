//! One link over several, or one whose bytes are checked, or both.
//!
//! A link of one lane without checksums is that lane: nothing is added to its bytes. Otherwise the
//! bytes of each pipe are cut into *frames*, each announced by its sequence and length, and with
//! checksums by that of its payload (`wire::frame`). Each frame travels on one lane. Several lanes
//! are for networks that limit each connection; shared memory has one.
//!
//! *Sending.* Whichever lane has room begins the next frame, so a lane that is slow takes fewer.
//! Nothing is copied: a frame that its lane takes only in part is remembered as a range of what
//! was offered, and goes on from there with the next offer. Other lanes go on with later frames
//! meanwhile. What counts as sent is the prefix of the pipe's bytes that lanes have taken without
//! a gap; bytes beyond it stay the sender's to keep unchanged, as any unsent bytes are. This needs
//! one thing of the caller: an offer begins where the pipe stands and reaches at least as far as the
//! one before, which holds for all that send buffers in order.
//!
//! *Receiving.* The lane whose next frame is the next of the pipe is read straight into the
//! caller's memory; the bytes of the others wait where they are. Each lane carries its frames in
//! rising order, so the next frame is always the next of the lane that carries it, and nothing can
//! deadlock. The announcement of a lane's next frame comes with the last bytes of the one before.
//!
//! *Checksums.* The next frame is received into memory of the pipe, and handed out when all of it
//! has arrived and is right: what is wrong is neither reduced nor passed on to other ranks, so no
//! rank can end a collective with it. What is wrong ends the pipe. The price is looking at every byte
//! once more on both sides, and on the receiving side one copy inside the cache: a reduction takes
//! its operand from where the frame was checked.
//!
//! *An end.* A peer that leaves ends all lanes at once, but their last bytes do not arrive at once:
//! a lane that has ended between two frames is only left out. If the next frame does not come,
//! the pipe is broken: at once if no lane is left that could bring it, or else when nothing has
//! come for a while.

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

/// Slices in one system call, the announcement included; more take several calls.
const SLICES: usize = 66;

/// A link over all of these `lanes`, at least one, whose bytes are checked if they are to be.
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

/// Says on which of several lanes something broke.
fn on_lane(lane: usize, lanes: usize) -> impl Fn(Broken) -> Broken {
    move |broken| match lanes {
        1 => broken,
        _ => Broken {
            stream: Some(lane),
            ..broken
        },
    }
}
