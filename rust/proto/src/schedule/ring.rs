//! The ring: every rank sends to its successor and receives from its predecessor only.
//!
//! *Reduce-scatter.* Chunk c starts at rank c+1 and travels once around the ring. Each rank on the
//! way adds its own contribution, and rank c, the last one, owns the result. So in step k rank r
//! sends chunk r-k-1 and receives chunk r-k-2. Invariant after step k: the received chunk holds the
//! contributions of k+2 ranks. There are N-1 steps, and each rank sends S(N-1)/N bytes, which is
//! the minimum.
//!
//! *All-gather.* The finished chunks travel once more: in step k rank r sends chunk r-k and
//! receives chunk r-k-1. Another N-1 steps and S(N-1)/N bytes.
//!
//! *All-reduce* performs both in a row: 2(N-1) steps, 2S(N-1)/N bytes; see P. Patarasuk and X.
//! Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel
//! Distrib. Comput. 69 (2009).
//!
//! *Reduce* is a reduce-scatter and an all-gather whose chunks travel no further than the root.
//!
//! *Broadcast* is a pipeline: the root sends to its successor, which forwards while it receives.
//!
//! Ranks of one host are neighbours, so that bytes enter each host once. Above, "rank r" is the
//! rank at position r.

use std::ops::Range;

use super::choice::MESH_RANKS_MAX;
use super::topology::Topology;
use super::{Action, Contents, Part, Receive, Schedule, Send, Step, chunks_of, even_parts};
use crate::collective::Collective;

pub(super) fn build(collective: &Collective, part: &Part<'_>) -> Option<Schedule> {
    let ring = Ring::through_all(part.topology, part.rank);
    Some(match collective {
        Collective::AllReduce { .. } => part.in_blocks(
            |block| ring.reduce_scatter(&part.chunks(block)),
            |block| ring.all_gather(&part.chunks(block)),
        ),
        Collective::Reduce { root, .. } => part.in_blocks(
            |block| ring.reduce_scatter(&part.chunks(block)),
            |block| ring.gather(&part.chunks(block), *root),
        ),
        Collective::ReduceScatter { counts, .. } => {
            ring.reduce_scatter(&ring.in_order(&chunks_of(counts)))
        }
        Collective::AllGather { counts } => ring.all_gather(&ring.in_order(&chunks_of(counts))),
        Collective::Broadcast { root } => ring.broadcast(part.count, *root),
        _ => return None,
    })
}

/// A ring of ranks, seen from one of them.
pub(super) struct Ring {
    members: Vec<usize>,
    position: usize,
}

impl Ring {
    /// The ring through `members`, seen from `rank`, which is one of them.
    pub(super) fn through(members: Vec<usize>, rank: usize) -> Self {
        let position = position(&members, rank);
        Self { members, position }
    }

    /// The ring through all ranks, seen from `rank`.
    pub(super) fn through_all(topology: &Topology, rank: usize) -> Self {
        let world_size = topology.world_size();
        let members = match world_size {
            ..=MESH_RANKS_MAX => topology.hosts().concat(),
            // In larger groups, only neighbours in this order are connected.
            _ => (0..world_size).collect(),
        };
        Self::through(members, rank)
    }

    /// `whole`, cut into a chunk for each member.
    pub(super) fn parts(&self, whole: &Range<usize>) -> Vec<Range<usize>> {
        even_parts(whole, self.members.len())
    }

    /// Values of the members, in the order of the ring.
    pub(super) fn in_order<T: Clone>(&self, of_ranks: &[T]) -> Vec<T> {
        let members = self.members.iter();
        members.map(|&rank| of_ranks[rank].clone()).collect()
    }

    /// Leaves each member with its own reduced chunk; `chunks` are in the order of the ring.
    pub(super) fn reduce_scatter(&self, chunks: &[Range<usize>]) -> Schedule {
        self.reduce(chunks, Action::ReduceAndFinish)
    }

    /// Like `reduce_scatter`, but results lack contributions from outside of the ring.
    pub(super) fn reduce_scatter_partially(&self, chunks: &[Range<usize>]) -> Schedule {
        self.reduce(chunks, Action::Reduce)
    }

    fn reduce(&self, chunks: &[Range<usize>], at_last: Action) -> Schedule {
        self.exchange(|step| {
            let (sent, received) = (self.behind(step + 1), self.behind(step + 2));
            let action = match step + 2 == self.members.len() {
                true => at_last,
                false => Action::Reduce,
            };
            (chunks[sent].clone(), chunks[received].clone(), action)
        })
    }

    /// The two members with which this one exchanges; itself, if it is alone.
    pub(super) fn neighbours(&self) -> [usize; 2] {
        [self.successor(), self.predecessor()]
    }

    /// Gives every member all `chunks`, which are in the order of the ring. At first each member
    /// has its own.
    pub(super) fn all_gather(&self, chunks: &[Range<usize>]) -> Schedule {
        self.exchange(|step| {
            let (sent, received) = (self.behind(step), self.behind(step + 1));
            (chunks[sent].clone(), chunks[received].clone(), Action::Copy)
        })
    }

    /// Gives rank `root` all `chunks`; at first each member has its own. This is an `all_gather`
    /// whose chunks travel no further than the root.
    pub(super) fn gather(&self, chunks: &[Range<usize>], root: usize) -> Schedule {
        let size = self.members.len();
        let distance = (position(&self.members, root) + size - self.position) % size;
        let mut steps = self.all_gather(chunks);
        for (number, step) in steps.iter_mut().enumerate() {
            // The sent chunk comes from `number` places behind, the received chunk from one more.
            step.send
                .take_if(|_| distance == 0 || distance + number >= size);
            step.receive.take_if(|_| distance + number + 1 >= size);
        }
        steps
    }

    /// Gives every member the contents of rank `root`.
    pub(super) fn broadcast(&self, count: usize, root: usize) -> Schedule {
        let distance = self.behind(position(&self.members, root));
        let receive = (distance > 0).then(|| Receive {
            peer: self.predecessor(),
            range: 0..count,
            action: Action::Copy,
        });
        let send = (distance + 1 < self.members.len()).then(|| Send {
            peer: self.successor(),
            range: 0..count,
            contents: Contents::Final,
        });
        // Two steps, because the send forwards received elements.
        vec![
            Step {
                send: None,
                receive,
            },
            Step {
                send,
                receive: None,
            },
        ]
    }

    /// N-1 steps that each send one range to the successor and receive one from the predecessor.
    fn exchange(&self, ranges: impl Fn(usize) -> (Range<usize>, Range<usize>, Action)) -> Schedule {
        (0..self.members.len() - 1)
            .map(|step| {
                let (sent, received, action) = ranges(step);
                Step {
                    send: Some(Send {
                        peer: self.successor(),
                        range: sent,
                        contents: action.contents(),
                    }),
                    receive: Some(Receive {
                        peer: self.predecessor(),
                        range: received,
                        action,
                    }),
                }
            })
            .collect()
    }

    fn successor(&self) -> usize {
        self.members[(self.position + 1) % self.members.len()]
    }

    fn predecessor(&self) -> usize {
        self.members[self.behind(1)]
    }

    /// The position `distance` places before this one.
    const fn behind(&self, distance: usize) -> usize {
        let size = self.members.len();
        (self.position + size - distance % size) % size
    }
}

fn position(members: &[usize], rank: usize) -> usize {
    let found = members.iter().position(|&member| member == rank);
    found.expect("every rank is on the ring")
}
