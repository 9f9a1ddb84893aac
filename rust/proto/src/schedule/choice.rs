//! Choice of the algorithm that performs a collective.
//!
//! What decides between sums of different order, and so between different bits, depends on nothing
//! but the call, the number of ranks, and which of them share a host or a rack. Direct, one-shot and star
//! sum in the same order; among these the times measured when the group formed decide. So do halving
//! and doubling; between these the size decides.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use super::Algorithm;
use super::algorithm_rules::Rules;
use super::topology::Topology;
use crate::collective::{Call, Collective};
use crate::dtype::DType;

/// Most ranks that are connected with one another; more have links for the ring and for halving.
pub const MESH_RANKS_MAX: usize = 64;

/// Most ranks that reduce large buffers directly: above, streams that meet at every rank cost more
/// than a ring's longer way.
pub(super) const DIRECT_RANKS_MAX: usize = 8;

/// Largest chunk, in bytes, that is sent directly between many ranks of one host, or between the
/// hosts of few ranks: where latency still counts.
const DIRECT_CHUNK_BYTES_MAX: usize = 64 << 10;

/// The same between many ranks on several hosts.
const DIRECT_CHUNK_BYTES_MAX_BETWEEN_HOSTS: usize = 128 << 10;

/// Most bytes for each host, times its ranks, that many ranks reduce without regard to who shares a
/// host. They send to all others over a line that they share.
const FLAT_BYTES_MAX: usize = 32 << 10;

/// Most bytes for each host, where racks are known, that are not better sent around a ring: it enters
/// each rack once, and only its steps cost.
const LEVELS_BYTES_MAX: usize = 64 << 10;

/// Most bytes, times ranks and times those of a host, that many ranks in racks send to each: what they
/// send to other racks shares a line.
const RACK_FLAT_BYTES_MAX: usize = 512 << 10;

/// Most bytes that the ranks of one host send together in pairs where levels have their links, and some
/// ranks would be guests, or pairs would cross racks anywhere.
const RACK_PAIRED_BYTES_MAX: usize = 64 << 10;

/// As `FLAT_BYTES_MAX`, where some ranks would be guests in a schedule of halves, and send all they have.
const GUEST_BYTES_MAX: usize = 48 << 10;

/// Largest buffer, in bytes, that goes by doubling where pairs of ranks reduce it: larger ones take
/// longer to send than a step's latency.
const DOUBLED_BYTES_MAX: usize = 16 << 10;

/// Most bytes that the ranks of one host send together in a step of it.
const DOUBLED_HOST_BYTES_MAX: usize = 48 << 10;

/// Fewest ranks, each on its own host, for which the steps of doubling take less time than as many
/// messages as there are ranks.
const DOUBLED_RANKS_MIN: usize = 32;

/// The same where some ranks would be guests, for which there are two steps more.
const DOUBLED_WITH_GUESTS_RANKS_MIN: usize = 48;

/// The same for ranks that share hosts, though not evenly; those of a host stand in a row.
const DOUBLED_SHARED_RANKS_MIN: usize = 20;

/// Largest buffer, in bytes, that these reduce in pairs.
const DOUBLED_SHARED_BYTES_MAX: usize = 4 << 10;

/// Largest buffer, in bytes, for which measured times count: they are of much smaller ones, and on a
/// busy machine their slope may be anything.
pub(super) const MEASURED_BYTES_MAX: usize = 256 << 10;

/// Sizes, in bytes, of the buffers whose times are measured: of nearly no size, and of some.
pub const MEASURED_SIZES: (usize, usize) = (8, 64 << 10);

/// Largest buffer, in bytes, that takes one step whatever was measured: it fits into a packet, so
/// that only the number of steps counts.
pub(super) const ONE_PACKET_BYTES_MAX: usize = 1 << 10;

/// Largest buffer, in bytes, that takes one step if nothing was measured.
pub(super) const ONE_SHOT_BYTES_MAX: usize = 4096;

