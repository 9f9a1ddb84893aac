use std::time::Instant;

use super::*;
use gradring_proto::dtype::ReduceOp;
use gradring_proto::schedule::Turn;
use gradring_proto::schedule::choice::MESH_RANKS_MAX;

const MIB: usize = 1 << 20;

fn all_reduce(dtype: DType, count: usize) -> Call {
    Call {
        collective: Collective::AllReduce { op: ReduceOp::Sum },
        dtype,
        count,
        name: "x".into(),
        shapes: String::new(),
        is_mapped: false,
    }
}

/// Plan of rank 1 for an all-reduce of `bytes`, with the numbers of its operations and conflicts.
fn plan(world_size: usize, bytes: usize, algorithm: Algorithm) -> (Plans, usize, usize) {
    let call = all_reduce(DType::F32, bytes / 4);
    let mut plans = Plans::default();
    let topology = Topology::one_host(world_size);
    let plan = plans.get(&call, DType::F32, algorithm, 1, &topology);
    let sizes = (plan.operations.len(), plan.conflicts.len());
    (plans, sizes.0, sizes.1)
}

#[test]
fn an_operation_has_few_conflicts_however_long_the_plan_is() {
    for (world_size, bytes, algorithm) in [
        (64, 64 * MIB, Algorithm::Ring),
        (256, 16 * MIB, Algorithm::Ring),
        (64, 64 * MIB, Algorithm::Direct),
        (64, MIB, Algorithm::OneShot),
    ] {
        let (_, operations, conflicts) = plan(world_size, bytes, algorithm);
        assert!(operations > 2 * world_size - 3);
        assert!(conflicts <= 2 * operations, "{conflicts} of {operations}");
    }
}

/// Plans of all ranks for all-reduces that keep values beside the buffer, in one block and in many.
/// In some blocks, some ranks have no elements.
fn plans_that_keep() -> Vec<Plan> {
    let collective = Collective::AllReduce { op: ReduceOp::Sum };
    let mut all = Vec::new();
    for world_size in (2..=8).chain([16, 33, MESH_RANKS_MAX]) {
        let topology = Topology::one_host(world_size);
        for algorithm in [
            Algorithm::Direct,
            Algorithm::OneShot,
            Algorithm::Star,
            Algorithm::Doubling,
        ] {
            for (count, block) in [(3 * world_size + 1, 7), (100, 40), (61, 3)] {
                for rank in 0..world_size {
                    let steps =
                        schedule::build(algorithm, &collective, rank, &topology, count, block);
                    all.push(Plan::new(steps, rank, world_size, |_| 1));
                }
            }
        }
    }
    all
}

#[test]
fn what_is_kept_takes_memory_that_nothing_else_needs_in_whatever_order_bytes_move() {
    for (seed, mut plan) in plans_that_keep().into_iter().enumerate() {
        // Element whose result occupies each place of the memory.
        let mut results = vec![None; plan.offsets.count()];
        let mut random = seed;
        let mut done = 0;
        while done < plan.operations.len() {
            let pipes = plan.outgoing.iter().chain(&plan.incoming);
            let movable: Vec<_> = pipes
                .chain([&plan.own])
                .filter_map(Pipe::head)
                .map(|number| (number, plan.watermark(number)))
                .filter(|&(number, end)| end > plan.operations[number].moved_bytes)
                .collect();
            assert!(!movable.is_empty(), "plan {seed} is stuck");
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1);
            let (number, end) = movable[(random >> 33) % movable.len()];
            let operation = &mut plan.operations[number];
            // A few elements, of one byte each.
            let moved = end.min(operation.moved_bytes + 1 + (random >> 40) % 8);
            let is_own = plan.own.head() == Some(number);
            // Presence of a kept value before and after the move.
            let kept = match operation.action {
                Some(Action::Fold(turn)) => Some((turn != Turn::First, turn != Turn::Last)),
                Some(Action::SetAside) => Some((false, true)),
                _ => is_own.then_some((true, false)),
            };
            if let Some((before, after)) = kept {
                let first = operation.range.start;
                for element in first + operation.moved_bytes..first + moved {
                    let result = &mut results[plan.offsets.of(element)];
                    let expected = before.then_some(element);
                    assert_eq!(*result, expected, "{:?} of {element}", operation.action);
                    *result = after.then_some(element);
                }
            }
            operation.moved_bytes = moved;
            if operation.left_bytes() == 0 {
                done += 1;
                let pipes = plan.outgoing.iter_mut().chain(&mut plan.incoming);
                let mut pipes = pipes.chain([&mut plan.own]);
                let pipe = pipes.find(|pipe| pipe.head() == Some(number));
                pipe.expect("it was a head").advance();
            }
        }
    }
}

