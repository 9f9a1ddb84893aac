//! Workers and servers over real sockets: a synchronous training has the bits of the pure code, and
//! training continues after a worker or a server is lost.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use common::free_address;
use gradring_net::config::Config;
use gradring_net::link::tcp::connection::Connection;
use gradring_net::session::connect::{Connector, Retry};
use gradring_net::session::credentials::Credentials;
use gradring_proto::error::{Breach, Error, ErrorKind, NotServed, Result, Unusable};
use gradring_proto::parameters::float::FloatType;
use gradring_proto::parameters::optimizer::{Adam, Hyper, Optimizer, Sgd};
use gradring_proto::parameters::rules::{Late, Rules};
use gradring_proto::parameters::shard::{Gradient, Shard, Spec};
use gradring_proto::wire::handshake::{ClientKind, Hello, Purpose};
use gradring_servers::model::{Given, Model, Variable};
use gradring_servers::server::{Server, ServerPlace};
use gradring_servers::values::Values as _;
use gradring_servers::worker::Worker;
use mean::apply_mean;
use serving::{Served, config, serve, serve_as};

#[path = "../../core/tests/common/mod.rs"]
mod common;
#[path = "../../proto/tests/mean/mod.rs"]
mod mean;
mod serving;

const ROWS: usize = 9;
const WIDTH: usize = 5;
const ADAM: Optimizer = Optimizer::Adam(Adam {
    beta_1: 0.9,
    beta_2: 0.999,
    epsilon: 1e-7,
    is_amsgrad: false,
});
const HYPER: Hyper = Hyper {
    learning_rate: 0.5,
    weight_decay: 0.0,
};
const SGD: Optimizer = Optimizer::Sgd(Sgd {
    momentum: 0.0,
    is_nesterov: false,
});

fn rules(workers: u32, staleness: Option<u64>) -> Rules {
    Rules {
        workers,
        staleness,
        late: Late::Keep,
        snapshot_every: 3,
        ..Rules::default()
    }
}

fn addresses(count: usize) -> Vec<String> {
    (0..count).map(|_| free_address()).collect()
}

fn with_transport(transport: &str) -> Config {
    let mut config = config();
    config.settings.transport = transport.into();
    config
}

fn with_streams(streams: usize) -> Config {
    let mut config = with_transport("tcp");
    config.settings.streams = streams;
    config
}

fn serve_all(addresses: &[String], rules: &Rules) -> Vec<Served> {
    serve_all_as(&config(), addresses, rules)
}

fn serve_all_as(config: &Config, addresses: &[String], rules: &Rules) -> Vec<Served> {
    let servers = 0..addresses.len();
    servers
        .map(|server| serve_as(config, addresses, server, rules, None))
        .collect()
}

fn worker(addresses: &[String], index: usize, optimizer: Optimizer) -> Arc<Worker> {
    worker_as(&config(), addresses, index, optimizer)
}

fn worker_as(
    config: &Config,
    addresses: &[String],
    index: usize,
    optimizer: Optimizer,
) -> Arc<Worker> {
    let worker = Worker::new(index, 0, addresses.to_vec(), config).unwrap();
    worker.begin(model(optimizer, addresses.len())).unwrap();
    worker
}

fn model(optimizer: Optimizer, servers: usize) -> Model {
    let variable = Variable {
        name: "table".into(),
        shape: vec![ROWS, WIDTH],
        float_type: FloatType::F32,
        decays: true,
    };
    Model::new(vec![variable], optimizer, &BTreeMap::new(), servers)
}

/// Takes one turn of the program: returns pulled weights, or `None` after it has pushed the initial
/// weights.
fn pull(worker: &Worker) -> Result<Option<Vec<f32>>> {
    let mut weights = vec![0.0_f32; ROWS * WIDTH];
    let pulled = worker.pull(&mut [weights.bytes_mut()], &mut || false)?;
    if pulled.is_none() {
        worker.push_initial(&[values(99)[..].into()])?;
    }
    Ok(pulled.map(|_| weights))
}

fn pulled(worker: &Worker) -> Vec<f32> {
    loop {
        if let Some(weights) = pull(worker).unwrap() {
            return weights;
        }
    }
}

