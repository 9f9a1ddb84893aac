//! Which ranks connect with which.

use std::collections::BTreeMap;

use crate::link::tcp::connection::Connection;
use crate::schedule::choice::MESH_RANKS_MAX;
use crate::schedule::partners;

/// The ranks to which `rank` connects, so that every two partners connect once: of all, the half that
/// stands before it; of few, those of a lower rank.
pub(crate) fn connects_to(rank: usize, world_size: usize) -> Vec<usize> {
    if world_size > MESH_RANKS_MAX {
        let mut partners = partners(rank, world_size);
        partners.retain(|&peer| peer < rank);
        return partners;
    }
    let before = (1..world_size).map(|distance| (rank + world_size - distance) % world_size);
    before
        .filter(|&peer| initiates(rank, peer, world_size))
        .collect()
}

/// Whether `rank` is the one of the two that connects, where any two may have to: to the half that
/// stands before it.
pub(crate) const fn initiates(rank: usize, peer: usize, world_size: usize) -> bool {
    // Opposite ranks would connect to each other.
    let distances = match rank < world_size.div_ceil(2) {
        true => (world_size - 1) / 2,
        false => world_size / 2,
    };
    (rank + world_size - peer) % world_size <= distances
}

/// The ranks that connect to `rank`.
pub(crate) fn accepts_from(rank: usize, world_size: usize) -> Vec<usize> {
    let mut partners = partners(rank, world_size);
    partners.retain(|&peer| connects_to(peer, world_size).contains(&rank));
    partners
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
    fn many_ranks_connect_with_few_each_pair_once() {
        for world_size in [MESH_RANKS_MAX + 1, 128, 1000, 2048] {
            let mut connected = BTreeSet::new();
            for rank in 0..world_size {
                let partners = partners(rank, world_size);
                assert!(partners.len() <= 3 + world_size.ilog2() as usize);
                assert!(partners.contains(&((rank + 1) % world_size)));
                for peer in connects_to(rank, world_size) {
                    assert!(accepts_from(peer, world_size).contains(&rank));
                    assert!(connected.insert((peer, rank)));
                }
            }
            for (rank, peer) in (0..world_size).flat_map(|rank| {
                let partners = partners(rank, world_size);
                partners.into_iter().map(move |peer| (rank, peer))
            }) {
                assert!(connected.contains(&(rank.min(peer), rank.max(peer))));
            }
        }
    }
}
