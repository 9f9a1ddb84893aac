//! The ring: every rank talks to its successor and listens to its predecessor only.
//!
//! *Reduce-scatter.* Chunk c starts its journey at rank c+1 and travels once around the ring;
//! each rank on the way adds its own contribution, and rank c, the last, owns the result. In step
//! k rank r therefore sends chunk r-k-1 and receives chunk r-k-2. Invariant after step k: what
//! was just received holds the contributions of k+2 ranks. N-1 steps, S(N-1)/N bytes sent per
//! rank, which is the least possible.
//!
//! *All-gather.* The finished chunks travel once more: in step k rank r sends chunk r-k and
//! receives chunk r-k-1. Another N-1 steps and S(N-1)/N bytes.
//!
//! *All-reduce* is the two in a row: 2(N-1) steps, 2S(N-1)/N bytes; see P. Patarasuk and X. Yuan,
//! "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib.
//! Comput. 69 (2009).
//!
//! *Broadcast* is a pipeline: the root sends to its successor, which forwards while it receives.

use std::ops::Range;

use super::{Action, Contents, Receive, Schedule, Send, Step};

pub(super) fn reduce_scatter(rank: usize, chunks: &[Range<usize>]) -> Schedule {
    let world_size = chunks.len();
    let last = world_size - 2;
    exchange(rank, world_size, |step| {
        let sent = behind(rank, step + 1, world_size);
        let received = behind(rank, step + 2, world_size);
        let action = if step == last {
            Action::ReduceAndFinish
        } else {
            Action::Reduce
        };
        (chunks[sent].clone(), chunks[received].clone(), action)
    })
}

pub(super) fn all_gather(rank: usize, chunks: &[Range<usize>]) -> Schedule {
    let world_size = chunks.len();
    exchange(rank, world_size, |step| {
        let sent = behind(rank, step, world_size);
        let received = behind(rank, step + 1, world_size);
        (chunks[sent].clone(), chunks[received].clone(), Action::Copy)
    })
}

pub(super) fn broadcast(rank: usize, world_size: usize, count: usize, root: usize) -> Schedule {
    let distance = behind(rank, root, world_size);
    let receive = (distance > 0).then(|| Receive {
        peer: behind(rank, 1, world_size),
        range: 0..count,
        action: Action::Copy,
    });
    let send = (distance + 1 < world_size).then(|| Send {
        peer: (rank + 1) % world_size,
        range: 0..count,
        contents: Contents::Final,
    });
    // Two steps, because the send forwards what the receive brings.
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
fn exchange(
    rank: usize,
    world_size: usize,
    ranges: impl Fn(usize) -> (Range<usize>, Range<usize>, Action),
) -> Schedule {
    (0..world_size - 1)
        .map(|step| {
            let (sent, received, action) = ranges(step);
            Step {
                send: Some(Send {
                    peer: (rank + 1) % world_size,
                    range: sent,
                    contents: action.contents(),
                }),
                receive: Some(Receive {
                    peer: behind(rank, 1, world_size),
                    range: received,
                    action,
                }),
            }
        })
        .collect()
}

/// The index `distance` places before `rank` on the ring.
const fn behind(rank: usize, distance: usize, world_size: usize) -> usize {
    (rank + world_size - distance % world_size) % world_size
}
