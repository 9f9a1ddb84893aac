//! Gossip: status and clock of each rank.

use serde::{Deserialize, Serialize};

/// Status of one rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gossip {
    /// The rank.
    pub rank: usize,
    /// Grows with every gossip of the rank.
    pub number: u64,
    /// Collectives that it has ended.
    pub collectives: u64,
    /// Its current collective, if that has made progress since the last gossip.
    pub moves_in: Option<u64>,
    /// Peers for which it has waited.
    pub late: Vec<Late>,
    /// Message from its program, such as a number of steps.
    pub note: Vec<u8>,
}

/// Time that a rank has waited for a peer, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Late {
    /// The peer.
    pub rank: usize,
    /// Total since the communicator was made.
    pub total_ns: u64,
    /// Time in the last 5 to 10 seconds.
    pub recent_ns: u64,
}

/// Clock readings in a heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tick {
    /// Time of sending, in nanoseconds since 1970 by the sender's clock.
    pub sent_ns: u64,
    /// Smallest recent lag of the receiver's own heartbeats (see `observe/neighbour_clock.rs`).
    pub lag_ns: Option<i64>,
    /// The sender's clock relative to that of rank 0.
    pub to_first: Option<ClockOffset>,
}

/// Offset of a rank's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockOffset {
    /// Nanoseconds to add to this rank's times to get those of rank 0.
    pub ns: i64,
    /// Bound on the error of `ns`, in nanoseconds.
    pub within_ns: u64,
}
