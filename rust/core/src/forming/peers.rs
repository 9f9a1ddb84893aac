//! Pairs of ranks that connect, and the initiator of each pair.

use std::collections::BTreeMap;

use gradring_net::link::tcp::connection::Connection;
use gradring_proto::schedule::partners;
use gradring_proto::schedule::topology::Topology;

/// The ranks to which `rank` connects, the nearest first.
pub(crate) fn connects_to(rank: usize, topology: &Topology) -> Vec<usize> {
    let world_size = topology.world_size();
    let mut partners = partners(rank, topology);
    partners.retain(|&peer| initiates(rank, peer, world_size));
    partners.sort_by_key(|peer| (rank + world_size - peer) % world_size);
    partners
}

/// The ranks that connect to `rank`.
pub(crate) fn accepts_from(rank: usize, topology: &Topology) -> Vec<usize> {
    let mut partners = partners(rank, topology);
    partners.retain(|&peer| initiates(peer, rank, topology.world_size()));
    partners
}

/// Returns `true` if `initiator` connects to `responder` when they need a connection. Every rank
/// connects to the half of the ranks before it.
pub(crate) const fn initiates(initiator: usize, responder: usize, world_size: usize) -> bool {
    // Without this, opposite ranks would connect to each other.
    let distances = match initiator < world_size.div_ceil(2) {
        true => (world_size - 1) / 2,
        false => world_size / 2,
    };
    let distance = (initiator + world_size - responder) % world_size;
    0 < distance && distance <= distances
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
    use gradring_proto::schedule::choice::MESH_RANKS_MAX;

    #[test]
    fn every_pair_of_a_mesh_connects_once() {
        for world_size in 1..=MESH_RANKS_MAX {
            let topology = Topology::one_host(world_size);
            let mut connected = BTreeSet::new();
            for rank in 0..world_size {
                let responders = connects_to(rank, &topology);
                let initiators = accepts_from(rank, &topology);
                assert!(responders.len().abs_diff(initiators.len()) <= 1);
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
        let racks = |ranks: usize, of_host: usize, of_rack: usize| {
            let host = move |rank| rank / of_host;
            let topology = Topology::by_host((0..ranks).map(host));
            topology.in_racks(move |rank| (host(rank) / of_rack).to_string())
        };
        for (topology, more) in [
            (Topology::one_host(MESH_RANKS_MAX + 1), 3),
            (Topology::one_host(128), 3),
            (Topology::one_host(1000), 3),
            (Topology::one_host(2048), 3),
            (racks(1000, 8, 25), 9),
            (racks(1920, 5, 16), 9),
            (racks(96, 1, 12), 7),
            // Too uneven for links of their own.
            (racks(96, 8, 5), 3),
        ] {
            let world_size = topology.world_size();
            let mut connected = BTreeSet::new();
            for rank in 0..world_size {
                let partners = partners(rank, &topology);
                assert!(partners.len() <= more + world_size.ilog2() as usize);
                assert!(partners.contains(&((rank + 1) % world_size)));
                for peer in connects_to(rank, &topology) {
                    assert!(accepts_from(peer, &topology).contains(&rank));
                    assert!(connected.insert((peer, rank)));
                }
                for peer in partners {
                    assert!(super::partners(peer, &topology).contains(&rank));
                }
            }
        }
    }
}
