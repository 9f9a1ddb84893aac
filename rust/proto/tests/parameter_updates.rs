//! A synchronous update of a parameter server has the bits of `all_reduce` with
//! `reproducible=True`, and an update of rows has the bits of one with zeros in the other rows.

use std::sync::Arc;

use gradring_proto::dtype::{Element, ReduceOp};
use gradring_proto::kernel;
use gradring_proto::parameters::float::FloatType;
use gradring_proto::parameters::floats::Float;
use gradring_proto::parameters::floats::Floats;
use gradring_proto::parameters::optimizer::{
    Adadelta, Adagrad, Adam, Adamax, Ftrl, Hyper, Lion, Nadam, Optimizer, Rmsprop, Sgd,
};
use gradring_proto::parameters::shard::{Gradient, Shard, Spec};
use half::{bf16, f16};
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
            product: FloatType::F32,
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

fn floats<T: Float>(seed: usize) -> Floats {
    let values: Vec<_> = values(seed)
        .into_iter()
        .map(|it| T::of(it.into()))
        .collect();
    T::floats(values.into())
}

fn shard<T: Float>(optimizer: Optimizer) -> Shard {
    let spec = Spec {
        rows: ROWS,
        width: WIDTH,
        decays: true,
    };
    Shard::new(optimizer, &[(spec, Arc::new(floats::<T>(99)))])
}

fn apply<T: Float>(shard: &mut Shard, version: u64, gradients: &[Gradient]) -> Vec<u64> {
    apply_mean(shard, version, gradients, HYPER);
    let weights = &shard.weights()[0];
    weights
        .of::<T>()
        .iter()
        .map(|it| it.number().to_bits())
        .collect()
}

/// The mean by the kernels of an all-reduce, which reduce in the type of sums.
fn all_reduced<T: Float<Sum: Element> + Element>(step: usize) -> Floats {
    let op = ReduceOp::Mean;
    assert_eq!(T::DTYPE.accumulator(op), T::Sum::DTYPE);
    let wide = |worker| T::all_widened(floats::<T>(step * WORKERS + worker).of()).into_owned();
    let mut sum = wide(0);
    let mut mean = sum.iter().map(|_| T::default()).collect::<Vec<_>>();
    let (pointer, count) = (sum.as_mut_ptr().cast(), sum.len());
    for worker in 1..WORKERS {
        let other = wide(worker);
        // SAFETY: both have so many elements, and are two arrays.
        unsafe { kernel::reduce(T::Sum::DTYPE, op, pointer, other.as_ptr().cast(), count) };
    }
    // SAFETY: both have so many elements of their types, and are two arrays.
    unsafe {
        kernel::finish(
            T::DTYPE,
            op,
            WORKERS,
            mean.as_mut_ptr().cast(),
            pointer,
            count,
        );
    }
    T::floats(mean.into())
}

fn trains_as_an_all_reduce<T: Float<Sum: Element> + Element>() {
    for optimizer in optimizers() {
        let (mut served, mut reduced) = (shard::<T>(optimizer), shard::<T>(optimizer));
        for step in 1..=200 {
            let pushed = (0..WORKERS).map(|worker| floats::<T>(step * WORKERS + worker));
            let pushed: Vec<_> = pushed.map(Gradient::Dense).collect();
            let version = step as u64 + 1;
            let mean = Gradient::Dense(all_reduced::<T>(step));
            let expected = apply::<T>(&mut reduced, version, &[mean]);
            assert_eq!(
                apply::<T>(&mut served, version, &pushed),
                expected,
                "{optimizer:?}"
            );
        }
    }
}

#[test]
fn a_mean_of_workers_has_the_bits_of_a_reproducible_all_reduce() {
    trains_as_an_all_reduce::<f32>();
    trains_as_an_all_reduce::<f64>();
    trains_as_an_all_reduce::<bf16>();
    trains_as_an_all_reduce::<f16>();
}

#[test]
fn rows_change_weights_as_if_all_others_were_zero() {
    let rows_of = |step: usize, worker: usize| -> Vec<u32> {
        let is_there = |row: &u32| !(*row as usize + step + worker).is_multiple_of(3);
        (0..ROWS as u32).filter(is_there).collect()
    };
    for optimizer in optimizers() {
        let (mut by_rows, mut whole) = (shard::<f32>(optimizer), shard::<f32>(optimizer));
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
            let expected = apply::<f32>(&mut whole, version, &dense);
            assert_eq!(
                apply::<f32>(&mut by_rows, version, &sparse),
                expected,
                "{optimizer:?}"
            );
        }
    }
}

#[test]
fn gradients_that_do_not_fit_are_told_from_those_that_do() {
    let shard = shard::<f32>(optimizers()[0]);
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
