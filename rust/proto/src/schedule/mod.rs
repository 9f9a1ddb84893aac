//! A collective as data: the steps that one rank performs, without any socket, thread or clock.
//!
//! A schedule *means* that its steps are performed one after the other, with the send and the
//! receive of one step side by side. The executor overlaps steps as far as their element ranges do
//! not conflict, which does not change the result. A fold keeps its intermediate result beside the
//! buffer, so until its last turn it conflicts only with its other turns. Elements that are set
//! aside conflict only with the step that reduces them.
//!
//! Words: N ranks; a buffer of `count` elements, cut into N chunks. A transfer carries
//! *contributions* (a rank's input), *partial* results (still to be reduced, in the accumulator
//! type) or *final* values.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::collective::Collective;
use crate::dtype::ReduceOp;
use crate::names::named;

pub mod algorithm_rules;
pub mod choice;
mod direct;
mod doubling;
mod explanation;
mod halving;
mod hierarchical;
mod one_shot;
mod pairs;
mod ring;
mod star;
pub mod symmetry;
pub mod topology;
#[cfg(test)]
mod verify;

use choice::MESH_RANKS_MAX;
use hierarchical::Levels;
use pairs::Pairs;
use ring::Ring;
use topology::Topology;

/// The steps of one rank in one collective.
pub type Schedule = Vec<Step>;

/// One exchange: at most one send and at most one receive, of disjoint element ranges.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// The send, if the step has one.
    pub send: Option<Send>,
    /// The receive, if the step has one.
    pub receive: Option<Receive>,
}

impl Step {
    const fn send(peer: usize, range: Range<usize>, contents: Contents) -> Self {
        Self {
            send: Some(Send {
                peer,
                range,
                contents,
            }),
            receive: None,
        }
    }

    const fn receive(peer: usize, range: Range<usize>, action: Action) -> Self {
        Self {
            send: None,
            receive: Some(Receive {
                peer,
                range,
                action,
            }),
        }
    }
}

/// An element range that goes to a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Send {
    /// The rank that receives it.
    pub peer: usize,
    /// Elements to send.
    pub range: Range<usize>,
    /// State of the elements: contributions, partial results or final values.
    pub contents: Contents,
}

/// An element range that comes from a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Receive {
    /// The rank that sends the elements. It is this rank itself where a step folds its own
    /// contribution, or reduces elements that it has set aside.
    pub peer: usize,
    /// Elements to receive.
    pub range: Range<usize>,
    /// Operation on the received elements.
    pub action: Action,
}

/// Memory that an operation uses: elements of the buffer, and those that are kept beside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    /// Use of the buffer.
    pub buffer: Use,
    /// True if it uses elements that are kept beside the buffer.
    pub beside: bool,
}

/// Use of elements by an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// Neither reads nor writes them.
    Nothing,
    /// Reads them.
    Read,
    /// Writes them, and may read them.
    Write,
}

impl Access {
    /// Access of a send.
    pub const SEND: Self = Self {
        buffer: Use::Read,
        beside: false,
    };

    /// Access of `rank` that receives elements from `source`.
    pub const fn receive(rank: usize, source: usize, action: Action) -> Self {
        let buffer = match action {
            Action::Fold(Turn::First | Turn::Middle) if rank != source => Use::Nothing,
            Action::SetAside => Use::Nothing,
            Action::Fold(Turn::First | Turn::Middle) => Use::Read,
            _ => Use::Write,
        };
        Self {
            buffer,
            beside: match action {
                Action::Fold(_) | Action::SetAside => true,
                Action::Reduce | Action::ReduceAndFinish => rank == source,
                Action::Copy => false,
            },
        }
    }

    /// Returns whether two operations on the same elements must keep their order.
    #[cfg(any(test, feature = "testing"))]
    #[must_use]
    pub fn conflicts(self, other: Self) -> bool {
        let untouched = self.buffer == Use::Nothing || other.buffer == Use::Nothing;
        let unchanged = self.buffer != Use::Write && other.buffer != Use::Write;
        (self.beside && other.beside) || !(untouched || unchanged)
    }
}

/// Contents of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Contents {
    /// A rank's input, in the buffer's own type.
    Contribution,
    /// Results that lack contributions, in the accumulator type.
    Partial,
    /// Finished values, in the buffer's own type.
    Final,
}

