//! The receiving end of a pipe.

use std::io::IoSliceMut;
use std::ops::Range;
use std::time::{Duration, Instant};

use super::{SLICES, on_lane};
use crate::link::{Broken, Link, STREAMS_MAX, parts};
use gradring_proto::error::{BadSegment, Breakage};
use gradring_proto::wire::frame::{CHECKED_BYTES_MAX, FRAME_HEADER_BYTES, Frame, checksum};

/// Once a lane has ended, this much time without a byte means that its pipe is broken, and not
/// that a peer has left whose last bytes are under way: more than several retransmissions.
pub(super) const LAST_BYTES_LIMIT: Duration = Duration::from_secs(5);

/// What is received together with an announcement: small frames take one call.
const INBOX_BYTES: usize = 256;

/// The receiving end of a pipe of one or more lanes, which the caller owns.
pub(super) struct Incoming {
    frames: Frames,
    checked: Option<Checked>,
}

/// The frames of a pipe, in order.
struct Frames {
    checked: bool,
    /// By lane.
    inlets: Vec<Inlet>,
    /// Sequence of the frame to deliver next.
    next: u32,
    /// The lane that has it, if the sender's lanes all had room.
    turn: usize,
    /// Since when nothing has come although a lane has ended.
    silent_since: Option<Instant>,
}

/// The next frame of a pipe whose frames are checked before they are handed out.
#[derive(Default)]
struct Checked {
    /// Allocated when the pipe is first used.
    memory: Box<[u8]>,
    /// How much of the frame has been received.
    received: usize,
    /// What was right of it and has not been handed out.
    right: Range<usize>,
}

/// What a lane has brought of its next frame.
#[derive(Clone)]
struct Inlet {
    inbox: [u8; INBOX_BYTES],
    /// Which part of the inbox has not been looked at.
    held: Range<usize>,
    /// The announced frame, and what is left of its length.
    frame: Option<(Frame, usize)>,
    ended: bool,
}

impl Incoming {
    /// A pipe over so many lanes, at least one.
    pub(super) fn new(lanes: usize, checked: bool) -> Self {
        assert!((1..=STREAMS_MAX).contains(&lanes));
        let inlet = Inlet {
            inbox: [0; INBOX_BYTES],
            held: 0..0,
            frame: None,
            ended: false,
        };
        Self {
            frames: Frames {
                checked,
                inlets: vec![inlet; lanes],
                next: 0,
                turn: 0,
                silent_since: None,
            },
            checked: checked.then(Checked::default),
        }
    }

    /// Whether to wait for a lane after `try_receive` found nothing: it could have the next frame.
    pub(super) fn awaits(&self, lane: usize) -> bool {
        match self.frames.lane_of_next() {
            Some(known) => lane == known,
            None => self.frames.inlets[lane].may_announce(),
        }
    }

    /// Whether there is something to receive that has left its lane.
    pub(super) fn has_buffered(&self) -> bool {
        let right = |checked: &Checked| !checked.right.is_empty();
        let mut lanes = 0..self.frames.inlets.len();
        self.checked.as_ref().is_some_and(right)
            || lanes.any(|lane| self.awaits(lane) && self.frames.inlets[lane].has_buffered())
    }

