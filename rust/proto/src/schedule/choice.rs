//! Choice of the algorithm that performs a collective.
//!
//! Algorithms that sum in different orders give different bits. The choice between them depends
//! only on the call, the number of ranks, and the hosts and racks that ranks share. Direct,
//! one-shot and star sum in the same order, so the times measured when the group formed decide
//! among them. Halving and doubling also sum in the same order, and the size decides between them.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use super::Algorithm;
use super::algorithm_rules::Rules;
use super::topology::Topology;
use crate::collective::{Call, Collective};
use crate::dtype::DType;

/// Largest number of ranks that are all connected with one another. Larger groups have links for
/// the ring and for halving.
pub const MESH_RANKS_MAX: usize = 64;

/// Largest number of ranks that reduce large buffers directly. In larger groups, the streams that
/// meet at every rank cost more than a ring's longer way.
pub(super) const DIRECT_RANKS_MAX: usize = 8;

/// Largest chunk, in bytes, that is sent directly between many ranks of one host, or between the
/// hosts of few ranks. Up to this size latency counts.
const DIRECT_CHUNK_BYTES_MAX: usize = 64 << 10;

/// Largest chunk, in bytes, that is sent directly between many ranks on several hosts.
const DIRECT_CHUNK_BYTES_MAX_BETWEEN_HOSTS: usize = 128 << 10;

/// Largest buffer, in bytes per host and times the ranks of a host, that many ranks reduce without
/// regard to hosts. The ranks of a host send to all others over one shared line.
const FLAT_BYTES_MAX: usize = 32 << 10;

/// Largest buffer, in bytes per host, that hosts in racks do not send around a ring. A ring enters
/// each rack once, so only the number of its steps speaks against it.
const LEVELS_BYTES_MAX: usize = 64 << 10;

/// Largest buffer, in bytes times ranks times ranks of a host, that many ranks in racks send to
/// each other directly. Transfers to other racks share one line.
const RACK_FLAT_BYTES_MAX: usize = 512 << 10;

/// Bound on the bytes that the ranks of one host send together in pairs. It applies where levels
/// have their links, and some ranks would be guests or pairs would cross racks.
const RACK_PAIRED_BYTES_MAX: usize = 64 << 10;

/// Like `FLAT_BYTES_MAX`, for schedules of halves with guests, which send their whole buffers.
const GUEST_BYTES_MAX: usize = 48 << 10;

/// Largest buffer, in bytes, that pairs of ranks reduce by doubling. Larger ones take longer to
/// send than the latency of a step.
const DOUBLED_BYTES_MAX: usize = 16 << 10;

/// Bound on the bytes that the ranks of one host send together in a step of doubling.
const DOUBLED_HOST_BYTES_MAX: usize = 48 << 10;

/// Smallest number of ranks, each on its own host, for which the steps of doubling take less time
/// than one message per rank.
const DOUBLED_RANKS_MIN: usize = 32;

/// Smallest number of such ranks if some would be guests, which costs two more steps.
const DOUBLED_WITH_GUESTS_RANKS_MIN: usize = 48;

/// Smallest number of ranks for doubling on unevenly shared hosts, with the ranks of each host in a
/// row.
const DOUBLED_SHARED_RANKS_MIN: usize = 20;

/// Largest buffer, in bytes, that such ranks reduce in pairs.
const DOUBLED_SHARED_BYTES_MAX: usize = 4 << 10;

/// Largest buffer, in bytes, for which measured times count. Only much smaller buffers are
/// measured, and on a busy machine the measured slope is unreliable.
pub(super) const MEASURED_BYTES_MAX: usize = 256 << 10;

/// Largest buffer, in bytes, that travels through slots in memory that all ranks share.
pub const SLOT_BYTES_MAX: usize = 64 << 10;

/// Like `SLOT_BYTES_MAX`, for two ranks. In a link between the two, one sends the first bytes of a
/// larger buffer while the other receives them.
const SLOT_BYTES_MAX_OF_TWO: usize = 8 << 10;

/// Largest all-reduce, in bytes, that is performed in the same way wherever the buffer is.
pub const MAPPED_ABOVE_BYTES: usize = SLOT_BYTES_MAX;

/// Like `MAPPED_ABOVE_BYTES`, for two ranks. Up to this size, three turns take as long as the rings
/// of a link, through which one sends while the other receives.
const MAPPED_ABOVE_BYTES_OF_TWO: usize = 256 << 10;

/// Most bytes of other ranks' slots that a rank reads to save a turn.
const SLOTS_READ_BYTES_MAX: usize = 32 << 10;

/// Sizes, in bytes, of the two measured buffers: one of nearly no size, and a larger one.
pub const MEASURED_SIZES: (usize, usize) = (8, 64 << 10);

/// Largest buffer, in bytes, that takes one step regardless of measured times. It fits into a
/// packet, so only the number of steps counts.
pub(super) const ONE_PACKET_BYTES_MAX: usize = 1 << 10;

/// Largest buffer, in bytes, that takes one step if nothing was measured.
pub(super) const ONE_SHOT_BYTES_MAX: usize = 4096;

/// Smallest number of ranks of which one may reduce small buffers for all. Fewer ranks send few
/// messages anyway, and with the other algorithms each of them sees which rank is late.
pub(super) const STAR_RANKS_MIN: usize = 8;

/// The empty range of sizes.
#[expect(clippy::reversed_empty_ranges, reason = "nothing is in it")]
const NONE: RangeInclusive<usize> = 1..=0;

/// Largest number whose part, one of `parts` and rounded down, is at most `part`.
const fn whole_parts(part: usize, parts: usize) -> usize {
    part * parts + parts - 1
}

/// Measured cost of an algorithm: a latency and a time per byte.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// Time for an empty buffer.
    pub latency: Duration,
    /// Seconds for each byte of the buffer.
    pub seconds_per_byte: f64,
}

