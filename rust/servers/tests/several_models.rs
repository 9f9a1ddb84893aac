//! Several models in one job: each has a log, versions and snapshots of its own, and the servers
//! end with the last of them.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use common::free_address;
use gradring_proto::error::{Error, ErrorKind, NotServed, Result};
use gradring_proto::parameters::float::FloatType;
use gradring_proto::parameters::floats::FloatSlice;
use gradring_proto::parameters::optimizer::{Hyper, Optimizer, Sgd};
use gradring_proto::parameters::rules::{Combine, Late, Rules};
use gradring_proto::wire::handshake::MODELS_MAX;
use gradring_servers::model::{Given, Model, Variable};
use gradring_servers::values::Values as _;
use gradring_servers::worker::Worker;
use serving::{Served, config, serve, serve_as};

#[path = "../../core/tests/common/mod.rs"]
mod common;
mod serving;

const ELEMENTS: usize = 8;
const INITIAL: f32 = 1000.0;
const EVERY: u64 = 3;
const HYPER: Hyper = Hyper {
    learning_rate: 1.0,
    weight_decay: 0.0,
};

fn rules(workers: u32, staleness: Option<u64>) -> Rules {
    Rules {
        workers,
        staleness,
        late: Late::Keep,
        combine: Combine::Sum,
        snapshot_every: EVERY,
        ..Rules::default()
    }
}

fn worker(addresses: &[String], index: usize, number: usize, name: &str) -> Arc<Worker> {
    worker_of(addresses, (index, number), name, FloatType::F32)
}

fn worker_of(
    addresses: &[String],
    (index, number): (usize, usize),
    name: &str,
    float_type: FloatType,
) -> Arc<Worker> {
    let variable = Variable {
        name: name.into(),
        shape: vec![ELEMENTS],
        float_type,
        decays: false,
    };
    let sgd = Optimizer::Sgd(Sgd {
        momentum: 0.0,
        is_nesterov: false,
    });
    let model = Model::new(vec![variable], sgd, &BTreeMap::new(), addresses.len());
    let worker = Worker::new(index, number, addresses.to_vec(), &config()).unwrap();
    worker.begin(model).unwrap();
    worker
}

fn pull(worker: &Worker) -> Result<Vec<f32>> {
    let mut weights = vec![0.0_f32; ELEMENTS];
    let into = &mut [weights.bytes_mut()];
    while worker.pull(into, &mut || false)?.is_none() {
        worker.push_initial(&[FloatSlice::F32(&[INITIAL; ELEMENTS])])?;
    }
    Ok(weights)
}

/// Pushes a gradient of the weights pulled before, and pulls again.
fn step(worker: &Worker, gradient: f32) -> f32 {
    let gradient = [gradient; ELEMENTS];
    worker
        .push(&[Some(Given::Dense(gradient[..].into()))], HYPER)
        .unwrap();
    let weights = pull(worker).unwrap();
    assert!(weights.iter().all(|it| *it == weights[0]), "{weights:?}");
    weights[0]
}

fn end(served: Vec<Served>) {
    for Served { thread, .. } in served {
        thread.join().unwrap().unwrap();
    }
}

/// A worker's steps: three of the first model for one of the second, which begins late.
fn train(addresses: &[String], index: usize) -> [f32; 2] {
    let first = worker(addresses, index, 0, "first");
    pull(&first).unwrap();
    let mut second = None;
    let mut found = [0.0; 2];
    for round in 0..5 {
        for _ in 0..3 {
            found[0] = step(&first, 1.0);
        }
        if round == 1 {
            let late = worker(addresses, index, 1, "second");
            pull(&late).unwrap();
            second = Some(late);
        }
        if let Some(second) = &second {
            found[1] = step(second, 10.0);
        }
    }
    second.unwrap().leave(&mut || false).unwrap();
    // The servers have not ended with the second model.
    first.leave(&mut || false).unwrap();
    found
}

#[test]
fn each_model_has_updates_of_its_own_and_the_servers_end_with_the_last() {
    let addresses = [free_address(), free_address()];
    let rules = rules(2, Some(0));
    let served = [0, 1].map(|it| serve(&addresses, it, &rules, None));
    let workers = [0, 1].map(|index| {
        let addresses = addresses.clone();
        std::thread::spawn(move || train(&addresses, index))
    });
    for worker in workers {
        let expected = [INITIAL - 2.0 * 15.0, INITIAL - 2.0 * 40.0];
        assert_eq!(worker.join().unwrap(), expected);
    }
    let servers = served.each_ref().map(|it| Arc::clone(&it.server));
    end(served.into());
    let stats = servers.map(|it| it.stats().unwrap());
    assert_eq!(stats.each_ref().map(|it| it.models), [2, 2]);
    assert_eq!(stats.each_ref().map(|it| it.version), [16, 16]);
    let counted = &stats[0].counted;
    assert_eq!((counted.updates, counted.counts.applied), (19, 38));
}

