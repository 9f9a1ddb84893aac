//! Proof by symbolic execution: runs the schedules of all ranks on sets of contributions.
//!
//! Every element is the set of ranks whose contributions it holds. Transfers happen as in the
//! strictest network, one without any buffering. Sender and receiver must both have reached a
//! transfer, and must have done all earlier operations on the same elements. Transfers on one link
//! keep their order. The order of several possible transfers cannot change their contents. So if
//! this run ends, every order of delivery ends with the same result; more buffering only enables
//! more.

use std::collections::HashMap;
use std::ops::Range;

use super::choice::Policy;
use super::topology::Topology;
use super::{Access, Action, Algorithm, Contents, Part, Schedule, Turn, build};
use crate::collective::Collective;
use crate::dtype::ReduceOp;

/// A bit for each rank.
type Ranks = u128;

/// State of an element: its contributions, as a set of ranks, and whether it is final.
/// Contributions may also be `folded` beside it, always those of the lowest ranks, or be set
/// `aside`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Element {
    contributions: Ranks,
    is_final: bool,
    folded: Ranks,
    aside: Ranks,
    /// Its index in the buffer of the rank that contributed it.
    place: usize,
}

struct Operation {
    range: Range<usize>,
    peer: usize,
    action: Option<Action>,
    contents: Contents,
    access: Access,
    step: usize,
}

impl Operation {
    fn is_send(&self) -> bool {
        self.action.is_none()
    }
}

/// Runs `schedules` from the state `initial(rank, element)`; returns every rank's elements.
fn run(
    schedules: &[Schedule],
    count: usize,
    initial: impl Fn(usize, usize) -> Element,
) -> Result<Vec<Vec<Element>>, String> {
    let mut state: Vec<Vec<Element>> = (0..schedules.len())
        .map(|rank| (0..count).map(|index| initial(rank, index)).collect())
        .collect();
    // Remaining operations.
    let mut operations: Vec<Vec<Operation>> = (0..).zip(schedules).map(flatten).collect();
    let all = Ranks::MAX >> (Ranks::BITS as usize - schedules.len());
    loop {
        let mut progressed = false;
        for sender in 0..schedules.len() {
            let mut index = 0;
            while index < operations[sender].len() {
                let Some((receiver, other)) = ready(&operations, sender, index) else {
                    index += 1;
                    continue;
                };
                let (send, receive) = (&operations[sender][index], &operations[receiver][other]);
                let contents = send.contents;
                if send.range.len() != receive.range.len() || contents != receive.contents {
                    return Err(format!("rank {sender} and rank {receiver} do not pair up"));
                }
                let mut sent = state[sender][send.range.clone()].to_vec();
                if contents == Contents::Contribution
                    && sent
                        .iter()
                        .any(|element| element.contributions != 1 << sender)
                {
                    return Err("something else was sent as a contribution".into());
                }
                if sender == receiver && contents == Contents::Partial {
                    for (source, target) in
                        sent.iter_mut().zip(&mut state[sender][send.range.clone()])
                    {
                        source.contributions = std::mem::take(&mut target.aside);
                    }
                }
                for element in &mut sent {
                    (element.folded, element.aside) = (0, 0);
                }
                let action = receive.action.expect("a receive has an action");
                for (target, source) in state[receiver][receive.range.clone()].iter_mut().zip(sent)
                {
                    apply(action, all, target, source)?;
                }
                operations[receiver].remove(other);
                if sender != receiver {
                    operations[sender].remove(index);
                }
                progressed = true;
            }
        }
        if operations.iter().all(Vec::is_empty) {
            return Ok(state);
        }
        if !progressed {
            return Err("deadlock".into());
        }
    }
}

fn flatten((rank, schedule): (usize, &Schedule)) -> Vec<Operation> {
    let mut operations = Vec::new();
    for (step, exchange) in schedule.iter().enumerate() {
        if let (Some(send), Some(receive)) = (&exchange.send, &exchange.receive) {
            assert!(
                !overlap(&send.range, &receive.range),
                "step conflicts with itself"
            );
        }
        operations.extend(exchange.send.iter().map(|send| Operation {
            range: send.range.clone(),
            peer: send.peer,
            action: None,
            contents: send.contents,
            access: Access::SEND,
            step,
        }));
        operations.extend(exchange.receive.iter().map(|receive| Operation {
            range: receive.range.clone(),
            peer: receive.peer,
            action: Some(receive.action),
            contents: receive.action.contents(),
            access: Access::receive(rank, receive.peer, receive.action),
            step,
        }));
    }
    operations
}