/// Operation of a receiver on the elements of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Combines partial results with this rank's own.
    Reduce,
    /// Combines them, and turns the complete result into final values: scales a mean, rounds once.
    ReduceAndFinish,
    /// Copies final values into the buffer.
    Copy,
    /// Combines a contribution with those of lower ranks, beside the buffer.
    Fold(Turn),
    /// Keeps partial results beside the buffer until this rank reduces them.
    SetAside,
}

/// Position of a contribution in the fold of one range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// Rank 0's contribution, which begins the fold.
    First,
    /// A contribution between the first and the last.
    Middle,
    /// The last rank's contribution. The complete result goes into the buffer as final values.
    Last,
}

impl Action {
    /// Contents of a transfer that ends in this action.
    #[must_use]
    #[inline]
    pub const fn contents(self) -> Contents {
        match self {
            Self::Reduce | Self::ReduceAndFinish | Self::SetAside => Contents::Partial,
            Self::Copy => Contents::Final,
            Self::Fold(_) => Contents::Contribution,
        }
    }
}

named! {
    /// Algorithm of a collective.
    pub enum Algorithm {
        /// Every rank exchanges with its neighbours on a ring.
        Ring: "ring",
        /// Every rank exchanges with every other, in two steps.
        Direct: "direct",
        /// Every rank sends everything to every other, in one step.
        OneShot: "one_shot",
        /// Ranks reduce inside their hosts first, then in racks, then across.
        Hierarchical: "hierarchical",
        /// Every rank sends everything to rank 0, and rank 0 sends the result to every other.
        Star: "star",
        /// Every rank exchanges halves with one other, then halves of these with the next.
        Halving: "halving",
        /// Every rank exchanges everything with one other, then with the next.
        Doubling: "doubling",
    }
}

impl Algorithm {
    /// Returns whether this algorithm performs the collective in a group with this topology.
    #[must_use]
    pub fn performs(self, collective: &Collective, topology: &Topology) -> bool {
        match self {
            Self::Ring => !matches!(
                collective,
                Collective::AllToAll
                    | Collective::AllToAllV { .. }
                    | Collective::Gather { .. }
                    | Collective::Scatter { .. }
                    | Collective::Send { .. }
                    | Collective::Receive { .. }
            ),
            Self::Direct => !matches!(
                collective,
                Collective::Broadcast { .. } | Collective::Barrier
            ),
            Self::OneShot | Self::Star | Self::Halving | Self::Doubling => matches!(
                collective,
                Collective::AllReduce { .. } | Collective::Reduce { .. } | Collective::Barrier
            ),
            Self::Hierarchical => {
                topology.has_levels()
                    && matches!(
                        collective,
                        Collective::AllReduce { .. } | Collective::Reduce { .. }
                    )
            }
        }
    }

    /// Returns whether the group has the links of this algorithm even if not all ranks are
    /// connected.
    fn needs_few_links(self, topology: &Topology) -> bool {
        match self {
            Self::Ring | Self::Halving | Self::Doubling => true,
            Self::Hierarchical => topology.has_even_racks(),
            Self::Direct | Self::OneShot | Self::Star => false,
        }
    }

    /// Returns whether it sums in the order of ranks, for any number of ranks.
    const fn folds(self) -> bool {
        match self {
            Self::Direct | Self::OneShot | Self::Star => true,
            Self::Ring | Self::Hierarchical | Self::Halving | Self::Doubling => false,
        }
    }

    const fn builder(self) -> Builder {
        match self {
            Self::Ring => ring::build,
            Self::Direct => direct::build,
            Self::OneShot => one_shot::build,
            Self::Hierarchical => hierarchical::build,
            Self::Star => star::build,
            Self::Halving => halving::build,
            Self::Doubling => doubling::build,
        }
    }
}

/// The ranks with which `rank` has links, in ascending order. In small groups these are all others.
/// In larger groups these are its partners on the ring, in pairs, and between racks.
pub fn partners(rank: usize, topology: &Topology) -> Vec<usize> {
    let world_size = topology.world_size();
    if world_size <= MESH_RANKS_MAX {
        return (0..world_size).filter(|&peer| peer != rank).collect();
    }
    let ring = Ring::through_all(topology, rank);
    let mut partners: BTreeSet<usize> = Pairs::new(rank, world_size)
        .partners()
        .into_iter()
        .chain(ring.neighbours())
        .collect();
    if topology.has_even_racks() {
        partners.extend(Levels::of(rank, topology).partners());
    }
    partners.remove(&rank);
    partners.into_iter().collect()
}

