//! Direct: every rank exchanges with every other, in two steps.
//!
//! *Reduce-scatter.* Every rank sends chunk c of its contribution straight to rank c. Rank c folds
//! all contributions to its chunk in the order of ranks: g0 + g1 + .. + gN-1, with its own in its
//! place. *All-gather.* Every owner sends its finished chunk to all others.
//!
//! *Reduce.* After a reduce-scatter, every owner sends its finished chunk to the root alone.
//! *Gather* and *scatter* are one step, in which only the root has more than one peer.
//!
//! A rank sends 2S(N-1)/N bytes, which is the minimum, as on the ring. It waits for 2 messages
//! instead of 2(N-1), and contributions travel in the type of the elements, never in that of the
//! accumulator. The price is a connection to every rank, and N-1 streams that meet at each rank. It
//! is the pairwise exchange of R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective
//! communication operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005).

use std::ops::Range;

use super::{Action, Contents, Part, Receive, Schedule, Send, Step, chunks_of, fold_in_rank_order};
use crate::collective::Collective;

pub(super) fn build(collective: &Collective, part: &Part<'_>) -> Option<Schedule> {
    let (rank, world_size) = (part.rank, part.world_size());
    Some(match collective {
        Collective::AllReduce { .. } => part.in_blocks(
            |block| reduce_scatter(rank, &part.chunks(block)),
            |block| all_gather(rank, &part.chunks(block)),
        ),
        Collective::Reduce { root, .. } => part.in_blocks(
            |block| reduce_scatter(rank, &part.chunks(block)),
            |block| {
                let chunks = part.chunks(block);
                gather(rank, *root, chunks[rank].clone(), &chunks)
            },
        ),
        Collective::ReduceScatter { counts, .. } => reduce_scatter(rank, &chunks_of(counts)),
        Collective::AllGather { counts } => all_gather(rank, &chunks_of(counts)),
        Collective::AllToAll => {
            let half = part.count / 2;
            let (source, target) = (0..half, half..part.count);
            all_to_all(rank, &part.chunks(&source), &part.chunks(&target))
        }
        Collective::AllToAllV { sent, received } => {
            let chunks = chunks_of(&[&sent[..], received].concat());
            let (source, target) = chunks.split_at(world_size);
            all_to_all(rank, source, target)
        }
        Collective::Gather { root, chunk } => gather(
            rank,
            *root,
            0..*chunk,
            &part.chunks(&(0..chunk * world_size)),
        ),
        Collective::Scatter { root, chunk } => scatter(
            rank,
            *root,
            0..*chunk,
            &part.chunks(&(0..chunk * world_size)),
        ),
        Collective::Send { .. } | Collective::Receive { .. } if world_size == 2 => {
            from_first_to_second(rank, part.count)
        }
        _ => return None,
    })
}

fn reduce_scatter(rank: usize, chunks: &[Range<usize>]) -> Schedule {
    let world_size = chunks.len();
    let mut steps: Schedule = others(rank, world_size)
        .map(|peer| Step::send(peer, chunks[peer].clone(), Contents::Contribution))
        .collect();
    steps.extend(fold_in_rank_order(world_size, &chunks[rank]));
    steps
}

/// Exchanges final elements with every other rank. `sent` has the range for each rank, and `target`
/// has the range for the elements from each rank.
fn exchange<'a>(
    rank: usize,
    world_size: usize,
    sent: impl Fn(usize) -> &'a Range<usize>,
    target: impl Fn(usize) -> &'a Range<usize>,
) -> Schedule {
    others(rank, world_size)
        .map(|peer| {
            let mirrored = mirrored(rank, peer, world_size);
            Step {
                send: Some(Send {
                    peer,
                    range: sent(peer).clone(),
                    contents: Contents::Final,
                }),
                receive: Some(Receive {
                    peer: mirrored,
                    range: target(mirrored).clone(),
                    action: Action::Copy,
                }),
            }
        })
        .collect()
}

fn all_gather(rank: usize, chunks: &[Range<usize>]) -> Schedule {
    let world_size = chunks.len();
    exchange(rank, world_size, |_| &chunks[rank], |peer| &chunks[peer])
}

/// Gives `root` the chunk `own` of each rank, at its place in `chunks`.
fn gather(rank: usize, root: usize, own: Range<usize>, chunks: &[Range<usize>]) -> Schedule {
    if rank != root {
        return vec![Step::send(root, own, Contents::Final)];
    }
    others(rank, chunks.len())
        .map(|peer| Step::receive(peer, chunks[peer].clone(), Action::Copy))
        .collect()
}

/// Gives every rank one of the root's `chunks`, in `own`.
fn scatter(rank: usize, root: usize, own: Range<usize>, chunks: &[Range<usize>]) -> Schedule {
    if rank != root {
        return vec![Step::receive(root, own, Action::Copy)];
    }
    others(rank, chunks.len())
        .map(|peer| Step::send(peer, chunks[peer].clone(), Contents::Final))
        .collect()
}

/// Gives the second of two ranks the contents of the first one.
fn from_first_to_second(rank: usize, count: usize) -> Schedule {
    vec![match rank {
        0 => Step::send(1, 0..count, Contents::Final),
        _ => Step::receive(0, 0..count, Action::Copy),
    }]
}

/// Sends chunk c of `source` to rank c, and receives chunk c of `target` from rank c. These are two
/// parts of the buffer: two ranks that swap chunks in place would each have to send before
/// receiving. A rank sends all chunks but its own, which are S(N-1)/N bytes if all chunks are
/// equal.
fn all_to_all(rank: usize, source: &[Range<usize>], target: &[Range<usize>]) -> Schedule {
    exchange(
        rank,
        source.len(),
        |peer| &source[peer],
        |peer| &target[peer],
    )
}

/// The rank that sends to this one while this one sends to `peer`.
const fn mirrored(rank: usize, peer: usize, world_size: usize) -> usize {
    (2 * rank + world_size - peer) % world_size
}

/// All other ranks, beginning with the next one, so that ranks do not all send to the same one at
/// once.
pub(super) fn others(rank: usize, world_size: usize) -> impl Iterator<Item = usize> {
    (1..world_size).map(move |distance| (rank + distance) % world_size)
}
