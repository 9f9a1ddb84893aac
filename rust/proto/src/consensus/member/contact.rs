//! Contacts of a member: requests that are due, and processes that do not reply.

use std::time::{Duration, Instant};

use super::Member;
use crate::consensus::message::{MemberRequest, Step};
use crate::consensus::quorum::Peer;
use crate::consensus::timing::Timing;

/// State of the conversation with one process.
#[derive(Default)]
pub(super) struct Contact {
    pub(super) is_asked: bool,
    pub(super) due: Option<Instant>,
    /// Time of the first request that is still without a reply.
    pub(super) unanswered: Option<Instant>,
    /// Time of the first of its consecutive `Busy` replies.
    pub(super) busy: Option<Instant>,
}

impl Contact {
    /// Returns whether further waiting for it is useless.
    pub(super) fn is_given_up(&self, timing: &Timing, silence: Duration, now: Instant) -> bool {
        let over = |since: Option<Instant>, limit| since.is_some_and(|since| now >= since + limit);
        over(self.unanswered, silence) || over(self.busy, timing.busy)
    }

    pub(super) const fn is_busy(&self) -> bool {
        self.busy.is_some()
    }
}

impl Member {
    /// The next due request to one of these peers, or the time to wait for it.
    pub(super) fn ask(&mut self, peers: &[Peer], request: &MemberRequest, now: Instant) -> Step {
        let mut next = None;
        for peer in peers {
            let contact = self.contacts.entry(peer.id).or_default();
            if contact.is_asked {
                continue;
            }
            match contact.due {
                Some(due) if due > now => next = Some(next.map_or(due, |next| due.min(next))),
                _ => {
                    contact.is_asked = true;
                    contact.unanswered.get_or_insert(now);
                    let (address, envelope) = self.envelope(peer, request.clone());
                    return Step::Send(address, envelope);
                }
            }
        }
        let poll = now + self.timing.again;
        Step::Wait(Some(next.map_or(poll, |next| next.min(poll))))
    }
}