fn push(worker: &Worker, gradient: &[f32]) -> bool {
    worker
        .push(&[Some(Given::Dense(gradient.into()))], HYPER)
        .unwrap()
}

fn values(seed: usize) -> Vec<f32> {
    let mixed = |index: usize| (seed * 7919 + index * 104_729) % 2003;
    (0..ROWS * WIDTH)
        .map(|index| mixed(index) as f32 / 997.0 - 1.0)
        .collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|it| it.to_bits()).collect()
}

/// Weights after `steps` steps of two workers, computed by the pure code without sockets.
fn expected(steps: usize) -> Vec<f32> {
    let spec = Spec {
        rows: ROWS,
        width: WIDTH,
        decays: true,
    };
    let mut shard = Shard::new(ADAM, &[(spec, Arc::new(values(99).into()))]);
    for step in 0..steps {
        let pushed = [0, 1].map(|worker| Gradient::Dense(values(2 * step + worker).into()));
        apply_mean(&mut shard, step as u64 + 2, &pushed, HYPER);
    }
    shard.weights()[0].of::<f32>().to_vec()
}

#[test]
fn a_synchronous_training_has_the_bits_of_the_pure_code_and_ends_by_itself() {
    train_synchronously(&config());
}

#[test]
fn so_it_does_over_links_of_several_connections() {
    for streams in [2, 16] {
        train_synchronously(&with_streams(streams));
    }
}

fn train_synchronously(config: &Config) {
    const STEPS: usize = 20;
    let addresses = addresses(2);
    let served = serve_all_as(config, &addresses, &rules(2, Some(0)));
    let train = |index: usize| {
        let (addresses, config) = (addresses.clone(), config.clone());
        std::thread::spawn(move || {
            let worker = worker_as(&config, &addresses, index, ADAM);
            for step in 0..STEPS {
                pulled(&worker);
                assert!(push(&worker, &values(2 * step + index)));
            }
            let last = pulled(&worker);
            worker.leave(&mut || false).unwrap();
            last
        })
    };
    let trained = [train(0), train(1)].map(|it| it.join().unwrap());
    for weights in trained {
        assert_eq!(bits(&weights), bits(&expected(STEPS)));
    }
    let mut histories = Vec::new();
    for Served { server, thread } in served {
        thread.join().unwrap().unwrap();
        let stats = server.stats().unwrap();
        assert_eq!(stats.version, STEPS as u64 + 1);
        let number = |worker| stats.applied[&worker].1;
        assert_eq!(number(0).max(number(1)), STEPS as u64 + 1);
        histories.push(stats.history);
    }
    assert_eq!(histories[0], histories[1]);
}

#[test]
fn asynchronous_gradients_count_once_each() {
    const STEPS: usize = 30;
    let addresses = addresses(2);
    let served = serve_all(&addresses, &rules(3, None));
    let train = |index: usize| {
        let addresses = addresses.clone();
        std::thread::spawn(move || {
            let worker = worker(&addresses, index, SGD);
            // Each worker changes an element of its own.
            let mut gradient = vec![0.0; ROWS * WIDTH];
            gradient[index] = 1.0;
            for _ in 0..STEPS {
                pulled(&worker);
                assert!(push(&worker, &gradient));
            }
            let last = pulled(&worker);
            worker.leave(&mut || false).unwrap();
            last[index]
        })
    };
    let trained = [train(0), train(1), train(2)].map(|it| it.join().unwrap());
    for (index, weight) in trained.into_iter().enumerate() {
        assert_eq!(weight, values(99)[index] - 0.5 * STEPS as f32, "{index}");
    }
    for Served { server, thread } in served {
        thread.join().unwrap().unwrap();
        if server.place().server == 0 {
            let stats = server.stats().unwrap();
            assert_eq!(stats.counted.counts.applied, 3 * STEPS as u64);
            assert_eq!(
                stats.counted.staleness.values().sum::<u64>(),
                3 * STEPS as u64
            );
        }
    }
}