/// The receive that send `index` of `sender` can meet now, if both sides are ready for it.
fn ready(operations: &[Vec<Operation>], sender: usize, index: usize) -> Option<(usize, usize)> {
    let send = &operations[sender][index];
    if !startable(&operations[sender], index) {
        return None;
    }
    if send.peer == sender {
        return Some((sender, index));
    }
    if !send.is_send() {
        return None;
    }
    let receiver = send.peer;
    let other = operations[receiver]
        .iter()
        .position(|op| !op.is_send() && op.peer == sender)?;
    startable(&operations[receiver], other).then_some((receiver, other))
}

/// Returns whether an operation is first on its link, and free of earlier conflicts.
fn startable(operations: &[Operation], index: usize) -> bool {
    let operation = &operations[index];
    operations[..index].iter().all(|earlier| {
        earlier.step == operation.step
            || !((earlier.is_send() == operation.is_send() && earlier.peer == operation.peer)
                || (overlap(&earlier.range, &operation.range)
                    && earlier.access.conflicts(operation.access)))
    })
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start.max(b.start) < a.end.min(b.end)
}

fn apply(action: Action, all: Ranks, target: &mut Element, source: Element) -> Result<(), String> {
    if action != Action::Copy && source.place != target.place {
        return Err("elements of different places were combined".into());
    }
    match action {
        Action::Copy if source.is_final => *target = source,
        Action::Copy => return Err("a partial result was copied as final".into()),
        Action::Fold(turn) => {
            let next = target.folded.trailing_ones();
            if source.contributions != 1 << next || (turn == Turn::First) != (next == 0) {
                return Err("contributions were folded in another order than that of ranks".into());
            }
            target.folded |= source.contributions;
            if turn == Turn::Last {
                if target.folded != all {
                    return Err("an incomplete result was finished".into());
                }
                *target = Element {
                    contributions: all,
                    is_final: true,
                    folded: 0,
                    ..*target
                };
            }
        }
        Action::SetAside if source.is_final || source.contributions == 0 || target.aside != 0 => {
            return Err("something else was set aside than partial results".into());
        }
        Action::SetAside => target.aside = source.contributions,
        Action::Reduce | Action::ReduceAndFinish => {
            if source.is_final || target.is_final {
                return Err("a final value was reduced again".into());
            }
            if source.contributions & target.contributions != 0 {
                return Err("a contribution was counted twice".into());
            }
            target.contributions |= source.contributions;
            if action == Action::ReduceAndFinish {
                if target.contributions != all {
                    return Err("an incomplete result was finished".into());
                }
                target.is_final = true;
            }
        }
    }
    Ok(())
}

fn schedules(
    algorithm: Algorithm,
    collective: &Collective,
    topology: &Topology,
    count: usize,
) -> Vec<Schedule> {
    (0..topology.world_size())
        .map(|rank| build(algorithm, collective, rank, topology, count, BLOCK))
        .collect()
}

/// The schedules of every algorithm that performs `collective`.
fn each_algorithm(
    collective: &Collective,
    topology: &Topology,
    count: usize,
) -> impl Iterator<Item = Vec<Schedule>> {
    Algorithm::ALL
        .into_iter()
        .filter(|algorithm| algorithm.performs(collective, topology))
        .map(move |algorithm| schedules(algorithm, collective, topology, count))
}

fn own_contribution(rank: usize, place: usize) -> Element {
    Element {
        contributions: 1 << rank,
        is_final: false,
        folded: 0,
        aside: 0,
        place,
    }
}

fn final_values_of_its_own(rank: usize, place: usize) -> Element {
    Element {
        is_final: true,
        ..own_contribution(rank, place)
    }
}

/// World sizes to prove: with `EVERY_WORLD_SIZE` set, as in `make test-all`, all up to 64.
/// Otherwise these are all small ones, and among the larger ones neighbours of a power of two and
/// some with divisors.
fn world_sizes() -> impl Iterator<Item = usize> {
    (2..=64).filter(|&world_size| is_proved(world_size))
}

fn is_proved(world_size: usize) -> bool {
    let every = std::env::var_os("EVERY_WORLD_SIZE").is_some();
    every || world_size <= 17 || [23, 24, 31, 32, 33, 63, 64].contains(&world_size)
}

/// World sizes, each with counts below, at and above it.
fn cases() -> impl Iterator<Item = (usize, usize)> {
    world_sizes().flat_map(|n| [0, 1, n - 1, n, n + 1, 2 * n + 1].map(|count| (n, count)))
}

