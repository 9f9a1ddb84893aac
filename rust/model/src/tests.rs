use super::network::ticks;
use super::*;
use gradring_core::executor::{Outline, Way};
use gradring_proto::collective::Call;
use gradring_proto::schedule::symmetry::Symmetry;

/// One rank on each host; only latency and lines take time.
fn uniform(world_size: usize) -> Network {
    Network {
        world_size,
        ranks_per_host: 1,
        between: Path {
            latency_s: 10e-6,
            bytes_per_s: 1e9,
        },
        inside: Path {
            latency_s: 1e-6,
            bytes_per_s: 5e9,
        },
        uplink: None,
        cores: None,
        message_s: 0.0,
        copy_s_per_byte: 0.0,
        fold_s_per_byte: 0.0,
        stragglers: Vec::new(),
    }
}

/// The same network with processors that take time.
fn with_processors(world_size: usize) -> Network {
    Network {
        message_s: 2e-6,
        copy_s_per_byte: 0.2e-9,
        fold_s_per_byte: 0.3e-9,
        ..uniform(world_size)
    }
}

fn timing(bytes: usize, algorithm: Algorithm, network: &Network) -> Timing {
    time(&sum(bytes), algorithm, network, &mut || false).unwrap()
}

fn sum(bytes: usize) -> Traffic {
    Traffic::AllReduce { bytes }
}

fn exchange(bytes: usize, splits: &[u32]) -> Traffic {
    let splits = splits.to_vec();
    Traffic::AllToAll { bytes, splits }
}

fn exchanged(bytes: usize, splits: &[u32], network: &Network) -> Timing {
    let traffic = exchange(bytes, splits);
    time(&traffic, Algorithm::Direct, network, &mut || false).unwrap()
}

fn assert_ticks(seconds: f64, expected: f64) {
    assert_eq!(
        ticks(seconds),
        ticks(expected),
        "{seconds} is not {expected}"
    );
}

#[test]
fn the_ring_takes_2_n_minus_1_steps_of_a_chunk() {
    for world_size in [2, 3, 8, 64, 100] {
        let chunk = 4096;
        let timing = timing(world_size * chunk, Algorithm::Ring, &uniform(world_size));
        let step = 10e-6 + chunk as f64 / 1e9;
        assert_ticks(timing.seconds, 2.0 * (world_size - 1) as f64 * step);
        assert_ticks(timing.first_seconds, timing.seconds);
        assert_eq!(timing.pieces as usize, 2 * world_size * (world_size - 1));
    }
}

#[test]
fn processors_add_what_a_message_and_its_bytes_cost_on_both_sides() {
    let (world_size, chunk) = (8, 4096);
    let timing = timing(
        world_size * chunk,
        Algorithm::Ring,
        &with_processors(world_size),
    );
    let bytes = chunk as f64;
    let moved = 10e-6 + bytes / 1e9 + 2.0 * (2e-6 + bytes * 0.2e-9);
    let steps = (world_size - 1) as f64;
    assert_ticks(timing.seconds, steps * (2.0 * moved + bytes * 0.3e-9));
}

#[test]
fn what_takes_longer_than_virtual_time_is_refused() {
    for latency_s in [2e7, 1e30, f64::INFINITY] {
        let mut network = uniform(4);
        network.between.latency_s = latency_s;
        let refused = time(&sum(64), Algorithm::Ring, &network, &mut || false);
        assert!(refused.is_err(), "{refused:?} with {latency_s} s");
    }
}

#[test]
fn direct_takes_two_latencies_and_the_bytes_of_a_ring() {
    for world_size in [3, 4, 8] {
        let chunk = 4096;
        let timing = timing(world_size * chunk, Algorithm::Direct, &uniform(world_size));
        let step = 10e-6 + (world_size - 1) as f64 * chunk as f64 / 1e9;
        assert_ticks(timing.seconds, 2.0 * step);
    }
}

