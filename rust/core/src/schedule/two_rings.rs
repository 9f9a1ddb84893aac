//! Two rings: one half of the buffer travels a ring, and the other the same ring backwards.
//!
//! Each half is done as by `ring`, in the same 2(N-1) steps, side by side: a rank sends 2S(N-1)/N bytes,
//! half of them to its successor and half to its predecessor. Invariants are those of the rings.
//!
//! A line that carries both directions at once is filled by one ring, so a second one gains nothing
//! there, and has twice as many messages. It gains where each connection is slower than the line: with
//! two, twice as much goes through.

use std::ops::Range;

use super::ring::Ring;
use super::topology::Topology;
use super::{Schedule, even_parts};

/// The rings through all ranks, seen from one of them.
pub(super) struct TwoRings([Ring; 2]);

impl TwoRings {
    pub(super) fn through_all(topology: &Topology, rank: usize) -> Self {
        let ring = Ring::through_all(topology, rank);
        let backwards = ring.backwards();
        Self([ring, backwards])
    }

    /// Leaves each rank with a chunk of each half of `block`.
    pub(super) fn reduce_scatter(&self, block: &Range<usize>) -> Schedule {
        self.side_by_side(block, Ring::reduce_scatter)
    }

    /// Gives every rank what all ranks' `reduce_scatter` of `block` left.
    pub(super) fn all_gather(&self, block: &Range<usize>) -> Schedule {
        self.side_by_side(block, Ring::all_gather)
    }

    /// Gives rank `root` what all ranks' `reduce_scatter` of `block` left.
    pub(super) fn gather(&self, block: &Range<usize>, root: usize) -> Schedule {
        self.side_by_side(block, |ring, chunks| ring.gather(chunks, root))
    }

    /// What each ring does with its half, step by step in turns.
    fn side_by_side(
        &self,
        block: &Range<usize>,
        steps: impl Fn(&Ring, &[Range<usize>]) -> Schedule,
    ) -> Schedule {
        let of_half = |(ring, half): (&Ring, Range<usize>)| steps(ring, &ring.parts(&half));
        let halves = self.0.iter().zip(even_parts(block, 2));
        let [forwards, backwards] =
            <[Schedule; 2]>::try_from(halves.map(of_half).collect::<Vec<_>>()).expect("two halves");
        forwards
            .into_iter()
            .zip(backwards)
            .flat_map(|(one, other)| [one, other])
            .collect()
    }
}
