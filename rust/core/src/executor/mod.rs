//! The executor performs one collective on this rank. Only here do bytes move between buffers and
//! other ranks: over links (`piped`), or in memory that all ranks share: through slots (`slotted`),
//! or from heap to heap (`mapped`).

use gradring_net::link::{Broken, Interest, Transport};
use gradring_proto::buffer::Buffer;
use gradring_proto::collective::Call;
use gradring_proto::error::Error;
use gradring_proto::schedule::Algorithm;
use gradring_proto::schedule::topology::Topology;
use gradring_proto::wire::signature::Header;

mod conflicts;
mod mapped;
mod meeting;
mod operands;
mod outline;
mod piped;
mod plan;
mod slotted;

use mapped::Mapped;
use operands::BesideMemory;
pub use outline::{Outline, Way, Work};
use piped::{Arrival, Piped, TILE_BYTES};
use plan::Plans;
use slotted::Slotted;

/// Reusable memory of an executor.
pub(crate) struct Scratch {
    tile: Vec<u64>,
    beside: BesideMemory,
    plans: Plans,
    headers_sent: Vec<usize>,
    arrivals: Vec<Arrival>,
    interests: Vec<Interest>,
    /// Places of all ranks' buffers in their heaps.
    offsets: Vec<usize>,
}

impl Default for Scratch {
    fn default() -> Self {
        Self {
            tile: vec![0; TILE_BYTES / size_of::<u64>()],
            beside: BesideMemory::default(),
            plans: Plans::default(),
            headers_sent: Vec::new(),
            arrivals: Vec::new(),
            interests: Vec::new(),
            offsets: Vec::new(),
        }
    }
}

fn bytes_of(tile: &mut [u64]) -> &mut [u8] {
    // SAFETY: a u64 is eight initialised bytes.
    unsafe { std::slice::from_raw_parts_mut(tile.as_mut_ptr().cast(), size_of_val(tile)) }
}

/// Reason why a collective cannot continue, as seen by this rank.
#[derive(Debug)]
pub(crate) enum Fault {
    /// A pipe broke.
    Link { peer: usize, broken: Broken },
    /// A peer started another collective than this rank. The text behind the header may be missing.
    Header {
        peer: usize,
        received: Box<Header>,
        text: Vec<u8>,
    },
    /// A peer's array is said to lie where no array can be.
    OutsideHeap { peer: usize },
}

/// Outcome of one attempt to advance.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The collective has ended on this rank.
    Done,
    /// Something moved; try again.
    Moved,
    /// Nothing can move until one of `interests` is ready.
    Blocked,
}