/// Networks that differ in all properties.
fn networks() -> impl Iterator<Item = Network> {
    [(2, 1), (6, 1), (8, 2), (12, 4), (16, 16), (24, 3)]
        .into_iter()
        .flat_map(|(world_size, ranks_per_host)| {
            [uniform(world_size), with_processors(world_size)]
                .into_iter()
                .flat_map(move |network| {
                    let network = Network {
                        ranks_per_host,
                        ..network
                    };
                    let narrow = Network {
                        uplink: Some(Uplink {
                            hosts: 2,
                            bytes_per_s: 0.7e9,
                        }),
                        cores: Some(1),
                        ..network.clone()
                    };
                    [network, narrow]
                })
        })
}

#[test]
fn no_algorithm_goes_below_what_lines_have_to_carry() {
    for network in networks() {
        let call = Call::float_sum(4);
        let performs = |a: &Algorithm| a.performs(&call.collective, &network.topology());
        for algorithm in Algorithm::ALL.into_iter().filter(performs) {
            for bytes in [4, 4096, 1 << 20, 3 << 20] {
                let timing = timing(bytes, algorithm, &network);
                let bound = network.bandwidth_bound_s(&sum(bytes));
                let found = timing.seconds;
                assert!(
                    found > bound * (1.0 - 1e-9) || bytes == 4,
                    "{algorithm:?} {bytes} {network:?}: {found} is below {bound}"
                );
                assert!(timing.busiest_line <= 1.0 && timing.busiest_rank <= 1.0);
                assert!(timing.first_seconds <= timing.seconds);
            }
        }
    }
}

#[test]
fn halving_takes_2_log2_n_steps_of_halves() {
    for world_size in [2, 4, 16, 128] {
        let bytes = world_size * 256;
        let timing = timing(bytes, Algorithm::Halving, &uniform(world_size));
        let steps = 2.0 * f64::from(world_size.ilog2());
        let carried = 2.0 * (bytes - 256) as f64;
        assert_ticks(timing.seconds, steps * 10e-6 + carried / 1e9);
    }
}

#[test]
fn doubling_takes_log2_n_steps_of_the_whole() {
    for (log2, world_size) in [(1, 2), (3, 8), (6, 64), (8, 256)] {
        let bytes = 4096;
        let timing = timing(bytes, Algorithm::Doubling, &uniform(world_size));
        let step = 10e-6 + bytes as f64 / 1e9;
        assert_ticks(timing.seconds, f64::from(log2) * step);
    }
}

#[test]
fn ranks_that_stand_for_others_find_what_all_find() {
    for network in networks() {
        for bytes in [network.world_size * 4 * 100, network.world_size << 18] {
            for (traffic, algorithm) in [
                (sum(bytes), Algorithm::Ring),
                (exchange(bytes, &[1]), Algorithm::Direct),
            ] {
                let none = Symmetry::None;
                let all = simulate::simulate_as(&traffic, algorithm, &network, none, &mut || false);
                let few = time(&traffic, algorithm, &network, &mut || false).unwrap();
                assert_eq!(few, all.unwrap(), "{traffic:?} {network:?}");
            }
        }
    }
}

#[test]
fn a_straggler_slows_every_step_of_a_ring_that_it_takes_part_in() {
    let (world_size, chunk) = (8, 4096);
    let slow = Network {
        stragglers: vec![(3, 4.0)],
        ..uniform(world_size)
    };
    let timing = timing(world_size * chunk, Algorithm::Ring, &slow);
    // Every rank waits for chunks that have passed the straggler.
    let step = |factor: f64| 10e-6 + factor * chunk as f64 / 1e9;
    let all_slow = 2.0 * (world_size - 1) as f64 * step(4.0);
    let none_slow = 2.0 * (world_size - 1) as f64 * step(1.0);
    assert!(timing.seconds > none_slow && timing.seconds <= all_slow + 1e-12);
    // The straggler's line alone carries all of its own chunks this slowly.
    let carried = 2.0 * (world_size - 1) as f64 * 4.0 * chunk as f64 / 1e9;
    assert!(timing.seconds >= carried);
}

