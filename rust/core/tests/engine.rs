//! The engine over in-process links: every collective, and every kind of failure.

use std::io::{IoSlice, IoSliceMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex, OnceLock, mpsc};
use std::thread;
use std::time::Duration;

use gradring_core::engine::{Engine, Parts, SpinPolicy, Stall, Supervisor, Suspicion};
use gradring_core::work::WaitOutcome;
use gradring_net::abort::AbortSwitch;
use gradring_net::link::memory::MemoryLink;
use gradring_net::link::mesh::Mesh;
use gradring_net::link::poll::PollFd;
use gradring_net::link::{
    Broken, Direction, Interest, Link, SlotFile, Slots, Transport, framing, memory,
};
use gradring_proto::buffer::{Buffer, Slice};
use gradring_proto::collective::{Collective, Request};
use gradring_proto::dtype::{DType, ReduceOp};
use gradring_proto::error::{Breach, Damage, Error, ErrorKind, Late, Lost};
use gradring_proto::schedule::algorithm_rules::Rules;
use gradring_proto::schedule::choice::Policy;
use gradring_proto::schedule::topology::Topology;
use gradring_proto::schedule::{self, Algorithm};
use rustix::thread::{CpuSet, sched_getcpu, sched_setaffinity};

/// A supervisor that turns every suspicion into an error, and ends all ranks of one test with it.
struct Recording {
    switches: Vec<Arc<AbortSwitch>>,
    /// The error that ends the group; later suspicions do not change it.
    first: OnceLock<Error>,
    /// Late ranks of each warning, whether they had entered, and the ordinal of the collective.
    warnings: Mutex<Vec<(Vec<usize>, bool, u64)>>,
}

impl Supervisor for Recording {
    fn investigate(&self, suspicion: Suspicion) {
        let error = match suspicion {
            Suspicion::LinkBroken { peer, broken } => {
                Error::from(Lost::LinkEnded { broken }).blaming(peer, "h")
            }
            Suspicion::Garbled { peer, how } => {
                Error::from(Breach::Garbled { how }).blaming(peer, "h")
            }
            Suspicion::Corrupted {
                peer,
                broken,
                call,
                sequence,
            } => Error::from(Damage::OnLink {
                from: peer,
                from_host: "h".into(),
                to: 0,
                to_host: "h".into(),
                broken,
            })
            .blaming(peer, "h")
            .during(&*call, sequence),
            Suspicion::HeadersDiffer { peer, .. } => Error::new(ErrorKind::Mismatch {
                theirs: "theirs".into(),
                others: "ours".into(),
            })
            .blaming(peer, "h"),
            Suspicion::Stalled { awaited, .. } => {
                Error::from(Late::NotEntered).blaming(awaited[0], "h")
            }
        };
        self.abort(self.first.get_or_init(|| error).clone());
    }

    fn abort(&self, cause: Error) {
        for switch in &self.switches {
            switch.raise(cause.clone());
        }
    }

    fn warn(&self, stall: &Stall<'_>) {
        let warning = (stall.awaited.clone(), stall.entered, stall.sequence);
        self.warnings.lock().unwrap().push(warning);
    }
}

/// Runs `body(rank, engine)` on every rank of a group whose pipes hold `capacity_bytes`.
fn group<T: Send + 'static>(
    world_size: usize,
    capacity_bytes: usize,
    timeout: Duration,
    body: impl Fn(usize, &Engine) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let topology = Topology::one_host(world_size);
    group_with("auto", &topology, capacity_bytes, timeout, body)
}

/// Runs a group like `group`, with these algorithms and hosts.
fn group_with<T: Send + 'static>(
    algorithm: &str,
    topology: &Topology,
    capacity_bytes: usize,
    timeout: Duration,
    body: impl Fn(usize, &Engine) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let links = memory::mesh(topology.world_size(), capacity_bytes);
    let links = links.into_iter().map(|link| Box::new(link) as _).collect();
    group_over(links, algorithm, topology, timeout, body)
}

/// Runs a group like `group_with`, over these links of all ranks.
fn group_over<T: Send + 'static>(
    links: Vec<Box<dyn Transport>>,
    algorithm: &str,
    topology: &Topology,
    timeout: Duration,
    body: impl Fn(usize, &Engine) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let switches: Vec<Arc<AbortSwitch>> = links.iter().map(|_| Arc::default()).collect();
    let supervisor = Arc::new(Recording {
        switches: switches.clone(),
        first: OnceLock::new(),
        warnings: Mutex::default(),
    });
    let body = Arc::new(body);
    let ranks: Vec<_> = links
        .into_iter()
        .enumerate()
        .map(|(rank, transport)| {
            let engine = Engine::new(Parts {
                rank,
                policy: Policy {
                    rules: Rules::parse(algorithm).unwrap(),
                    ..Policy::new(topology.clone())
                },
                transport,
                supervisor: Arc::clone(&supervisor) as _,
                abort: Arc::clone(&switches[rank]),
                recorder: Arc::default(),
                stall_timeout: timeout,
                stall_warning: timeout,
                spin_policy: SpinPolicy::default(),
            });
            let engine = engine.unwrap();
            let body = Arc::clone(&body);
            thread::spawn(move || body(rank, &engine))
        })
        .collect();
    ranks
        .into_iter()
        .map(|rank| rank.join().expect("no rank panics"))
        .collect()
}

const PATIENT: Duration = Duration::from_secs(60);

/// Makes a request over memory in two slices, which the test reads afterwards.
fn request(values: &mut [f32], collective: Collective) -> Request {
    let count = values.len();
    let (first, second) = values.split_at_mut(count / 3);
    let slices = [first, second].map(|part| Slice {
        start: part.as_mut_ptr().cast(),
        count: part.len(),
    });
    Request {
        collective,
        // SAFETY: the tests wait for the collective before they touch `values` again.
        buffer: unsafe { Buffer::new(DType::F32, slices, Box::new(())) },
        name: "x".into(),
        shapes: format!("[{count}]"),
    }
}

/// Values that identify every element of every rank, exact in float32.
fn contribution(rank: usize, count: usize) -> Vec<f32> {
    (0..count).map(|index| (index * 16 + rank) as f32).collect()
}

const SUM: Collective = Collective::AllReduce { op: ReduceOp::Sum };