/// Topologies with these numbers of ranks per host: ranks of a host in a row, and in turn with
/// others.
fn in_a_row_and_interleaved(sizes: &[usize]) -> [Topology; 2] {
    let hosts = || 0..sizes.len();
    let largest = *sizes.iter().max().unwrap();
    let in_a_row = hosts().flat_map(|host| vec![host; sizes[host]]);
    let interleaved = (0..largest).flat_map(|turn| hosts().filter(move |&h| turn < sizes[h]));
    [Topology::by_host(in_a_row), Topology::by_host(interleaved)]
}

/// One host, and three hosts that take ranks in turn.
fn groups(world_size: usize) -> [Topology; 2] {
    let in_turn = Topology::by_host((0..world_size).map(|rank| rank % 3));
    [Topology::one_host(world_size), in_turn]
}

/// Groups of up to 64 ranks on several hosts, with equal and with different numbers of ranks.
fn groups_on_hosts() -> impl Iterator<Item = Topology> {
    let even = (2..=32).flat_map(|hosts| (1..=64 / hosts).map(move |size| vec![size; hosts]));
    let even = even.filter(|sizes| is_proved(sizes.iter().sum()));
    let uneven = (2..=10).flat_map(|hosts| {
        let sizes = [
            (0..hosts).map(|host| host % 3 + 1).collect(),
            (0..hosts).map(|host| 1 + 5 * host % 7).collect(),
            (0..hosts).map(|host| hosts - host).collect(),
            (0..hosts)
                .map(|host| if host == 1 { 8 } else { 1 })
                .collect(),
        ];
        sizes
            .into_iter()
            .filter(|sizes: &Vec<usize>| sizes.iter().sum::<usize>() <= 64)
    });
    even.chain(uneven)
        .flat_map(|sizes| in_a_row_and_interleaved(&sizes))
        .chain(groups_in_racks())
}

/// Groups on hosts with equal and with different numbers of ranks, in racks with equal and with
/// different numbers of hosts. Hosts of a rack are in a row, or in turn with others.
fn groups_in_racks() -> impl Iterator<Item = Topology> {
    let shapes = [
        vec![1; 4],
        vec![1; 9],
        vec![2; 6],
        vec![3; 8],
        vec![3, 1, 2, 2, 5],
        vec![1, 1, 8, 1, 1, 1, 2],
        vec![4; 6],
    ];
    shapes.into_iter().flat_map(|sizes| {
        let hosts = sizes.len();
        let racks = move |host| {
            [
                host / 2,
                host % 2,
                host % 3,
                usize::from(host > 0),
                host * host % 5,
            ]
        };
        let groups = in_a_row_and_interleaved(&sizes);
        (0..5).flat_map(move |way| {
            groups.clone().map(|topology| {
                let mut rack_of = HashMap::new();
                for (host, ranks) in topology.hosts().iter().enumerate() {
                    rack_of.insert(ranks[0], racks(host % hosts)[way].to_string());
                }
                topology.in_racks(|rank| rack_of[&rank].clone())
            })
        })
    })
}

/// Small enough for several blocks if there are more elements than ranks.
const BLOCK: usize = 20;
const OP: ReduceOp = ReduceOp::Sum;

fn prove_all_reduce(schedules: &[Schedule], topology: &Topology, count: usize) {
    for elements in reduced(schedules, topology, count) {
        assert!(is_complete(topology, &elements));
    }
}

fn prove_reduce(schedules: &[Schedule], topology: &Topology, count: usize, root: usize) {
    let end = reduced(schedules, topology, count);
    assert!(is_complete(topology, &end[root]), "{topology:?} {root}");
}

/// Final elements of each rank.
fn reduced(schedules: &[Schedule], topology: &Topology, count: usize) -> Vec<Vec<Element>> {
    run(schedules, count, own_contribution)
        .unwrap_or_else(|why| panic!("{topology:?} count={count}: {why}"))
}

fn is_complete(topology: &Topology, elements: &[Element]) -> bool {
    let complete = |place| Element {
        contributions: Ranks::MAX >> (Ranks::BITS as usize - topology.world_size()),
        is_final: true,
        folded: 0,
        aside: 0,
        place,
    };
    let expected = (0..elements.len()).map(complete);
    elements.iter().copied().eq(expected)
}

/// Some roots: the first, the last, and one between them.
fn roots(world_size: usize) -> [usize; 3] {
    [0, world_size / 2, world_size - 1]
}