#[test]
fn an_uplink_that_is_shared_bounds_what_crosses_it() {
    let rate = 0.1e9;
    let network = Network {
        uplink: Some(Uplink {
            hosts: 4,
            bytes_per_s: rate,
        }),
        ..uniform(8)
    };
    let bytes = 8 * 4096;
    // On a ring, one chunk of each step crosses each uplink, and no rank before it waits.
    let ring = timing(bytes, Algorithm::Ring, &network).seconds;
    assert!(ring >= 14.0 * 4096.0 / rate);
    assert!(ring <= 14.0 * (10e-6 + 4096.0 / rate) + 1e-12);
    // In each half of a direct all-reduce, all 16 pairs of the two racks cross the uplink.
    let direct = timing(bytes, Algorithm::Direct, &network).seconds;
    assert!(direct >= 2.0 * 16.0 * 4096.0 / rate);
}

#[test]
fn ranks_that_share_a_processor_take_turns() {
    let network = Network {
        between: Path {
            latency_s: 0.0,
            bytes_per_s: f64::INFINITY,
        },
        inside: Path {
            latency_s: 0.0,
            bytes_per_s: f64::INFINITY,
        },
        ranks_per_host: 4,
        ..with_processors(4)
    };
    let on = |cores| {
        let network = Network {
            cores,
            ..network.clone()
        };
        timing(4 * 4096, Algorithm::Ring, &network).seconds
    };
    assert_ticks(on(Some(1)), 4.0 * on(None));
    assert_ticks(on(Some(2)), 2.0 * on(None));
}

#[test]
fn hosts_are_reduced_inside_first_where_lines_are_slow() {
    let network = Network {
        ranks_per_host: 4,
        ..uniform(12)
    };
    let of = |algorithm| timing(4 << 20, algorithm, &network).seconds;
    assert!(of(Algorithm::Hierarchical) < of(Algorithm::Direct));
    let policy = policy(Rules::default(), &network, &mut || false).unwrap();
    assert_eq!(
        policy.choose(&Call::float_sum(4 << 20)),
        Algorithm::Hierarchical
    );
    assert_eq!(policy.choose(&Call::float_sum(4)), Algorithm::OneShot);
}

#[test]
fn what_is_too_large_and_what_is_given_up_is_an_error() {
    let network = uniform(4096);
    let caught = |bytes, algorithm, gives_up: bool| {
        time(&sum(bytes), algorithm, &network, &mut || gives_up).unwrap_err()
    };
    let odd = caught((10 << 30) + 4, Algorithm::Ring, false).to_string();
    assert!(odd.contains("choose fewer ranks"), "{odd}");
    let levels = caught(4096, Algorithm::Hierarchical, false).to_string();
    assert!(levels.contains("several hosts"), "{levels}");
    let gives_up = caught(1 << 20, Algorithm::Ring, true).to_string();
    assert!(gives_up.contains("gave up"), "{gives_up}");
}

#[test]
fn a_large_ring_is_simulated_by_the_ranks_that_differ() {
    let network = Network {
        ranks_per_host: 8,
        ..uniform(1024)
    };
    let timing = timing(100 << 20, Algorithm::Ring, &network);
    assert!(timing.seconds > network.bandwidth_bound_s(&sum(100 << 20)));
    // A chunk of 100 KiB is two pieces.
    assert_eq!(timing.pieces, 2 * 1024 * 2 * 1023);
}

#[test]
fn all_to_all_takes_one_latency_and_the_bytes_for_others() {
    for world_size in [2, 3, 8, 100] {
        let chunk = 4096;
        let timing = exchanged(world_size * chunk, &[1], &uniform(world_size));
        let sent = (world_size - 1) * chunk;
        assert_ticks(timing.seconds, 10e-6 + sent as f64 / 1e9);
        assert_eq!(timing.pieces as usize, world_size * (world_size - 1));
        assert_ticks(timing.busiest_line * timing.seconds, sent as f64 / 1e9);
    }
}

