//! The meeting of all ranks in a collective by slots. It tells the ranks that are missing, and those
//! that perform another collective.
//!
//! A rank that waits here does not see what others send over links, and those do not see its slot.
//! So a rank that waits long looks there, and finds peers that perform another collective.

use super::{Fault, Part};
use gradring_net::link::{Direction, Interest, Slots, Transport};
use gradring_proto::wire::signature::{self, HEADER_BYTES, Header};

/// One rank at the meeting.
pub(super) struct Meeting<'a> {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) header: Header,
    /// First rank that has not published, when this rank last looked.
    awaited: Option<usize>,
    interests: &'a mut Vec<Interest>,
    /// Peer that entered last, once all have entered.
    pub(super) last_to_enter: Option<usize>,
}

impl<'a> Meeting<'a> {
    pub(super) fn new(part: &Part<'_>, interests: &'a mut Vec<Interest>) -> Self {
        interests.clear();
        Self {
            rank: part.rank,
            world_size: part.topology.world_size(),
            header: part.header,
            awaited: None,
            interests,
            last_to_enter: None,
        }
    }

    pub(super) fn interests(&self) -> &[Interest] {
        self.interests
    }

    pub(super) fn awaited(&self) -> Vec<usize> {
        self.interests
            .iter()
            .map(|interest| interest.peer)
            .collect()
    }

    pub(super) fn late(&self) -> (Vec<usize>, bool) {
        (self.awaited(), self.last_to_enter.is_some())
    }

    /// Returns the number of ranks, counted from rank 0, that have published the turn. Wakes
    /// sleepers if these are all.
    #[inline]
    pub(super) fn poll(&self, slots: &mut Slots) -> Result<usize, Fault> {
        let arrived = slots
            .poll()
            .map_err(|peer| self.fault(peer, slots.header_of(peer)))?;
        if arrived == self.world_size {
            slots.wake_sleepers();
        }
        Ok(arrived)
    }

    /// Waits for the ranks from `first` on that have not published the turn.
    pub(super) fn wait_for(&mut self, first: usize, slots: &Slots) {
        self.awaited = Some(first);
        self.interests.clear();
        let missing = (first..self.world_size).filter(|&rank| !slots.has_published(rank));
        self.interests.extend(missing.map(|peer| Interest {
            peer,
            direction: Direction::Receive,
        }));
    }

    /// Waits for the end of the group, which has failed at a peer.
    pub(super) fn wait_for_news_of(&mut self, peer: usize) {
        self.interests.clear();
        self.interests.push(Interest {
            peer,
            direction: Direction::Receive,
        });
    }

    /// Records that all ranks have published the turn.
    #[inline]
    pub(super) fn all_have_entered(&mut self) {
        if self.last_to_enter.is_none() {
            self.last_to_enter = self.awaited.or(Some(self.any_peer()));
        }
    }

    /// Looks whether a peer from rank `first` on performs another collective: a peer behind the
    /// first that is missing, or one that sends something over its link.
    pub(super) fn look_at_all(
        &self,
        first: usize,
        transport: &mut dyn Transport,
    ) -> Result<(), Fault> {
        for peer in (first..self.world_size).filter(|&peer| peer != self.rank) {
            let found = match transport.readable(peer) {
                Ok(bytes) => {
                    Ok(bytes.and_then(|bytes| bytes.first_chunk::<HEADER_BYTES>().copied()))
                }
                Err(broken) => Err(Fault::Link { peer, broken }),
            };
            // A peer publishes before it goes on, which may be the end of its link.
            let slots = slots_of(transport);
            if slots.has_published(peer) {
                if slots.differs(peer) {
                    return Err(self.fault(peer, slots.header_of(peer)));
                }
            } else if let Some(received) = found? {
                return Err(Fault::Header {
                    peer,
                    received: Box::new(received),
                    text: Vec::new(),
                });
            }
        }
        Ok(())
    }

    const fn any_peer(&self) -> usize {
        match self.rank + 1 == self.world_size {
            true => self.rank - 1,
            false => self.world_size - 1,
        }
    }

    fn fault(&self, peer: usize, received: Header) -> Fault {
        Fault::Header {
            peer,
            received: Box::new(signature::with_endpoints(received, peer, self.rank)),
            text: Vec::new(),
        }
    }
}

pub(super) fn slots_of(transport: &mut dyn Transport) -> &mut Slots {
    transport.slots().expect("the group agreed on slots")
}