/// The algorithms whose schedules differ from those on one host.
fn where_ranks_are_matters(topology: &Topology) -> impl Iterator<Item = Algorithm> {
    let reordered = !topology.hosts().concat().is_sorted();
    let ring = reordered.then_some(Algorithm::Ring);
    let hierarchical = topology.has_levels().then_some(Algorithm::Hierarchical);
    ring.into_iter().chain(hierarchical)
}

#[test]
fn an_algorithm_has_schedules_for_what_it_performs_and_no_more() {
    let two = [Topology::one_host(2), Topology::one_host(3)];
    for topology in two.into_iter().chain(groups_in_racks()) {
        let size = topology.world_size();
        let collectives = [
            Collective::AllReduce { op: OP },
            Collective::Reduce { op: OP, root: 1 },
            Collective::ReduceScatter {
                op: OP,
                counts: vec![2; size],
            },
            Collective::AllGather {
                counts: vec![2; size],
            },
            Collective::Broadcast { root: 1 },
            Collective::AllToAll,
            Collective::AllToAllV {
                sent: vec![1; size],
                received: vec![1; size],
            },
            Collective::Gather { root: 1, chunk: 2 },
            Collective::Scatter { root: 1, chunk: 2 },
        ];
        let part = Part {
            rank: 0,
            topology: &topology,
            count: 2 * size,
            block: BLOCK,
        };
        for algorithm in Algorithm::ALL {
            for collective in &collectives {
                let built = algorithm.builder()(collective, &part);
                let performs = algorithm.performs(collective, &topology);
                assert_eq!(built.is_some(), performs, "{algorithm:?} {collective:?}");
            }
        }
    }
}

#[test]
fn all_reduce_gives_every_rank_every_contribution_exactly_once() {
    for (world_size, count) in cases() {
        let topology = Topology::one_host(world_size);
        for schedules in each_algorithm(&Collective::AllReduce { op: OP }, &topology, count) {
            prove_all_reduce(&schedules, &topology, count);
        }
    }
}

#[test]
fn all_reduce_does_so_wherever_the_ranks_are() {
    for topology in groups_on_hosts() {
        for count in [1, 2 * topology.world_size() + 1] {
            for algorithm in where_ranks_are_matters(&topology) {
                let all_reduce = Collective::AllReduce { op: OP };
                let schedules = schedules(algorithm, &all_reduce, &topology, count);
                prove_all_reduce(&schedules, &topology, count);
            }
        }
    }
}

#[test]
fn reduce_gives_the_root_every_contribution_exactly_once() {
    for (world_size, count) in cases() {
        let topology = Topology::one_host(world_size);
        let root = (world_size + 3 * count) % world_size;
        let reduce = Collective::Reduce { op: OP, root };
        for schedules in each_algorithm(&reduce, &topology, count) {
            prove_reduce(&schedules, &topology, count, root);
        }
    }
}

#[test]
fn reduce_does_so_wherever_the_ranks_are() {
    for topology in groups_on_hosts() {
        let count = 2 * topology.world_size() + 1;
        for algorithm in where_ranks_are_matters(&topology) {
            let root = 5 % topology.world_size();
            let reduce = Collective::Reduce { op: OP, root };
            let schedules = schedules(algorithm, &reduce, &topology, count);
            prove_reduce(&schedules, &topology, count, root);
        }
    }
}

#[test]
fn reduce_folds_at_the_root_as_all_reduce_does() {
    // Each algorithm combines in the same steps, so the order of every sum is the same.
    let folds = |schedule: &Schedule| -> Vec<_> {
        let receives = schedule.iter().filter_map(|step| step.receive.clone());
        receives
            .filter(|receive| receive.action != Action::Copy)
            .collect()
    };
    for topology in groups_on_hosts().chain(world_sizes().map(Topology::one_host)) {
        let count = 2 * topology.world_size() + 1;
        for algorithm in [Algorithm::Ring, Algorithm::Direct, Algorithm::Hierarchical] {
            let (all_reduce, root) = (Collective::AllReduce { op: OP }, 1);
            let reduce = Collective::Reduce { op: OP, root };
            if algorithm.performs(&reduce, &topology) {
                let all = schedules(algorithm, &all_reduce, &topology, count);
                let rooted = schedules(algorithm, &reduce, &topology, count);
                assert!(all.iter().map(folds).eq(rooted.iter().map(folds)));
            }
        }
    }
}

