//! A synchronous update of a parameter server has the bits of `all_reduce` with
//! `reproducible=True`, and an update of rows has the bits of one with zeros in the other rows.

use std::sync::Arc;

use gradring_proto::dtype::{DType, ReduceOp};
use gradring_proto::kernel;
use gradring_proto::parameters::optimizer::{
    Adadelta, Adagrad, Adam, Adamax, Ftrl, Hyper, Lion, Nadam, Optimizer, Rmsprop, Sgd,
};
use gradring_proto::parameters::shard::{Gradient, Shard, Spec};
use mean::apply_mean;

mod mean;

const WORKERS: usize = 3;
const ROWS: usize = 7;
const WIDTH: usize = 5;
const HYPER: Hyper = Hyper {
    learning_rate: 0.1,
    weight_decay: 0.01,
};

fn values(seed: usize) -> Vec<f32> {
    let mixed = |index: usize| (seed * 7919 + index * 104_729) % 2003;
    (0..ROWS * WIDTH)
        .map(|index| mixed(index) as f32 / 997.0 - 1.0)
        .collect()
}

fn optimizers() -> [Optimizer; 10] {
    [
        Optimizer::Sgd(Sgd {
            momentum: 0.0,
            is_nesterov: false,
        }),
        Optimizer::Sgd(Sgd {
            momentum: 0.9,
            is_nesterov: true,
        }),
        Optimizer::Adagrad(Adagrad {
            initial: 0.1,
            epsilon: 1e-7,
        }),
        Optimizer::Adam(Adam {
            beta_1: 0.9,
            beta_2: 0.999,
            epsilon: 1e-7,
            is_amsgrad: false,
        }),
        Optimizer::Rmsprop(Rmsprop {
            rho: 0.9,
            momentum: 0.5,
            epsilon: 1e-7,
            is_centered: true,
        }),
        Optimizer::Adadelta(Adadelta {
            rho: 0.95,
            epsilon: 1e-7,
        }),
        Optimizer::Adamax(Adamax {
            beta_1: 0.9,
            beta_2: 0.999,
            epsilon: 1e-7,
        }),
        Optimizer::Nadam(Nadam {
            beta_1: 0.9,
            beta_2: 0.999,
            epsilon: 1e-7,
        }),
        Optimizer::Lion(Lion {
            beta_1: 0.9,
            beta_2: 0.99,
        }),
        Optimizer::Ftrl(Ftrl {
            power: -0.5,
            initial: 0.1,
            l1: 0.01,
            l2: 0.02,
            shrinkage: 0.03,
            beta: 0.04,
        }),
    ]
}

fn shard(optimizer: Optimizer) -> Shard {
    let spec = Spec {
        rows: ROWS,
        width: WIDTH,
        decays: true,
    };
    Shard::new(optimizer, &[(spec, Arc::new(values(99).into()))])
}

fn apply(shard: &mut Shard, version: u64, gradients: &[Gradient]) -> Vec<u32> {
    apply_mean(shard, version, gradients, HYPER);
    shard.weights()[0].iter().map(|it| it.to_bits()).collect()
}

fn all_reduced(step: usize) -> Vec<f32> {
    let mut mean = values(step * WORKERS);
    let (pointer, count) = (mean.as_mut_ptr().cast(), mean.len());
    for worker in 1..WORKERS {
        let other = values(step * WORKERS + worker);
        // SAFETY: both have so many elements, and are two vectors.
        unsafe {
            kernel::reduce(
                DType::F32,
                ReduceOp::Mean,
                pointer,
                other.as_ptr().cast(),
                count,
            );
        }
    }
    // SAFETY: source and target are the same, of one type.
    unsafe { kernel::finish(DType::F32, ReduceOp::Mean, WORKERS, pointer, pointer, count) }
    mean
}

#[test]
fn a_mean_of_workers_has_the_bits_of_a_reproducible_all_reduce() {
    for optimizer in optimizers() {
        let (mut served, mut reduced) = (shard(optimizer), shard(optimizer));
        for step in 1..=200 {
            let pushed = (0..WORKERS).map(|worker| values(step * WORKERS + worker));
            let pushed: Vec<_> = pushed.map(|it| Gradient::Dense(it.into())).collect();
            let version = step as u64 + 1;
            let expected = apply(
                &mut reduced,
                version,
                &[Gradient::Dense(all_reduced(step).into())],
            );
            assert_eq!(
                apply(&mut served, version, &pushed),
                expected,
                "{optimizer:?}"
            );
        }
    }
}

#[test]
fn rows_change_weights_as_if_all_others_were_zero() {
    let rows_of = |step: usize, worker: usize| -> Vec<u32> {
        let is_there = |row: &u32| !(*row as usize + step + worker).is_multiple_of(3);
        (0..ROWS as u32).filter(is_there).collect()
    };
    for optimizer in optimizers() {
        let (mut by_rows, mut whole) = (shard(optimizer), shard(optimizer));
        for step in 1..=20 {
            let (mut sparse, mut dense) = (Vec::new(), Vec::new());
            for worker in 0..WORKERS {
                let (rows, all) = (rows_of(step, worker), values(step * WORKERS + worker));
                let (mut some, mut zeros) = (Vec::<f32>::new(), vec![0.0; all.len()]);
                for row in &rows {
                    let place = *row as usize * WIDTH..(*row as usize + 1) * WIDTH;
                    some.extend(&all[place.clone()]);
                    zeros[place.clone()].copy_from_slice(&all[place]);
                }
                let values = some.into();
                sparse.push(Gradient::Rows { rows, values });
                dense.push(Gradient::Dense(zeros.into()));
            }
            let version = step as u64 + 1;
            let expected = apply(&mut whole, version, &dense);
            assert_eq!(
                apply(&mut by_rows, version, &sparse),
                expected,
                "{optimizer:?}"
            );
        }
    }
}

#[test]
fn gradients_that_do_not_fit_are_told_from_those_that_do() {
    let shard = shard(optimizers()[0]);
    let rows = |rows: Vec<u32>, count| Gradient::Rows {
        rows,
        values: vec![0.0; count].into(),
    };
    for (gradient, fits) in [
        (Gradient::Dense(vec![0.0; ROWS * WIDTH].into()), true),
        (Gradient::Dense(vec![0.0; ROWS * WIDTH - 1].into()), false),
        (rows(vec![0, 6], 2 * WIDTH), true),
        (rows(vec![], 0), true),
        (rows(vec![0, 7], 2 * WIDTH), false),
        (rows(vec![1, 1], 2 * WIDTH), false),
        (rows(vec![3, 1], 2 * WIDTH), false),
        (rows(vec![1], WIDTH + 1), false),
    ] {
        assert_eq!(shard.fits(&[Some(gradient.clone())]), fits, "{gradient:?}");
    }
    assert!(!shard.fits(&[]) && shard.fits(&[None]));
}
