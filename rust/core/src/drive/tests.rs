use std::cell::RefCell;
use std::io::IoSlice;
use std::sync::Arc;

use super::*;
use crate::executor::Fault;
use gradring_net::link::mesh::Mesh;
use gradring_net::link::{SlotFile, memory};
use gradring_proto::buffer::Buffer;
use gradring_proto::collective::{Call, Collective, Request};
use gradring_proto::dtype::{DType, ReduceOp};
use gradring_proto::error::{Abort, BadSegment, Breakage, Garbled, Text};
use gradring_proto::schedule::choice::Policy;
use gradring_proto::wire::signature::{self, HEADER_BYTES};

const TIMEOUT: Duration = Duration::from_secs(30);
const LIMITS: Limits = Limits {
    timeout: TIMEOUT,
    stall_warning: TIMEOUT,
};

/// A supervisor that raises the switch on request, and finds no causes.
#[derive(Default)]
struct Clueless {
    abort: AbortSwitch,
    suspicions: RefCell<Vec<Suspicion>>,
    /// Durations of stalls at which it warned.
    warnings: RefCell<Vec<Duration>>,
}

impl Supervisor for Clueless {
    fn investigate(&self, suspicion: Suspicion) {
        self.suspicions.borrow_mut().push(suspicion);
    }

    fn abort(&self, cause: Error) {
        self.abort.raise(cause);
    }

    fn warn(&self, stall: &Stall<'_>) {
        self.warnings.borrow_mut().push(stall.idle);
    }
}

/// Steps until a drive is done or blocked. Returns whether anything moved, and whether it is done.
fn go_on(drive: &mut Drive<'_>, links: &mut dyn Transport, now: Instant) -> (bool, bool) {
    let mut moved = false;
    loop {
        match drive.step(links, || now) {
            Step::Moved => moved = true,
            Step::Blocked => return (moved, false),
            Step::Done => return (true, true),
            Step::Failed(cause) => panic!("{cause}"),
        }
    }
}

/// An all-reduce of 1000 bytes between two ranks.
fn all_reduce() -> (Launched, Buffer) {
    launched(0, Collective::AllReduce { op: ReduceOp::Sum }, "x")
}

fn launched(rank: usize, collective: Collective, name: &str) -> (Launched, Buffer) {
    let request = Request {
        collective,
        buffer: Buffer::zeroed(DType::F64, 125),
        name: name.into(),
        shapes: String::new(),
    };
    let (call, buffer) = request.into_parts();
    let policy = Policy::new(Topology::one_host(2));
    (
        Prepared::new(Arc::new(call), rank, &policy)
            .unwrap()
            .launch(0, 1, 0),
        buffer,
    )
}

fn context<'a>(
    rank: usize,
    topology: &'a Topology,
    supervisor: &'a Clueless,
    waits: &'a WaitRecord,
) -> Context<'a> {
    Context {
        rank,
        topology,
        limits: LIMITS,
        abort: &supervisor.abort,
        supervisor,
        waits,
    }
}

#[test]
fn a_collective_that_moves_is_no_stall_however_long_it_takes() {
    let topology = Topology::one_host(2);
    let supervisors = [Clueless::default(), Clueless::default()];
    let waits = [WaitRecord::default(), WaitRecord::default()];
    let started = Instant::now();
    let mut memories = [Memory::default(), Memory::default()];
    let calls = [all_reduce().0, all_reduce().0];
    let mut operands: Vec<_> = memories
        .iter_mut()
        .zip(&calls)
        .map(|(memory, call)| memory.operand(all_reduce().1, call).unwrap())
        .collect();
    let mut drives: Vec<_> = operands
        .iter_mut()
        .enumerate()
        .map(|(rank, operand)| {
            let context = context(rank, &topology, &supervisors[rank], &waits[rank]);
            Drive::new(context, &calls[rank], operand, started).unwrap()
        })
        .collect();
    let mut links: Vec<_> = memory::mesh(2, 100).into_iter().collect();
    let (mut now, mut done) = (started, [false; 2]);
    while done != [true; 2] {
        for rank in 0..2 {
            if !done[rank] {
                (_, done[rank]) = go_on(&mut drives[rank], &mut links[rank], now);
            }
            if !done[rank] {
                drives[rank].poll(now, &mut links[rank]);
            }
        }
        now += TIMEOUT / 2;
    }
    assert!(now - started > 4 * TIMEOUT, "{:?}", now - started);
    assert!(supervisors.iter().all(|s| s.suspicions.borrow().is_empty()));
}