#[test]
fn a_lost_worker_stops_nobody_and_comes_back_under_its_index() {
    let addresses = addresses(2);
    let served = serve_all(&addresses, &rules(2, Some(0)));
    let stays = worker(&addresses, 0, SGD);
    let goes = worker(&addresses, 1, SGD);
    let comes = std::thread::spawn({
        let addresses = addresses.clone();
        move || {
            pulled(&goes);
            push(&goes, &values(1));
            pulled(&goes);
            goes.close();
            let comes = worker(&addresses, 1, SGD);
            pulled(&comes);
            push(&comes, &values(1));
            pulled(&comes);
            comes.leave(&mut || false).unwrap();
        }
    });
    for _ in 0..5 {
        pulled(&stays);
        push(&stays, &values(1));
    }
    while !comes.is_finished() {
        pulled(&stays);
        push(&stays, &values(1));
    }
    comes.join().unwrap();
    stays.leave(&mut || false).unwrap();
    for Served { thread, .. } in served {
        thread.join().unwrap().unwrap();
    }
}

#[test]
fn a_lost_server_is_restored_from_its_directory_and_workers_go_on() {
    let addresses = addresses(2);
    let rules = rules(1, Some(0));
    let directories = ["0", "1"].map(|it| {
        let name = format!("gradring-servers-{}-{it}", std::process::id());
        std::env::temp_dir().join(name)
    });
    let start = |server: usize| serve(&addresses, server, &rules, Some(&directories[server]));
    let mut served = [Some(start(0)), Some(start(1))];
    let worker = worker(&addresses, 0, ADAM);
    let mut version = 0;
    for lost in [1, 0] {
        for _ in 0..10 {
            pulled(&worker);
            push(&worker, &values(3));
        }
        pulled(&worker);
        let before = worker.stats().unwrap().version;
        assert!(before >= version + 9, "{before} after {version}");
        let term = worker.stats().unwrap().term;
        let closed = served[lost].take().unwrap();
        closed.server.close();
        closed.thread.join().unwrap().unwrap_err();
        served[lost] = Some(start(lost));
        // The servers lose some of the last pushes, so a gradient computed from them does not
        // count.
        push(&worker, &values(3));
        pulled(&worker);
        let stats = worker.stats().unwrap();
        assert!(stats.term > term, "{stats:?}");
        version = stats.version;
        assert!(
            version + 2 * 3 + 1 >= before && version <= before + 1,
            "{version} {before}"
        );
        push(&worker, &values(3));
    }
    worker.leave(&mut || false).unwrap();
    for Served { thread, .. } in served.into_iter().flatten() {
        thread.join().unwrap().unwrap();
    }
    // The job has ended well, so the next one must not continue from its snapshots.
    for directory in directories {
        assert!(!directory.exists());
        std::fs::remove_dir_all(directory.with_extension("finished")).unwrap();
    }
}

fn kind(error: Error) -> NotServed {
    match error.kind {
        ErrorKind::Parameters(NotServed::Greeting { error, .. }) => kind(*error),
        ErrorKind::Parameters(fact) => fact,
        other => panic!("{other:?}"),
    }
}

#[test]
fn workers_that_train_something_else_or_are_too_many_are_turned_away_by_name() {
    let addresses = addresses(1);
    let served = serve_all(&addresses, &rules(2, None));
    let first = worker(&addresses, 0, SGD);
    while served[0].server.stats().unwrap().connections == 0 {
        std::thread::yield_now();
    }
    let other = worker(&addresses, 1, ADAM);
    let error = kind(pull(&other).unwrap_err());
    assert_eq!(
        error,
        NotServed::ModelsDiffer {
            worker: 1,
            other: 0
        }
    );
    let fourth = worker(&addresses, 3, SGD);
    let error = kind(pull(&fourth).unwrap_err());
    let (worker, workers) = (3, 2);
    assert_eq!(error, NotServed::NoSuchWorker { worker, workers });
    assert!(matches!(
        kind(first.push_initial(&[values(99)[..].into()]).unwrap_err()),
        NotServed::OutOfTurn { .. }
    ));
    for Served { server, thread } in served {
        server.close();
        thread.join().unwrap().unwrap_err();
    }
}

