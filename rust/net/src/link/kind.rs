//! Kinds of links: a name, and the function with which two ranks make one.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use super::tcp::connection::Connection;
use super::tcp::deadline_stream::GoOn;
use super::{Link, SlotFile};
use gradring_proto::schedule::choice::MESH_RANKS_MAX;
use gradring_proto::schedule::topology::Topology;

/// A kind of link, such as TCP or shared memory.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    /// Name that users see.
    pub name: &'static str,
    /// Tries to make a link with the peer of an introduction, which calls this at the same time.
    /// Returns the lanes, or the reason why there are none; both sides get the same outcome. It
    /// takes the connections that it needs, and leaves no bytes of the attempt on the others.
    pub link: fn(&mut Introduction<'_>) -> io::Result<Result<Lanes, String>>,
}

/// Slots in memory that all ranks of a group share, while the group forms.
#[derive(Default)]
pub struct GroupSlots {
    /// Number of ranks of the group.
    pub world_size: usize,
    /// The slots, if this rank passes them on to the others.
    pub own: Option<SlotFile>,
    /// The slots, if this rank has received them.
    pub received: Option<SlotFile>,
}

impl GroupSlots {
    /// Slots of a group on one host, which `rank` creates if it is the first. Any other group, and
    /// one without memory for them, has none.
    #[must_use]
    pub fn of(rank: usize, topology: &Topology, may_share: bool) -> Self {
        let world_size = topology.world_size();
        let may_be = topology.hosts().len() == 1 && (2..=MESH_RANKS_MAX).contains(&world_size);
        let own = (may_be && may_share && rank == 0).then(|| SlotFile::create(world_size).ok());
        Self {
            world_size,
            own: own.flatten(),
            received: None,
        }
    }

    /// Keeps slots that a peer has passed on, if it has.
    pub(crate) fn take(&mut self, passed: Option<SlotFile>) {
        self.received = self.received.take().or(passed);
    }
}

/// Links to one peer that are combined into one.
pub type Lanes = Vec<Box<dyn Link>>;

/// Two authenticated processes that are about to make a link.
pub struct Introduction<'a> {
    /// Connections between the two, at least one; no payload has travelled on them.
    pub connections: Vec<Connection>,
    /// Name of this process in messages to the peer.
    pub name: &'a str,
    /// `true` on the side that begins; exactly one does.
    pub initiator: bool,
    /// An eventfd that the peer may ring to wake this process.
    pub doorbell: BorrowedFd<'a>,
    /// Number of linked pairs of processes on the host with the most of them. So both sides have
    /// the same number.
    pub pairs: usize,
    /// The slots of the group, which one rank creates and passes on to the others.
    pub slots: &'a mut GroupSlots,
    /// Time by which the link must be made.
    pub deadline: Instant,
    /// Polled during waits; `false` cancels the attempt.
    pub go_on: GoOn<'a>,
}