/// The schedule of `rank` for this collective over `count` elements.
///
/// An all-reduce or reduce that consists of two halves is done in blocks of at most `block`
/// elements, one after the other.
///
/// # Panics
/// When `algorithm` does not perform `collective` in this group.
#[must_use]
pub fn build(
    algorithm: Algorithm,
    collective: &Collective,
    rank: usize,
    topology: &Topology,
    count: usize,
    block: usize,
) -> Schedule {
    if topology.world_size() == 1 {
        return Schedule::new();
    }
    let part = Part {
        rank,
        topology,
        count,
        block,
    };
    let built = match collective {
        // Each rank's result depends on the contributions of all ranks.
        Collective::Barrier => algorithm.builder()(
            &Collective::AllReduce { op: ReduceOp::Max },
            &Part { count: 1, ..part },
        ),
        _ => algorithm.builder()(collective, &part),
    };
    built.unwrap_or_else(|| {
        let (algorithm, collective) = (algorithm.name(), collective.name());
        panic!("{algorithm} does not perform {collective} here")
    })
}

/// Builds a schedule. Returns `None` if the algorithm does not perform the collective.
type Builder = fn(&Collective, &Part<'_>) -> Option<Schedule>;

/// One rank's part in a collective over `count` elements, reduced in blocks of `block` elements.
struct Part<'a> {
    rank: usize,
    topology: &'a Topology,
    count: usize,
    block: usize,
}

impl Part<'_> {
    fn world_size(&self) -> usize {
        self.topology.world_size()
    }

    fn blocks(&self) -> Vec<Range<usize>> {
        let blocks = self.count.div_ceil(self.block).max(1);
        even_parts(&(0..self.count), blocks)
    }

    /// `whole`, cut into a chunk for each rank.
    fn chunks(&self, whole: &Range<usize>) -> Vec<Range<usize>> {
        even_parts(whole, self.world_size())
    }

    /// A reduction by blocks, each with a reduce-scatter and a gathering.
    ///
    /// The part of a block that a rank has sent is still in its cache when the results overwrite
    /// it. So a large buffer passes through memory twice (read and written once), and not three
    /// times.
    fn in_blocks(
        &self,
        reduce_scatter: impl Fn(&Range<usize>) -> Schedule,
        gather: impl Fn(&Range<usize>) -> Schedule,
    ) -> Schedule {
        let (blocks, ahead) = (self.blocks(), blocks_ahead(self.topology));
        let mut steps = Schedule::new();
        for number in 0..blocks.len() + ahead {
            if let Some(block) = blocks.get(number) {
                steps.extend(reduce_scatter(block));
            }
            if number >= ahead {
                steps.extend(gather(&blocks[number - ahead]));
            }
        }
        steps
    }
}

/// Number of blocks that are reduced ahead of the one that is gathered. They keep links busy while
/// a block's last contributions arrive, and give work to ranks that share a core. Two ranks of one
/// host need none: their bytes arrive at once, and with fewer blocks under way more of them stay in
/// the cache.
fn blocks_ahead(topology: &Topology) -> usize {
    match (topology.hosts().len(), topology.world_size()) {
        (1, 2) => 0,
        _ => 2,
    }
}

/// The steps in which one rank folds all contributions to `range`.
fn fold_in_rank_order(world_size: usize, range: &Range<usize>) -> Schedule {
    let fold = |source| {
        let turn = match source {
            0 => Turn::First,
            _ if source == world_size - 1 => Turn::Last,
            _ => Turn::Middle,
        };
        Step::receive(source, range.clone(), Action::Fold(turn))
    };
    (0..world_size).map(fold).collect()
}

/// Chunk `index` of `count` elements cut into `parts`: the first `count % parts` chunks have one
/// element more than the others, as in `numpy.array_split`.
#[must_use]
#[inline]
pub const fn chunk(count: usize, parts: usize, index: usize) -> Range<usize> {
    let (least, longer) = (count / parts, count % parts);
    let start = index * least + if index < longer { index } else { longer };
    start..start + least + (index < longer) as usize
}

/// `whole`, cut as by `chunk`.
fn even_parts(whole: &Range<usize>, parts: usize) -> Vec<Range<usize>> {
    let part = |index| {
        let part = chunk(whole.len(), parts, index);
        whole.start + part.start..whole.start + part.end
    };
    (0..parts).map(part).collect()
}

/// Chunks of these lengths, one behind the other.
#[must_use]
pub fn chunks_of(counts: &[usize]) -> Vec<Range<usize>> {
    counts
        .iter()
        .scan(0, |start, &count| {
            let range = *start..*start + count;
            *start = range.end;
            Some(range)
        })
        .collect()
}
