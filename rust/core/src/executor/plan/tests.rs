use std::time::Instant;

use super::*;
use crate::dtype::ReduceOp;

const MIB: usize = 1 << 20;

/// The plan of rank 1 for an all-reduce of so many bytes.
fn plan(world_size: usize, bytes: usize, algorithm: Algorithm) -> (Plans, usize, usize) {
    let call = Call {
        collective: Collective::AllReduce { op: ReduceOp::Sum },
        dtype: DType::F32,
        count: bytes / 4,
        name: "x".into(),
        shapes: String::new(),
    };
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

#[test]
fn plans_are_kept_as_long_as_they_are_few_and_short() {
    let key = |count| Key {
        count,
        dtype: DType::F32,
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