/// Sums `count` elements with every algorithm, over pipes of small and of large capacity.
fn assert_sums(topology: &Topology, count: usize) {
    let ranks = (0..topology.world_size()).map(|rank| contribution(rank, count));
    let expected: Vec<f32> = (0..count)
        .map(|index| ranks.clone().map(|values| values[index]).sum())
        .collect();
    for (algorithm, capacity_bytes) in Algorithm::ALL
        .into_iter()
        .flat_map(|a| [(a, 3), (a, 100_000)])
    {
        let name = algorithm.name();
        let body = move |rank, engine: &Engine| {
            let mut values = contribution(rank, count);
            engine
                .run(request(&mut values, SUM), &mut || false)
                .unwrap();
            values
        };
        for result in group_with(name, topology, capacity_bytes, PATIENT, body) {
            assert_eq!(result, expected, "{name} {topology:?} count={count}");
        }
    }
}

#[test]
fn all_reduce_sums_for_every_algorithm_world_size_count_and_pipe_capacity() {
    for world_size in [1, 2, 3, 5, 8] {
        for count in [0, 1, 2, 7, 1000] {
            assert_sums(&Topology::one_host(world_size), count);
        }
    }
}

/// Links in memory of all ranks of a group, with slots.
fn meshes_with_slots(world_size: usize) -> impl Iterator<Item = Mesh> {
    let file = SlotFile::create(world_size).unwrap();
    let links = memory::mesh(world_size, 100_000).into_iter().enumerate();
    links.map(move |(rank, mesh)| mesh.with_slots(file.map(rank).ok()))
}

/// Lets an engine use its slots, as a group does that has agreed on them.
fn use_slots(engine: &Engine) {
    engine.set_policy(Policy {
        has_slots: true,
        ..engine.policy()
    });
}

/// Runs a group that has slots.
fn group_with_slots<T: Send + 'static>(
    algorithm: &str,
    world_size: usize,
    timeout: Duration,
    body: impl Fn(usize, &Engine) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let topology = Topology::one_host(world_size);
    let links = meshes_with_slots(world_size).map(|mesh| Box::new(mesh) as _);
    let links = links.collect();
    group_over(links, algorithm, &topology, timeout, move |rank, engine| {
        use_slots(engine);
        body(rank, engine)
    })
}

#[test]
fn all_reduce_sums_through_slots() {
    for world_size in [2, 3, 5, 8] {
        for count in [0, 1, 2, 7, 1000, 16 << 10] {
            for algorithm in ["one_shot", "direct", "auto"] {
                let body = move |rank, engine: &Engine| {
                    let mut results = Vec::new();
                    // A slot is written again after two operations.
                    for round in 0..3 {
                        let mut values = contribution(rank + round, count);
                        let request = request(&mut values, SUM);
                        engine.run(request, &mut || false).unwrap();
                        results.push(values);
                    }
                    engine.run(Request::barrier(), &mut || false).unwrap();
                    results
                };
                let results = group_with_slots(algorithm, world_size, PATIENT, body);
                for (round, index) in (0..3).flat_map(|round| (0..count).map(move |i| (round, i))) {
                    let value = |rank| (index * 16 + rank + round) as f32;
                    let expected = (0..world_size).map(value).sum::<f32>();
                    for of_rank in &results {
                        assert!(
                            of_rank[round][index] == expected,
                            "{algorithm} {world_size}"
                        );
                    }
                }
            }
        }
    }
}

/// A collective that does not travel through slots.
fn over_links(rank: usize, engine: &Engine, kind: usize) -> Result<(), Error> {
    let mut values = contribution(rank, if kind == 0 { 20_000 } else { 10 });
    let collective = match kind {
        0 => SUM,
        1 => Collective::Broadcast { root: 0 },
        _ => Collective::Reduce {
            op: ReduceOp::Sum,
            root: 0,
        },
    };
    engine.run(request(&mut values, collective), &mut || false)
}

#[test]
fn ranks_in_slots_and_over_links_notice_that_they_differ() {
    let world_size = 3;
    for (kind, other) in (0..3).flat_map(|kind| (0..world_size).map(move |rank| (kind, rank))) {
        let started = std::time::Instant::now();
        let body = move |rank, engine: &Engine| {
            engine.run(Request::barrier(), &mut || false).unwrap();
            match rank == other {
                true => over_links(rank, engine, kind),
                false => {
                    let mut values = contribution(rank, 10);
                    engine.run(request(&mut values, SUM), &mut || false)
                }
            }
        };
        for (rank, result) in group_with_slots("auto", world_size, PATIENT, body)
            .into_iter()
            .enumerate()
        {
            // A rank that only sends may have ended before.
            if rank == other && result.is_ok() {
                continue;
            }
            let kind_of = result.unwrap_err().kind;
            assert!(
                matches!(kind_of, ErrorKind::Mismatch { .. }),
                "{kind} {other} {rank} {kind_of:?}"
            );
        }
        assert!(started.elapsed() < PATIENT / 10, "{kind} {other}");
    }
}

#[test]
fn ranks_that_differ_are_told_although_one_before_them_is_missing() {
    let others_have_failed = Arc::new(Barrier::new(3));
    let body = move |rank, engine: &Engine| {
        if rank == 0 {
            others_have_failed.wait();
        }
        let mut values = contribution(rank, 10 + rank);
        let result = engine.run(request(&mut values, SUM), &mut || false);
        if rank > 0 {
            others_have_failed.wait();
        }
        result
    };
    for result in group_with_slots("auto", 3, PATIENT, body).drain(1..) {
        let kind = result.unwrap_err().kind;
        assert!(matches!(kind, ErrorKind::Mismatch { .. }), "{kind:?}");
    }
}

/// A transport on which a peer publishes a message and leaves while this rank looks at its link.
struct LeavingPeer {
    inner: Mesh,
    peer: Option<Mesh>,
    message: Vec<u8>,
}