#[test]
fn reduce_sends_every_contribution_once_and_every_result_once() {
    for topology in world_sizes().skip(1).map(Topology::one_host) {
        let world_size = topology.world_size();
        let count = world_size * 8;
        let reduce = Collective::Reduce { op: OP, root: 0 };
        let schedules = schedules(Algorithm::Direct, &reduce, &topology, count);
        for (rank, schedule) in schedules.iter().enumerate() {
            let sends = schedule.iter().filter_map(|step| step.send.as_ref());
            let sent: usize = sends.map(|send| send.range.len()).sum();
            assert!(if rank == 0 {
                sent < count
            } else {
                sent == count
            });
        }
    }
}

#[test]
fn reduce_scatter_gives_every_rank_its_own_chunk_even_of_uneven_lengths() {
    for world_size in world_sizes() {
        let counts: Vec<usize> = (0..world_size).map(|rank| rank * 7 % 4).collect();
        let (chunks, count) = (super::chunks_of(&counts), counts.iter().sum());
        let collective = Collective::ReduceScatter { op: OP, counts };
        for topology in &groups(world_size) {
            for schedules in each_algorithm(&collective, topology, count) {
                let end = run(&schedules, count, own_contribution).unwrap();
                for (elements, chunk) in end.iter().zip(&chunks) {
                    assert!(
                        elements[chunk.clone()]
                            .iter()
                            .all(|element| element.is_final)
                    );
                }
            }
        }
    }
}

#[test]
fn all_gather_gives_every_rank_every_chunk_even_of_uneven_lengths() {
    for world_size in world_sizes() {
        let counts: Vec<usize> = (0..world_size).map(|rank| rank * 7 % 4).collect();
        let owner: HashMap<usize, usize> = super::chunks_of(&counts)
            .into_iter()
            .enumerate()
            .flat_map(|(rank, chunk)| chunk.map(move |index| (index, rank)))
            .collect();
        let count = counts.iter().sum();
        let all_gather = Collective::AllGather { counts };
        for topology in &groups(world_size) {
            for schedules in each_algorithm(&all_gather, topology, count) {
                let end = run(&schedules, count, final_values_of_its_own).unwrap();
                for elements in end {
                    for (index, element) in elements.into_iter().enumerate() {
                        assert_eq!(element, final_values_of_its_own(owner[&index], index));
                    }
                }
            }
        }
    }
}

#[test]
fn broadcast_gives_every_rank_the_roots_contents() {
    for world_size in world_sizes() {
        for (root, topology) in roots(world_size)
            .into_iter()
            .flat_map(|root| groups(world_size).map(|topology| (root, topology)))
        {
            let collective = Collective::Broadcast { root };
            let schedules = schedules(Algorithm::Ring, &collective, &topology, 3);
            let end = run(&schedules, 3, final_values_of_its_own).unwrap();
            for elements in end {
                let expected = (0..3).map(|place| final_values_of_its_own(root, place));
                assert!(elements.into_iter().eq(expected));
            }
        }
    }
}

/// Proves a gather or a scatter of chunks between `root` and the others, of one chunk per rank.
/// `expected` has the origin of each final element: a rank, and the index there.
fn prove_chunks(
    collective: &Collective,
    topology: &Topology,
    (root, chunk): (usize, usize),
    expected: impl Fn(usize, usize) -> (usize, usize),
) {
    let count = chunk * topology.world_size();
    let schedules = schedules(Algorithm::Direct, collective, topology, count);
    let end = run(&schedules, count, final_values_of_its_own).unwrap();
    for (rank, elements) in end.into_iter().enumerate() {
        let own = if rank == root { count } else { chunk };
        let steps = schedules[rank].iter();
        let ends = steps.flat_map(|step| {
            let (send, receive) = (step.send.as_ref(), step.receive.as_ref());
            let ranges = [send.map(|it| it.range.end), receive.map(|it| it.range.end)];
            ranges.into_iter().flatten()
        });
        assert!(ends.into_iter().all(|end| end <= own));
        for (place, element) in elements.into_iter().take(own).enumerate() {
            let (source, there) = expected(rank, place);
            assert_eq!(element, final_values_of_its_own(source, there));
        }
    }
}

