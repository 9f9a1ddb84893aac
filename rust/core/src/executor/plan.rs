//! A plan is a schedule prepared for execution: the order of operations, and their pipes.
//!
//! Training repeats the same collectives. Plans are kept, so that a repeated collective allocates
//! nothing.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use super::conflicts::{Conflict, History};
use gradring_proto::collective::{Call, Collective};
use gradring_proto::dtype::DType;
use gradring_proto::schedule::topology::Topology;
use gradring_proto::schedule::{self, Access, Action, Algorithm, Contents, Schedule};

/// Most plans kept, more than a step of most models has buckets.
const PLANS_MAX: usize = 64;
/// Most operations of all kept plans, at about 150 bytes each; a larger plan is kept alone.
const OPERATIONS_MAX: usize = 1 << 20;

/// Approximate bytes of an all-reduce under way at a time. This much stays in cache.
const BLOCK_BYTES: usize = 1 << 20;
/// Smallest part of each rank in these bytes between hosts: more than arrives within a step's
/// latency.
const CHUNK_BYTES_MIN: usize = 128 << 10;
/// Bound on the number of blocks, and so on the length of a plan.
const BLOCKS_MAX: usize = 256;
/// Most ranges kept beside the buffer at a time, more than blocks are under way. Each range takes
/// the memory of an earlier one, which is still in cache.
const KEPT_MAX: usize = 4;

/// Approximate elements of an all-reduce under way at a time.
pub(super) fn block_elements(call: &Call, dtype: DType, topology: &Topology) -> usize {
    let chunks = match topology.hosts().len() {
        1 => 0,
        _ => CHUNK_BYTES_MIN * topology.world_size(),
    };
    let block = BLOCK_BYTES.max(chunks).max(call.bytes() / BLOCKS_MAX);
    block / dtype.size_bytes()
}

/// Plan of one rank for one kind of collective, and its progress.
pub(super) struct Plan {
    pub(super) operations: Vec<Operation>,
    /// Conflicts of all operations, one operation after the other.
    conflicts: Vec<Conflict>,
    /// Sends, by receiver.
    pub(super) outgoing: Vec<Pipe>,
    /// Receives, by sender.
    pub(super) incoming: Vec<Pipe>,
    /// Operations on this rank's own values: its contribution, or values that it has set aside.
    pub(super) own: Pipe,
    /// `true` if partial results travel.
    pub(super) keeps_partials: bool,
    pub(super) offsets: Arc<Offsets>,
}

/// One send, receive, fold of an own contribution, or reduction of values set aside.
pub(super) struct Operation {
    pub(super) range: Range<usize>,
    pub(super) element_bytes: usize,
    pub(super) moved_bytes: usize,
    pub(super) action: Option<Action>,
    pub(super) contents: Contents,
    /// Range of this operation's conflicts in the plan: those that it must follow.
    conflicts: Range<usize>,
}

/// Operations that keep their order.
pub(super) struct Pipe {
    pub(super) peer: usize,
    operations: Vec<usize>,
    done: usize,
}

impl Pipe {
    const fn new(peer: usize) -> Self {
        Self {
            peer,
            operations: Vec::new(),
            done: 0,
        }
    }

    /// All operations of the pipe, in order.
    pub(super) fn operations(&self) -> &[usize] {
        &self.operations
    }

    /// The operation whose turn has come.
    pub(super) fn head(&self) -> Option<usize> {
        self.operations.get(self.done).copied()
    }

    /// Moves on to the next operation.
    pub(super) const fn advance(&mut self) {
        self.done += 1;
    }
}

impl Plan {
    /// The plan of `rank` for `call`, whose elements travel as `dtype`.
    pub(super) fn of(
        call: &Call,
        dtype: DType,
        algorithm: Algorithm,
        rank: usize,
        topology: &Topology,
    ) -> Self {
        let schedule = schedule::build(
            algorithm,
            &call.collective,
            rank,
            topology,
            call.count,
            block_elements(call, dtype, topology),
        );
        let op = call.collective.op();
        let partial = op.map_or(dtype, |op| dtype.accumulator(op));
        Self::new(
            schedule,
            rank,
            topology.world_size(),
            |contents| match contents {
                Contents::Partial => partial.size_bytes(),
                Contents::Final | Contents::Contribution => dtype.size_bytes(),
            },
        )
    }