/// Kind of link that a worker and a server choose, or the error if they have none in common.
fn transport(worker_offers: &str, server_offers: &str) -> Result<String> {
    let addresses = addresses(1);
    let served = serve_as(
        &with_transport(server_offers),
        &addresses,
        0,
        &rules(1, Some(0)),
        None,
    );
    let worker = worker_as(&with_transport(worker_offers), &addresses, 0, ADAM);
    let trained = pull(&worker).map(|_| {
        for step in 0..5 {
            pulled(&worker);
            push(&worker, &values(step));
        }
        worker.stats().unwrap().transport
    });
    match trained {
        Ok(_) => worker.leave(&mut || false).unwrap(),
        Err(_) => served.server.close(),
    }
    let ended = served.thread.join().unwrap();
    assert_eq!(ended.is_ok(), trained.is_ok());
    trained
}

#[test]
fn a_worker_and_a_server_of_one_host_share_memory_if_both_offer_it() {
    for (worker, server, link) in [
        ("auto", "auto", "shm"),
        ("shm", "auto", "shm"),
        ("auto", "tcp", "tcp"),
        ("tcp", "auto", "tcp"),
    ] {
        assert_eq!(
            transport(worker, server).unwrap(),
            link,
            "{worker} {server}"
        );
    }
}

#[test]
fn a_worker_and_a_server_that_offer_nothing_in_common_say_what_they_offer() {
    let error = kind(transport("shm", "tcp").unwrap_err());
    let (theirs, ours) = ("tcp".into(), "shm".into());
    let reason = "they have nothing in common".into();
    let expected = NotServed::NoLink {
        theirs,
        ours,
        reason,
    };
    assert_eq!(error, expected);
}

#[test]
fn processes_that_want_other_numbers_of_streams_hear_both() {
    let addresses = addresses(1);
    let served = serve_as(&with_streams(1), &addresses, 0, &rules(1, None), None);
    let error = pull(&worker_as(&with_streams(2), &addresses, 0, SGD)).unwrap_err();
    assert_eq!(error.kind.exception(), "ConfigError");
    let (client, theirs, ours) = ("worker 0".into(), 2, 1);
    let expected = NotServed::StreamsDiffer {
        client,
        theirs,
        ours,
    };
    assert_eq!(kind(error), expected);
    served.server.close();
    served.thread.join().unwrap().unwrap_err();
}

#[test]
fn a_number_of_streams_that_no_link_can_have_is_refused_before_anything_is_connected() {
    for streams in [0, 17] {
        let config = with_streams(streams);
        let place = ServerPlace {
            server: 0,
            addresses: addresses(1),
        };
        let worker = Worker::new(0, 0, place.addresses.clone(), &config).unwrap();
        let limit = Duration::from_secs(2);
        let made = Server::new(place, &rules(1, None), None, limit, &config);
        for error in [made.err(), worker.begin(model(SGD, 1)).err()] {
            let error = error.expect("it is refused").kind;
            let is_named = matches!(&error, ErrorKind::Config(Unusable::Value { name, .. })
                if **name == *"streams");
            assert!(is_named, "{error:?}");
        }
    }
}

/// Opens one of the two streams of a link, as a process of worker 0.
fn connect_stream(address: &str, process: u64, stream: usize) -> Result<Connection, ErrorKind> {
    let credentials = Credentials::of(&config()).unwrap();
    let retry = Retry::of_one_that_listens(Duration::from_secs(60));
    let hello = |_: &mut _, _: &_| {
        let client = ClientKind::Worker {
            index: 0,
            process: (process, 4711, "another host".into()),
            model: model(SGD, 1).fingerprint(),
        };
        let purpose = Purpose::Parameters {
            job: String::new(),
            model: 0,
            server: 0,
            client,
            transports: vec!["tcp".into()],
            stream,
            streams: 2,
            attempt: 1,
        };
        Hello::new((0, 0), 0, purpose)
    };
    let mut check = || -> Result<()> { Ok(()) };
    let connected = Connector::new(address, &credentials, retry)
        .connect(&mut check, hello, |_| Ok(()))
        .map_err(|failure| failure.error(address).kind)?;
    Ok(connected.0)
}

