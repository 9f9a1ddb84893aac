//! More ranks than this machine could run as processes. They are threads of one process, each with
//! the links, threads and sockets of a rank. `RANKS=1024 cargo test --release --test many_ranks --
//! --nocapture` prints their cost.

use std::fs;
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use gradring_core::communicator::Communicator;
use gradring_net::config::{Config, Settings};
use gradring_proto::buffer::{Buffer, Slice};
use gradring_proto::collective::{Collective, Request};
use gradring_proto::dtype::{DType, ReduceOp};
use gradring_proto::error::Result;

use common::free_address;

mod common;
#[path = "common/descriptors.rs"]
mod descriptors;

/// More ranks than connect in a full mesh.
const RANKS: usize = 160;
/// Ranks of a full mesh for which a process has enough descriptors.
const RANKS_IN_A_MESH: usize = 72;
/// Elements that each rank sends to another one.
const CHUNK: usize = 3;

fn config(rank: usize, world_size: usize, rendezvous: &str) -> Config {
    Config {
        settings: Settings {
            transport: "tcp".into(),
            timeout: Duration::from_secs(300),
            stall_timeout: Duration::from_secs(300),
            stall_warning: Duration::from_secs(300),
            ..Settings::default()
        },
        ..Config::new(rank, world_size, rendezvous)
    }
}

/// Runs a collective for which there is no method over slices.
fn run(communicator: &Communicator, values: &mut [i64], collective: Collective) -> Result<()> {
    let slice = Slice {
        start: values.as_mut_ptr().cast(),
        count: values.len(),
    };
    let request = Request {
        collective,
        // SAFETY: `run` ends before `values` is used again.
        buffer: unsafe { Buffer::new(DType::I64, [slice], Box::new(())) },
        name: "x".into(),
        // The common part of the ranks' shapes: the root of a gather or a scatter has more
        // elements.
        shapes: String::new(),
    };
    communicator.engine.run(request, &mut || false)
}