/// Fewest ranks of which one may reduce small buffers for all. Fewer send few messages anyway, and
/// with the other algorithms each of them sees who is late.
pub(super) const STAR_RANKS_MIN: usize = 8;

/// No size at all.
#[expect(clippy::reversed_empty_ranges, reason = "nothing is in it")]
const NONE: RangeInclusive<usize> = 1..=0;

/// The largest number whose part, one of so many `parts`, is at most `part`, rounded down.
const fn whole_parts(part: usize, parts: usize) -> usize {
    part * parts + parts - 1
}

/// What an algorithm was found to cost: a latency and a time per byte.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// Time for a buffer of no size.
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

/// What all-reduces that sum in the order of ranks cost in this group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    /// In one step.
    pub one_shot: Cost,
    /// In two steps.
    pub two_steps: Cost,
    /// Through rank 0, if that was tried.
    pub star: Option<Cost>,
}

/// How a group chooses.
#[derive(Debug, Clone)]
pub struct Policy {
    /// Which ranks share a host.
    pub topology: Arc<Topology>,
    /// What the user wants.
    pub rules: Rules,
    /// Whether sums must be folds in the order of ranks.
    pub reproducible: bool,
    /// Type to which float32 elements of reductions are rounded for travelling, if any.
    pub wire_dtype: Option<DType>,
    /// How large a reduction has to be for that.
    pub narrowed_from_bytes: usize,
    /// What was measured when the group formed, if it was.
    pub measured: Option<Measured>,
    /// Whether links that are not there are made when they are needed.
    pub connects_on_demand: bool,
}

