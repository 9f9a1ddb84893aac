//! The crate as a program without Python uses it: only its public names, without the feature
//! `testing`.

use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;

use half::{bf16, f16};

use gradring_core::communicator::Communicator;
use gradring_core::config::Config;
use gradring_core::dtype::{Element, ReduceOp};
use gradring_core::error::{Blamed, ErrorKind};

use common::free_address;

mod common;
#[path = "../examples/sum.rs"]
#[expect(dead_code, reason = "nobody calls its `main`")]
mod example;

/// Runs `body` on each rank of a group, and returns the results.
fn ranks<T: Send>(
    world_size: usize,
    body: impl Fn(Arc<Communicator>) -> T + Send + Sync,
) -> Vec<T> {
    let (address, body) = (&free_address(), &body);
    thread::scope(|scope| {
        let start = |rank| {
            scope.spawn(move || {
                let mut config = Config::new(rank, world_size, address);
                config.token = b"secret".into();
                body(Communicator::connect(&config, &mut || false).expect("the group forms"))
            })
        };
        let threads: Vec<_> = (0..world_size).map(start).collect();
        let results = threads.into_iter().map(|thread| thread.join());
        results
            .map(|result| result.expect("no rank panics"))
            .collect()
    })
}

fn sums_are_right<T: Element + PartialEq + Debug + Send>(value: impl Fn(u8) -> T + Send + Sync) {
    for world_size in 1..=3_u8 {
        let all = ranks(world_size.into(), |group| {
            let rank = u8::try_from(group.rank).unwrap();
            let mut values = vec![value(rank + 1); 70_001];
            group.all_reduce(&mut values, ReduceOp::Sum, "sum").unwrap();
            values
        });
        let expected = value(world_size * (world_size + 1) / 2);
        assert!(all.iter().flatten().all(|sum| *sum == expected));
    }
}

#[test]
fn slices_of_every_element_type_are_summed() {
    sums_are_right(f32::from);
    sums_are_right(f64::from);
    sums_are_right(f16::from);
    sums_are_right(bf16::from);
    sums_are_right(i32::from);
    sums_are_right(i64::from);
    sums_are_right(|value| value);
}

#[test]
fn a_broadcast_gives_every_rank_the_slice_of_its_root() {
    let all = ranks(3, |group| {
        let mut values = [group.rank as i64; 5];
        group.broadcast(&mut values, 1, "values").unwrap();
        group.barrier().unwrap();
        values
    });
    assert_eq!(all, [[1; 5]; 3]);
}

#[test]
fn a_root_that_is_no_rank_is_refused_before_anything_is_sent() {
    ranks(2, |group| {
        let error = group.broadcast(&mut [0_u8; 3], 2, "").unwrap_err();
        assert!(matches!(error.kind, ErrorKind::Config(_)), "{error}");
        let mut values = [1.0_f32; 3];
        group.all_reduce(&mut values, ReduceOp::Sum, "").unwrap();
        assert_eq!(values, [2.0; 3]);
    });
}

#[test]
fn an_error_names_the_rank_that_called_something_else_on_every_rank() {
    let all_have_failed = Barrier::new(3);
    let errors = ranks(3, |group| {
        let mut values = vec![1.0_f32; if group.rank == 2 { 7 } else { 6 }];
        let result = group.all_reduce(&mut values, ReduceOp::Mean, "weights");
        all_have_failed.wait();
        result.unwrap_err()
    });
    for error in errors {
        assert!(matches!(error.kind, ErrorKind::Mismatch { .. }), "{error}");
        assert!(
            matches!(error.blamed, Some(Blamed { rank: 2, .. })),
            "{error}"
        );
        let text = error.to_string();
        assert!(text.contains("rank 2 on "), "{text}");
        assert!(
            text.contains("all_reduce(mean) 'weights' float32[7]"),
            "{text}"
        );
    }
}

#[test]
fn a_world_of_one_needs_neither_rendezvous_nor_token() {
    let group = Communicator::connect(&Config::new(0, 1, ""), &mut || false).unwrap();
    let mut values = [3_i32; 4];
    group.all_reduce(&mut values, ReduceOp::Mean, "").unwrap();
    assert_eq!(values, [3; 4]);
}

#[test]
fn a_rank_without_the_token_is_turned_away_and_a_wait_can_be_given_up() {
    let (address, is_over) = (&free_address(), &AtomicBool::new(false));
    thread::scope(|scope| {
        let waiting = scope.spawn(move || {
            let mut config = Config::new(0, 2, address);
            config.token = b"secret".into();
            let mut give_up = || is_over.load(Ordering::Relaxed);
            Communicator::connect(&config, &mut give_up).err()
        });
        let refused = Communicator::connect(&Config::new(1, 2, address), &mut || false).err();
        is_over.store(true, Ordering::Relaxed);
        let error = refused.expect("it does not know the token");
        assert!(
            matches!(error.kind, ErrorKind::Authentication(_)),
            "{error}"
        );
        assert!(waiting.join().unwrap().is_some());
    });
}

#[test]
fn the_example_sums_over_tcp() {
    let address = &free_address();
    let arguments = |rank: usize| [rank.to_string(), "3".into(), address.clone()];
    let responses: Vec<_> = thread::scope(|scope| {
        let start = |rank| {
            let sum = move || example::sum(&arguments(rank), "secret").map_err(|e| e.to_string());
            scope.spawn(sum)
        };
        let threads: Vec<_> = (0..3).map(start).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    for (rank, response) in responses.into_iter().enumerate() {
        let response = response.expect("the ranks sum");
        assert!(
            response.starts_with(&format!("rank {rank} on ")),
            "{response}"
        );
        assert!(response.ends_with(": 6"), "{response}");
    }
    let error = example::sum(&arguments(0), "").expect_err("a token is needed");
    assert!(error.to_string().contains("GRADRING_TOKEN"), "{error}");
}
