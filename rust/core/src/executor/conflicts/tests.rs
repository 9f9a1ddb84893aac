use std::collections::BTreeSet;

use super::*;
use gradring_proto::collective::Collective;
use gradring_proto::dtype::ReduceOp;
use gradring_proto::schedule::topology::Topology;
use gradring_proto::schedule::{self, Algorithm, Step};

/// Elements and accesses of a schedule's operations, in order.
fn operations(rank: usize, steps: Vec<Step>) -> Vec<(Range<usize>, Access)> {
    let of_step = |step: Step| {
        let send = step.send.map(|send| (send.range, Access::SEND));
        let receive = step.receive.map(|receive| {
            let access = Access::receive(rank, receive.peer, receive.action);
            (receive.range, access)
        });
        send.into_iter().chain(receive)
    };
    let operations = steps.into_iter().flat_map(of_step);
    operations.filter(|(range, _)| !range.is_empty()).collect()
}

fn conflicts_of(operations: &[(Range<usize>, Access)]) -> Vec<Vec<Conflict>> {
    let (mut history, mut all) = (History::default(), Vec::new());
    let add = |(number, (range, access)): (usize, &(Range<usize>, Access))| {
        history.add(number, range, *access, &mut all)
    };
    let places: Vec<_> = operations.iter().enumerate().map(add).collect();
    places
        .into_iter()
        .map(|place| all[place].to_vec())
        .collect()
}

/// Operations that precede `number` on `element`, directly or through others.
fn before(conflicts: &[Vec<Conflict>], number: usize, element: usize) -> BTreeSet<usize> {
    let (mut found, mut to_visit) = (BTreeSet::new(), vec![number]);
    while let Some(number) = to_visit.pop() {
        for (earlier, range) in &conflicts[number] {
            if range.contains(&element) && found.insert(*earlier) {
                to_visit.push(*earlier);
            }
        }
    }
    found
}

/// The schedules of every algorithm for small groups, on one host and on several.
fn schedules() -> Vec<Vec<(Range<usize>, Access)>> {
    let op = ReduceOp::Sum;
    let mut all = Vec::new();
    for world_size in [2, 3, 5, 8] {
        let two_hosts = (0..world_size).map(|rank| rank * 2 / world_size);
        for topology in [Topology::one_host(world_size), Topology::by_host(two_hosts)] {
            let count = 3 * world_size + 1;
            let mut counts = vec![3; world_size];
            counts[0] = 4;
            let collectives = [
                Collective::AllReduce { op },
                Collective::ReduceScatter {
                    op,
                    counts: counts.clone(),
                },
                Collective::AllGather { counts },
                Collective::Broadcast { root: 1 },
                Collective::AllToAll,
                Collective::AllToAllV {
                    sent: vec![1; world_size],
                    received: vec![2; world_size],
                },
                Collective::Reduce { op, root: 1 },
                Collective::Gather { root: 1, chunk: 3 },
                Collective::Scatter { root: 1, chunk: 3 },
            ];
            for (algorithm, collective) in Algorithm::ALL
                .iter()
                .flat_map(|a| collectives.iter().map(move |c| (*a, c)))
                .filter(|(algorithm, collective)| algorithm.performs(collective, &topology))
            {
                for rank in 0..world_size {
                    let steps = schedule::build(algorithm, collective, rank, &topology, count, 7);
                    all.push(operations(rank, steps));
                }
            }
        }
    }
    all
}

#[test]
fn what_is_kept_implies_every_conflict_and_nothing_else() {
    for operations in schedules() {
        let conflicts = conflicts_of(&operations);
        for (number, (range, access)) in operations.iter().enumerate() {
            for element in range.clone() {
                let before = before(&conflicts, number, element);
                for (earlier, (touched, other)) in operations[..number].iter().enumerate() {
                    if touched.contains(&element) && other.conflicts(*access) {
                        assert!(before.contains(&earlier), "{earlier} before {number}");
                    }
                }
            }
            for (earlier, common) in &conflicts[number] {
                let (touched, other) = &operations[*earlier];
                assert!(*earlier < number && other.conflicts(*access));
                let inside = |of: &Range<usize>| of.start <= common.start && common.end <= of.end;
                assert!(!common.is_empty() && inside(range) && inside(touched));
            }
        }
    }
}
