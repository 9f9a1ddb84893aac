//! Kinds of links: a name, and the function with which two ranks make one.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use super::Link;
use super::tcp::connection::Connection;
use super::tcp::deadline_stream::GoOn;

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
    /// Time by which the link must be made.
    pub deadline: Instant,
    /// Polled during waits; `false` cancels the attempt.
    pub go_on: GoOn<'a>,
}
