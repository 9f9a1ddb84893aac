//! Gossip: how each rank is doing, and what its clock says.

use serde::{Deserialize, Serialize};

/// How one rank is doing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gossip {
    /// The rank.
    pub rank: usize,
    /// Grows with every gossip of the rank.
    pub number: u64,
    /// Collectives that it has ended.
    pub collectives: u64,
    /// The one that it is in, if something has moved there since its last gossip.
    pub moves_in: Option<u64>,
    /// For whom it has waited.
    pub late: Vec<Late>,
    /// What its program says, such as a number of steps.
    pub note: Vec<u8>,
}

/// A peer that was waited for, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Late {
    /// The peer.
    pub rank: usize,
    /// Since the communicator was made.
    pub total_ns: u64,
    /// In the last 5 to 10 seconds.
    pub recent_ns: u64,
}

/// What a heartbeat says about clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tick {
    /// When it was sent, in nanoseconds since 1970 by the sender's clock.
    pub sent_ns: u64,
    /// The smallest lag of late of the receiver's own heartbeats (see `observe/neighbour_clock.rs`).
    pub lag_ns: Option<i64>,
    /// The sender's clock against that of rank 0.
    pub to_first: Option<ClockOffset>,
}

/// Where a rank's clock stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockOffset {
    /// To be added to this rank's times to get those of rank 0, in nanoseconds.
    pub ns: i64,
    /// How wrong that may be, in nanoseconds.
    pub within_ns: u64,
}