/// Returns a number of /proc/self/status.
fn status(name: &str) -> usize {
    let text = fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn open_descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Runs every collective that this many ranks support, and checks it element by element.
fn collectives(communicator: &Communicator, rank: usize, world_size: usize) {
    let op = ReduceOp::Sum;
    let (of_all, last) = (world_size as i64, world_size - 1);
    let sum = |per_rank: i64| of_all * (of_all - 1) / 2 * per_rank;
    for count in [1, 1_000, 100_003] {
        let mut values: Vec<i64> = (0..count).map(|at| at + rank as i64).collect();
        communicator.all_reduce(&mut values, op, "x").unwrap();
        assert!(
            (0..)
                .zip(&values)
                .all(|(at, &value)| value == at * of_all + sum(1))
        );

        let mut values: Vec<i64> = (0..count).map(|at| at * (rank as i64 + 1)).collect();
        communicator.broadcast(&mut values, last, "x").unwrap();
        assert!((0..).zip(&values).all(|(at, &value)| value == at * of_all));

        let mut values = vec![rank as i64; count as usize];
        let root = world_size / 2;
        run(communicator, &mut values, Collective::Reduce { op, root }).unwrap();
        assert!(rank != root || values.iter().all(|&value| value == sum(1)));
    }
    let counts: Vec<usize> = (0..world_size).map(|rank| rank % 3 + 1).collect();
    let all: usize = counts.iter().sum();
    let start: usize = counts[..rank].iter().sum();
    let own = start..start + counts[rank];

    let mut values: Vec<i64> = (0..all as i64).map(|at| at * rank as i64).collect();
    let scattered = Collective::ReduceScatter {
        op,
        counts: counts.clone(),
    };
    run(communicator, &mut values, scattered).unwrap();
    assert!(own.clone().all(|at| values[at] == sum(at as i64)));

    let mut values = vec![-1; all];
    values[own.clone()].fill(rank as i64);
    let gathered = Collective::AllGather {
        counts: counts.clone(),
    };
    run(communicator, &mut values, gathered).unwrap();
    let expected = (0..)
        .zip(&counts)
        .flat_map(|(rank, &count)| vec![rank; count]);
    assert!(values.iter().copied().eq(expected));

    communicator.barrier().unwrap();
    to_and_from_a_root(communicator, rank, world_size);
}

/// Elements that `from` sends to `to`.
fn sent(from: usize, to: usize) -> [i64; CHUNK] {
    [(1000 * from + to) as i64; CHUNK]
}

/// Ranks connect lazily, when they first exchange data.
fn to_and_from_a_root(communicator: &Communicator, rank: usize, world_size: usize) {
    let (root, chunk) = (world_size / 3, CHUNK);
    let mut gathered = sent(rank, 0).to_vec();
    if rank == root {
        gathered = gathered.repeat(world_size);
    }
    run(
        communicator,
        &mut gathered,
        Collective::Gather { root, chunk },
    )
    .unwrap();
    let of_all: Vec<i64> = (0..world_size).flat_map(|from| sent(from, 0)).collect();
    assert!(rank != root || gathered == of_all);

    let mut scattered = vec![-1; chunk];
    if rank == root {
        scattered = (0..world_size).flat_map(|to| sent(root, to)).collect();
    }
    run(
        communicator,
        &mut scattered,
        Collective::Scatter { root, chunk },
    )
    .unwrap();
    assert!(rank == root || scattered == sent(root, rank));
}

fn from_all_to_all(communicator: &Communicator, rank: usize, world_size: usize) {
    let to_all = (0..world_size).flat_map(|to| sent(rank, to));
    let mut values: Vec<i64> = to_all.collect();
    values.extend(sent(rank, rank).repeat(world_size));
    run(communicator, &mut values, Collective::AllToAll).unwrap();
    let from_all: Vec<i64> = (0..world_size).flat_map(|from| sent(from, rank)).collect();
    assert_eq!(values[CHUNK * world_size..], from_all);
}

#[test]
fn any_two_of_many_ranks_connect_when_they_have_something_to_say_to_each_other() {
    descriptors::allow_most();
    let address = free_address();
    let ranks: Vec<_> = (0..RANKS_IN_A_MESH)
        .map(|rank| {
            let mut config = config(rank, RANKS_IN_A_MESH, &address);
            config.settings.reproducible = true;
            thread::spawn(move || {
                let communicator = Communicator::connect(&config, &mut || false).unwrap();
                let mut token = [rank as f64];
                // Neighbours are connected for collectives; these two ranks are not.
                match rank {
                    0 => communicator.receive(&mut token, 50, "x").unwrap(),
                    50 => communicator.send(&mut token, 0, "x").unwrap(),
                    _ => {}
                }
                assert!(rank > 0 || token == [50.0]);
                let contribution = |rank: usize| (rank as f32 + 0.1) * 1e3;
                let mut values = [contribution(rank); 5];
                communicator
                    .all_reduce(&mut values, ReduceOp::Sum, "x")
                    .unwrap();
                let in_order = (1..RANKS_IN_A_MESH).map(contribution);
                assert_eq!(
                    values,
                    [in_order.fold(contribution(0), |sum, own| sum + own); 5]
                );
                for _ in 0..2 {
                    from_all_to_all(&communicator, rank, RANKS_IN_A_MESH);
                }
                communicator.barrier().unwrap();
            })
        })
        .collect();
    for rank in ranks {
        rank.join().expect("no rank panics");
    }
}

#[test]
fn every_collective_works_among_many_ranks_and_all_hear_which_one_gave_up() {
    let world_size: usize = std::env::var("RANKS").map_or(RANKS, |ranks| ranks.parse().unwrap());
    descriptors::allow_most();
    let [memory, threads] = ["VmRSS", "Threads"].map(status);
    let descriptors_before = open_descriptors();
    let address = free_address();
    let all_are_here = Arc::new(Barrier::new(world_size));
    let begun = Instant::now();
    let responses = Arc::new(Mutex::new(Vec::new()));
    let ranks: Vec<_> = (0..world_size)
        .map(|rank| {
            let (all_are_here, responses) = (Arc::clone(&all_are_here), Arc::clone(&responses));
            let config = config(rank, world_size, &address);
            let body = move || {
                let communicator = Communicator::connect(&config, &mut || false).unwrap();
                all_are_here.wait();
                if rank == 0 {
                    let per_rank =
                        |now: usize, before: usize| (now - before) as f64 / world_size as f64;
                    println!(
                        "{world_size} ranks: formed in {:.2} s; each has {:.0} kB, {:.1} threads \
                         (one of them the test's), {:.1} descriptors",
                        begun.elapsed().as_secs_f64(),
                        per_rank(status("VmRSS"), memory),
                        per_rank(status("Threads"), threads),
                        per_rank(open_descriptors(), descriptors_before),
                    );
                }
                all_are_here.wait();
                let begun = Instant::now();
                collectives(&communicator, rank, world_size);
                all_are_here.wait();
                if rank == 0 {
                    println!("all collectives: {:.2} s", begun.elapsed().as_secs_f64());
                }
                if rank == 3 {
                    communicator.abort("has had enough");
                }
                let begun = Instant::now();
                let error = loop {
                    let mut one = [1.0_f32];
                    if let Err(error) = communicator.all_reduce(&mut one, ReduceOp::Sum, "x") {
                        break error;
                    }
                };
                let blamed = error.blamed.as_ref().map(|blamed| blamed.rank);
                responses.lock().unwrap().push((blamed, begun.elapsed()));
            };
            thread::Builder::new()
                .stack_size(1 << 20)
                .spawn(body)
                .unwrap()
        })
        .collect();
    for rank in ranks {
        rank.join().expect("no rank panics");
    }
    let responses = responses.lock().unwrap();
    let wrong = responses
        .iter()
        .filter(|(blamed, _)| *blamed != Some(3))
        .count();
    assert_eq!(wrong, 0, "ranks that blame another one");
    let last = responses.iter().map(|&(_, after)| after).max().unwrap();
    println!(
        "the last rank heard of it after {:.2} s",
        last.as_secs_f64()
    );
}