#[test]
fn a_model_of_which_only_one_worker_knows_holds_nobody_up_at_the_end() {
    let addresses = [free_address(), free_address()];
    let served = [0, 1].map(|it| serve(&addresses, it, &rules(2, None), None));
    let workers = [0, 1].map(|it| worker(&addresses, it, 0, "first"));
    for worker in &workers {
        pull(worker).unwrap();
        step(worker, 1.0);
    }
    let only = worker(&addresses, 0, 1, "second");
    // It connects, and ends before it is a member.
    while served[1].server.stats().unwrap().models == 1 {
        std::thread::yield_now();
    }
    only.close();
    for worker in workers {
        worker.leave(&mut || false).unwrap();
    }
    end(served.into());
}

fn fact(error: Error) -> NotServed {
    match error.kind {
        ErrorKind::Parameters(NotServed::Greeting { error, .. }) => fact(*error),
        ErrorKind::Parameters(fact) => fact,
        other => panic!("{other:?}"),
    }
}

#[test]
fn workers_that_begin_models_in_another_order_or_of_another_dtype_are_refused() {
    let addresses = [free_address()];
    let served = serve(&addresses, 0, &rules(2, None), None);
    let mut kept = Vec::new();
    for (number, name) in ["first", "second"].into_iter().enumerate() {
        kept.push(worker(&addresses, 0, number, name));
        while served.server.stats().unwrap().connections == number {
            std::thread::yield_now();
        }
    }
    for (number, name) in ["second", "first"].into_iter().enumerate() {
        let wrong = worker(&addresses, 1, number, name);
        let (worker, other) = (1, 0);
        let differ = NotServed::ModelsDiffer { worker, other };
        assert_eq!(fact(pull(&wrong).unwrap_err()), differ);
    }
    let wide = worker_of(&addresses, (1, 0), "first", FloatType::F64);
    let (worker, other) = (1, 0);
    let differ = NotServed::ModelsDiffer { worker, other };
    assert_eq!(fact(pull(&wide).unwrap_err()), differ);
    served.server.close();
    served.thread.join().unwrap().unwrap_err();
}

#[test]
fn a_model_beyond_the_bound_is_refused() {
    let addresses = [free_address()];
    let served = serve(&addresses, 0, &rules(1, None), None);
    let worker = worker(&addresses, 0, MODELS_MAX, "one too many");
    let error = pull(&worker).unwrap_err().to_string();
    assert!(error.contains("a model below 64"), "{error}");
    assert_eq!(served.server.stats().unwrap().models, 1);
    served.server.close();
    served.thread.join().unwrap().unwrap_err();
}

fn directories(name: &str) -> [PathBuf; 2] {
    [0, 1].map(|it| {
        let name = format!("gradring-{name}-{}-{it}", std::process::id());
        std::env::temp_dir().join(name)
    })
}

#[test]
fn a_lost_server_finds_the_snapshots_of_each_model() {
    let addresses = [free_address(), free_address()];
    let rules = rules(1, Some(0));
    let directories = directories("several");
    let start = |server: usize| serve(&addresses, server, &rules, Some(&directories[server]));
    let mut served = [Some(start(0)), Some(start(1))];
    let workers = [(0, "first"), (1, "second")].map(|(number, name)| {
        let worker = worker(&addresses, 0, number, name);
        pull(&worker).unwrap();
        worker
    });
    let mut weights = [INITIAL; 2];
    for lost in [1, 0] {
        for _ in 0..10 {
            for (worker, weight) in workers.iter().zip(&mut weights) {
                *weight = step(worker, 1.0);
            }
        }
        let closed = served[lost].take().unwrap();
        closed.server.close();
        closed.thread.join().unwrap().unwrap_err();
        assert!(directories[lost].join("optimizer-1/terms").exists());
        served[lost] = Some(start(lost));
        for (worker, weight) in workers.iter().zip(&mut weights) {
            let before = std::mem::replace(weight, step(worker, 1.0));
            let given_up = *weight - before;
            assert!(
                (-1.0..=2.0 * EVERY as f32).contains(&given_up),
                "{weight} after {before}"
            );
        }
    }
    for worker in workers.iter().rev() {
        worker.leave(&mut || false).unwrap();
    }
    end(served.into_iter().flatten().collect());
    for directory in directories {
        assert!(!directory.exists());
        let finished = directory.with_extension("finished");
        assert!(finished.join("optimizer-1").is_dir());
        std::fs::remove_dir_all(finished).unwrap();
    }
}