#[test]
fn a_link_that_is_half_made_takes_no_other_stream_and_ends_with_its_process() {
    let addresses = addresses(1);
    let config = with_streams(2);
    let served = serve_as(&config, &addresses, 0, &rules(1, Some(0)), None);
    let connect = |process, stream| connect_stream(&addresses[0], process, stream);
    let wanted = "a stream that its link lacks".into();
    let in_vain = ErrorKind::Protocol(Breach::Unexpected { wanted });
    for stream in [2, 16, usize::MAX] {
        assert_eq!(connect(7, stream).err(), Some(in_vain.clone()));
    }
    // A refused client holds no index.
    let half = connect(8, 1).unwrap();
    assert_eq!(connect(8, 1).err(), Some(in_vain));
    let taken = NotServed::WorkerTaken {
        worker: 0,
        process: 4711,
        host: "another host".into(),
    };
    assert_eq!(connect(7, 0).err(), Some(ErrorKind::Parameters(taken)));
    drop(half);
    let worker = worker_as(&config, &addresses, 0, SGD);
    for step in 0..3 {
        pulled(&worker);
        assert!(push(&worker, &values(step)));
    }
    worker.leave(&mut || false).unwrap();
    served.thread.join().unwrap().unwrap();
    assert_eq!(served.server.stats().unwrap().version, 4);
}

const TABLE_ROWS: usize = 4000;
const TABLE_WIDTH: usize = 8;
const TABLE_BYTES: u64 = (TABLE_ROWS * TABLE_WIDTH * size_of::<f32>()) as u64;
const BIAS: usize = 3;

/// A worker that trains a table of embeddings by rows, and a bias.
fn embedding_worker(addresses: &[String], index: usize) -> Arc<Worker> {
    let variable = |name: &str, shape: &[usize]| Variable {
        name: name.into(),
        shape: shape.into(),
        float_type: FloatType::F32,
        decays: false,
    };
    let table = variable("table", &[TABLE_ROWS, TABLE_WIDTH]);
    let variables = vec![table, variable("bias", &[BIAS])];
    let model = Model::new(variables, SGD, &BTreeMap::new(), addresses.len());
    let worker = Worker::new(index, 0, addresses.to_vec(), &config()).unwrap();
    worker.begin(model).unwrap();
    worker
}

fn initial_embedding() -> (Vec<f32>, Vec<f32>) {
    let table = (0..TABLE_ROWS * TABLE_WIDTH).map(|it| it as f32 / 997.0);
    (table.collect(), vec![0.5; BIAS])
}

/// Gradients that a worker computes with the weights of a version: rows of the table with their
/// values, and the bias.
fn embedding_gradients(version: u64, worker: usize) -> (Vec<usize>, Vec<f32>, Vec<f32>) {
    let seed = version as usize * 37 + worker * 11;
    let rows = (0..20).map(|it| seed % 97 + it * 190);
    let value = |it: usize| ((seed + it * 13) % 29) as f32 / 7.0 - 2.0;
    let values = (0..20 * TABLE_WIDTH).map(value);
    (
        rows.collect(),
        values.collect(),
        (0..BIAS).map(value).collect(),
    )
}

/// Table and bias at a version, computed by the pure code without sockets.
fn expected_embedding(version: u64, workers: usize) -> (Vec<f32>, Vec<f32>) {
    let (table, bias) = initial_embedding();
    let shard = |rows, width, values: Vec<f32>| {
        let decays = false;
        let spec = Spec {
            rows,
            width,
            decays,
        };
        Shard::new(SGD, &[(spec, Arc::new(values.into()))])
    };
    let mut table = shard(TABLE_ROWS, TABLE_WIDTH, table);
    let mut bias = shard(BIAS, 1, bias);
    for before in 1..version {
        let (mut of_table, mut of_bias) = (Vec::new(), Vec::new());
        for worker in 0..workers {
            let (rows, values, bias) = embedding_gradients(before, worker);
            of_table.push(Gradient::Rows {
                rows: rows.iter().map(|row| *row as u32).collect(),
                values: values.into(),
            });
            of_bias.push(Gradient::Dense(bias.into()));
        }
        apply_mean(&mut table, before + 1, &of_table, HYPER);
        apply_mean(&mut bias, before + 1, &of_bias, HYPER);
    }
    (
        table.weights()[0].of::<f32>().to_vec(),
        bias.weights()[0].of::<f32>().to_vec(),
    )
}