/// Why an algorithm was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reason {
    /// The user wants it.
    Rule,
    /// There is no other for this collective.
    NoOther,
    /// It fits into a packet.
    OnePacket,
    /// The measured times say so, or the size, if there are none.
    FewerSteps,
    /// The measured times say so.
    FewerMessages,
    /// Ranks share hosts, and bytes between hosts count.
    SharedHosts,
    /// Hosts share racks, and bytes between racks count.
    SharedRacks,
    /// With so many ranks, a number of steps that grows with their logarithm is less.
    FewHalvings,
    /// The same, and the buffer is so small that only steps count.
    FewDoublings,
    /// Between two ranks a ring is direct.
    TwoRanks,
    /// Sums must be folds in the order of ranks.
    Reproducible,
    /// Few enough ranks to send to each.
    FewRanks,
    /// Chunks are so small that latency counts.
    SmallChunks,
    /// Nothing else applies.
    ManyRanks,
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

    /// The algorithms among which measured times decide, as all of them sum in the order of ranks.
    #[must_use]
    pub fn measurable(&self) -> Vec<Algorithm> {
        let star = (self.world_size() >= STAR_RANKS_MIN).then_some(Algorithm::Star);
        [Algorithm::OneShot, self.two_steps()]
            .into_iter()
            .chain(star)
            .collect()
    }

    /// What an all-reduce by `algorithm` was measured to cost, if it was.
    #[must_use]
    pub fn measured(&self, algorithm: Algorithm) -> Option<Cost> {
        let measured = self.measured?;
        match algorithm {
            Algorithm::OneShot => Some(measured.one_shot),
            Algorithm::Star => measured.star,
            _ => (algorithm == self.two_steps()).then_some(measured.two_steps),
        }
    }

    /// Whether all ranks are connected with one another.
    #[must_use]
    pub fn is_mesh(&self) -> bool {
        self.world_size() <= MESH_RANKS_MAX
    }

    /// Whether every rank has or gets a link with any other.
    #[must_use]
    pub fn reaches_all(&self) -> bool {
        self.is_mesh() || self.connects_on_demand
    }

    /// The type in which elements of `call` travel, if it is not their own.
    #[must_use]
    pub fn wire_dtype(&self, call: &Call) -> Option<DType> {
        let reduces =
            !matches!(call.collective, Collective::Barrier) && call.collective.op().is_some();
        let large = call.bytes() >= self.narrowed_from_bytes;
        self.wire_dtype
            .filter(|_| reduces && large && call.dtype == DType::F32)
    }

    /// The algorithm for `call`, which is the same on all ranks.
    #[must_use]
    pub fn choose(&self, call: &Call) -> Algorithm {
        self.decide(call).0
    }

    /// The algorithm for `call`, and why.
    pub(super) fn decide(&self, call: &Call) -> (Algorithm, Reason) {
        let ruled = self.rules.choose(call, &self.topology);
        // What is asked for by name is worth the connections that it takes.
        let can_be = |algorithm| {
            let connects = self.connects(algorithm) || self.connects_on_demand;
            connects && self.sums_as_asked(algorithm, call)
        };
        if let Some(chosen) = ruled.filter(|&algorithm| can_be(algorithm)) {
            return (chosen, Reason::Rule);
        }
        match call.collective {
            Collective::AllToAll
            | Collective::AllToAllV { .. }
            | Collective::Gather { .. }
            | Collective::Scatter { .. }
            | Collective::Send { .. }
            | Collective::Receive { .. } => (Algorithm::Direct, Reason::NoOther),
            _ if !self.is_mesh() => self.decide_by_size(call),
            Collective::Broadcast { .. } => (Algorithm::Ring, Reason::NoOther),
            Collective::Barrier if self.doubled().contains(&0) => self.decide_by_size(call),
            Collective::Barrier if self.star_is_fastest(0) => {
                (Algorithm::Star, Reason::FewerMessages)
            }
            Collective::Barrier => (Algorithm::OneShot, Reason::NoOther),
            // Alike, so that the bits are the same.
            Collective::AllReduce { .. } | Collective::Reduce { .. } => {
                let of_several_steps = self.decide_by_size(call);
                // Where the two sum differently, a measurement must not decide.
                if !self.folds(of_several_steps.0, call) {
                    of_several_steps
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

    /// Whether a group of so many ranks has the links for `algorithm` from its start.
    pub(super) fn connects(&self, algorithm: Algorithm) -> bool {
        algorithm.needs_few_links(&self.topology) || self.is_mesh()
    }

    /// Whether `algorithm` has its links, and sums in the order that is asked for.
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

    /// Largest buffer, in bytes, that is reduced without regard to which ranks share a host.
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

    /// Sizes, in bytes, of the buffers that many ranks reduce in pairs, by halves or by doubling. If all
    /// ranks take part, and neighbours share hosts, no schedule sends fewer bytes between these than
    /// halving.
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
            // Each has its own host.
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

    /// Those of them that go by doubling: both ways have the same bits.
    pub(super) fn doubled(&self) -> RangeInclusive<usize> {
        let paired = self.paired();
        let limit = match self.topology.hosts().len() {
            1 => DOUBLED_BYTES_MAX,
            _ => DOUBLED_BYTES_MAX.min(DOUBLED_HOST_BYTES_MAX / self.topology.local_ranks_max()),
        };
        *paired.start()..=limit.min(*paired.end())
    }

    /// Whether `algorithm` sums in the order of ranks.
    fn folds(&self, algorithm: Algorithm, call: &Call) -> bool {
        algorithm.folds() || (algorithm == Algorithm::Ring && self.ring_is_direct(call))
    }

    /// Between two ranks the ring and the direct way are the same, without a fold beside the
    /// buffer, unless partial results have a type of their own.
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
        // The ranks of 96 that are guests would send all they have over their hosts' lines.
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
        // In pairs, of these by doubling, without regard to hosts, and directly.
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
            let told = all.map(|algorithm| policy.measured(algorithm));
            assert_eq!(told, [Some(one_shot), Some(two_steps), Some(star)]);
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
        // Both in 1300 us.
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
    fn users_choose_by_size() {
        let policy = policy(4, "one_shot:4KiB,direct:8MiB,ring");
        let chosen = |bytes| policy.choose(&call(DType::U8, bytes));
        assert_eq!(chosen(4096), Algorithm::OneShot);
        assert_eq!(chosen(4097), Algorithm::Direct);
        assert_eq!(chosen((8 << 20) + 1), Algorithm::Ring);
    }
}