impl Cost {
    /// The line through the times of a small and a large buffer.
    #[must_use]
    pub fn fitted(small: (usize, Duration), large: (usize, Duration)) -> Self {
        let time = large.1.saturating_sub(small.1).as_secs_f64();
        Self {
            latency: small.1,
            seconds_per_byte: time / (large.0 - small.0) as f64,
        }
    }

    /// Expected time for a buffer.
    #[must_use]
    pub fn of(&self, bytes: usize) -> f64 {
        self.latency.as_secs_f64() + self.seconds_per_byte * bytes as f64
    }
}

/// Measured costs of all-reduces that sum in the order of ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    /// All-reduce in one step.
    pub one_shot: Cost,
    /// All-reduce in two steps.
    pub two_steps: Cost,
    /// All-reduce through rank 0, if it was measured.
    pub star: Option<Cost>,
}

/// Everything on which a group's choice depends.
#[derive(Debug, Clone)]
pub struct Policy {
    /// Hosts and racks that ranks share.
    pub topology: Arc<Topology>,
    /// Rules of the user.
    pub rules: Rules,
    /// True if sums must be folds in the order of ranks.
    pub reproducible: bool,
    /// Type to which float32 elements of reductions are rounded for travelling, if any.
    pub wire_dtype: Option<DType>,
    /// Smallest reduction, in bytes, that is rounded for travelling.
    pub narrowed_from_bytes: usize,
    /// Costs measured when the group formed, if any.
    pub measured: Option<Measured>,
    /// True if missing links are made when they are needed.
    pub connects_on_demand: bool,
    /// True if all ranks share memory in which each of them has a slot.
    pub has_slots: bool,
    /// True if that memory has a heap of each rank, which all others read.
    pub has_heaps: bool,
}

/// Reason for a choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reason {
    /// A rule of the user.
    Rule,
    /// No other algorithm performs this collective.
    NoOther,
    /// The buffer fits into a packet.
    OnePacket,
    /// One step takes less time, by the measured times or else by the size.
    FewerSteps,
    /// Rank 0 reduces faster for all, by the measured times.
    FewerMessages,
    /// Ranks share hosts, and bytes between hosts count.
    SharedHosts,
    /// Hosts share racks, and bytes between racks count.
    SharedRacks,
    /// The group is so large that steps growing with its logarithm are fewer.
    FewHalvings,
    /// Few steps as before, and the buffer is so small that only steps count.
    FewDoublings,
    /// All ranks share memory, and the buffer fits into their slots.
    SharedMemory,
    /// Two ranks exchange directly on a ring.
    TwoRanks,
    /// Sums must be folds in the order of ranks.
    Reproducible,
    /// There are few enough ranks to send to each of them.
    FewRanks,
    /// Chunks are so small that latency counts.
    SmallChunks,
    /// No other reason applies.
    ManyRanks,
}

/// Returns whether every rank gets something from each other one.
const fn is_seen_by_all(collective: &Collective) -> bool {
    matches!(
        collective,
        Collective::AllReduce { .. }
            | Collective::ReduceScatter { .. }
            | Collective::AllGather { .. }
            | Collective::AllToAll
            | Collective::Barrier
    )
}

impl Policy {
    /// A policy without rules or measurements.
    #[must_use]
    pub fn new(topology: Topology) -> Self {
        Self {
            topology: Arc::new(topology),
            rules: Rules::default(),
            reproducible: false,
            wire_dtype: None,
            narrowed_from_bytes: 0,
            measured: None,
            connects_on_demand: true,
            has_slots: false,
            has_heaps: false,
        }
    }

    fn world_size(&self) -> usize {
        self.topology.world_size()
    }

    /// The algorithm that sums in the order of ranks in two steps.
    #[must_use]
    pub fn two_steps(&self) -> Algorithm {
        match self.world_size() {
            2 => Algorithm::Ring,
            _ => Algorithm::Direct,
        }
    }

    /// The algorithms among which measured times decide; all of them sum in the order of ranks.
    #[must_use]
    pub fn measurable(&self) -> Vec<Algorithm> {
        let star = (self.world_size() >= STAR_RANKS_MIN).then_some(Algorithm::Star);
        [Algorithm::OneShot, self.two_steps()]
            .into_iter()
            .chain(star)
            .collect()
    }

    /// Measured cost of an all-reduce by `algorithm`, if there is one.
    #[must_use]
    pub fn measured(&self, algorithm: Algorithm) -> Option<Cost> {
        let measured = self.measured?;
        match algorithm {
            Algorithm::OneShot => Some(measured.one_shot),
            Algorithm::Star => measured.star,
            _ => (algorithm == self.two_steps()).then_some(measured.two_steps),
        }
    }

    /// Returns whether all ranks are connected with one another.
    #[must_use]
    pub fn is_mesh(&self) -> bool {
        self.world_size() <= MESH_RANKS_MAX
    }

    /// Returns whether every rank has a link with any other, or can make one.
    #[must_use]
    pub fn reaches_all(&self) -> bool {
        self.is_mesh() || self.connects_on_demand
    }

    /// Type in which elements of `call` travel, if it differs from their own.
    #[must_use]
    pub fn wire_dtype(&self, call: &Call) -> Option<DType> {
        let reduces =
            !matches!(call.collective, Collective::Barrier) && call.collective.op().is_some();
        let large = call.bytes() >= self.narrowed_from_bytes;
        self.wire_dtype
            .filter(|_| reduces && large && call.dtype == DType::F32)
    }