    /// Builds a plan. Headers are exchanged with the peers in the schedule and with the neighbours
    /// on the ring, even if no payload is.
    fn new(
        schedule: Schedule,
        rank: usize,
        world_size: usize,
        element_bytes: impl Fn(Contents) -> usize,
    ) -> Self {
        let receives = || schedule.iter().filter_map(|step| step.receive.as_ref());
        let sends = || schedule.iter().filter_map(|step| step.send.as_ref());
        let mut plan = Self {
            keeps_partials: receives().any(|r| r.action.contents() == Contents::Partial)
                || sends().any(|s| s.contents == Contents::Partial),
            offsets: Arc::new(Offsets::new(ranges_beside(&schedule, rank))),
            operations: Vec::new(),
            conflicts: Vec::new(),
            outgoing: vec![Pipe::new((rank + 1) % world_size)],
            incoming: vec![Pipe::new((rank + world_size - 1) % world_size)],
            own: Pipe::new(rank),
        };
        let mut history = History::default();
        // Ranges kept beside the buffer, each with its last operation so far. An operation that
        // reuses the memory of a range must follow that operation.
        let mut kept: Vec<(Range<usize>, usize)> = Vec::new();
        for step in schedule {
            // A step's send and receive touch different elements, so their order is free.
            if let Some(send) = step.send {
                let (contents, access) = (send.contents, Access::SEND);
                let size = element_bytes(contents);
                let number = plan.add(&mut history, send.range, size, None, contents, access);
                pipe(&mut plan.outgoing, send.peer)
                    .operations
                    .extend(number);
            }
            if let Some(receive) = step.receive {
                let contents = receive.action.contents();
                let access = Access::receive(rank, receive.peer, receive.action);
                let (size, action) = (element_bytes(contents), Some(receive.action));
                let range = receive.range;
                let number = plan.add(&mut history, range.clone(), size, action, contents, access);
                if let Some(number) = number.filter(|_| access.beside) {
                    match kept.last_mut() {
                        Some((of, last)) if *of == range => *last = number,
                        _ => {
                            if let Some(before) = kept.len().checked_sub(KEPT_MAX) {
                                plan.follow(number, kept[before].1);
                            }
                            kept.push((range, number));
                        }
                    }
                }
                let pipe = match receive.peer == rank {
                    true => &mut plan.own,
                    false => pipe(&mut plan.incoming, receive.peer),
                };
                pipe.operations.extend(number);
            }
        }
        plan
    }

    /// Adds an operation after all others; `None` if it moves nothing.
    fn add(
        &mut self,
        history: &mut History,
        range: Range<usize>,
        element_bytes: usize,
        action: Option<Action>,
        contents: Contents,
        access: Access,
    ) -> Option<usize> {
        if range.is_empty() {
            return None;
        }
        let number = self.operations.len();
        let conflicts = history.add(number, &range, access, &mut self.conflicts);
        self.operations.push(Operation {
            range,
            element_bytes,
            moved_bytes: 0,
            action,
            contents,
            conflicts,
        });
        Some(number)
    }

    /// Makes operation `newest` wait until all of an earlier one, on lower elements, has moved.
    fn follow(&mut self, newest: usize, earlier: usize) {
        let range = self.operations[earlier].range.clone();
        debug_assert!(range.end <= self.operations[newest].range.start);
        self.conflicts.push((earlier, range));
        self.operations[newest].conflicts.end = self.conflicts.len();
    }

    /// Operations that an operation must follow, and on which elements.
    pub(super) fn conflicts(&self, operation: &Operation) -> &[Conflict] {
        &self.conflicts[operation.conflicts.clone()]
    }

    /// Moves on from an incoming operation once all of it has arrived.
    pub(super) fn pass_received(&mut self, pipe: usize, number: usize) {
        if self.operations[number].left_bytes() == 0 {
            self.incoming[pipe].advance();
        }
    }

    fn restart(&mut self) {
        for operation in &mut self.operations {
            operation.moved_bytes = 0;
        }
        let pipes = self.outgoing.iter_mut().chain(&mut self.incoming);
        for pipe in pipes.chain([&mut self.own]) {
            pipe.done = 0;
        }
    }

    /// Bytes of an operation that may have moved, given the progress of earlier ones.
    pub(super) fn watermark(&self, number: usize) -> usize {
        let operation = &self.operations[number];
        let mut end = operation.range.end;
        for (earlier, common) in self.conflicts(operation) {
            let reached = self.operations[*earlier].reached();
            if reached < common.end {
                end = end.min(reached.max(common.start));
            }
        }
        let bytes = end.saturating_sub(operation.range.start) * operation.element_bytes;
        bytes.max(operation.moved_bytes)
    }
}