#[test]
fn memory_of_folds_does_not_grow_with_the_number_of_blocks() {
    let capacity = |world_size, bytes, algorithm| {
        let (plans, ..) = plan(world_size, bytes, algorithm);
        4 * plans.kept[0].1.offsets.count()
    };
    for (algorithm, folded) in [(Algorithm::Direct, MIB / 4), (Algorithm::OneShot, MIB)] {
        assert_eq!(capacity(4, MIB, algorithm), folded);
    }
    assert_eq!(capacity(4, 64 * MIB, Algorithm::Direct), KEPT_MAX * MIB / 4);
    // Blocks grow where there would be too many.
    assert_eq!(capacity(4, 1024 * MIB, Algorithm::Direct), KEPT_MAX * MIB);
}

#[test]
fn arrays_that_travel_as_another_type_have_a_plan_of_their_own() {
    let (mut plans, topology) = (Plans::default(), Topology::one_host(2));
    // The block size depends on the program's type, not on the type that travels.
    let operations = [DType::F32, DType::Bf16].map(|dtype| {
        let call = all_reduce(dtype, 128 * MIB);
        let plan = plans.get(&call, DType::Bf16, Algorithm::Ring, 1, &topology);
        plan.operations.len()
    });
    assert!(operations[0] < operations[1], "{operations:?}");
}

#[test]
fn plans_are_kept_as_long_as_they_are_few_and_short() {
    let key = |count| Key {
        count,
        dtypes: (DType::F32, DType::F32),
        algorithm: Algorithm::Ring,
        collective: Collective::Barrier,
    };
    let (mut source, operations, _) = plan(64, 256 * MIB, Algorithm::Ring);
    let (_, long) = source.kept.pop_back().unwrap();
    let mut plans = Plans::default();
    for count in 0..2 * PLANS_MAX {
        let short = plan(2, 4, Algorithm::Ring).0.kept.pop_back().unwrap().1;
        plans.keep(key(count), short);
        assert!(plans.kept.len() <= PLANS_MAX);
    }
    assert_eq!(plans.kept.len(), PLANS_MAX);
    assert_eq!(plans.kept[0].0.count, PLANS_MAX);
    plans.operations += OPERATIONS_MAX - operations;
    plans.keep(key(0), long);
    assert_eq!(plans.kept.len(), 1);
}

/// `cargo test --release -p gradring-core --lib plan::tests::building -- --ignored --nocapture`
#[test]
#[ignore = "measures"]
fn building() {
    if cfg!(debug_assertions) {
        panic!("measure with --release");
    }
    for (world_size, bytes) in [(8, 256), (64, 256), (256, 256), (2048, 16), (2048, 256)] {
        let mut best = std::time::Duration::MAX;
        let mut sizes = (0, 0);
        for _ in 0..5 {
            let started = Instant::now();
            let (_, operations, conflicts) = plan(world_size, bytes * MIB, Algorithm::Ring);
            best = best.min(started.elapsed());
            sizes = (operations, conflicts);
        }
        println!(
            "{world_size:>5} ranks {bytes:>4} MiB: {:>7.1} ms, {} operations, {} conflicts",
            best.as_secs_f64() * 1e3,
            sizes.0,
            sizes.1
        );
    }
}

#[test]
fn in_a_star_ranks_exchange_payload_with_rank_0_alone() {
    let (plans, operations, _) = plan(64, 64, Algorithm::Star);
    assert_eq!(operations, 2);
    let plan = &plans.kept.back().unwrap().1;
    let with_payload = |pipes: &[Pipe]| -> Vec<usize> {
        let pipes = pipes.iter().filter(|pipe| pipe.head().is_some());
        pipes.map(|pipe| pipe.peer).collect()
    };
    assert_eq!(with_payload(&plan.outgoing), [0]);
    assert_eq!(with_payload(&plan.incoming), [0]);
}