#[test]
fn the_rank_that_gets_everything_takes_the_bytes_of_all_others() {
    for receiver in 0..8 {
        let mut splits = [0; 8];
        splits[receiver] = 3;
        let bytes = 8192;
        let timing = exchanged(bytes, &splits, &uniform(8));
        assert_ticks(timing.seconds, 10e-6 + (7 * bytes) as f64 / 1e9);
        assert_eq!(timing.pieces, 7, "what is empty does not travel");
    }
}

/// Splits of all kinds: equal ones, some that repeat for further ranks, one for everything.
const SPLITS: [&[u32]; 6] = [
    &[1],
    &[3, 1],
    &[0, 5, 1, 1],
    &[1, 0, 0, 0, 0, 0, 0],
    &[0, 1],
    &[u32::MAX, 1, 7],
];

#[test]
fn each_pair_of_ranks_moves_what_the_splits_say_and_no_line_less() {
    for (network, splits) in networks().flat_map(|it| SPLITS.map(|splits| (it.clone(), splits))) {
        let (world_size, topology) = (network.world_size, network.topology());
        for bytes in [4, 4096, 3 << 20] {
            let traffic = exchange(bytes, splits);
            let parts = traffic.parts(world_size);
            let mut pieces = 0;
            for rank in 0..world_size {
                let call = traffic.call(rank, world_size);
                call.validate(rank, world_size, true).unwrap();
                let outline = Outline::of(&call, Algorithm::Direct, rank, &topology);
                let mut moved = [vec![0; world_size], vec![0; world_size]];
                for route in outline.pipes() {
                    let sizes = route.pieces.iter().map(|piece| outline.piece(*piece).bytes);
                    moved[usize::from(route.way == Way::In)][route.peer] += sizes.sum::<u32>();
                    pieces += usize::from(route.way == Way::Out) * route.pieces.len();
                }
                for peer in (0..world_size).filter(|peer| *peer != rank) {
                    let [sent, received] = [peer, rank].map(|receiver| 4 * parts[receiver] as u32);
                    assert_eq!([moved[0][peer], moved[1][peer]], [sent, received]);
                }
            }
            let timing = exchanged(bytes, splits, &network);
            let bound = network.bandwidth_bound_s(&traffic);
            assert_eq!(timing.pieces as usize, pieces, "{traffic:?} {network:?}");
            assert!(
                timing.seconds >= bound * (1.0 - 1e-9),
                "{traffic:?} {network:?}"
            );
        }
    }
}

#[test]
fn parts_are_in_relation_to_each_other_as_splits_say() {
    let parts = |bytes, splits: &[u32], ranks| exchange(bytes, splits).parts(ranks);
    assert_eq!(parts(4 * 100, &[3, 1], 4), [37, 13, 37, 13]);
    assert_eq!(parts(4 * 7, &[1], 3), [2, 2, 3]);
    assert_eq!(parts(4 * 7, &[0, 0, 1], 5), [0, 0, 7, 0, 0]);
    assert_eq!(parts(usize::MAX, &[u32::MAX, 0], 2), [usize::MAX / 4, 0]);
    assert_eq!(parts(0, &[2, 1], 3), [0, 0, 0]);
    // Neither of the two ranks has a share.
    assert_eq!(parts(4 * 7, &[0, 0, 1], 2), [0, 0]);
}

#[test]
fn an_all_to_all_that_cannot_be_simulated_is_an_error() {
    let caught = |bytes, splits: &[u32], algorithm, ranks| {
        let traffic = exchange(bytes, splits);
        let refused = time(&traffic, algorithm, &uniform(ranks), &mut || false);
        refused.unwrap_err().to_string()
    };
    let ring = caught(4096, &[1], Algorithm::Ring, 4);
    assert!(ring.contains("all_to_all needs direct"), "{ring}");
    let odd = caught((1 << 40) + 4, &[1, 2], Algorithm::Direct, 4096);
    assert!(
        odd.contains("an all-to-all of 1099511627780 bytes"),
        "{odd}"
    );
    assert!(
        odd.contains("one with equal splits without stragglers, of 1099511644160"),
        "{odd}"
    );
}
