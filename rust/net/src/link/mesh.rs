//! The links of one rank to all others, and the one place where it waits for them.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, IoSlice, IoSliceMut};
use std::sync::Arc;
use std::time::Duration;

use super::poll::{self, WakeUp};
use super::{Broken, Heap, Interest, Link, Slots, Transport};
use crate::abort::Waker;
use gradring_proto::error::Breakage;

/// Makes links on demand that were not made when the group formed.
pub trait LinkConnector: Send {
    /// Returns the link with `peer` once it is made. The first call begins to make it, and both
    /// ranks have to call. The call does not wait; the mesh is woken when another call may succeed.
    /// An error that makes a link impossible aborts the group.
    fn link(&mut self, peer: usize) -> Option<Box<dyn Link>>;
}

/// The links of one rank.
pub struct Mesh {
    /// Indexed by rank; `None` where no link has been needed yet.
    links: Vec<Option<Box<dyn Link>>>,
    /// Makes missing links on demand; `None` if that is impossible.
    connector: Option<Box<dyn LinkConnector>>,
    /// Rung by threads of this process.
    wake_up: Arc<WakeUp>,
    /// Rung by peers that share memory.
    doorbell: Arc<WakeUp>,
    /// Slots of memory that all ranks share.
    slots: Option<Slots>,
}

impl Mesh {
    /// Creates a mesh of `links`, indexed by rank. Peers that share memory ring `doorbell`.
    ///
    /// # Errors
    /// When the system has no file descriptor left.
    pub fn new(links: Vec<Option<Box<dyn Link>>>, doorbell: Arc<WakeUp>) -> io::Result<Self> {
        let wake_up = Arc::new(WakeUp::new()?);
        Ok(Self {
            links,
            connector: None,
            wake_up,
            doorbell,
            slots: None,
        })
    }

    /// Sets the slots of memory that all ranks share.
    #[must_use]
    pub fn with_slots(mut self, slots: Option<Slots>) -> Self {
        self.slots = slots;
        self
    }

    /// Returns whether all ranks share memory in which this rank has a slot.
    #[must_use]
    pub const fn has_slots(&self) -> bool {
        self.slots.is_some()
    }

    /// Returns the heap of this rank, if all ranks share memory with heaps.
    #[must_use]
    pub fn heap(&self) -> Option<&Arc<Heap>> {
        self.slots.as_ref()?.heap()
    }

    /// Sets the connector for links that are needed later. It gets the waker of this mesh.
    #[must_use]
    pub fn with_connector(
        mut self,
        connector: impl FnOnce(Waker) -> Box<dyn LinkConnector>,
    ) -> Self {
        self.connector = Some(connector(self.waker()));
        self
    }

    /// Returns the TCP congestion controls in use, each with its reasons.
    #[must_use]
    pub fn congestion(&self) -> BTreeMap<String, BTreeSet<String>> {
        let mut reasons = BTreeMap::<_, BTreeSet<_>>::new();
        for (name, reason) in self.links.iter().flatten().filter_map(|l| l.congestion()) {
            reasons.entry(name).or_default().insert(reason);
        }
        reasons
    }

    /// Returns the link with a peer; `None` while it is being made.
    #[inline]
    fn link(&mut self, peer: usize) -> Result<Option<&mut dyn Link>, Broken> {
        if self.links[peer].is_none() {
            let connector = self.connector.as_mut().ok_or(Breakage::Absent)?;
            self.links[peer] = connector.link(peer);
        }
        Ok(self.links[peer].as_deref_mut().map(|link| link as _))
    }
}

impl Transport for Mesh {
    fn try_send(&mut self, peer: usize, parts: &[IoSlice<'_>]) -> Result<Option<usize>, Broken> {
        if let Some(slots) = &self.slots {
            slots.note_core();
        }
        self.link(peer)?
            .map_or(Ok(None), |link| link.try_send(parts))
    }

    fn try_receive(
        &mut self,
        peer: usize,
        parts: &mut [IoSliceMut<'_>],
    ) -> Result<Option<usize>, Broken> {
        self.link(peer)?
            .map_or(Ok(None), |link| link.try_receive(parts))
    }

    fn readable(&mut self, peer: usize) -> Result<Option<&[u8]>, Broken> {
        self.link(peer)?.map_or(Ok(None), |link| link.readable())
    }

    fn consume(&mut self, peer: usize, count: usize) {
        if let Some(link) = &mut self.links[peer] {
            link.consume(count);
        }
    }

    fn slots(&mut self) -> Option<&mut Slots> {
        self.slots.as_mut()
    }

    fn core_of_peer(&self, peer: usize) -> Option<usize> {
        match &self.slots {
            Some(slots) => slots.core_of(peer),
            None => self.links[peer].as_ref()?.core_of_peer(),
        }
    }

    fn wait(&mut self, interests: &[Interest], timeout: Duration) {
        if let Some(slots) = self.slots.as_ref().filter(|slots| slots.is_waiting()) {
            let slept = slots.nap(timeout);
            for interest in interests {
                if let Some(link) = &mut self.links[interest.peer] {
                    link.awake(slept);
                }
            }
            return;
        }
        let sleeps = interests.iter().all(|interest| {
            let link = self.links[interest.peer].as_mut();
            link.is_none_or(|link| link.may_sleep(interest.direction))
        });
        if sleeps {
            let mut awaited = vec![self.doorbell.awaited(), self.wake_up.awaited()];
            for interest in interests {
                if let Some(link) = &self.links[interest.peer] {
                    link.awaited(interest.direction, &mut awaited);
                }
            }
            poll::wait(awaited, timeout);
        }
        for interest in interests {
            if let Some(link) = &mut self.links[interest.peer] {
                link.awake(sleeps);
            }
        }
        self.doorbell.reset();
        // The reason of a wake-up, such as an abort, is stored elsewhere, so the reset loses
        // nothing.
        self.wake_up.reset();
    }

    fn waker(&self) -> Waker {
        let wake_up = Arc::clone(&self.wake_up);
        Box::new(move || wake_up.wake())
    }
}
