//! A collective as data: the steps one rank performs, with no socket, thread or clock in sight.
//!
//! A schedule *means* what it says when its steps are performed one after the other, the send
//! and the receive of one step side by side. The executor overlaps steps as far as their element
//! ranges do not conflict, which cannot be told apart from that meaning by its result.
//!
//! Words: N ranks, a buffer of `count` elements, cut into N chunks. Contents travel either as
//! *partial* results (still to be reduced, in the accumulator type) or as *final* values.

use std::ops::Range;

use crate::collective::Collective;

mod ring;
#[cfg(test)]
mod verify;

/// The part of one rank in one collective.
pub type Schedule = Vec<Step>;

/// One exchange: at most one send and at most one receive, of disjoint element ranges.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// What is sent, if anything.
    pub send: Option<Send>,
    /// What is received, if anything.
    pub receive: Option<Receive>,
}

/// An element range that goes to a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Send {
    /// The rank that receives it.
    pub peer: usize,
    /// Which elements.
    pub range: Range<usize>,
    /// Whether they are partial results or final values.
    pub contents: Contents,
}

/// An element range that comes from a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Receive {
    /// The rank that sends it.
    pub peer: usize,
    /// Which elements.
    pub range: Range<usize>,
    /// What is done with them.
    pub action: Action,
}

/// What a transfer carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Contents {
    /// Results that lack contributions, in the accumulator type.
    Partial,
    /// Finished values, in the buffer's own type.
    Final,
}

/// What a receiver does with what arrives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Combine partial results with this rank's own.
    Reduce,
    /// Combine, and turn the complete result into final values (scale a mean, round once).
    ReduceAndFinish,
    /// Put final values in place.
    Copy,
}

impl Action {
    /// What the transfer that feeds this action carries.
    #[must_use]
    pub const fn contents(self) -> Contents {
        match self {
            Self::Reduce | Self::ReduceAndFinish => Contents::Partial,
            Self::Copy => Contents::Final,
        }
    }
}

/// The schedule of `rank` for this collective over `count` elements.
#[must_use]
pub fn build(collective: &Collective, rank: usize, world_size: usize, count: usize) -> Schedule {
    if world_size == 1 {
        return Schedule::new();
    }
    match collective {
        Collective::AllReduce { .. } => ring::all_reduce(rank, world_size, count),
        Collective::ReduceScatter { counts, .. } => ring::reduce_scatter(rank, &chunks_of(counts)),
        Collective::AllGather { counts } => ring::all_gather(rank, &chunks_of(counts)),
        Collective::Broadcast { root } => ring::broadcast(rank, world_size, count, *root),
        // Everybody's contribution to one element passes through everybody.
        Collective::Barrier => ring::all_reduce(rank, world_size, 1),
    }
}

/// Name of the algorithm that `build` chooses, for statistics and the contract check.
#[must_use]
pub const fn algorithm(_collective: &Collective) -> &'static str {
    "ring"
}

/// Chunk `index` of `count` elements cut into `parts`: the first `count % parts` chunks have one
/// element more than the others, as in `numpy.array_split`.
#[must_use]
pub const fn chunk(count: usize, parts: usize, index: usize) -> Range<usize> {
    let (least, longer) = (count / parts, count % parts);
    let start = index * least + if index < longer { index } else { longer };
    start..start + least + (index < longer) as usize
}

fn even_chunks(count: usize, parts: usize) -> Vec<Range<usize>> {
    (0..parts).map(|index| chunk(count, parts, index)).collect()
}

fn chunks_of(counts: &[usize]) -> Vec<Range<usize>> {
    counts
        .iter()
        .scan(0, |start, &count| {
            let range = *start..*start + count;
            *start = range.end;
            Some(range)
        })
        .collect()
}
