//! Algorithms among which the size of a buffer may decide, because their results are the same to
//! the bit.

use std::thread;

use gradring_core::communicator::Communicator;
use gradring_core::drive::MAPPED;
use gradring_net::config::{Config, Settings};
use gradring_proto::buffer::{Buffer, Slice};
use gradring_proto::collective::{Collective, Request};
use gradring_proto::dtype::{DType, ReduceOp};
use gradring_proto::schedule::Algorithm;
use gradring_proto::schedule::algorithm_rules::Rules;

use common::free_address;

mod common;

/// More words than a tile holds, and a prime number.
const WORDS: usize = 40_009;
/// More words than a section of three ranks, and the least that are read in heaps by more than two.
const OF_HEAPS: [usize; 2] = [200_003, 8193];
/// As many words as a slot holds, and so few that they stand behind the number of the turn.
const OF_SLOTS: [usize; 2] = [8192, 5];

/// Arbitrary bits. Half of them are those of NaNs, zeros, or extreme floats.
fn words(rank: usize, count: usize) -> Vec<u64> {
    let awkward = [
        0x7FC0_0001_FFC0_0002,
        0x7FF8_0000_0000_0001,
        0x8000_0000_0000_0000,
        0x0000_8000_7F80_FF80,
        0x7C00_FC00_7E01_8001,
    ];
    (0..count)
        .map(|index| {
            let mixed = (index * 64 + rank + 1) as u64;
            let mixed = mixed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
            let mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            match mixed >> 63 {
                0 => mixed,
                _ => awkward[(mixed >> 32) as usize % awkward.len()],
            }
        })
        .collect()
}

fn all_reduced(group: &Communicator, count: usize, dtype: DType, op: ReduceOp) -> Vec<u64> {
    let mut words = words(group.rank, count);
    let start = words.as_mut_ptr();
    reduce(group, start, count, dtype, op);
    words
}

/// Like `all_reduced`, in the heap of the rank.
fn mapped(group: &Communicator, count: usize, dtype: DType, op: ReduceOp) -> Vec<u64> {
    let words = words(group.rank, count);
    let bytes = size_of_val(&*words);
    let block = group.allocate(bytes).unwrap().expect("the group has heaps");
    let start = block.start().as_ptr().cast::<u64>();
    // SAFETY: the block has as many bytes, and nothing else refers to them.
    unsafe { start.copy_from_nonoverlapping(words.as_ptr(), count) };
    reduce(group, start, count, dtype, op);
    assert_eq!(group.stats().all.algorithm, MAPPED);
    // SAFETY: as above.
    unsafe { std::slice::from_raw_parts(start, count) }.to_vec()
}

fn reduce(group: &Communicator, start: *mut u64, words: usize, dtype: DType, op: ReduceOp) {
    let slice = Slice {
        start: start.cast(),
        count: words * size_of::<u64>() / dtype.size_bytes(),
    };
    let request = Request {
        collective: Collective::AllReduce { op },
        // SAFETY: `run` ends before the words are used again.
        buffer: unsafe { Buffer::new(dtype, [slice], Box::new(())) },
        name: "x".into(),
        shapes: "[]".into(),
    };
    group.engine.run(request, &mut || false).unwrap();
}

/// Reduces words of a rank in its own way, and returns the result.
type Way = fn(&Communicator, usize, DType, ReduceOp) -> Vec<u64>;

/// Results of `algorithm` for every dtype and op, by rank.
fn results(
    algorithm: Algorithm,
    world_size: usize,
    count: usize,
    transport: &str,
    way: Way,
) -> Vec<Vec<Vec<u64>>> {
    let address = &free_address();
    let run = |rank| {
        let settings = Settings {
            algorithm: Rules::always(algorithm),
            transport: transport.into(),
            ..Settings::default()
        };
        let config = Config {
            settings,
            ..Config::new(rank, world_size, address)
        };
        let group = Communicator::connect(&config, &mut || false).unwrap();
        assert_eq!(group.engine.policy().has_slots, transport == "shm");
        let calls = DType::ALL
            .into_iter()
            .flat_map(|dtype| ReduceOp::ALL.map(|op| (dtype, op)));
        calls
            .map(|(dtype, op)| way(&group, count, dtype, op))
            .collect()
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..world_size)
            .map(|rank| scope.spawn(move || run(rank)))
            .collect();
        let results = threads.into_iter().map(|thread| thread.join());
        results.map(|result| result.unwrap()).collect()
    })
}

#[test]
fn doubling_has_the_bits_of_halving() {
    for world_size in [2, 3, 4, 6, 8, 13, 16] {
        let halved = results(Algorithm::Halving, world_size, WORDS, "tcp", all_reduced);
        assert!(
            halved.iter().all(|of_rank| *of_rank == halved[0]),
            "ranks differ"
        );
        let doubled = results(Algorithm::Doubling, world_size, WORDS, "tcp", all_reduced);
        assert!(halved == doubled, "{world_size} ranks");
    }
}

#[test]
fn slots_have_the_bits_of_links() {
    for world_size in [2, 3, 5] {
        for count in OF_SLOTS {
            let over_links = results(Algorithm::OneShot, world_size, count, "tcp", all_reduced);
            for algorithm in [Algorithm::OneShot, Algorithm::Direct] {
                let in_slots = results(algorithm, world_size, count, "shm", all_reduced);
                assert!(
                    in_slots.iter().all(|of_rank| *of_rank == over_links[0]),
                    "{world_size} ranks, {count} words, {}",
                    algorithm.name()
                );
            }
        }
    }
}

#[test]
fn heaps_have_the_bits_of_links() {
    for world_size in [2, 3, 4, 8] {
        for count in OF_HEAPS {
            if count < OF_HEAPS[0] && world_size == 2 {
                continue;
            }
            let direct = Algorithm::Direct;
            let over_links = results(direct, world_size, count, "tcp", all_reduced);
            let in_heaps = results(direct, world_size, count, "shm", mapped);
            assert!(
                in_heaps.iter().all(|of_rank| *of_rank == over_links[0]),
                "{world_size} ranks, {count} words"
            );
        }
    }
}