/// Pulls weights and checks all of their bits. Returns their version.
fn pulled_embedding(worker: &Worker, workers: usize) -> u64 {
    let (mut table, mut bias) = initial_embedding();
    loop {
        let into = &mut [table.bytes_mut(), bias.bytes_mut()];
        if let Some(version) = worker.pull(into, &mut || false).unwrap() {
            let expected = expected_embedding(version, workers);
            assert_eq!(bits(&table), bits(&expected.0), "{version}");
            assert_eq!(bits(&bias), bits(&expected.1), "{version}");
            return version;
        }
        let (table, bias) = initial_embedding();
        let initial = [table[..].into(), bias[..].into()];
        worker.push_initial(&initial).unwrap();
    }
}

fn push_embedding(worker: &Worker, version: u64) {
    let (rows, values, bias) = embedding_gradients(version, worker.index() as usize);
    let gradients = [
        Some(Given::Rows(&rows, values[..].into())),
        Some(Given::Dense(bias[..].into())),
    ];
    worker.push(&gradients, HYPER).unwrap();
}

#[test]
fn a_pull_of_embeddings_brings_the_rows_that_have_changed_and_has_the_bits_of_whole_pulls() {
    const STEPS: u64 = 20;
    let addresses = addresses(2);
    let served = serve_all(&addresses, &rules(2, Some(0)));
    let train = |index: usize| {
        let addresses = addresses.clone();
        std::thread::spawn(move || {
            let worker = embedding_worker(&addresses, index);
            let mut received = Vec::new();
            loop {
                let version = pulled_embedding(&worker, 2);
                received.push(worker.stats().unwrap().bytes_received);
                if version > STEPS {
                    worker.leave(&mut || false).unwrap();
                    return received;
                }
                push_embedding(&worker, version);
            }
        })
    };
    for received in [train(0), train(1)].map(|it| it.join().unwrap()) {
        let steps: Vec<_> = received.windows(2).map(|it| it[1] - it[0]).collect();
        // The servers learn from the first gradients that rows of the table change alone.
        let (whole, rows) = steps.split_at(1);
        assert!(whole[0] >= TABLE_BYTES, "{steps:?}");
        assert!(rows.iter().all(|it| *it < TABLE_BYTES / 20), "{steps:?}");
    }
    for Served { thread, .. } in served {
        thread.join().unwrap().unwrap();
    }
}

#[test]
fn after_a_lost_server_a_pull_of_embeddings_is_whole() {
    let addresses = addresses(2);
    let rules = rules(1, Some(0));
    let directories = ["0", "1"].map(|it| {
        let name = format!("gradring-embeddings-{}-{it}", std::process::id());
        std::env::temp_dir().join(name)
    });
    let start = |server: usize| serve(&addresses, server, &rules, Some(&directories[server]));
    let mut served = [Some(start(0)), Some(start(1))];
    let worker = embedding_worker(&addresses, 0);
    let received = |worker: &Worker| worker.stats().unwrap().bytes_received;
    for lost in [None, Some(1), Some(0)] {
        if let Some(lost) = lost {
            let version = pulled_embedding(&worker, 1);
            let (term, before) = (worker.stats().unwrap().term, received(&worker));
            let closed = served[lost].take().unwrap();
            closed.server.close();
            closed.thread.join().unwrap().unwrap_err();
            served[lost] = Some(start(lost));
            push_embedding(&worker, version);
            let version = pulled_embedding(&worker, 1);
            assert!(worker.stats().unwrap().term > term);
            assert!(received(&worker) >= before + TABLE_BYTES);
            push_embedding(&worker, version);
        }
        for step in 0..8 {
            let before = received(&worker);
            let version = pulled_embedding(&worker, 1);
            let bytes = received(&worker) - before;
            assert!(step < 2 || bytes < TABLE_BYTES / 20, "{step}: {bytes}");
            push_embedding(&worker, version);
        }
    }
    pulled_embedding(&worker, 1);
    worker.leave(&mut || false).unwrap();
    for Served { thread, .. } in served.into_iter().flatten() {
        thread.join().unwrap().unwrap();
    }
    for directory in directories {
        std::fs::remove_dir_all(directory.with_extension("finished")).unwrap();
    }
}