#[test]
fn a_stall_is_suspected_once_and_ends_with_its_cause_or_without_one() {
    let topology = Topology::one_host(2);
    for explained in [true, false] {
        let (supervisor, waits) = (Clueless::default(), WaitRecord::default());
        let mut memory = Memory::default();
        let (call, buffer) = all_reduce();
        let mut operand = memory.operand(buffer, &call).unwrap();
        let started = Instant::now();
        let context = context(0, &topology, &supervisor, &waits);
        let mut drive = Drive::new(context, &call, &mut operand, started).unwrap();
        let mut links = memory::mesh(2, 100).into_iter();
        let (mut link, _absent) = (links.next().unwrap(), links.next());
        while matches!(drive.step(&mut link, || started), Step::Moved) {}
        let peers: Vec<_> = drive.interests().iter().map(|it| it.peer).collect();
        assert_eq!(peers, [1, 1]);
        drive.poll(started, &mut link);
        assert!(waits.now().is_none());
        let early = started + TIMEOUT - Duration::from_millis(1);
        assert_eq!(drive.poll(early, &mut link), Duration::from_millis(1));
        assert!(supervisor.suspicions.borrow().is_empty());
        assert_eq!(waits.now().unwrap().awaited, [1]);
        drive.poll(started + TIMEOUT, &mut link);
        drive.poll(started + TIMEOUT, &mut link);
        assert_eq!(supervisor.suspicions.borrow().len(), 1);
        assert!(matches!(drive.step(&mut link, || started), Step::Blocked));
        assert!(drive.interests().is_empty());
        match explained {
            true => supervisor.abort(Error::aborted("the cause")),
            false => drop(drive.poll(started + TIMEOUT + INVESTIGATION_LIMIT, &mut link)),
        }
        let Step::Failed(cause) = drive.step(&mut link, || started) else {
            panic!("the switch is raised");
        };
        let expected = match explained {
            true => "the cause",
            false => {
                "the cause of this: collective #1, waiting for rank 1, did not move for 30.0 s"
            }
        };
        assert!(cause.to_string().contains(expected), "{cause}");
        drop(drive);
        assert!(waits.now().is_none());
    }
}

#[test]
fn people_are_warned_when_twice_as_long_has_gone_by_and_not_when_somebody_is_suspected() {
    let (topology, supervisor) = (Topology::one_host(2), Clueless::default());
    let waits = WaitRecord::default();
    let mut memory = Memory::default();
    let (call, buffer) = all_reduce();
    let mut operand = memory.operand(buffer, &call).unwrap();
    let mut link = memory::mesh(2, 100).remove(0);
    let started = Instant::now();
    let mut context = context(0, &topology, &supervisor, &waits);
    context.limits.stall_warning = TIMEOUT / 4;
    let mut drive = Drive::new(context, &call, &mut operand, started).unwrap();
    let seconds = [7.0, 7.5, 8.0, 16.0, 17.0, 30.0].map(Duration::from_secs_f64);
    for idle in seconds {
        drive.poll(started + idle, &mut link);
    }
    assert_eq!(*supervisor.warnings.borrow(), [seconds[1], seconds[3]]);
    assert_eq!(supervisor.suspicions.borrow().len(), 1);
}

#[test]
fn a_stall_counts_from_when_somebody_has_moved_in_an_earlier_collective() {
    let (topology, supervisor) = (Topology::one_host(2), Clueless::default());
    let waits = WaitRecord::default();
    let mut memory = Memory::default();
    let (call, buffer) = all_reduce();
    let mut operand = memory.operand(buffer, &call).unwrap();
    let mut link = memory::mesh(2, 100).remove(0);
    let started = Instant::now();
    let context = context(0, &topology, &supervisor, &waits);
    let mut drive = Drive::new(context, &call, &mut operand, started).unwrap();
    waits.note_earlier_move(started + TIMEOUT / 3);
    drive.poll(started + TIMEOUT, &mut link);
    assert!(supervisor.suspicions.borrow().is_empty());
    drive.poll(started + TIMEOUT + TIMEOUT / 3, &mut link);
    assert_eq!(supervisor.suspicions.borrow().len(), 1);
}

