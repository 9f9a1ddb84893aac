//! A kind of link: its name, and how two ranks make one.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use super::Link;
use super::tcp::connection::Connection;
use super::tcp::deadline_stream::GoOn;

/// What a link can be made of.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    /// What users call it.
    pub name: &'static str,
    /// Tries to make a link with the peer of an introduction, which tries the same at the same
    /// time; returns its lanes, or why there is none: the same on both sides. It takes the
    /// connections that it needs, and what it leaves carries nothing of this.
    pub link: fn(&mut Introduction<'_>) -> io::Result<Result<Lanes, String>>,
}

/// Links to one peer of which one is made.
pub type Lanes = Vec<Box<dyn Link>>;

/// Two processes that know each other, and can agree about a link.
pub struct Introduction<'a> {
    /// Between them, at least one; payload has not travelled on them.
    pub connections: Vec<Connection>,
    /// This one, as the other is told of it.
    pub name: &'a str,
    /// Whether this side begins; exactly one of both does.
    pub initiator: bool,
    /// An eventfd that the peer may ring to wake this process.
    pub doorbell: BorrowedFd<'a>,
    /// How many pairs of processes a host has between which there are links: on the host that has most,
    /// so that both sides say the same.
    pub pairs: usize,
    /// Bounds the agreement.
    pub deadline: Instant,
    /// Asked now and then whether to go on.
    pub go_on: GoOn<'a>,
}
