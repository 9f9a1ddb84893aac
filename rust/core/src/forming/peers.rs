//! Which ranks connect with which.

use std::collections::BTreeMap;

use crate::link::tcp::connection::Connection;
use crate::schedule::choice::MESH_RANKS_MAX;

/// The ranks to which `rank` connects: the half of all that stands before it, so that every pair
/// connects once, or the one before it, if they are too many.
pub(crate) fn connects_to(rank: usize, world_size: usize) -> Vec<usize> {
    let distances = match world_size {
        // Opposite ranks would connect to each other.
        ..=MESH_RANKS_MAX if rank < world_size.div_ceil(2) => (world_size - 1) / 2,
        ..=MESH_RANKS_MAX => world_size / 2,
        _ => 1,
    };
    (1..=distances)
        .map(|distance| (rank + world_size - distance) % world_size)
        .collect()
}

/// The ranks that connect to `rank`.
pub(crate) fn accepts_from(rank: usize, world_size: usize) -> Vec<usize> {
    (0..world_size)
        .filter(|&peer| peer != rank && connects_to(peer, world_size).contains(&rank))
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_pair_of_a_mesh_connects_once() {
        for world_size in 1..=MESH_RANKS_MAX {
            let mut connected = BTreeSet::new();
            for rank in 0..world_size {
                let responders = connects_to(rank, world_size);
                assert!(
                    responders
                        .len()
                        .abs_diff(accepts_from(rank, world_size).len())
                        <= 1
                );
                for peer in responders {
                    assert_ne!(peer, rank);
                    assert!(connected.insert((rank.min(peer), rank.max(peer))));
                }
            }
            assert_eq!(connected.len(), world_size * (world_size - 1) / 2);
        }
    }

    #[test]
    fn many_ranks_connect_as_a_ring() {
        let world_size = MESH_RANKS_MAX + 1;
        assert_eq!(connects_to(0, world_size), [world_size - 1]);
        assert_eq!(accepts_from(world_size - 1, world_size), [0]);
    }
}