#[test]
fn workers_that_wait_for_each_other_in_two_models_go_on() {
    let addresses = [free_address()];
    let mut config = config();
    // As long as a circle of waiting is waited for, too.
    config.timing.silence = Duration::from_secs(4);
    let served = serve_as(&config, &addresses, 0, &rules(2, Some(0)), None);
    let workers = [0, 1].map(|index| {
        let addresses = addresses.clone();
        std::thread::spawn(move || {
            let models = [(0, "first"), (1, "second")];
            let mut models = models.map(|(number, name)| {
                let worker = worker(&addresses, index, number, name);
                pull(&worker).unwrap();
                worker
            });
            if index == 1 {
                models.reverse();
            }
            for model in &models {
                step(model, 1.0);
            }
            for model in &models {
                model.leave(&mut || false).unwrap();
            }
        })
    });
    for worker in workers {
        worker.join().unwrap();
    }
    let server = Arc::clone(&served.server);
    end(vec![served]);
    let counted = server.stats().unwrap().counted;
    assert_eq!((counted.updates, counted.counts.applied), (3, 4));
}

#[test]
fn a_worker_that_begins_the_next_model_earlier_does_not_hold_up_the_others() {
    // Twice the same two trainings: in the second round both models have weights.
    for (staleness, updates) in [(0, 90), (2, 106)] {
        let addresses = [free_address()];
        let mut config = config();
        config.timing.silence = Duration::from_secs(2);
        let served = serve_as(&config, &addresses, 0, &rules(2, Some(staleness)), None);
        let (ended, end_of_worker) = std::sync::mpsc::channel();
        for index in [0, 1] {
            let (addresses, ended) = (addresses.clone(), ended.clone());
            std::thread::spawn(move || {
                let steps = [[40, 3][index], 5];
                let train = |worker: &Worker, number: usize| {
                    for _ in 0..steps[number] {
                        step(worker, 1.0);
                    }
                };
                let models = [(0, "first"), (1, "second")].map(|(number, name)| {
                    let worker = worker(&addresses, index, number, name);
                    pull(&worker).unwrap();
                    train(&worker, number);
                    worker
                });
                for (number, model) in models.iter().enumerate() {
                    train(model, number);
                }
                for model in models {
                    model.leave(&mut || false).unwrap();
                }
                ended.send(()).unwrap();
            });
        }
        for _ in 0..2 {
            // The servers begin after 300 s in any case.
            end_of_worker
                .recv_timeout(Duration::from_secs(100))
                .unwrap();
        }
        let server = Arc::clone(&served.server);
        end(vec![served]);
        let counted = server.stats().unwrap().counted;
        assert_eq!((counted.updates, counted.counts.applied), (updates, 106));
    }
}

#[test]
fn a_push_of_many_pieces_counts_whole_and_is_closed_by_its_own_handle() {
    const PIECES: usize = 200;
    let addresses = [free_address()];
    let served = serve(&addresses, 0, &rules(1, Some(0)), None);
    let variable = |index| Variable {
        name: format!("variable {index}"),
        shape: vec![ELEMENTS],
        float_type: FloatType::F32,
        decays: false,
    };
    let sgd = Optimizer::Sgd(Sgd {
        momentum: 0.0,
        is_nesterov: false,
    });
    let variables = (0..PIECES).map(variable).collect();
    let model = Model::new(variables, sgd, &BTreeMap::new(), 1);
    let worker = Worker::new(0, 0, addresses.to_vec(), &config()).unwrap();
    worker.begin(model).unwrap();
    let weights = || {
        let mut weights = vec![vec![0.0_f32; ELEMENTS]; PIECES];
        let mut into: Vec<_> = weights.iter_mut().map(|it| it.bytes_mut()).collect();
        while worker.pull(&mut into, &mut || false).unwrap().is_none() {
            worker
                .push_initial(&[FloatSlice::F32(&[INITIAL; ELEMENTS]); PIECES])
                .unwrap();
        }
        weights
    };
    weights();

    let abandoned = worker.open_push(PIECES).unwrap();
    let push = worker.open_push(PIECES).unwrap();
    for piece in (0..PIECES).rev() {
        let gradient = [piece as f32; ELEMENTS];
        let mut given = [const { None }; PIECES];
        given[piece] = Some(Given::Dense(FloatSlice::F32(&[-1.0; ELEMENTS])));
        worker.put_gradients(abandoned, piece, &given).unwrap();
        given[piece] = Some(Given::Dense(gradient[..].into()));
        worker.put_gradients(push, piece, &given).unwrap();
    }
    let refused = worker.close_push(abandoned, HYPER).unwrap_err();
    let out_of_turn = NotServed::OutOfTurn {
        call: "push()".into(),
    };
    assert_eq!(refused, out_of_turn.into());
    assert!(worker.close_push(push, HYPER).unwrap());
    for (piece, weights) in weights().into_iter().enumerate() {
        assert_eq!(weights, [INITIAL - piece as f32; ELEMENTS]);
    }
    worker.leave(&mut || false).unwrap();
    end(vec![served]);
}