impl Transport for LeavingPeer {
    fn try_send(&mut self, peer: usize, parts: &[IoSlice<'_>]) -> Result<Option<usize>, Broken> {
        self.inner.try_send(peer, parts)
    }

    fn try_receive(
        &mut self,
        peer: usize,
        parts: &mut [IoSliceMut<'_>],
    ) -> Result<Option<usize>, Broken> {
        self.inner.try_receive(peer, parts)
    }

    fn readable(&mut self, _peer: usize) -> Result<Option<&[u8]>, Broken> {
        if let Some(mut peer) = self.peer.take() {
            let header = self.inner.slots().unwrap().header_of(0);
            let slots = peer.slots().unwrap();
            let parts = [(0, &*self.message)].into_iter();
            slots.begin(&header, self.message.len(), parts);
            slots.publish();
        }
        Err(Broken::closed())
    }

    fn slots(&mut self) -> Option<&mut Slots> {
        self.inner.slots()
    }

    fn wait(&mut self, interests: &[Interest], timeout: Duration) {
        self.inner.wait(interests, timeout);
    }

    fn waker(&self) -> Box<dyn Fn() + Send + Sync> {
        self.inner.waker()
    }
}

#[test]
fn a_peer_that_leaves_after_it_has_published_is_no_loss() {
    let mut meshes = meshes_with_slots(2);
    let transport = LeavingPeer {
        inner: meshes.next().unwrap(),
        peer: meshes.next(),
        message: Vec::new(),
    };
    let (engine, _) = engine_with_slots(transport, (PATIENT, PATIENT));
    assert_eq!(engine.run(Request::barrier(), &mut || false), Ok(()));
}

#[test]
fn a_peer_whose_array_lies_in_no_heap_is_blamed_before_anything_is_read() {
    let count = 100_000;
    for offset in [u64::MAX, 2, 1 << 62] {
        let mut meshes = meshes_with_slots(2);
        let transport = LeavingPeer {
            inner: meshes.next().unwrap(),
            peer: meshes.next(),
            message: offset.to_ne_bytes().to_vec(),
        };
        let block = transport.inner.heap().unwrap().allocate(4 * count).unwrap();
        let (engine, _) = engine_with_slots(transport, (PATIENT, PATIENT));
        engine.set_policy(Policy {
            has_heaps: true,
            ..engine.policy()
        });
        // SAFETY: the block outlives the call, and nothing else refers to it.
        let buffer =
            unsafe { Buffer::contiguous(DType::F32, block.start().as_ptr().cast(), count) };
        let request = Request {
            collective: SUM,
            buffer,
            name: "x".into(),
            shapes: "[]".into(),
        };
        let kind = engine.run(request, &mut || false).unwrap_err().kind;
        assert!(
            matches!(kind, ErrorKind::Protocol(Breach::Garbled { .. })),
            "{offset} {kind:?}"
        );
    }
}

/// Rank 0 of two that have slots.
fn engine_with_slots(
    transport: impl Transport + 'static,
    stall: (Duration, Duration),
) -> (Engine, Arc<Recording>) {
    let (engine, supervisor) = one_of_two(0, transport, stall, SpinPolicy::default());
    use_slots(&engine);
    (engine, supervisor)
}

#[test]
fn who_waits_in_slots_is_warned_of_ranks_that_have_not_entered() {
    for collective in [SUM, Collective::AllGather { counts: vec![3, 3] }] {
        let mut meshes = meshes_with_slots(2);
        let (own, _peer) = (meshes.next().unwrap(), meshes.next());
        let (engine, supervisor) = engine_with_slots(own, (PATIENT / 100, PATIENT / 400));
        let mut values = contribution(0, 6);
        let result = engine.run(request(&mut values, collective), &mut || false);
        assert!(result.is_err(), "rank 1 never comes");
        let warnings = supervisor.warnings.lock().unwrap();
        assert!(!warnings.is_empty());
        let is_right = |(late, entered, _): &(Vec<usize>, bool, u64)| *late == [1] && !entered;
        assert!(warnings.iter().all(is_right), "{warnings:?}");
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_by_those_who_wait_in_slots() {
    let timeout = Duration::from_millis(300);
    let body = |rank, engine: &Engine| {
        let mut values = contribution(rank, 10);
        match rank {
            1 => {
                thread::sleep(Duration::from_millis(900));
                Ok(())
            }
            _ => engine.run(request(&mut values, SUM), &mut || false),
        }
    };
    let results = group_with_slots("auto", 3, timeout, body);
    for rank in [0, 2] {
        let error = results[rank].clone().unwrap_err();
        let blamed = error.blamed.as_ref().map(|blamed| blamed.rank);
        assert_eq!(blamed, Some(1), "{error}");
    }
}

#[test]
fn all_reduce_sums_wherever_the_ranks_are() {
    for hosts in ["aabb", "abab", "aab", "abbaccc"] {
        for count in [1, 7, 1000] {
            assert_sums(&Topology::by_host(hosts.chars()), count);
        }
    }
}

#[test]
fn reduce_scatter_all_gather_broadcast_and_barrier_do_what_they_say() {
    let (world_size, count) = (3, 10);
    let results = group(world_size, 64, PATIENT, move |rank, engine| {
        let run = |values: &mut Vec<f32>, collective| {
            engine
                .run(request(values, collective), &mut || false)
                .unwrap();
        };
        let mut scattered = contribution(rank, count);
        run(
            &mut scattered,
            Collective::ReduceScatter {
                op: ReduceOp::Max,
                counts: vec![4, 3, 3],
            },
        );
        let own = schedule::chunk(count, world_size, rank);

        let counts = vec![1, 0, 4];
        let start: usize = counts[..rank].iter().sum();
        let mut gathered = vec![-1.0; 5];
        gathered[start..start + counts[rank]].fill(rank as f32);
        run(&mut gathered, Collective::AllGather { counts });

        let mut copied = contribution(rank, count);
        run(&mut copied, Collective::Broadcast { root: 1 });
        // Chunk c of the first half is for rank c; the second half begins equal to the first.
        let mut exchanged: Vec<f32> = (0..6).map(|index| (10 * rank + index % 3) as f32).collect();
        run(&mut exchanged, Collective::AllToAll);
        assert_eq!(
            exchanged[3..],
            [0., 10., 20.].map(|sent| sent + rank as f32)
        );
        // Rank 1 has an element for itself and one for rank 2, rank 2 has two for rank 0.
        let sent = [[0, 0, 0], [0, 1, 1], [2, 0, 0]];
        let received = [[0, 0, 2], [0, 1, 0], [0, 1, 0]];
        let start = sent[rank].iter().sum::<usize>();
        let mut divided = vec![rank as f32; start + received[rank].iter().sum::<usize>()];
        let collective = parts(&sent[rank], &received[rank]);
        let mut exchange = request(&mut divided, collective);
        exchange.shapes = "[]".into();
        engine.run(exchange, &mut || false).unwrap();
        let expected = [vec![2.0; 2], vec![1.0], vec![1.0]];
        assert_eq!(divided[start..], expected[rank]);
        engine.run(Request::barrier(), &mut || false).unwrap();
        (
            scattered[own.clone()] == contribution(2, count)[own],
            gathered,
            copied,
        )
    });
    for (scattered, gathered, copied) in results {
        assert!(scattered);
        assert_eq!(gathered, [0., 2., 2., 2., 2.]);
        assert_eq!(copied, contribution(1, count));
    }
}

#[test]
fn reduce_gather_and_scatter_have_a_root_that_has_or_gets_everything() {
    let (world_size, count, root) = (3, 10, 1);
    let expected: Vec<f32> = (0..count).map(|index| (index * 48 + 3) as f32).collect();
    let results = group(world_size, 64, PATIENT, move |rank, engine| {
        let run = |values: &mut Vec<f32>, collective| {
            let mut request = request(values, collective);
            // The root's buffer may be larger than those of the others.
            request.shapes = "[2]".into();
            engine.run(request, &mut || false).unwrap();
        };
        let mut reduced = contribution(rank, count);
        let op = ReduceOp::Sum;
        run(&mut reduced, Collective::Reduce { op, root });

        let all = || (0..6).map(|index| index as f32).collect::<Vec<_>>();
        let own = 2 * rank..2 * rank + 2;
        let chunk = 2;
        let mut gathered = all()[own.clone()].to_vec();
        if rank == root {
            gathered = vec![-1.0; 6];
            gathered[own.clone()].copy_from_slice(&all()[own.clone()]);
        }
        run(&mut gathered, Collective::Gather { root, chunk });

        let mut scattered = if rank == root { all() } else { vec![-1.0; 2] };
        run(&mut scattered, Collective::Scatter { root, chunk });
        let part = if rank == root { own.clone() } else { 0..2 };
        assert_eq!(scattered[part], all()[own]);
        (reduced, gathered)
    });
    assert_eq!(results[root].0, expected);
    assert_eq!(results[root].1, [0., 1., 2., 3., 4., 5.]);
    assert_eq!(results[0].1, [0., 1.]);
}

#[test]
fn asynchronous_works_run_in_launch_order_behind_and_before_blocking_calls() {
    let results = group(2, 1000, PATIENT, |rank, engine| {
        let mut values: Vec<Vec<f32>> = (0..20).map(|index| vec![index as f32; 50]).collect();
        let works: Vec<_> = values
            .iter_mut()
            .map(|values| engine.start(request(values, SUM)).unwrap())
            .collect();
        let mut last = vec![rank as f32; 3];
        engine.run(request(&mut last, SUM), &mut || false).unwrap();
        assert!(works.iter().all(gradring_core::work::Work::done));
        (values, last)
    });
    for (values, last) in results {
        assert_eq!(last, [1.0; 3]);
        for (index, values) in values.into_iter().enumerate() {
            assert_eq!(values, [2.0 * index as f32; 50]);
        }
    }
}

#[test]
fn different_calls_are_a_mismatch_on_every_rank_before_a_wrong_value_is_written() {
    let results = group(3, 1000, PATIENT, |rank, engine| {
        let mut values = vec![1.0; if rank == 1 { 7 } else { 6 }];
        let error = engine
            .run(request(&mut values, SUM), &mut || false)
            .unwrap_err();
        (error, values)
    });
    for (rank, (error, values)) in results.into_iter().enumerate() {
        assert!(matches!(error.kind, ErrorKind::Mismatch { .. }), "{error}");
        assert!(error.collective.is_some() && error.sequence == Some(1));
        // Rank 0 receives from rank 2, whose call is equal, so it may have begun to add, rightly.
        let right: &[f32] = if rank == 0 { &[1.0, 2.0] } else { &[1.0] };
        assert!(values.iter().all(|value| right.contains(value)));
    }
}

fn parts(sent: &[usize], received: &[usize]) -> Collective {
    Collective::AllToAllV {
        sent: sent.to_vec(),
        received: received.to_vec(),
    }
}

#[test]
fn a_rank_that_sends_other_parts_than_it_has_told_is_named_before_anything_is_written() {
    let results = group(2, 1000, PATIENT, |rank, engine| {
        let mut values = vec![rank as f32; 4];
        let call = match rank {
            0 => parts(&[0, 2], &[0, 2]),
            // Rank 0 expects two elements from this rank.
            _ => parts(&[1, 0], &[2, 1]),
        };
        let divided = engine.run(request(&mut values, call), &mut || false);
        // Rank 1 may have finished its part.
        let ended = divided.and_then(|()| engine.run(Request::barrier(), &mut || false));
        (ended.unwrap_err(), values)
    });
    assert_eq!(results[0].1, [0.0; 4]);
    for (error, _) in results {
        // The supervisor of these tests reports every difference between headers this way.
        assert!(matches!(error.kind, ErrorKind::Mismatch { .. }), "{error}");
        assert_eq!(error.blamed.unwrap().rank, 1);
    }
}

#[test]
fn a_call_that_makes_no_sense_is_refused_before_anything_is_sent() {
    let kinds = group(2, 1000, PATIENT, |_, engine| {
        let mut values = vec![1.0; 6];
        let wrong = [
            Collective::Broadcast { root: 2 },
            Collective::AllGather { counts: vec![3, 4] },
            Collective::AllGather { counts: vec![6] },
            Collective::AllToAll,
            parts(&[3, 0], &[2, 2]),
            parts(&[3, 1], &[2]),
            parts(&[usize::MAX, 2], &[3, 2]),
            Collective::Reduce {
                op: ReduceOp::Sum,
                root: 2,
            },
            Collective::Gather { root: 2, chunk: 6 },
            // Six elements would be right for the root with chunks of three, and for others of six.
            Collective::Gather { root: 0, chunk: 2 },
            Collective::Scatter { root: 1, chunk: 5 },
        ];
        let kinds = wrong.map(|collective| {
            let request = request(&mut values, collective);
            engine.run(request, &mut || false).unwrap_err().kind
        });
        engine
            .run(request(&mut values, SUM), &mut || false)
            .unwrap();
        kinds
    });
    for kind in kinds.into_iter().flatten() {
        assert!(matches!(kind, ErrorKind::Config { .. }), "{kind:?}");
    }
}

#[test]
fn an_absent_rank_is_a_timeout_that_names_it_and_poisons_later_calls() {
    let failed = Barrier::new(2);
    let results = group(2, 1000, Duration::from_millis(300), move |rank, engine| {
        if rank == 1 {
            failed.wait();
        }
        let mut values = vec![1.0; 6];
        let first = engine
            .run(request(&mut values, SUM), &mut || false)
            .unwrap_err();
        if rank == 0 {
            failed.wait();
        }
        let second = engine.start(request(&mut values, SUM)).unwrap_err();
        (first, second)
    });
    for (first, second) in results {
        for error in [first, second] {
            assert!(
                matches!(error.kind, ErrorKind::CollectiveTimeout { .. }),
                "{error}"
            );
            assert_eq!(error.blamed.unwrap().rank, 1);
        }
    }
}

#[test]
fn closing_fails_what_is_under_way_and_a_wait_can_time_out() {
    group(2, 1000, PATIENT, |rank, engine| {
        if rank == 1 {
            return;
        }
        let mut values = vec![1.0; 6];
        let work = engine.start(request(&mut values, SUM)).unwrap();
        let outcome = work.wait(Some(Duration::from_millis(1)), &mut || false);
        // Rank 1 may be gone by now, which ends the work as well.
        assert!(matches!(
            outcome,
            WaitOutcome::TimedOut(_) | WaitOutcome::Ended(Err(_))
        ));
        engine.close();
        assert!(work.wait_forever().is_err());
        assert!(engine.start(request(&mut values, SUM)).is_err());
    });
}

#[test]
fn closing_ends_a_blocking_call_of_another_thread_and_returns() {
    let mut ends = memory::mesh(2, 1000); // rank 1's stays open, and never sends
    let (engine, _) = alone(ends.remove(0), PATIENT, PATIENT);
    let engine = Arc::new(engine);
    let (entered, waits) = mpsc::channel();
    let blocked = thread::spawn({
        let engine = Arc::clone(&engine);
        move || {
            engine.run(request(&mut [1.0; 6], SUM), &mut || {
                entered.send(()).unwrap();
                // Leaves the other thread time to close the engine.
                thread::sleep(Duration::from_millis(200));
                false
            })
        }
    });
    waits.recv().unwrap();
    let (closed, has_closed) = mpsc::channel();
    thread::spawn(move || {
        engine.close();
        closed.send(()).unwrap();
    });
    assert_eq!(has_closed.recv_timeout(PATIENT), Ok(()));
    assert!(blocked.join().unwrap().is_err());
}

/// Error of a blocking call during which a signal handler of the program uses the same engine.
///
/// The call drives its collective itself, or waits for the progress thread if `behind` another one.
fn from_a_handler(behind: bool, handler: impl Fn(&Engine)) -> Error {
    let mut ends = memory::mesh(2, 1000); // rank 1's stays open, and never sends
    let (engine, _) = alone(ends.remove(0), PATIENT, PATIENT);
    let mut before = [1.0; 6];
    let _before = behind.then(|| engine.start(request(&mut before, SUM)).unwrap());
    let mut handled = false;
    let result = engine.run(request(&mut [1.0; 6], SUM), &mut || {
        if !std::mem::replace(&mut handled, true) {
            handler(&engine);
        }
        false
    });
    engine.close();
    result.unwrap_err()
}

#[test]
fn a_handler_may_close_the_engine_in_whose_call_it_runs() {
    for behind in [false, true] {
        let error = from_a_handler(behind, |engine| {
            let close = thread::scope(|scope| scope.spawn(|| engine.close()).join());
            close.unwrap();
            engine.close();
            let _ = engine.stats();
        });
        assert!(matches!(error.kind, ErrorKind::Aborted { .. }), "{error}");
        assert!(error.to_string().contains("was closed while"), "{error}");
    }
}

#[test]
fn a_handler_that_calls_a_collective_learns_at_once_that_it_cannot() {
    for behind in [false, true] {
        from_a_handler(behind, |engine| {
            let mut values = [1.0; 6];
            let errors = [
                engine.run(Request::barrier(), &mut || false).unwrap_err(),
                engine.start(request(&mut values, SUM)).unwrap_err(),
            ];
            for error in errors {
                assert!(matches!(error.kind, ErrorKind::Misuse { .. }), "{error}");
                assert!(error.to_string().contains("while all_reduce(sum) 'x'"));
            }
            engine.close();
        });
    }
}

#[test]
fn threads_that_mix_their_collectives_fail_the_group_and_hear_of_both_calls() {
    for asynchronous in [false, true] {
        let mut ends = memory::mesh(2, 1000);
        let (engine, _) = alone(ends.remove(0), PATIENT, PATIENT);
        let (inside, waits) = mpsc::channel();
        let (first, second) = thread::scope(|scope| {
            let engine = &engine;
            let first = scope.spawn(move || {
                engine.run(request(&mut [1.0; 6], SUM), &mut || {
                    inside.send(()).unwrap();
                    false
                })
            });
            waits.recv().unwrap();
            let second = match asynchronous {
                true => engine.start(Request::barrier()).map(drop),
                false => engine.run(Request::barrier(), &mut || false),
            };
            (first.join().unwrap(), second)
        });
        for error in [first, second].map(Result::unwrap_err) {
            assert!(matches!(error.kind, ErrorKind::Misuse { .. }), "{error}");
            assert_eq!(error.blamed.as_ref().map(|blamed| blamed.rank), Some(0));
            let text = error.to_string();
            assert!(
                text.contains(
                    "one thread called barrier while another one was inside all_reduce(sum) 'x'"
                ),
                "{text}"
            );
        }
    }
}

#[test]
fn works_may_be_launched_and_waited_for_by_different_threads() {
    let results = group(2, 1000, PATIENT, |rank, engine| {
        let mut values = vec![vec![rank as f32; 6]; 3];
        for values in &mut values {
            let work = thread::scope(|scope| {
                let launch = scope.spawn(|| engine.start(request(values, SUM)).unwrap());
                launch.join().unwrap()
            });
            thread::scope(|scope| scope.spawn(|| work.wait_forever()).join().unwrap()).unwrap();
        }
        engine.run(Request::barrier(), &mut || false).unwrap();
        values
    });
    for values in results.into_iter().flatten() {
        assert_eq!(values, [1.0; 6]);
    }
}

#[test]
fn waits_that_drive_keep_the_launch_order_from_whichever_threads() {
    let results = group(2, 1000, PATIENT, |_, engine| {
        let mut values: Vec<Vec<f32>> = (0..60).map(|index| vec![index as f32; 50]).collect();
        let works: Vec<_> = values
            .iter_mut()
            .map(|values| engine.start(request(values, SUM)).unwrap())
            .collect();
        thread::scope(|scope| {
            for part in works.chunks(20) {
                scope.spawn(|| {
                    for work in part.iter().rev() {
                        let outcome = engine.wait(work, &mut || false);
                        assert_eq!(outcome, WaitOutcome::Ended(Ok(())));
                    }
                });
            }
        });
        values
    });
    for values in results {
        for (index, values) in values.into_iter().enumerate() {
            assert_eq!(values, [2.0 * index as f32; 50]);
        }
    }
}

#[test]
fn a_wait_that_drives_returns_before_what_was_launched_later_is_over() {
    let waited = Barrier::new(2);
    group(2, 1000, PATIENT, move |rank, engine| {
        for _ in 0..20 {
            let (mut first, mut second) = (vec![1.0; 6], vec![1.0; 6]);
            let first = engine.start(request(&mut first, SUM)).unwrap();
            // Rank 1 launches the second one after rank 0 has returned from its wait for the first.
            if rank == 1 {
                waited.wait();
            }
            let second = engine.start(request(&mut second, SUM)).unwrap();
            let over = WaitOutcome::Ended(Ok(()));
            assert_eq!(engine.wait(&first, &mut || false), over);
            if rank == 0 {
                waited.wait();
            }
            assert_eq!(engine.wait(&second, &mut || false), over);
        }
    });
}

#[test]
fn an_interrupt_ends_a_blocking_call() {
    let interrupted = Barrier::new(2);
    let results = group(2, 1000, PATIENT, move |rank, engine| {
        let mut values = vec![1.0; 6];
        if rank == 1 {
            interrupted.wait();
        }
        let result = engine.run(request(&mut values, SUM), &mut || rank == 0);
        if rank == 0 {
            interrupted.wait();
        }
        result.unwrap_err().kind
    });
    for kind in results {
        assert!(matches!(kind, ErrorKind::Aborted { .. }), "{kind:?}");
    }
}

#[test]
fn an_interrupt_ends_a_wait_whoever_drives() {
    let interrupted = Barrier::new(2);
    group(2, 1000, PATIENT, move |rank, engine| {
        let mut values = vec![1.0; 6];
        if rank == 0 {
            let work = engine.start(request(&mut values, SUM)).unwrap();
            if engine.wait(&work, &mut || true) == WaitOutcome::Interrupted {
                engine.interrupt();
            }
            let kind = work.wait_forever().unwrap_err().kind;
            assert!(matches!(kind, ErrorKind::Aborted { .. }), "{kind:?}");
        }
        interrupted.wait();
    });
}

#[test]
fn what_had_arrived_when_the_group_failed_ends_a_collective_well() {
    let (waits, ended) = (Barrier::new(2), Barrier::new(2));
    let results = group(2, 1000, PATIENT, move |rank, engine| {
        let mut values = contribution(rank, 6);
        let first = if rank == 0 {
            engine.run(request(&mut values, SUM), &mut || {
                waits.wait();
                ended.wait();
                true
            })
        } else {
            waits.wait();
            let first = engine.run(request(&mut values, SUM), &mut || false);
            ended.wait();
            first
        };
        let mut more = [1.0; 6];
        let second = engine.run(request(&mut more, SUM), &mut || false);
        (first, values, second)
    });
    for (first, values, second) in results {
        assert_eq!(first, Ok(()));
        assert_eq!(values, [1.0, 33.0, 65.0, 97.0, 129.0, 161.0]);
        assert!(second.is_err());
    }
}

/// A transport that panics whenever something is sent.
struct Defective;

impl Transport for Defective {
    fn try_send(&mut self, _peer: usize, _parts: &[IoSlice<'_>]) -> Result<Option<usize>, Broken> {
        panic!("a defect of the transport");
    }

    fn try_receive(
        &mut self,
        _peer: usize,
        _parts: &mut [IoSliceMut<'_>],
    ) -> Result<Option<usize>, Broken> {
        Ok(None)
    }

    fn wait(&mut self, _interests: &[Interest], _timeout: Duration) {}

    fn waker(&self) -> Box<dyn Fn() + Send + Sync> {
        Box::new(|| {})
    }
}

/// Rank 0 of two, with its supervisor.
fn alone(
    transport: impl Transport + 'static,
    stall_timeout: Duration,
    stall_warning: Duration,
) -> (Engine, Arc<Recording>) {
    let stall = (stall_timeout, stall_warning);
    one_of_two(0, transport, stall, SpinPolicy::default())
}

/// One rank of two, with its supervisor.
fn one_of_two(
    rank: usize,
    transport: impl Transport + 'static,
    (stall_timeout, stall_warning): (Duration, Duration),
    spin_policy: SpinPolicy,
) -> (Engine, Arc<Recording>) {
    let switch: Arc<AbortSwitch> = Arc::default();
    let supervisor = Arc::new(Recording {
        switches: vec![Arc::clone(&switch)],
        first: OnceLock::new(),
        warnings: Mutex::default(),
    });
    let engine = Engine::new(Parts {
        rank,
        policy: Policy::new(Topology::one_host(2)),
        transport: Box::new(transport),
        supervisor: Arc::clone(&supervisor) as _,
        abort: switch,
        recorder: Arc::default(),
        stall_timeout,
        stall_warning,
        spin_policy,
    });
    (engine.unwrap(), supervisor)
}

#[test]
fn a_panic_fails_the_works_and_all_later_ones_but_not_the_process() {
    for blocking in [true, false] {
        let (engine, _) = alone(Defective, PATIENT, PATIENT);
        let mut values = vec![1.0; 6];
        let mut launch = |asynchronous: bool| match asynchronous {
            false => engine.run(request(&mut values, SUM), &mut || false),
            true => engine
                .start(request(&mut values, SUM))
                .and_then(|work| work.wait_forever()),
        };
        for error in [launch(!blocking), launch(true), launch(false)].map(Result::unwrap_err) {
            assert!(matches!(error.kind, ErrorKind::Protocol { .. }), "{error}");
            assert_eq!(error.blamed.as_ref().map(|blamed| blamed.rank), Some(0));
            assert!(error.to_string().contains("a defect of the transport"));
            // The error names the collective and the time, both if the call failed and if it was
            // refused.
            assert!(error.collective.is_some() && error.sequence.is_some());
            assert!(error.elapsed.is_some(), "{error}");
        }
        engine.close();
    }
}

#[test]
fn a_stall_is_warned_of_at_doubled_intervals_before_it_fails() {
    let mut mesh = memory::mesh(2, 1000).into_iter();
    let (transport, _absent) = (mesh.next().unwrap(), mesh.next());
    let warning_after = Duration::from_millis(40);
    let (engine, supervisor) = alone(transport, Duration::from_secs(2), warning_after);
    let mut values = vec![1.0; 6];
    let result = engine.run(request(&mut values, SUM), &mut || false);
    assert!(matches!(
        result.unwrap_err().kind,
        ErrorKind::CollectiveTimeout { .. }
    ));
    // Warnings come after 40, 80, ... 1280 ms; a rank that polls late warns once for all that are
    // due.
    let warnings = supervisor.warnings.lock().unwrap();
    assert!((2..=6).contains(&warnings.len()), "{warnings:?}");
    assert!(
        warnings
            .iter()
            .all(|warning| *warning == (vec![1], false, 1))
    );
}

/// Links that report when their rank sleeps.
struct WatchedTransport {
    inner: Mesh,
    sleeps: mpsc::Sender<()>,
    /// `true` if the peer seems to share this rank's core.
    is_crowded: bool,
}

impl Transport for WatchedTransport {
    fn try_send(&mut self, peer: usize, parts: &[IoSlice<'_>]) -> Result<Option<usize>, Broken> {
        self.inner.try_send(peer, parts)
    }

    fn try_receive(
        &mut self,
        peer: usize,
        parts: &mut [IoSliceMut<'_>],
    ) -> Result<Option<usize>, Broken> {
        self.inner.try_receive(peer, parts)
    }

    fn core_of_peer(&self, _peer: usize) -> Option<usize> {
        self.is_crowded.then(sched_getcpu)
    }

    fn wait(&mut self, interests: &[Interest], timeout: Duration) {
        let _ = self.sleeps.send(());
        self.inner.wait(interests, timeout);
    }

    fn waker(&self) -> Box<dyn Fn() + Send + Sync> {
        self.inner.waker()
    }
}

const LONG: SpinPolicy = SpinPolicy {
    spinning: PATIENT.saturating_mul(2),
    yielding: PATIENT.saturating_mul(2),
    yields_for_slots: 0,
};

#[test]
fn the_progress_thread_sleeps_unless_the_program_waits() {
    let [own, other] = memory::mesh(2, 1000).try_into().ok().unwrap();
    let (sleeps, asleep) = mpsc::channel();
    let own = WatchedTransport {
        inner: own,
        sleeps,
        is_crowded: false,
    };
    let (own, _) = one_of_two(0, own, (PATIENT, PATIENT), LONG);
    let (other, _) = one_of_two(1, other, (PATIENT, PATIENT), SpinPolicy::default());
    let mut values = vec![1.0; 10_000];
    let work = own.start(request(&mut values, SUM)).unwrap();
    asleep.recv_timeout(PATIENT).unwrap();
    let (asks, asked) = mpsc::channel();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            own.wait(&work, &mut || {
                let _ = asks.send(());
                false
            })
        });
        asked.recv_timeout(PATIENT).unwrap();
        let _ = asleep.try_iter().count();
        // Now bytes arrive a few at a time, since pipes hold no more.
        let mut theirs = vec![1.0; 10_000];
        other.run(request(&mut theirs, SUM), &mut || false).unwrap();
        assert_eq!(waiting.join().unwrap(), WaitOutcome::Ended(Ok(())));
    });
    assert_eq!(asleep.try_iter().count(), 0);
    assert_eq!(values, vec![2.0; 10_000]);
}

#[test]
fn a_rank_that_shares_a_core_with_the_peer_it_waits_for_sleeps_instead_of_spinning() {
    let [own, other] = memory::mesh(2, 1000).try_into().ok().unwrap();
    let (sleeps, asleep) = mpsc::channel();
    let own = WatchedTransport {
        inner: own,
        sleeps,
        is_crowded: true,
    };
    let policy = SpinPolicy {
        spinning: Duration::from_micros(20),
        yielding: PATIENT,
        ..SpinPolicy::default()
    };
    let (own, _) = one_of_two(0, own, (PATIENT, PATIENT), policy);
    let (other, _) = one_of_two(1, other, (PATIENT, PATIENT), SpinPolicy::default());
    let sum = |engine: &Engine| {
        let mut values = vec![1.0; 6];
        engine
            .run(request(&mut values, SUM), &mut || false)
            .map(|()| values)
    };
    thread::scope(|scope| {
        let first = scope.spawn(|| {
            // Leaves the thread no idle core to which it could move.
            let mut only = CpuSet::new();
            only.set(sched_getcpu());
            sched_setaffinity(None, &only).unwrap();
            sum(&own)
        });
        asleep.recv_timeout(PATIENT).unwrap();
        assert_eq!(sum(&other).unwrap(), [2.0; 6]);
        assert_eq!(first.join().unwrap().unwrap(), [2.0; 6]);
    });
}

/// Links that lead to rank 2 instead of rank 1, and to rank 1 instead of rank 2.
struct Crossed(Mesh);

impl Crossed {
    fn reached(peer: usize) -> usize {
        [0, 2, 1][peer]
    }
}

impl Transport for Crossed {
    fn try_send(&mut self, peer: usize, parts: &[IoSlice<'_>]) -> Result<Option<usize>, Broken> {
        self.0.try_send(Self::reached(peer), parts)
    }

    fn try_receive(
        &mut self,
        peer: usize,
        parts: &mut [IoSliceMut<'_>],
    ) -> Result<Option<usize>, Broken> {
        self.0.try_receive(Self::reached(peer), parts)
    }

    fn wait(&mut self, interests: &[Interest], timeout: Duration) {
        let interests = interests.iter().map(|interest| Interest {
            peer: Self::reached(interest.peer),
            ..*interest
        });
        self.0.wait(&interests.collect::<Vec<_>>(), timeout);
    }

    fn waker(&self) -> Box<dyn Fn() + Send + Sync> {
        self.0.waker()
    }
}

#[test]
fn what_was_sent_to_another_rank_is_not_used() {
    for algorithm in ["direct", "one_shot"] {
        let mut mesh = memory::mesh(3, 1 << 16).into_iter();
        let crossed = Box::new(Crossed(mesh.next().unwrap())) as Box<dyn Transport>;
        let links = std::iter::once(crossed).chain(mesh.map(|link| Box::new(link) as _));
        let topology = Topology::one_host(3);
        let results = group_over(
            links.collect(),
            algorithm,
            &topology,
            PATIENT,
            |rank, engine| {
                let mut values = vec![rank as f32; 6];
                let error = engine
                    .run(request(&mut values, SUM), &mut || false)
                    .unwrap_err();
                (error, values == vec![rank as f32; 6])
            },
        );
        for (error, untouched) in results {
            assert!(matches!(error.kind, ErrorKind::Protocol { .. }), "{error}");
            assert!(error.to_string().contains("sent to rank"), "{error}");
            assert!(untouched, "{algorithm}");
        }
    }
}

/// A link that turns one bit of the bytes that arrive, and counts these bytes.
struct Turning {
    inner: MemoryLink,
    bit: Option<usize>,
    arrived: Arc<AtomicUsize>,
}

impl Link for Turning {
    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> Result<Option<usize>, Broken> {
        self.inner.try_send(parts)
    }

    fn try_receive(&mut self, parts: &mut [IoSliceMut<'_>]) -> Result<Option<usize>, Broken> {
        let Some(part) = parts.iter_mut().find(|part| !part.is_empty()) else {
            return Ok(None);
        };
        let received = self.inner.try_receive(&mut [IoSliceMut::new(part)])?;
        if let Some(count) = received {
            let before = self.arrived.fetch_add(count, Ordering::Relaxed);
            if let Some(bit) = self.bit
                && (before..before + count).contains(&(bit / 8))
            {
                part[bit / 8 - before] ^= 1 << (bit % 8);
            }
        }
        Ok(received)
    }

    fn may_sleep(&mut self, direction: Direction) -> bool {
        self.inner.may_sleep(direction)
    }

    fn awaited<'a>(&'a self, direction: Direction, awaited: &mut Vec<PollFd<'a>>) {
        self.inner.awaited(direction, awaited);
    }
}

/// Runs an all-reduce with one bit turned on the way from rank 0 to rank 1. Returns the result of
/// every rank, and the number of bytes that went that way.
fn turned(
    bit: Option<usize>,
    checked: bool,
    algorithm: &str,
    world_size: usize,
) -> (Vec<Result<Vec<f32>, Error>>, usize) {
    let arrived = Arc::<AtomicUsize>::default();
    let links = memory::mesh_of(world_size, 1000, |rank, peer, inner| {
        let struck = (rank, peer) == (1, 0);
        let turning = Turning {
            inner,
            bit: bit.filter(|_| struck),
            arrived: if struck {
                Arc::clone(&arrived)
            } else {
                Arc::default()
            },
        };
        framing::over(vec![Box::new(turning)], checked)
    });
    let links = links.into_iter().map(|mesh| Box::new(mesh) as _);
    let topology = Topology::one_host(world_size);
    // No rank leaves while others still need its links: this supervisor grants no grace.
    let ended = Barrier::new(world_size);
    let body = move |rank, engine: &Engine| {
        let mut values = contribution(rank, 5);
        let result = engine.run(request(&mut values, SUM), &mut || false);
        ended.wait();
        result.map(|()| values)
    };
    let outcomes = group_over(links.collect(), algorithm, &topology, PATIENT, body);
    (outcomes, arrived.load(Ordering::Relaxed))
}

#[test]
fn any_turned_bit_of_a_collective_is_an_error_and_never_a_wrong_sum() {
    for (algorithm, world_size) in [("one_shot", 2), ("direct", 2), ("ring", 3)] {
        let (right, bytes) = turned(None, true, algorithm, world_size);
        let right = right.into_iter().map(Result::unwrap).collect::<Vec<_>>();
        for bit in 0..8 * bytes {
            let (outcomes, arrived) = turned(Some(bit), true, algorithm, world_size);
            for (outcome, right) in outcomes.iter().zip(&right) {
                match outcome {
                    Ok(values) => assert_eq!(values, right, "{algorithm}, bit {bit}"),
                    Err(error) => {
                        assert!(matches!(error.kind, ErrorKind::Corrupted { .. }), "{error}");
                        assert_eq!(error.blamed.as_ref().map(|blamed| blamed.rank), Some(0));
                        assert_eq!(error.sequence, Some(1));
                    }
                }
            }
            // The cut of the bytes into segments, and so their number, depends on timing.
            let seen = outcomes[1].is_err();
            assert_eq!(seen, bit / 8 < arrived, "{algorithm}, bit {bit}");
        }
        // Without checksums, the same links do harm.
        let (wrong, bytes) = turned(None, false, algorithm, world_size);
        assert!(wrong.iter().all(Result::is_ok));
        let (outcomes, _) = turned(Some(8 * bytes - 3), false, algorithm, world_size);
        let silently = outcomes.into_iter().zip(&right);
        let silently = silently.filter(|(found, right)| found.as_ref().is_ok_and(|f| f != *right));
        assert!(silently.count() > 0, "{algorithm}");
    }
}