#[test]
fn gather_and_scatter_move_each_chunk_between_the_root_and_its_rank() {
    for (world_size, chunk) in world_sizes().flat_map(|n| [0, 1, 3].map(|chunk| (n, chunk))) {
        for root in roots(world_size) {
            for topology in &groups(world_size) {
                let gather = Collective::Gather { root, chunk };
                prove_chunks(&gather, topology, (root, chunk), |rank, place| {
                    match place / chunk {
                        source if rank == root && source != root => (source, place % chunk),
                        _ => (rank, place),
                    }
                });
                let scatter = Collective::Scatter { root, chunk };
                prove_chunks(&scatter, topology, (root, chunk), |rank, place| {
                    match rank == root {
                        true => (root, place),
                        false => (root, rank * chunk + place),
                    }
                });
            }
        }
    }
}

#[test]
fn send_gives_the_second_of_two_ranks_what_the_first_one_has() {
    let topology = Topology::one_host(2);
    for count in [0, 1, 5] {
        let part = |rank, call| build(Algorithm::Direct, &call, rank, &topology, count, count);
        let schedules = [
            part(0, Collective::Send { to: 7 }),
            part(1, Collective::Receive { from: 3 }),
        ];
        let end = run(&schedules, count, final_values_of_its_own).unwrap();
        for elements in end {
            let sent = (0..count).map(|place| final_values_of_its_own(0, place));
            assert!(elements.into_iter().eq(sent));
        }
    }
}

#[test]
fn all_to_all_gives_every_rank_the_chunk_that_each_has_for_it() {
    for world_size in world_sizes() {
        for chunk in 0..3 {
            let half = chunk * world_size;
            for topology in &groups(world_size) {
                for schedules in each_algorithm(&Collective::AllToAll, topology, 2 * half) {
                    let end = run(&schedules, 2 * half, final_values_of_its_own).unwrap();
                    for (rank, elements) in end.into_iter().enumerate() {
                        let sent = (0..half).map(|place| (rank, place));
                        let received = (0..half).map(|place| match place / chunk {
                            source if source == rank => (rank, half + place),
                            source => (source, rank * chunk + place % chunk),
                        });
                        let expected = sent.chain(received);
                        let expected =
                            expected.map(|(rank, place)| final_values_of_its_own(rank, place));
                        assert!(
                            elements.into_iter().eq(expected),
                            "{topology:?} chunk={chunk}"
                        );
                    }
                }
            }
        }
    }
}

/// Number of elements that one rank sends to another: none, a few, or, from one rank, most.
fn part(from: usize, to: usize) -> usize {
    match (from, to) {
        (2, 0) => 40,
        _ => (3 * from + 5 * to) % 4,
    }
}

#[test]
fn all_to_all_of_any_parts_gives_every_rank_what_each_has_for_it_and_no_more() {
    for world_size in world_sizes() {
        let ranks = || 0..world_size;
        let sent = |rank| ranks().map(move |to| part(rank, to));
        let received = |rank| ranks().map(move |from| part(from, rank));
        let schedules: Vec<Schedule> = ranks()
            .map(|rank| {
                let collective = Collective::AllToAllV {
                    sent: sent(rank).collect(),
                    received: received(rank).collect(),
                };
                let count = sent(rank).chain(received(rank)).sum();
                let topology = Topology::one_host(world_size);
                build(
                    Algorithm::Direct,
                    &collective,
                    rank,
                    &topology,
                    count,
                    BLOCK,
                )
            })
            .collect();
        for (rank, schedule) in schedules.iter().enumerate() {
            let sends = schedule.iter().filter_map(|step| step.send.as_ref());
            let elements: usize = sends.map(|send| send.range.len()).sum();
            assert_eq!(elements, sent(rank).sum::<usize>() - part(rank, rank));
        }
        let largest = ranks().map(|rank| sent(rank).chain(received(rank)).sum());
        let end = run(&schedules, largest.max().unwrap(), final_values_of_its_own).unwrap();
        for (rank, elements) in end.into_iter().enumerate() {
            let own = sent(rank).sum::<usize>();
            let mut place = own;
            for from in ranks() {
                let before: usize = sent(from).take(rank).sum();
                for offset in 0..part(from, rank) {
                    let expected = match from == rank {
                        true => final_values_of_its_own(rank, place),
                        false => final_values_of_its_own(from, before + offset),
                    };
                    assert_eq!(elements[place], expected, "{world_size}: {from} to {rank}");
                    place += 1;
                }
            }
            let unchanged = (0..own).map(|place| final_values_of_its_own(rank, place));
            assert!(elements.into_iter().take(own).eq(unchanged));
        }
    }
}