    /// Returns whether `call` by `algorithm` travels through the slots of all ranks.
    ///
    /// Every rank must then see all others in the call, because that frees the memory of the call
    /// before.
    #[must_use]
    pub fn travels_in_slots(&self, call: &Call, algorithm: Algorithm) -> bool {
        self.has_slots
            && call.bytes() <= self.slot_bytes_max()
            && self.wire_dtype(call).is_none()
            && matches!(algorithm, Algorithm::OneShot | Algorithm::Direct)
            && is_seen_by_all(&call.collective)
    }

    /// Returns whether the ranks read each other's buffers in `call`, if these are in heaps. The
    /// result has the bits of `Direct`.
    #[must_use]
    pub fn maps(&self, call: &Call) -> bool {
        self.has_heaps
            && call.bytes() > self.mapped_above()
            && matches!(call.collective, Collective::AllReduce { .. })
            && self.wire_dtype(call).is_none()
            && (self.rules.choose(call, &self.topology))
                .is_none_or(|ruled| ruled == Algorithm::Direct)
    }

    /// Largest all-reduce, in bytes, that is performed in the same way wherever the buffer is.
    fn mapped_above(&self) -> usize {
        match self.world_size() {
            2 => MAPPED_ABOVE_BYTES_OF_TWO,
            _ => MAPPED_ABOVE_BYTES,
        }
    }

    /// The algorithm for a buffer that travels through slots; `None` if it does not.
    fn in_slots(&self, bytes: usize) -> Option<Algorithm> {
        let [one_shot, direct] = self.slot_bounds()?;
        match bytes {
            _ if bytes <= one_shot => Some(Algorithm::OneShot),
            _ if bytes <= direct => Some(Algorithm::Direct),
            _ => None,
        }
    }

    /// Largest buffers, in bytes, that travel through slots in one turn and in two, if there are
    /// slots.
    pub(super) fn slot_bounds(&self) -> Option<[usize; 2]> {
        let all = self.slot_bytes_max();
        let one_turn = SLOTS_READ_BYTES_MAX / (self.world_size() - 1).max(1);
        self.has_slots.then_some([one_turn.min(all), all])
    }

    /// Largest buffer, in bytes, that travels through slots, if there are any.
    fn slot_bytes_max(&self) -> usize {
        match self.world_size() {
            2 => SLOT_BYTES_MAX_OF_TWO,
            _ => SLOT_BYTES_MAX,
        }
    }

    /// The algorithm for `call`; all ranks get the same one.
    #[must_use]
    pub fn choose(&self, call: &Call) -> Algorithm {
        self.decide(call).0
    }

    /// The algorithm for `call`, with the reason.
    pub(super) fn decide(&self, call: &Call) -> (Algorithm, Reason) {
        let ruled = self.rules.choose(call, &self.topology);
        // A rule by name is worth connections on demand.
        let can_be = |algorithm| {
            let connects = self.connects(algorithm) || self.connects_on_demand;
            connects && self.sums_as_asked(algorithm, call)
        };
        if let Some(chosen) = ruled.filter(|&algorithm| can_be(algorithm)) {
            return (chosen, Reason::Rule);
        }
        match call.collective {
            _ if call.is_mapped => (Algorithm::Direct, Reason::SharedMemory),
            Collective::AllToAll
            | Collective::AllToAllV { .. }
            | Collective::Gather { .. }
            | Collective::Scatter { .. }
            | Collective::Send { .. }
            | Collective::Receive { .. } => (Algorithm::Direct, Reason::NoOther),
            _ if !self.is_mesh() => self.decide_by_size(call),
            Collective::Broadcast { .. } => (Algorithm::Ring, Reason::NoOther),
            Collective::Barrier if self.doubled().contains(&0) => self.decide_by_size(call),
            Collective::Barrier if self.has_slots => (Algorithm::OneShot, Reason::SharedMemory),
            Collective::Barrier if self.star_is_fastest(0) => {
                (Algorithm::Star, Reason::FewerMessages)
            }
            Collective::Barrier => (Algorithm::OneShot, Reason::NoOther),
            // Both choose equally, so that their bits are equal.
            Collective::AllReduce { .. } | Collective::Reduce { .. } => {
                let of_several_steps = self.decide_by_size(call);
                // If these algorithms sum in different orders, a measurement must not decide.
                if !self.folds(of_several_steps.0, call) {
                    of_several_steps
                } else if let Some(algorithm) = self.in_slots(call.bytes()) {
                    (algorithm, Reason::SharedMemory)
                } else if self.star_is_fastest(call.bytes()) {
                    (Algorithm::Star, Reason::FewerMessages)
                } else if call.bytes() <= ONE_PACKET_BYTES_MAX {
                    (Algorithm::OneShot, Reason::OnePacket)
                } else if self.one_shot_is_faster(call.bytes()) {
                    (Algorithm::OneShot, Reason::FewerSteps)
                } else {
                    of_several_steps
                }
            }
            _ if self.in_slots(call.bytes()).is_some() => (Algorithm::Direct, Reason::SharedMemory),
            _ => self.decide_by_size(call),
        }
    }

    fn decide_by_size(&self, call: &Call) -> (Algorithm, Reason) {
        let is_possible = |algorithm: Algorithm| {
            algorithm.performs(&call.collective, &self.topology) && self.allows(algorithm, call)
        };
        let bytes = call.bytes();
        let has_racks = !self.topology.racks().is_empty();
        if has_racks && is_possible(Algorithm::Ring) && bytes > self.levels_bytes_max() {
            (Algorithm::Ring, Reason::SharedRacks)
        } else if is_possible(Algorithm::Doubling) && self.doubled().contains(&bytes) {
            (Algorithm::Doubling, Reason::FewDoublings)
        } else if is_possible(Algorithm::Halving) && self.paired().contains(&bytes) {
            (Algorithm::Halving, Reason::FewHalvings)
        } else if is_possible(Algorithm::Hierarchical) && bytes > self.flat_bytes_max() {
            let reason = if has_racks {
                Reason::SharedRacks
            } else {
                Reason::SharedHosts
            };
            (Algorithm::Hierarchical, reason)
        } else if self.ring_is_direct(call) {
            (Algorithm::Ring, Reason::TwoRanks)
        } else if !self.allows(Algorithm::Ring, call) {
            (Algorithm::Direct, Reason::Reproducible)
        } else if self.world_size() <= DIRECT_RANKS_MAX {
            (Algorithm::Direct, Reason::FewRanks)
        } else if self.connects(Algorithm::Direct) && bytes <= self.direct_bytes_max() {
            (Algorithm::Direct, Reason::SmallChunks)
        } else {
            (Algorithm::Ring, Reason::ManyRanks)
        }
    }