    /// Receives into a prefix of `parts`, which has room; returns its length, or `None` if nothing
    /// is there.
    pub(super) fn try_receive(
        &mut self,
        lanes: &mut [Box<dyn Link>],
        parts: &mut [IoSliceMut<'_>],
    ) -> Result<Option<usize>, Broken> {
        let Some(bytes) = self.readable(lanes)? else {
            let received = self.frames.receive(lanes, parts)?;
            return Ok(received.map(|(count, _)| count));
        };
        let taken = parts::scatter(bytes, parts);
        self.consume(taken);
        Ok((taken > 0).then_some(taken))
    }

    /// What is right of the frame that comes next, as far as it was not consumed; nothing if it has
    /// not arrived in full. `None` if frames are not checked.
    pub(super) fn readable(
        &mut self,
        lanes: &mut [Box<dyn Link>],
    ) -> Result<Option<&[u8]>, Broken> {
        let Some(checked) = &mut self.checked else {
            return Ok(None);
        };
        if checked.memory.is_empty() {
            checked.memory = vec![0; CHECKED_BYTES_MAX].into();
        }
        while checked.right.is_empty() {
            let room = IoSliceMut::new(&mut checked.memory[checked.received..]);
            let Some((count, ended)) = self.frames.receive(lanes, &mut [room])? else {
                break;
            };
            checked.received += count;
            if let Some(frame) = ended {
                checked.right = 0..std::mem::take(&mut checked.received);
                check(frame, &checked.memory[checked.right.clone()])?;
            }
        }
        Ok(Some(&checked.memory[checked.right.clone()]))
    }

    /// Hands out the first `count` bytes of those that were right.
    pub(super) fn consume(&mut self, count: usize) {
        if let Some(checked) = &mut self.checked {
            assert!(
                count <= checked.right.len(),
                "what is consumed has been seen"
            );
            checked.right.start += count;
        }
    }
}

impl Frames {
    /// Receives of the next frame; returns how much, and the frame if that was the rest of it.
    fn receive(
        &mut self,
        lanes: &mut [Box<dyn Link>],
        parts: &mut [IoSliceMut<'_>],
    ) -> Result<Option<(usize, Option<Frame>)>, Broken> {
        let Some(index) = self.find_next(lanes)? else {
            return self.nothing_yet().map(|()| None);
        };
        let count = self.inlets.len();
        let inlet = &mut self.inlets[index];
        let received = inlet.receive_payload(&mut *lanes[index], parts);
        let received = received.map_err(on_lane(index, count))?;
        if let Some((_, Some(_))) = received {
            self.next = self.next.wrapping_add(1);
            self.turn = (index + 1) % count;
        }
        self.silent_since = None;
        Ok(received)
    }

    fn lane_of_next(&self) -> Option<usize> {
        let has_next = |i: &Inlet| {
            i.frame
                .is_some_and(|(frame, _)| frame.sequence == self.next)
        };
        self.inlets.iter().position(has_next)
    }

    /// The lane that has the next frame, as far as announcements have arrived.
    fn find_next(&mut self, lanes: &mut [Box<dyn Link>]) -> Result<Option<usize>, Broken> {
        let count = self.inlets.len();
        for index in 0..count {
            self.admit(index)?;
        }
        let known = self.lane_of_next();
        if known.is_some() {
            return Ok(known);
        }
        for step in 0..count {
            let index = (self.turn + step) % count;
            let inlet = &mut self.inlets[index];
            if !inlet.may_announce() {
                continue;
            }
            let received = inlet.receive_header(&mut *lanes[index]);
            received.map_err(on_lane(index, count))?;
            self.admit(index)?;
            if self.lane_of_next() == Some(index) {
                return Ok(Some(index));
            }
        }
        Ok(None)
    }

    /// Takes note of a lane's next frame, if its announcement is complete.
    fn admit(&mut self, index: usize) -> Result<(), Broken> {
        let inlet = &self.inlets[index];
        let held = &inlet.inbox[inlet.held.clone()];
        let (None, Some(header)) = (inlet.frame, held.first_chunk()) else {
            return Ok(());
        };
        let wrong = |problem| {
            let broken = corrupted(self.next, problem);
            Err(on_lane(index, self.inlets.len())(broken))
        };
        let Some(frame) = Frame::decode(header) else {
            return wrong(BadSegment::Announcement);
        };
        let mut others = self.inlets.iter().filter_map(|inlet| inlet.frame);
        let repeated = others.any(|(other, _)| other.sequence == frame.sequence);
        let came = frame.sequence;
        // Sequences start again after the last one.
        if repeated || frame.sequence.wrapping_sub(self.next) > u32::MAX / 2 {
            return wrong(BadSegment::OtherCame { came });
        }
        // With one lane there is no other that could bring it.
        if self.inlets.len() == 1 && frame.sequence != self.next {
            return wrong(BadSegment::OtherCame { came });
        }
        if self.checked && frame.length > CHECKED_BYTES_MAX {
            return wrong(BadSegment::TooLong);
        }
        let inlet = &mut self.inlets[index];
        inlet.held.start += FRAME_HEADER_BYTES;
        inlet.frame = Some((frame, frame.length));
        Ok(())
    }

    /// Whether the next frame can still come.
    fn nothing_yet(&mut self) -> Result<(), Broken> {
        let hopeless = !self.inlets.iter().any(Inlet::may_announce);
        let Some(ended) = self.inlets.iter().position(|inlet| inlet.ended) else {
            return match hopeless {
                true => Err(corrupted(self.next, BadSegment::NeverCame)),
                false => Ok(()),
            };
        };
        if self.inlets.iter().all(|inlet| inlet.ended) {
            return Err(Broken::closed());
        }
        let since = *self.silent_since.get_or_insert_with(Instant::now);
        if hopeless || since.elapsed() >= LAST_BYTES_LIMIT {
            return Err(on_lane(ended, self.inlets.len())(Broken::closed()));
        }
        Ok(())
    }
}

impl Inlet {
    /// Whether the lane could say now which frame is its next.
    const fn may_announce(&self) -> bool {
        self.frame.is_none() && !self.ended
    }