#[test]
fn a_ring_enters_each_host_once() {
    for topology in groups_on_hosts() {
        let host = |rank| topology.position(rank).0;
        let all_reduce = Collective::AllReduce { op: OP };
        let schedules = schedules(Algorithm::Ring, &all_reduce, &topology, 64);
        let entries = schedules.iter().enumerate().filter(|(rank, schedule)| {
            let sends = schedule.iter().filter_map(|step| step.send.as_ref());
            sends.into_iter().any(|send| host(send.peer) != host(*rank))
        });
        assert_eq!(entries.count(), topology.hosts().len(), "{topology:?}");
    }
}

#[test]
fn hierarchical_sends_as_little_as_possible_between_hosts() {
    for topology in groups_on_hosts().filter(Topology::has_levels) {
        let (host, hosts) = (|rank| topology.position(rank).0, topology.hosts().len());
        let count = hosts * 64;
        let all_reduce = Collective::AllReduce { op: OP };
        let schedules = schedules(Algorithm::Hierarchical, &all_reduce, &topology, count);
        let mut sent = vec![0; hosts];
        for (rank, schedule) in schedules.iter().enumerate() {
            let sends = schedule.iter().filter_map(|step| step.send.as_ref());
            let leaving = sends.filter(|send| host(send.peer) != host(rank));
            sent[host(rank)] += leaving.map(|send| send.range.len()).sum::<usize>();
        }
        assert_eq!(
            sent.iter().sum::<usize>(),
            2 * count * (hosts - 1),
            "{topology:?}"
        );
    }
}

#[test]
fn hierarchical_sends_as_little_as_possible_between_racks() {
    for topology in groups_in_racks().filter(|topology| !topology.racks().is_empty()) {
        let racks = topology.racks();
        let rack = |rank| {
            let host = topology.position(rank).0;
            racks.iter().position(|hosts| hosts.contains(&host))
        };
        let count = racks.len() * 720;
        let all_reduce = Collective::AllReduce { op: OP };
        let schedules = schedules(Algorithm::Hierarchical, &all_reduce, &topology, count);
        let sent = schedules.iter().enumerate().map(|(rank, schedule)| {
            let sends = schedule.iter().filter_map(|step| step.send.as_ref());
            let leaving = sends.filter(|send| rack(send.peer) != rack(rank));
            leaving.map(|send| send.range.len()).sum::<usize>()
        });
        assert_eq!(
            sent.sum::<usize>(),
            2 * count * (racks.len() - 1),
            "{topology:?}"
        );
    }
}

#[test]
fn many_ranks_reduce_over_the_links_that_they_have() {
    let racks = |ranks: usize, of_host: usize, of_rack: usize| {
        let host = move |rank: usize| rank * 7 % ranks / of_host;
        let topology = Topology::by_host((0..ranks).map(host));
        topology.in_racks(move |rank| (host(rank) / of_rack).to_string())
    };
    for topology in [
        Topology::one_host(65),
        racks(72, 2, 6),
        racks(120, 5, 3),
        racks(128, 8, 4),
        racks(96, 1, 12),
    ] {
        let count = topology.world_size() + 7;
        for algorithm in Algorithm::ALL {
            let all_reduce = Collective::AllReduce { op: OP };
            let connects = Policy::new(topology.clone()).connects(algorithm);
            if !connects || !algorithm.performs(&all_reduce, &topology) {
                continue;
            }
            let schedules: Vec<_> = (0..topology.world_size())
                .map(|rank| build(algorithm, &all_reduce, rank, &topology, count, count))
                .collect();
            for (rank, schedule) in schedules.iter().enumerate() {
                let partners = super::partners(rank, &topology);
                let sends = schedule.iter().filter_map(|step| step.send.as_ref());
                assert!(sends.into_iter().all(|send| partners.contains(&send.peer)));
            }
            prove_all_reduce(&schedules, &topology, count);
        }
    }
}

#[test]
fn chunks_cover_a_buffer_as_array_split_does() {
    assert_eq!(super::even_parts(&(0..7), 3), [0..3, 3..5, 5..7]);
    assert_eq!(super::even_parts(&(5..7), 4), [5..6, 6..7, 7..7, 7..7]);
}