    /// Returns whether the group has the links for `algorithm` from its start.
    pub(super) fn connects(&self, algorithm: Algorithm) -> bool {
        algorithm.needs_few_links(&self.topology) || self.is_mesh()
    }

    /// Returns whether `algorithm` has its links, and sums in the requested order.
    pub(super) fn allows(&self, algorithm: Algorithm, call: &Call) -> bool {
        self.connects(algorithm) && self.sums_as_asked(algorithm, call)
    }

    pub(super) fn sums_as_asked(&self, algorithm: Algorithm, call: &Call) -> bool {
        let sums = call.collective.op().is_some() && call.collective != Collective::Barrier;
        !(self.reproducible && sums) || self.folds(algorithm, call)
    }

    /// Largest buffer, in bytes, that many ranks send each other directly.
    pub(super) fn direct_bytes_max(&self) -> usize {
        let chunk = match self.topology.hosts().len() {
            1 => DIRECT_CHUNK_BYTES_MAX,
            _ => DIRECT_CHUNK_BYTES_MAX_BETWEEN_HOSTS,
        };
        whole_parts(chunk, self.world_size())
    }

    /// Largest buffer, in bytes, that is reduced without regard to shared hosts.
    pub(super) fn flat_bytes_max(&self) -> usize {
        let hosts = self.topology.hosts().len();
        match self.world_size() {
            ..=DIRECT_RANKS_MAX => whole_parts(DIRECT_CHUNK_BYTES_MAX, hosts),
            ranks if !self.topology.racks().is_empty() => {
                RACK_FLAT_BYTES_MAX / (ranks * self.topology.local_ranks_max())
            }
            _ => FLAT_BYTES_MAX * hosts / self.topology.local_ranks_max(),
        }
    }

    /// Largest buffer, in bytes, that hosts in racks do not send around a ring.
    pub(super) fn levels_bytes_max(&self) -> usize {
        whole_parts(LEVELS_BYTES_MAX, self.topology.hosts().len())
    }

    /// Sizes, in bytes, of the buffers that many ranks reduce in pairs, by halving or doubling. If
    /// all ranks take part and neighbours share hosts, no schedule sends fewer bytes between hosts
    /// than halving.
    pub(super) fn paired(&self) -> RangeInclusive<usize> {
        let (ranks, hosts) = (self.world_size(), self.topology.hosts().len());
        let is_even = ranks.is_power_of_two() && self.topology.has_even_blocks();
        match (ranks, hosts) {
            (..=DIRECT_RANKS_MAX, _) => NONE,
            (DOUBLED_WITH_GUESTS_RANKS_MIN..=MESH_RANKS_MAX, _)
                if !is_even && hosts == ranks && self.topology.racks().is_empty() =>
            {
                0..=DOUBLED_BYTES_MAX
            }
            (DOUBLED_SHARED_RANKS_MIN..=MESH_RANKS_MAX, 2..)
                if !is_even
                    && hosts < ranks
                    && self.topology.has_blocks()
                    && self.topology.racks().is_empty() =>
            {
                0..=DOUBLED_SHARED_BYTES_MAX
            }
            (..=MESH_RANKS_MAX, _) if !is_even => NONE,
            (..=MESH_RANKS_MAX, 2..) if hosts < ranks => 0..=usize::MAX,
            // Each rank has its own host.
            (MESH_RANKS_MAX, 2..) => 0..=DIRECT_CHUNK_BYTES_MAX,
            (DOUBLED_RANKS_MIN.., 2..) if self.is_mesh() => 0..=DOUBLED_BYTES_MAX,
            (..=MESH_RANKS_MAX, _) => NONE,
            _ if is_even => 0..=usize::MAX,
            _ if self.topology.has_even_racks() => {
                0..=RACK_PAIRED_BYTES_MAX / self.topology.local_ranks_max()
            }
            (_, 1) => 0..=GUEST_BYTES_MAX * ranks,
            _ => 0..=GUEST_BYTES_MAX * hosts / self.topology.local_ranks_max(),
        }
    }

    /// The part of [`Self::paired`] that uses doubling; halving and doubling give the same bits.
    pub(super) fn doubled(&self) -> RangeInclusive<usize> {
        let paired = self.paired();
        let limit = match self.topology.hosts().len() {
            1 => DOUBLED_BYTES_MAX,
            _ => DOUBLED_BYTES_MAX.min(DOUBLED_HOST_BYTES_MAX / self.topology.local_ranks_max()),
        };
        *paired.start()..=limit.min(*paired.end())
    }

    /// Returns whether `algorithm` sums in the order of ranks.
    fn folds(&self, algorithm: Algorithm, call: &Call) -> bool {
        algorithm.folds() || (algorithm == Algorithm::Ring && self.ring_is_direct(call))
    }

    /// Returns whether a ring is as direct as two steps. This holds between two ranks, without a
    /// fold beside the buffer, unless partial results have their own type.
    fn ring_is_direct(&self, call: &Call) -> bool {
        let dtype = self.wire_dtype(call).unwrap_or(call.dtype);
        let accumulator = call.collective.op().map(|op| dtype.accumulator(op));
        self.world_size() == 2 && accumulator.is_none_or(|accumulator| accumulator == dtype)
    }