/// One collective under way.
pub(crate) enum Execution<'a> {
    /// It travels over links.
    Piped(Piped<'a>),
    /// It travels through slots of all ranks.
    Slotted(Slotted<'a>),
    /// All ranks read each other's buffers.
    Mapped(Mapped<'a>),
}

/// A call, and how a rank performs it.
#[derive(Clone, Copy)]
pub(crate) struct Part<'a> {
    pub(crate) call: &'a Call,
    pub(crate) algorithm: Algorithm,
    /// `true` if it travels through slots of all ranks.
    pub(crate) in_slots: bool,
    pub(crate) rank: usize,
    pub(crate) topology: &'a Topology,
    /// Header without sender and receiver.
    pub(crate) header: Header,
}

impl<'a> Execution<'a> {
    /// Prepares a rank's part in a call over `buffer`.
    ///
    /// # Errors
    /// `Exhausted` when there is no memory for it.
    pub(crate) fn new(
        buffer: &'a mut Buffer,
        part: Part<'a>,
        scratch: &'a mut Scratch,
    ) -> Result<Self, Error> {
        Ok(match part.in_slots {
            true => Self::Slotted(Slotted::new(buffer, part, scratch)?),
            false if part.call.is_mapped => Self::Mapped(Mapped::new(buffer, part, scratch)?),
            false => Self::Piped(Piped::new(buffer, part, scratch)?),
        })
    }

    /// Rank that performs this part.
    pub(crate) const fn rank(&self) -> usize {
        match self {
            Self::Piped(piped) => piped.rank(),
            Self::Slotted(slotted) => slotted.meeting.rank,
            Self::Mapped(mapped) => mapped.meeting.rank,
        }
    }

    /// Description of the call, if it follows the header.
    pub(crate) fn text(&self) -> &[u8] {
        match self {
            Self::Piped(piped) => piped.text(),
            Self::Slotted(_) | Self::Mapped(_) => &[],
        }
    }

    /// Pipes to wait for after `Progress::Blocked`.
    pub(crate) fn interests(&self) -> &[Interest] {
        match self {
            Self::Piped(piped) => piped.interests(),
            Self::Slotted(slotted) => slotted.meeting.interests(),
            Self::Mapped(mapped) => mapped.meeting.interests(),
        }
    }

    /// Peers without which nothing can move after `Progress::Blocked`: first those that owe data,
    /// then those whose pipes are full.
    pub(crate) fn awaited(&self) -> Vec<usize> {
        match self {
            Self::Piped(piped) => piped.awaited(),
            Self::Slotted(slotted) => slotted.meeting.awaited(),
            Self::Mapped(mapped) => mapped.meeting.awaited(),
        }
    }

    /// Peers that keep this collective waiting, and whether they have entered it. If some have not
    /// entered, only these are returned; otherwise, the peers that still owe something.
    pub(crate) fn late(&self) -> (Vec<usize>, bool) {
        match self {
            Self::Piped(piped) => piped.late(),
            Self::Slotted(slotted) => slotted.meeting.late(),
            Self::Mapped(mapped) => mapped.meeting.late(),
        }
    }

    /// Peer that entered last, once all have entered.
    pub(crate) const fn last_to_enter(&self) -> Option<usize> {
        match self {
            Self::Piped(piped) => piped.last_to_enter,
            Self::Slotted(slotted) => slotted.meeting.last_to_enter,
            Self::Mapped(mapped) => mapped.meeting.last_to_enter,
        }
    }

    /// Bytes of payload sent so far.
    pub(crate) const fn bytes_sent(&self) -> u64 {
        match self {
            Self::Piped(piped) => piped.bytes_sent,
            Self::Slotted(slotted) => slotted.bytes_sent,
            Self::Mapped(mapped) => mapped.bytes_sent,
        }
    }

    /// Moves everything that can move without waiting.
    #[inline]
    pub(crate) fn advance(&mut self, transport: &mut dyn Transport) -> Result<Progress, Fault> {
        match self {
            Self::Piped(piped) => piped.advance(transport),
            Self::Slotted(slotted) => slotted.advance(transport),
            Self::Mapped(mapped) => mapped.advance(transport),
        }
    }

    /// Looks whether a peer that keeps this rank waiting performs another collective by the other
    /// way, where `advance` does not see it.
    pub(crate) fn look_elsewhere(&self, transport: &mut dyn Transport) -> Result<(), Fault> {
        match self {
            Self::Piped(piped) => piped.look_into_slots(transport),
            Self::Slotted(slotted) => slotted.look_at_all(transport),
            Self::Mapped(mapped) => mapped.look_at_all(transport),
        }
    }

    /// Tries to finish this collective with data that has already arrived, although the group has
    /// failed.
    ///
    /// News of a rank's end may overtake data that it sent before. Nothing more is sent.
    pub(crate) fn ends_all_the_same(&mut self, transport: &mut dyn Transport) -> bool {
        while self.has_sent_all() {
            match self.advance(transport) {
                Ok(Progress::Done) => return true,
                Ok(Progress::Moved) => {}
                Ok(Progress::Blocked) | Err(_) => return false,
            }
        }
        false
    }

    /// Tells other ranks, after a failure, that the buffer may change from now on.
    pub(crate) fn abandon(&self, transport: &mut dyn Transport) {
        match self {
            // Peers read a copy of these buffers.
            Self::Piped(_) | Self::Slotted(_) => {}
            Self::Mapped(mapped) => mapped.abandon(transport),
        }
    }

    fn has_sent_all(&self) -> bool {
        match self {
            Self::Piped(piped) => piped.has_sent_all(),
            Self::Slotted(slotted) => slotted.has_sent_all(),
            Self::Mapped(mapped) => mapped.has_sent_all(),
        }
    }
}