#[test]
fn a_wrong_schedule_is_refused() {
    let all_reduce = Collective::AllReduce { op: OP };
    let topology = Topology::one_host(3);
    let right = schedules(Algorithm::Ring, &all_reduce, &topology, 6);
    let run = |schedules: &[Schedule]| run(schedules, 6, own_contribution).unwrap_err();

    let mut unpaired = right.clone();
    unpaired[1].pop();
    assert_eq!(run(&unpaired), "deadlock");

    let mut shifted = right.clone();
    for schedule in &mut shifted {
        for step in schedule.iter_mut() {
            step.send.as_mut().unwrap().range = 0..2;
            step.receive.as_mut().unwrap().range = 2..4;
        }
    }
    assert_eq!(run(&shifted), "elements of different places were combined");

    let mut hasty = right;
    for schedule in &mut hasty {
        schedule[0].receive.as_mut().unwrap().action = Action::ReduceAndFinish;
    }
    assert_eq!(run(&hasty), "an incomplete result was finished");

    let mut unsorted = schedules(Algorithm::OneShot, &all_reduce, &topology, 6);
    unsorted[0].swap(3, 4);
    assert!(run(&unsorted).contains("in another order"));
}

#[test]
fn what_an_operation_touches_decides_whether_it_may_pass_another() {
    use super::Use::{Nothing, Read, Write};
    let of = |source, action| {
        let access = Access::receive(1, source, action);
        (access.buffer, access.beside)
    };
    let [first, middle, last] = [Turn::First, Turn::Middle, Turn::Last].map(Action::Fold);
    // Access of each action to elements of another rank, and to its own.
    for (action, of_another, of_its_own) in [
        (first, (Nothing, true), (Read, true)),
        (middle, (Nothing, true), (Read, true)),
        (last, (Write, true), (Write, true)),
        (Action::SetAside, (Nothing, true), (Nothing, true)),
        (Action::Reduce, (Write, false), (Write, true)),
        (Action::ReduceAndFinish, (Write, false), (Write, true)),
        (Action::Copy, (Write, false), (Write, false)),
    ] {
        assert_eq!((of(0, action), of(1, action)), (of_another, of_its_own));
    }
    let access = |buffer, beside| Access { buffer, beside };
    for (one, other, conflict) in [
        (access(Write, false), access(Write, false), true),
        (access(Write, false), access(Read, false), true),
        (access(Read, false), access(Read, false), false),
        (access(Write, true), access(Nothing, false), false),
        (access(Nothing, true), access(Nothing, true), true),
        (access(Read, true), access(Read, false), false),
    ] {
        assert_eq!(one.conflicts(other), conflict, "{one:?} {other:?}");
        assert_eq!(other.conflicts(one), conflict, "{other:?} {one:?}");
    }
}

#[test]
fn ranks_of_a_mesh_have_links_with_all_others_and_many_ranks_with_those_that_they_talk_to() {
    let partners = |rank, world_size| super::partners(rank, &Topology::one_host(world_size));
    assert_eq!(partners(1, 4), [0, 2, 3]);
    let mesh: Vec<usize> = (0..63).collect();
    assert_eq!(partners(63, 64), mesh);
    // Neighbours, and the rank at each power of two. The last rank is the guest of the first.
    assert_eq!(partners(0, 65), [1, 2, 4, 8, 16, 32, 64]);
    assert_eq!(partners(5, 65), [1, 4, 6, 7, 13, 21, 37]);
    assert_eq!(partners(64, 65), [0, 63]);
}

#[test]
fn two_ranks_of_one_host_gather_a_block_at_once_and_others_reduce_two_ahead() {
    for (hosts, ahead) in [
        (&[0, 0][..], 0),
        (&[0, 1], 2),
        (&[0, 0, 0], 2),
        (&[0, 1, 2], 2),
    ] {
        let topology = Topology::by_host(hosts.iter().copied());
        assert_eq!(super::blocks_ahead(&topology), ahead);
    }
}

#[test]
fn two_ranks_send_and_receive_in_a_group_of_their_own() {
    for (world_size, is_built) in [(2, true), (3, false)] {
        let topology = Topology::one_host(world_size);
        let part = Part {
            rank: 0,
            topology: &topology,
            count: 4,
            block: 4,
        };
        for collective in [Collective::Send { to: 1 }, Collective::Receive { from: 1 }] {
            let built = super::direct::build(&collective, &part);
            assert_eq!(built.is_some(), is_built);
        }
    }
}

#[test]
fn a_barrier_is_an_all_reduce_of_one_element_that_nobody_reads() {
    let topology = Topology::one_host(5);
    let all_reduce = Collective::AllReduce { op: ReduceOp::Max };
    for algorithm in Algorithm::ALL {
        if algorithm.performs(&Collective::Barrier, &topology) {
            let barrier = schedules(algorithm, &Collective::Barrier, &topology, 0);
            assert_eq!(barrier, schedules(algorithm, &all_reduce, &topology, 1));
        }
    }
}
