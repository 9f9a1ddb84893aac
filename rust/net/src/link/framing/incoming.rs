//! The receiving end of a pipe.

use std::io::IoSliceMut;
use std::ops::Range;
use std::time::{Duration, Instant};

use super::{SLICES, on_lane};
use crate::link::{Broken, Link, STREAMS_MAX, parts};
use gradring_proto::error::{BadSegment, Breakage};
use gradring_proto::wire::frame::{CHECKED_BYTES_MAX, FRAME_HEADER_BYTES, Frame, checksum};

/// Time without a byte after which a pipe with an ended lane is broken. Before that, the last bytes
/// of a peer that has left may still be under way. The limit covers several retransmissions.
pub(super) const LAST_BYTES_LIMIT: Duration = Duration::from_secs(5);

/// Bytes received together with a header, so that a small frame takes one call.
const INBOX_BYTES: usize = 256;

/// The receiving end of a pipe over one or more lanes; the caller owns the lanes.
pub(super) struct Incoming {
    frames: Frames,
    checked: Option<Checked>,
}

/// The frames of a pipe, in order.
struct Frames {
    checked: bool,
    /// State of each lane.
    inlets: Vec<Inlet>,
    /// Sequence number of the frame to deliver next.
    next: u32,
    /// Lane that carries it if all of the sender's lanes had free capacity.
    turn: usize,
    /// Start of the time without bytes after a lane has ended.
    silent_since: Option<Instant>,
}

/// The next frame of a pipe with checksums, which is checked before it is handed out.
#[derive(Default)]
struct Checked {
    /// Allocated when the pipe is first used.
    memory: Box<[u8]>,
    /// Bytes of the frame received so far.
    received: usize,
    /// Range of checked bytes that have not been handed out.
    right: Range<usize>,
}

/// Bytes that a lane has delivered of its next frame.
#[derive(Clone)]
struct Inlet {
    inbox: [u8; INBOX_BYTES],
    /// Range of the inbox that has not been processed.
    held: Range<usize>,
    /// Frame whose header has arrived, and the payload bytes still to receive.
    frame: Option<(Frame, usize)>,
    ended: bool,
}

impl Incoming {
    /// Creates the receiving end of a pipe over `lanes` lanes, at least one.
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

    /// Returns `true` if the lane may deliver the next frame, so that it is worth waiting for after
    /// `try_receive` returned `None`.
    pub(super) fn awaits(&self, lane: usize) -> bool {
        match self.frames.lane_of_next() {
            Some(known) => lane == known,
            None => self.frames.inlets[lane].may_announce(),
        }
    }

    /// Returns `true` if bytes to receive have left their lane, where `poll` does not see them.
    pub(super) fn has_buffered(&self) -> bool {
        let right = |checked: &Checked| !checked.right.is_empty();
        let mut lanes = 0..self.frames.inlets.len();
        self.checked.as_ref().is_some_and(right)
            || lanes.any(|lane| self.awaits(lane) && self.frames.inlets[lane].has_buffered())
    }

    /// Receives into a prefix of `parts`, which must not be empty; returns its length, or `None` if
    /// no bytes have arrived.
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

    /// Returns the checked bytes of the next frame that have not been consumed, none if it has not
    /// arrived in full. `None` if the pipe has no checksums.
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
            let spare = IoSliceMut::new(&mut checked.memory[checked.received..]);
            let Some((count, ended)) = self.frames.receive(lanes, &mut [spare])? else {
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

    /// Marks the first `count` checked bytes as handed out.
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
    /// Receives payload of the next frame. Returns the number of bytes, and the frame if it is
    /// complete.
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

    /// Returns the lane with the next frame, if its header has arrived.
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

    /// Checks and stores the header of a lane's next frame, if it is complete.
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
        // Sequence numbers wrap around.
        if repeated || frame.sequence.wrapping_sub(self.next) > u32::MAX / 2 {
            return wrong(BadSegment::OtherCame { came });
        }
        // A single lane cannot leave a gap that another one fills.
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

    /// Fails if the next frame can no longer arrive.
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
    /// Returns `true` if the next bytes of the lane are a header.
    const fn may_announce(&self) -> bool {
        self.frame.is_none() && !self.ended
    }

    /// Returns `true` if the bytes in the inbox are payload or a whole header.
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

    /// Receives payload of the current frame, and with its last bytes those of the next header that
    /// have arrived. Returns the number of payload bytes, and the frame if it is complete.
    fn receive_payload(
        &mut self,
        lane: &mut dyn Link,
        parts: &mut [IoSliceMut<'_>],
    ) -> Result<Option<(usize, Option<Frame>)>, Broken> {
        let (frame, left) = self.frame.expect("payload follows its frame");
        let payload = if self.held.is_empty() {
            let mut slices: [IoSliceMut<'_>; SLICES] =
                std::array::from_fn(|_| IoSliceMut::new(&mut []));
            let (mut filled, mut capacity) = (0, 0);
            for part in parts.iter_mut().take(SLICES - 1) {
                let length = part.len().min(left - capacity);
                slices[filled] = IoSliceMut::new(&mut part[..length]);
                filled += 1;
                capacity += length;
            }
            if capacity == left {
                slices[filled] = IoSliceMut::new(&mut self.inbox[..FRAME_HEADER_BYTES]);
                filled += 1;
            }
            let Some(received) = lane.try_receive(&mut slices[..filled])? else {
                return Ok(None);
            };
            self.held = 0..received.saturating_sub(capacity);
            received.min(capacity)
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

/// Compares a frame's payload with its checksum.
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