    fn star_is_fastest(&self, bytes: usize) -> bool {
        self.measured.is_some_and(|measured| {
            let others = measured
                .one_shot
                .of(bytes)
                .min(measured.two_steps.of(bytes));
            let star = measured.star.map(|star| star.of(bytes));
            bytes <= MEASURED_BYTES_MAX && star.is_some_and(|star| star < others)
        })
    }

    fn one_shot_is_faster(&self, bytes: usize) -> bool {
        self.measured
            .map_or(bytes <= ONE_SHOT_BYTES_MAX, |measured| {
                bytes <= MEASURED_BYTES_MAX
                    && measured.one_shot.of(bytes) <= measured.two_steps.of(bytes)
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::ReduceOp;

    fn call(dtype: DType, count: usize) -> Call {
        Call {
            collective: Collective::AllReduce { op: ReduceOp::Sum },
            dtype,
            count,
            name: "w".into(),
            shapes: String::new(),
            is_mapped: false,
        }
    }

    fn policy(world_size: usize, rules: &str) -> Policy {
        Policy {
            rules: Rules::parse(rules).unwrap(),
            ..Policy::new(Topology::one_host(world_size))
        }
    }

    fn on_hosts(hosts: usize, ranks_on_each: usize) -> Policy {
        Policy::new(Topology::by_host(
            (0..hosts * ranks_on_each).map(|rank| rank / ranks_on_each),
        ))
    }

    #[test]
    fn ranks_that_share_hosts_reduce_large_buffers_inside_them_first() {
        let (small, large) = (call(DType::F32, 30_000), call(DType::F32, 40_000));
        assert_eq!(on_hosts(2, 2).choose(&small), Algorithm::Direct);
        assert_eq!(on_hosts(2, 2).choose(&large), Algorithm::Hierarchical);
        assert_eq!(on_hosts(4, 1).choose(&large), Algorithm::Direct);
        let mut reproducible = on_hosts(2, 2);
        reproducible.reproducible = true;
        assert_eq!(reproducible.choose(&large), Algorithm::Direct);
        reproducible.rules = Rules::always(Algorithm::Hierarchical);
        assert_eq!(reproducible.choose(&large), Algorithm::Direct);
    }

    #[test]
    fn a_rule_for_levels_is_followed_where_there_are_any() {
        let large = call(DType::F32, 1 << 20);
        let rules = Rules::parse("one_shot:64KiB,hierarchical").unwrap();
        let ruled = |policy: Policy| Policy {
            rules: rules.clone(),
            ..policy
        };
        let small = call(DType::U8, 64 << 10);
        assert_eq!(ruled(on_hosts(3, 2)).choose(&small), Algorithm::OneShot);
        assert_eq!(
            ruled(on_hosts(3, 2)).choose(&large),
            Algorithm::Hierarchical
        );
        assert_eq!(ruled(on_hosts(1, 6)).choose(&large), Algorithm::Direct);
    }

    #[test]
    fn small_buffers_take_one_step_and_large_ones_as_few_bytes_as_possible() {
        let large = call(DType::F32, 10_000_000);
        for world_size in [2, 4, 64] {
            let policy = policy(world_size, "auto");
            assert_eq!(policy.choose(&call(DType::F32, 1)), Algorithm::OneShot);
        }
        assert_eq!(policy(2, "auto").choose(&large), Algorithm::Ring);
        assert_eq!(policy(4, "auto").choose(&large), Algorithm::Direct);
        assert_eq!(policy(64, "auto").choose(&large), Algorithm::Ring);
    }

    #[test]
    fn more_than_eight_ranks_on_hosts_reduce_in_pairs_if_these_are_even() {
        let chosen = |policy: Policy| {
            let floats = [1, 1 << 10, 1 << 12, 1 << 16, 1 << 22];
            floats.map(|count| policy.choose(&call(DType::F32, count)).name())
        };
        let [one_shot, direct, ring] = ["one_shot", "direct", "ring"];
        let [halving, doubling, hierarchical] = ["halving", "doubling", "hierarchical"];
        let paired = [doubling, doubling, halving, halving, halving];
        assert_eq!(chosen(on_hosts(4, 4)), paired);
        assert_eq!(
            chosen(on_hosts(3, 4)),
            [one_shot, one_shot, direct, hierarchical, hierarchical]
        );
        let turned = Policy::new(Topology::by_host((0..16).map(|rank| rank % 4)));
        assert_eq!(
            chosen(turned),
            [one_shot, one_shot, direct, hierarchical, hierarchical]
        );
        assert_eq!(
            chosen(on_hosts(64, 1)),
            [doubling, doubling, doubling, direct, ring]
        );
        assert_eq!(
            chosen(on_hosts(32, 1)),
            [doubling, doubling, doubling, direct, ring]
        );
        assert_eq!(
            chosen(on_hosts(48, 1)),
            [doubling, doubling, doubling, direct, ring]
        );
        assert_eq!(
            chosen(on_hosts(16, 1)),
            [one_shot, one_shot, direct, direct, ring]
        );
        assert_eq!(
            chosen(on_hosts(9, 1)),
            [one_shot, one_shot, direct, direct, ring]
        );
        assert_eq!(chosen(on_hosts(2, 4))[1..3], [one_shot, direct]);
        let uneven = [doubling, doubling, direct, hierarchical, hierarchical];
        assert_eq!(chosen(on_hosts(6, 8)), uneven);
        let turned = Policy::new(Topology::by_host((0..24).map(|rank| rank % 3)));
        assert_eq!(chosen(turned)[..2], [one_shot, one_shot]);
        // The guests among 96 ranks would send their whole buffers over their hosts' lines.
        assert_eq!(
            chosen(on_hosts(12, 8))[1..],
            [doubling, halving, ring, ring]
        );
    }

    fn in_racks(racks: usize, hosts_in_each: usize, ranks_on_each: usize) -> Policy {
        let ranks_in_each = hosts_in_each * ranks_on_each;
        let hosts = (0..racks * ranks_in_each).map(|rank| rank / ranks_on_each);
        let topology = Topology::by_host(hosts);
        Policy::new(topology.in_racks(|rank| (rank / ranks_in_each).to_string()))
    }

    #[test]
    fn ranks_in_racks_reduce_inside_them_first_and_large_buffers_on_a_ring_that_enters_each_once() {
        let chosen = |policy: Policy| {
            let floats = [1, 1 << 10, 1 << 13, 1 << 16, 1 << 22];
            floats.map(|count| policy.choose(&call(DType::F32, count)).name())
        };
        let [one_shot, direct, ring] = ["one_shot", "direct", "ring"];
        let [halving, doubling, hierarchical] = ["halving", "doubling", "hierarchical"];
        assert_eq!(
            chosen(in_racks(3, 5, 4)),
            [one_shot, hierarchical, hierarchical, hierarchical, ring]
        );
        assert_eq!(
            chosen(in_racks(3, 4, 1)),
            [one_shot, one_shot, direct, hierarchical, ring]
        );
        assert_eq!(
            chosen(in_racks(4, 4, 4)),
            [doubling, doubling, halving, halving, ring]
        );
        assert_eq!(
            chosen(in_racks(4, 3, 8)),
            [doubling, doubling, hierarchical, hierarchical, ring]
        );
        assert_eq!(
            chosen(in_racks(2, 4, 1)),
            [one_shot, one_shot, direct, direct, ring]
        );
    }

    #[test]
    fn many_ranks_reduce_in_pairs_except_where_that_sends_more() {
        let (small, large) = (call(DType::F32, 1), call(DType::F32, 10_000_000));
        for (world_size, of_large) in [(65, Algorithm::Ring), (128, Algorithm::Halving)] {
            let choose = |rules: &str, call: &Call| policy(world_size, rules).choose(call);
            assert_eq!(choose("auto", &small), Algorithm::Doubling);
            assert_eq!(choose("auto", &large), of_large);
            assert_eq!(choose("auto", &call(DType::F32, 5000)), Algorithm::Halving);
            assert_eq!(choose("ring", &small), Algorithm::Ring);
            assert_eq!(choose("halving", &large), Algorithm::Halving);
            assert_eq!(choose("direct", &small), Algorithm::Direct);
            let few_links = Policy {
                connects_on_demand: false,
                ..policy(world_size, "direct")
            };
            assert_eq!(few_links.choose(&small), Algorithm::Doubling);
            let in_order = Policy {
                reproducible: true,
                ..policy(world_size, "auto")
            };
            assert_eq!(in_order.choose(&large), Algorithm::Direct);
            assert_eq!(in_order.choose(&small), Algorithm::Direct);
            let barrier = Call {
                collective: Collective::Barrier,
                ..call(DType::U8, 1)
            };
            assert_eq!(in_order.choose(&barrier), Algorithm::Doubling);
            let broadcast = Call {
                collective: Collective::Broadcast { root: 1 },
                ..call(DType::F32, 1)
            };
            assert_eq!(choose("auto", &broadcast), Algorithm::Ring);
        }
    }

    #[test]
    fn sizes_up_to_which_a_group_reduces_how_follow_from_its_ranks_hosts_and_racks() {
        const KIB: usize = 1 << 10;
        let up_to = |bytes| 0..=bytes;
        let all = up_to(usize::MAX);
        // Sizes in pairs, largest sizes by doubling, without regard to hosts, and directly.
        for (policy, paired, doubled, flat, direct) in [
            (on_hosts(1, 8), NONE, 0, 64 * KIB, 64 * KIB * 8 + 7),
            (on_hosts(2, 2), NONE, 0, 128 * KIB + 1, 128 * KIB * 4 + 3),
            (on_hosts(1, 16), NONE, 0, 2 * KIB, 64 * KIB * 16 + 15),
            (on_hosts(16, 1), NONE, 0, 512 * KIB, 128 * KIB * 16 + 15),
            (on_hosts(24, 1), NONE, 0, 768 * KIB, 128 * KIB * 24 + 23),
            (on_hosts(3, 4), NONE, 0, 24 * KIB, 128 * KIB * 12 + 11),
            (
                on_hosts(4, 4),
                all.clone(),
                12 * KIB,
                32 * KIB,
                128 * KIB * 16 + 15,
            ),
            (
                on_hosts(6, 8),
                up_to(4 * KIB),
                4 * KIB,
                24 * KIB,
                128 * KIB * 48 + 47,
            ),
            (
                on_hosts(32, 1),
                up_to(16 * KIB),
                16 * KIB,
                1024 * KIB,
                128 * KIB * 32 + 31,
            ),
            (
                on_hosts(64, 1),
                up_to(64 * KIB),
                16 * KIB,
                2048 * KIB,
                128 * KIB * 64 + 63,
            ),
            (
                on_hosts(128, 1),
                all.clone(),
                16 * KIB,
                4096 * KIB,
                128 * KIB * 128 + 127,
            ),
            (
                on_hosts(1, 65),
                up_to(48 * KIB * 65),
                16 * KIB,
                504,
                64 * KIB * 65 + 64,
            ),
            (on_hosts(1, 128), all, 16 * KIB, 256, 64 * KIB * 128 + 127),
            (
                on_hosts(12, 8),
                up_to(72 * KIB),
                6 * KIB,
                48 * KIB,
                128 * KIB * 96 + 95,
            ),
            (
                in_racks(4, 3, 8),
                up_to(8 * KIB),
                6 * KIB,
                682,
                128 * KIB * 96 + 95,
            ),
        ] {
            assert_eq!(policy.paired(), paired, "{:?}", policy.topology);
            assert_eq!(*policy.doubled().end(), doubled, "{:?}", policy.topology);
            assert_eq!(policy.flat_bytes_max(), flat, "{:?}", policy.topology);
            assert_eq!(policy.direct_bytes_max(), direct, "{:?}", policy.topology);
        }
        let racks = in_racks(3, 4, 1);
        let largest = 64 * KIB * 12 + 11;
        assert_eq!(racks.levels_bytes_max(), largest);
        let chosen = |bytes| racks.choose(&call(DType::U8, bytes));
        assert_eq!(chosen(largest), Algorithm::Hierarchical);
        assert_eq!(chosen(largest + 1), Algorithm::Ring);
    }

    #[test]
    fn collectives_without_a_choice_have_their_algorithm_whatever_their_size() {
        let (root, chunk) = (0, 1 << 20);
        let parts = || vec![1 << 20; 16];
        let in_parts = Collective::AllToAllV {
            sent: parts(),
            received: parts(),
        };
        for (policy, others) in [
            (on_hosts(4, 4), Algorithm::Halving),
            (policy(4, "auto"), Algorithm::OneShot),
        ] {
            for (collective, algorithm) in [
                (Collective::AllToAll, Algorithm::Direct),
                (in_parts.clone(), Algorithm::Direct),
                (Collective::Gather { root, chunk }, Algorithm::Direct),
                (Collective::Scatter { root, chunk }, Algorithm::Direct),
                (Collective::Send { to: 1 }, Algorithm::Direct),
                (Collective::Receive { from: 1 }, Algorithm::Direct),
                (Collective::Broadcast { root }, Algorithm::Ring),
            ] {
                let call = Call {
                    collective,
                    ..call(DType::F32, 16 << 20)
                };
                assert_eq!(policy.decide(&call), (algorithm, Reason::NoOther), "{call}");
            }
            let barrier = Call {
                collective: Collective::Barrier,
                ..call(DType::U8, 0)
            };
            let without_bytes = match others {
                Algorithm::Halving => Algorithm::Doubling,
                other => other,
            };
            assert_eq!(policy.choose(&barrier), without_bytes);
        }
    }

    #[test]
    fn what_does_not_sum_is_neither_narrowed_nor_asked_for_an_order() {
        let policy = Policy {
            reproducible: true,
            wire_dtype: Some(DType::Bf16),
            ..policy(4, "ring")
        };
        let counts = vec![1; 4];
        for (collective, sums) in [
            (Collective::AllReduce { op: ReduceOp::Sum }, true),
            (Collective::AllGather { counts }, false),
            (Collective::Broadcast { root: 0 }, false),
            (Collective::Barrier, false),
        ] {
            let call = Call {
                collective,
                ..call(DType::F32, 4)
            };
            assert_eq!(policy.wire_dtype(&call).is_some(), sums, "{call}");
            assert_eq!(
                policy.sums_as_asked(Algorithm::Ring, &call),
                !sums,
                "{call}"
            );
        }
    }

    #[test]
    fn a_rule_needs_links_that_are_there_or_are_made() {
        for (world_size, on_demand, rule, followed) in [
            (64, false, "direct", true),
            (65, true, "direct", true),
            (65, false, "direct", false),
            (65, false, "ring", true),
        ] {
            let policy = Policy {
                connects_on_demand: on_demand,
                ..policy(world_size, rule)
            };
            let chosen = policy.choose(&call(DType::F32, 1)).name();
            assert_eq!(chosen == rule, followed, "{world_size} {chosen}");
            assert_eq!(policy.reaches_all(), world_size < 65 || on_demand);
        }
    }

    #[test]
    fn what_was_measured_is_told_by_algorithm() {
        let us = Duration::from_micros;
        let fitted = |small, large| Cost::fitted((8, us(small)), (8 + 64_000, us(large)));
        let [one_shot, two_steps, star] = [fitted(10, 74), fitted(20, 52), fitted(5, 4)];
        assert_eq!(one_shot.latency, us(10));
        assert!((one_shot.seconds_per_byte * 1e9 - 1.0).abs() < 1e-9);
        assert_eq!((star.latency, star.seconds_per_byte), (us(5), 0.0));
        for (world_size, two, measurable) in [
            (2, Algorithm::Ring, 2),
            (7, Algorithm::Direct, 2),
            (8, Algorithm::Direct, 3),
        ] {
            let mut policy = policy(world_size, "auto");
            assert_eq!(policy.measured(two), None);
            policy.measured = Some(Measured {
                one_shot,
                two_steps,
                star: Some(star),
            });
            let all = [Algorithm::OneShot, two, Algorithm::Star];
            assert_eq!(policy.measurable(), all[..measurable]);
            let measured = all.map(|algorithm| policy.measured(algorithm));
            assert_eq!(measured, [Some(one_shot), Some(two_steps), Some(star)]);
            assert_eq!(policy.measured(Algorithm::Halving), None);
        }
    }

    #[test]
    fn one_rank_does_not_reduce_for_all_where_that_takes_as_long() {
        let cost = Cost {
            latency: Duration::from_micros(100),
            seconds_per_byte: 1e-9,
        };
        let mut policy = policy(16, "auto");
        policy.measured = Some(Measured {
            one_shot: cost,
            two_steps: cost,
            star: Some(cost),
        });
        assert_eq!(policy.choose(&call(DType::U8, 1)), Algorithm::OneShot);
    }

    #[test]
    fn half_precision_travels_directly_where_the_ring_would_send_partial_sums() {
        let large = call(DType::Bf16, 10_000_000);
        assert_eq!(policy(2, "auto").choose(&large), Algorithm::Direct);
        let mut narrow = policy(2, "auto");
        narrow.wire_dtype = Some(DType::Bf16);
        let large = call(DType::F32, 10_000_000);
        assert_eq!(narrow.wire_dtype(&large), Some(DType::Bf16));
        assert_eq!(narrow.choose(&large), Algorithm::Direct);
        assert_eq!(narrow.wire_dtype(&call(DType::F64, 10)), None);
        narrow.narrowed_from_bytes = 40;
        assert_eq!(narrow.wire_dtype(&call(DType::F32, 9)), None);
        assert_eq!(narrow.wire_dtype(&call(DType::F32, 10)), Some(DType::Bf16));
    }

    #[test]
    fn measured_times_decide_between_algorithms_that_sum_alike() {
        let cost = |latency_us, seconds_per_byte| Cost {
            latency: Duration::from_micros(latency_us),
            seconds_per_byte,
        };
        let mut policy = policy(4, "auto");
        policy.measured = Some(Measured {
            one_shot: cost(10, 3e-9),
            two_steps: cost(40, 1e-9),
            star: None,
        });
        assert_eq!(policy.choose(&call(DType::U8, 14_999)), Algorithm::OneShot);
        assert_eq!(policy.choose(&call(DType::U8, 15_001)), Algorithm::Direct);
    }

    #[test]
    fn one_rank_reduces_for_all_where_that_was_measured_to_be_fastest() {
        let cost = |latency_us, seconds_per_byte| Cost {
            latency: Duration::from_micros(latency_us),
            seconds_per_byte,
        };
        let mut policy = policy(16, "auto");
        let measured = Measured {
            one_shot: cost(900, 9e-9),
            two_steps: cost(1000, 5e-9),
            star: Some(cost(100, 20e-9)),
        };
        policy.measured = Some(measured);
        assert_eq!(policy.choose(&call(DType::U8, 1)), Algorithm::Star);
        // Both take 1300 us at 60,000 bytes.
        assert_eq!(policy.choose(&call(DType::U8, 59_999)), Algorithm::Star);
        assert_eq!(policy.choose(&call(DType::U8, 60_001)), Algorithm::Direct);
        let barrier = Call {
            collective: Collective::Barrier,
            ..call(DType::U8, 1)
        };
        assert_eq!(policy.choose(&barrier), Algorithm::Star);
        policy.measured = Some(Measured {
            star: Some(cost(1100, 1e-9)),
            ..measured
        });
        assert_eq!(policy.choose(&call(DType::U8, 1)), Algorithm::OneShot);
        assert_eq!(policy.choose(&barrier), Algorithm::OneShot);
        let small = STAR_RANKS_MIN - 1;
        assert!(
            !Policy::new(Topology::one_host(small))
                .measurable()
                .contains(&Algorithm::Star)
        );
    }

    #[test]
    fn measured_times_of_small_buffers_decide_nothing_for_large_ones() {
        let cost = |seconds_per_byte| Cost {
            latency: Duration::ZERO,
            seconds_per_byte,
        };
        let mut policy = policy(4, "auto");
        policy.measured = Some(Measured {
            one_shot: cost(1e-9),
            two_steps: cost(3e-9),
            star: None,
        });
        let (small, large) = (MEASURED_BYTES_MAX, MEASURED_BYTES_MAX + 1);
        let (small, large) = (call(DType::U8, small), call(DType::U8, large));
        assert_eq!(policy.choose(&small), Algorithm::OneShot);
        assert_eq!(policy.choose(&large), Algorithm::Direct);
    }

    #[test]
    fn reproducible_sums_never_take_the_ring_unless_it_sums_in_the_order_of_ranks() {
        let large = call(DType::F32, 100_000_000);
        for (world_size, expected) in [(2, Algorithm::Ring), (64, Algorithm::Direct)] {
            let mut policy = policy(world_size, "ring");
            policy.reproducible = true;
            assert_eq!(policy.choose(&large), expected);
        }
    }

    #[test]
    fn large_all_reduces_of_heaps_are_mapped_unless_something_else_is_asked_for() {
        let maps = |policy: &Policy, bytes| policy.maps(&Call::float_sum(bytes));
        let with_heaps = |world_size, rules| Policy {
            has_heaps: true,
            ..policy(world_size, rules)
        };
        assert!(!maps(&policy(4, "auto"), 1 << 20), "no heaps");
        for (world_size, above) in [(2, 256 << 10), (3, 64 << 10), (64, 64 << 10)] {
            let policy = with_heaps(world_size, "auto");
            assert!(!maps(&policy, above) && maps(&policy, above + 4));
            let call = Call {
                is_mapped: true,
                ..Call::float_sum(above + 4)
            };
            assert_eq!(policy.choose(&call), Algorithm::Direct);
        }
        assert!(maps(&with_heaps(4, "direct"), 1 << 20));
        assert!(!maps(&with_heaps(4, "ring"), 1 << 20));
        let narrow = Policy {
            wire_dtype: Some(DType::Bf16),
            ..with_heaps(4, "auto")
        };
        assert!(!maps(&narrow, 1 << 20));
        let reduce = Call {
            collective: Collective::Reduce {
                op: ReduceOp::Sum,
                root: 0,
            },
            ..Call::float_sum(1 << 20)
        };
        assert!(!with_heaps(4, "auto").maps(&reduce));
    }

    #[test]
    fn users_choose_by_size() {
        let policy = policy(4, "one_shot:4KiB,direct:8MiB,ring");
        let chosen = |bytes| policy.choose(&call(DType::U8, bytes));
        assert_eq!(chosen(4096), Algorithm::OneShot);
        assert_eq!(chosen(4097), Algorithm::Direct);
        assert_eq!(chosen((8 << 20) + 1), Algorithm::Ring);
    }
}