    /// Whether what is held comes to something.
    fn has_buffered(&self) -> bool {
        match self.frame {
            Some(_) => !self.held.is_empty(),
            None => self.held.len() >= FRAME_HEADER_BYTES,
        }
    }

    fn receive_header(&mut self, lane: &mut dyn Link) -> Result<(), Broken> {
        self.inbox.copy_within(self.held.clone(), 0);
        self.held = 0..self.held.len();
        let rest = &mut self.inbox[self.held.end..];
        match lane.try_receive(&mut [IoSliceMut::new(rest)]) {
            Ok(received) => self.held.end += received.unwrap_or(0),
            Err(broken) if broken.how == Breakage::Closed && self.held.is_empty() => {
                self.ended = true
            }
            Err(broken) => return Err(broken),
        }
        Ok(())
    }

    /// Receives payload of the announced frame, and with its last bytes what follows of the next
    /// announcement; returns how much, and the frame if that was the rest of it.
    fn receive_payload(
        &mut self,
        lane: &mut dyn Link,
        parts: &mut [IoSliceMut<'_>],
    ) -> Result<Option<(usize, Option<Frame>)>, Broken> {
        let (frame, left) = self.frame.expect("payload follows its frame");
        let payload = if self.held.is_empty() {
            let mut slices: [IoSliceMut<'_>; SLICES] =
                std::array::from_fn(|_| IoSliceMut::new(&mut []));
            let (mut filled, mut room) = (0, 0);
            for part in parts.iter_mut().take(SLICES - 1) {
                let length = part.len().min(left - room);
                slices[filled] = IoSliceMut::new(&mut part[..length]);
                filled += 1;
                room += length;
            }
            if room == left {
                slices[filled] = IoSliceMut::new(&mut self.inbox[..FRAME_HEADER_BYTES]);
                filled += 1;
            }
            let Some(received) = lane.try_receive(&mut slices[..filled])? else {
                return Ok(None);
            };
            self.held = 0..received.saturating_sub(room);
            received.min(room)
        } else {
            let held = &self.inbox[self.held.clone()];
            let taken = parts::scatter(&held[..held.len().min(left)], parts);
            self.held.start += taken;
            taken
        };
        self.frame = (payload < left).then_some((frame, left - payload));
        Ok(Some((payload, (payload == left).then_some(frame))))
    }
}

/// Whether a frame's payload is what was sent.
fn check(frame: Frame, payload: &[u8]) -> Result<(), Broken> {
    let found = checksum([payload]);
    if found == frame.checksum {
        return Ok(());
    }
    let problem = BadSegment::Checksum {
        bytes: frame.length,
        found,
        sent: frame.checksum,
    };
    Err(corrupted(frame.sequence, problem))
}

fn corrupted(sequence: u32, problem: BadSegment) -> Broken {
    Breakage::Segment { sequence, problem }.into()
}