impl Operation {
    /// The first element that has not moved completely.
    pub(super) const fn reached(&self) -> usize {
        self.range.start + self.moved_bytes / self.element_bytes
    }

    pub(super) const fn position_bytes(&self) -> usize {
        self.range.start * self.element_bytes + self.moved_bytes
    }

    pub(super) fn left_bytes(&self) -> usize {
        self.range.len() * self.element_bytes - self.moved_bytes
    }
}

/// Ranges of which `rank` keeps values beside the buffer, in order.
fn ranges_beside(schedule: &Schedule, rank: usize) -> Vec<Range<usize>> {
    let receives = schedule.iter().filter_map(|step| step.receive.as_ref());
    let beside = receives
        .filter(|receive| Access::receive(rank, receive.peer, receive.action).beside)
        .map(|receive| receive.range.clone())
        .filter(|range| !range.is_empty());
    let mut ranges: Vec<_> = beside.collect();
    ranges.dedup();
    ranges
}

/// Returns the pipe of `peer`, and adds it if it is new.
fn pipe(pipes: &mut Vec<Pipe>, peer: usize) -> &mut Pipe {
    let known = pipes.iter().position(|pipe| pipe.peer == peer);
    let index = known.unwrap_or_else(|| {
        pipes.push(Pipe::new(peer));
        pipes.len() - 1
    });
    &mut pipes[index]
}

/// Places of ranges beside the buffer, reused in turn.
pub(super) struct Offsets {
    /// Each range's first element and its offset, in order.
    starts: Vec<(usize, usize)>,
    count: usize,
}

impl Offsets {
    fn new(ranges: Vec<Range<usize>>) -> Self {
        let capacity = ranges.iter().map(Range::len).max().unwrap_or(0);
        let starts: Vec<_> = (0..)
            .zip(ranges)
            .map(|(number, range)| (range.start, number % KEPT_MAX * capacity))
            .collect();
        let count = starts.len().min(KEPT_MAX) * capacity;
        Self { starts, count }
    }

    /// Number of elements that the memory must hold.
    pub(super) const fn count(&self) -> usize {
        self.count
    }

    /// Offset of an element kept beside the buffer.
    pub(super) fn of(&self, element: usize) -> usize {
        let after = self.starts.partition_point(|&(start, _)| start <= element);
        let (start, offset) = self.starts[after - 1];
        offset + element - start
    }
}

/// The plans of one rank.
#[derive(Default)]
pub(super) struct Plans {
    /// Kept plans, oldest first.
    kept: VecDeque<(Key, Plan)>,
    operations: usize,
    /// Plan of a call that will hardly be repeated.
    once: Option<Plan>,
}

struct Key {
    count: usize,
    /// Type of the elements, which determines how many are under way at a time, and the type as
    /// which they travel.
    dtypes: (DType, DType),
    algorithm: Algorithm,
    collective: Collective,
}

impl Plans {
    /// Returns the plan for `call`, whose elements travel as `dtype`, with all progress reset.
    pub(super) fn get(
        &mut self,
        call: &Call,
        dtype: DType,
        algorithm: Algorithm,
        rank: usize,
        topology: &Topology,
    ) -> &mut Plan {
        if let Collective::AllToAllV { .. } = call.collective {
            return (self.once).insert(Plan::of(call, dtype, algorithm, rank, topology));
        }
        let found = self.kept.iter().position(|(key, _)| {
            key.count == call.count
                && key.dtypes == (call.dtype, dtype)
                && key.algorithm == algorithm
                && key.collective == call.collective
        });
        let index = found.unwrap_or_else(|| {
            let plan = Plan::of(call, dtype, algorithm, rank, topology);
            let key = Key {
                count: call.count,
                dtypes: (call.dtype, dtype),
                algorithm,
                collective: call.collective.clone(),
            };
            self.keep(key, plan)
        });
        let plan = &mut self.kept[index].1;
        plan.restart();
        plan
    }

    /// Keeps a plan, and drops the oldest ones if there are too many. Returns its index.
    fn keep(&mut self, key: Key, plan: Plan) -> usize {
        self.operations += plan.operations.len();
        while self.kept.len() >= PLANS_MAX || self.operations > OPERATIONS_MAX {
            let Some((_, oldest)) = self.kept.pop_front() else {
                break;
            };
            self.operations -= oldest.operations.len();
        }
        self.kept.push_back((key, plan));
        self.kept.len() - 1
    }
}

#[cfg(test)]
mod tests;