#[test]
fn what_is_no_header_or_went_another_way_is_garbled() {
    let (topology, waits) = (Topology::one_host(2), WaitRecord::default());
    let (call, _) = all_reduce();
    let other_way = signature::with_endpoints(call.header, 1, 5);
    for (sent, expected) in [
        ([0; HEADER_BYTES], Garbled::NotAHeader),
        (
            other_way,
            Garbled::OtherWay {
                rank: 0,
                from: 1,
                to: 5,
            },
        ),
    ] {
        let supervisor = Clueless::default();
        assert_eq!(supervisor.in_group(3), 3);
        let mut memory = Memory::default();
        let mut operand = memory.operand(all_reduce().1, &call).unwrap();
        let now = Instant::now();
        let context = context(0, &topology, &supervisor, &waits);
        let mut drive = Drive::new(context, &call, &mut operand, now).unwrap();
        let mut links: Vec<_> = memory::mesh(2, 100).into_iter().collect();
        let sends = links[1].try_send(0, &[IoSlice::new(&sent)]);
        assert!(matches!(sends, Ok(Some(HEADER_BYTES))));
        go_on(&mut drive, &mut links[0], now);
        let suspicion = supervisor.suspicions.borrow_mut().pop();
        match suspicion {
            Some(Suspicion::Garbled { peer: 1, how }) => assert_eq!(how, expected),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_link_that_changes_bytes_is_told_from_one_that_ends() {
    let (topology, supervisor) = (Topology::one_host(2), Clueless::default());
    let (waits, mut memory) = (WaitRecord::default(), Memory::default());
    let (call, buffer) = all_reduce();
    let mut operand = memory.operand(buffer, &call).unwrap();
    let context = context(0, &topology, &supervisor, &waits);
    let drive = Drive::new(context, &call, &mut operand, Instant::now()).unwrap();
    let (sequence, problem) = (3, BadSegment::Announcement);
    for (how, is_corrupted) in [
        (Breakage::Closed, false),
        (Breakage::Segment { sequence, problem }, true),
    ] {
        let (peer, broken) = (1, how.into());
        let fault = Fault::Link { peer, broken };
        let suspicion = drive.stall.suspicion(fault, &drive.execution);
        let is = matches!(suspicion, Suspicion::Corrupted { peer: 1, .. });
        assert_eq!(is, is_corrupted, "{is_corrupted}");
    }
}

#[test]
fn when_the_last_peer_had_entered_is_noted_once() {
    let (topology, supervisor) = (Topology::one_host(2), Clueless::default());
    let waits = WaitRecord::default();
    let mut memories = [Memory::default(), Memory::default()];
    let calls = [all_reduce().0, all_reduce().0];
    let started = Instant::now();
    let mut links = memory::mesh(2, 100).into_iter();
    let mut links = [links.next().unwrap(), links.next().unwrap()];
    let [first, second] = &mut memories;
    let mut operands = [
        first.operand(all_reduce().1, &calls[0]).unwrap(),
        second.operand(all_reduce().1, &calls[1]).unwrap(),
    ];
    let [first, second] = &mut operands;
    let of = |rank| context(rank, &topology, &supervisor, &waits);
    let mut other = Drive::new(of(1), &calls[1], second, started).unwrap();
    let mut drive = Drive::new(of(0), &calls[0], first, started).unwrap();
    let at = |seconds| started + Duration::from_secs(seconds);
    go_on(&mut drive, &mut links[0], at(1));
    drive.idle(at(1));
    assert!(waits.take_moved() && !waits.take_moved());
    assert!(drive.measured(at(9)).everyone_entered.is_none());
    for seconds in 2..100 {
        go_on(&mut other, &mut links[1], at(seconds));
        if go_on(&mut drive, &mut links[0], at(seconds)).1 {
            assert!(seconds > 2, "it takes several turns");
            assert_eq!(drive.measured(at(99)).everyone_entered, Some((at(2), 1)));
            return;
        }
    }
    panic!("it ends");
}

/// Runs a send and its receive under these names through pipes of `pipe_bytes`. Returns which ranks
/// are done, and the suspicion of each.
fn of_two(pipe_bytes: usize, names: [&str; 2]) -> ([bool; 2], [Option<Suspicion>; 2]) {
    let topology = Topology::one_host(2);
    let supervisors = [Clueless::default(), Clueless::default()];
    let waits = [WaitRecord::default(), WaitRecord::default()];
    let now = Instant::now();
    let mut memories = [Memory::default(), Memory::default()];
    let collectives = [Collective::Send { to: 1 }, Collective::Receive { from: 0 }];
    let (calls, buffers): (Vec<_>, Vec<_>) = (collectives.into_iter().zip(names).enumerate())
        .map(|(rank, (collective, name))| launched(rank, collective, name))
        .unzip();
    let mut operands: Vec<_> = (memories.iter_mut().zip(&calls).zip(buffers))
        .map(|((memory, call), buffer)| memory.operand(buffer, call).unwrap())
        .collect();
    let mut drives: Vec<_> = (operands.iter_mut().enumerate())
        .map(|(rank, operand)| {
            let context = context(rank, &topology, &supervisors[rank], &waits[rank]);
            Drive::new(context, &calls[rank], operand, now).unwrap()
        })
        .collect();
    let mut links: Vec<_> = memory::mesh(2, pipe_bytes).into_iter().collect();
    let (mut done, mut moves) = ([false; 2], true);
    while std::mem::take(&mut moves) {
        for rank in 0..2 {
            if !done[rank] {
                let moved;
                (moved, done[rank]) = go_on(&mut drives[rank], &mut links[rank], now);
                moves |= moved;
            }
        }
    }
    drop(drives);
    (
        done,
        supervisors.map(|supervisor| supervisor.suspicions.into_inner().pop()),
    )
}

#[test]
fn what_each_of_two_ranks_has_called_follows_its_header_in_whatever_pieces() {
    for pipe_bytes in [1, 7, 64, 65, 200, 4096] {
        assert_eq!(of_two(pipe_bytes, ["x", "x"]).0, [true; 2]);
        let (done, suspicions) = of_two(pipe_bytes, ["x", "y"]);
        let (sent, received) = ("send(dest=1) 'x' float64", "recv(source=0) 'y' float64");
        let found = suspicions.map(|suspicion| match suspicion {
            Some(Suspicion::HeadersDiffer { theirs, own, .. }) => Some((theirs, own)),
            _ => None,
        });
        // The rank that notices the difference first stops sending, so its peer may not notice it.
        let right = [(received, sent), (sent, received)];
        let right = right.map(|(theirs, own)| Some((Text::from(theirs), Text::from(own))));
        assert!(found.iter().any(Option::is_some) && done == [false; 2]);
        assert!(
            found
                .iter()
                .zip(&right)
                .all(|(found, right)| found.is_none() || found == right)
        );
    }
}

#[test]
fn who_may_have_read_changes_after_a_failure_does_not_end() {
    const COUNT: usize = 100_000;
    let topology = Topology::one_host(2);
    let policy = Policy {
        has_heaps: true,
        ..Policy::new(topology.clone())
    };
    for fails in [false, true] {
        let file = SlotFile::create(2).unwrap();
        let mut meshes: Vec<Mesh> = (memory::mesh(2, 1000).into_iter().enumerate())
            .map(|(rank, mesh)| mesh.with_slots(file.map(rank).ok()))
            .collect();
        let blocks: Vec<_> = (meshes.iter())
            .map(|mesh| mesh.heap().unwrap().allocate(4 * COUNT).unwrap())
            .collect();
        let call = Call {
            is_mapped: true,
            ..Call::float_sum(4 * COUNT)
        };
        let prepared = Prepared::new(Arc::new(call), 0, &policy).unwrap();
        let launched = prepared.launch(0, 1, 0);
        let mut memories = [Memory::default(), Memory::default()];
        let mut operands: Vec<_> = (memories.iter_mut().zip(&blocks))
            .map(|(memory, block)| {
                let start = block.start().as_ptr().cast();
                // SAFETY: the block outlives the call, and nothing else refers to it.
                let buffer = unsafe { Buffer::contiguous(DType::F32, start, COUNT) };
                memory.operand(buffer, &launched).unwrap()
            })
            .collect();
        let supervisors = [Clueless::default(), Clueless::default()];
        let waits = [WaitRecord::default(), WaitRecord::default()];
        let now = Instant::now();
        let mut drives = operands.iter_mut().enumerate().map(|(rank, operand)| {
            let context = context(rank, &topology, &supervisors[rank], &waits[rank]);
            Drive::new(context, &launched, operand, now).unwrap()
        });
        let (mut late, mut early) = (drives.next().unwrap(), drives.next().unwrap());
        let [to_early, to_late] = &mut meshes[..] else {
            panic!("two ranks")
        };
        // Rank 0 enters, sees rank 1, and folds its chunk. It stops before it copies that of rank 1.
        assert_eq!(go_on(&mut early, to_late, now), (true, false));
        for _ in 0..3 {
            assert!(matches!(late.step(to_early, || now), Step::Moved));
        }
        assert_eq!(go_on(&mut early, to_late, now), (true, false));
        if fails {
            supervisors[1].abort(Abort::Closed.into());
            assert!(matches!(early.step(to_late, || now), Step::Failed(_)));
            assert_eq!(go_on(&mut late, to_early, now), (true, false));
            assert_eq!(late.interests().len(), 1);
            supervisors[0].abort(Abort::Closed.into());
            assert!(matches!(late.step(to_early, || now), Step::Failed(_)));
        } else {
            assert_eq!(go_on(&mut late, to_early, now), (true, true));
            assert_eq!(go_on(&mut early, to_late, now), (true, true));
        }
    }
}
