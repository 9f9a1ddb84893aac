//! Which ranks connect with which.

use std::collections::BTreeMap;

use crate::link::connection::Connection;
use crate::schedule::choice::MESH_RANKS_MAX;

/// The ranks to which `rank` sends: all others, or its successor if they are too many.
pub(crate) fn receivers(rank: usize, world_size: usize) -> Vec<usize> {
    let distances = if world_size <= MESH_RANKS_MAX {
        world_size - 1
    } else {
        1
    };
    (1..=distances)
        .map(|distance| (rank + distance) % world_size)
        .collect()
}

/// The ranks that send to `rank`.
pub(crate) fn senders(rank: usize, world_size: usize) -> Vec<usize> {
    (0..world_size)
        .filter(|&peer| peer != rank && receivers(peer, world_size).contains(&rank))
        .collect()
}

/// Every stream of every peer, by rank and index.
pub(crate) fn each_stream(
    peers: Vec<usize>,
    streams: usize,
) -> impl Iterator<Item = (usize, usize)> {
    let of_peer = move |peer| (0..streams).map(move |stream| (peer, stream));
    peers.into_iter().flat_map(of_peer)
}

/// The connections of each rank, in the order of their indices.
pub(crate) fn by_rank(
    data: BTreeMap<(usize, usize), Connection>,
) -> BTreeMap<usize, Vec<Connection>> {
    let mut by_rank: BTreeMap<usize, Vec<Connection>> = BTreeMap::new();
    for ((peer, _), stream) in data {
        by_rank.entry(peer).or_default().push(stream);
    }
    by_rank
}
