//! Network between ranks, given as numbers.

use super::traffic::Traffic;
use gradring_proto::dtype::DType;
use gradring_proto::schedule::topology::Topology;

/// Units of virtual time in a second. At 100 Gbit/s a byte takes 80 of them.
pub(super) const TICKS_PER_SECOND: f64 = 1e12;
/// End of virtual time: 213 days.
pub(super) const NEVER: u64 = u64::MAX;

/// Equal hosts with equal numbers of ranks, and the lines between and inside them.
#[derive(Debug, Clone, PartialEq)]
pub struct Network {
    /// Number of ranks: a multiple of `ranks_per_host`.
    pub world_size: usize,
    /// Ranks on each host, in a row.
    pub ranks_per_host: usize,
    /// Path between two hosts; the rate is that of each host's line in each direction.
    pub between: Path,
    /// Path between two ranks of a host; the rate is that of each rank's port in each direction.
    pub inside: Path,
    /// Link that the hosts of a rack share towards other racks, if it is limited.
    pub uplink: Option<Uplink>,
    /// Processors of each host; `None` means as many as it has ranks.
    pub cores: Option<usize>,
    /// Processor seconds to send or to receive one piece.
    pub message_s: f64,
    /// Processor seconds to send or to receive one byte.
    pub copy_s_per_byte: f64,
    /// Processor seconds to reduce one byte, besides those to receive it.
    pub fold_s_per_byte: f64,
    /// Slow ranks with their factors: their processor and their transfers take so many times as
    /// long.
    pub stragglers: Vec<(usize, f64)>,
}

/// A path between two ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Path {
    /// Seconds until the first byte arrives.
    pub latency_s: f64,
    /// Bytes per second.
    pub bytes_per_s: f64,
}

/// Link between a rack and the others, with this rate in each direction.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Uplink {
    /// Hosts in a rack, by consecutive numbers; the last rack may have fewer.
    pub hosts: usize,
    /// Bytes per second.
    pub bytes_per_s: f64,
}

impl Network {
    pub(super) fn topology(&self) -> Topology {
        let topology = Topology::by_host((0..self.world_size).map(|rank| self.host(rank)));
        match self.uplink {
            None => topology,
            Some(_) => topology.in_racks(|rank| self.rack(self.host(rank)).to_string()),
        }
    }

    pub(super) const fn host(&self, rank: usize) -> usize {
        rank / self.ranks_per_host
    }

    /// Number of the rack of a host.
    pub(super) fn rack(&self, host: usize) -> usize {
        self.uplink.map_or(0, |uplink| host / uplink.hosts)
    }

    pub(super) const fn hosts(&self) -> usize {
        self.world_size / self.ranks_per_host
    }

    /// Factor by which a rank is slower than others.
    pub(super) fn slowness(&self, rank: usize) -> f64 {
        let of_rank = self.stragglers.iter().filter(|(slow, _)| *slow == rank);
        of_rank.map(|(_, factor)| *factor).product()
    }

    /// Number of ranks after which the network repeats itself. If all ranks do the same relative to
    /// their position, so many stand for all.
    pub(super) fn period(&self) -> usize {
        let period = self.ranks_per_host * self.uplink.map_or(1, |uplink| uplink.hosts);
        let even = self.world_size.is_multiple_of(period) && self.stragglers.is_empty();
        if even { period } else { self.world_size }
    }

    /// Lower bound on the seconds of a collective, because lines, uplinks and ports have to carry
    /// its bytes.
    #[must_use]
    pub fn bandwidth_bound_s(&self, traffic: &Traffic) -> f64 {
        match traffic {
            Traffic::AllReduce { bytes } => self.sum_bound_s(*bytes),
            Traffic::AllToAll { .. } => self.exchange_bound_s(&traffic.parts(self.world_size)),
        }
    }

    /// Seconds to carry an all-reduce. Each host's line carries 2(H-1)/H of its bytes for H hosts.
    /// Each uplink does the same for racks, and, on a single host, each rank's port for ranks.
    fn sum_bound_s(&self, bytes: usize) -> f64 {
        let carried = |parts: usize| 2.0 * bytes as f64 * (parts - 1) as f64 / parts as f64;
        let hosts = self.hosts();
        if hosts == 1 {
            return carried(self.world_size) / self.inside.bytes_per_s;
        }
        let uplinks = self.uplink.map_or(0.0, |uplink| {
            carried(hosts.div_ceil(uplink.hosts)) / uplink.bytes_per_s
        });
        uplinks.max(carried(hosts) / self.between.bytes_per_s)
    }

    /// Seconds to carry an all-to-all. All elements of a rank for ranks elsewhere leave by its
    /// port, line and uplink, and all elements for it come in by them. `parts` are the elements
    /// that each rank has for each.
    fn exchange_bound_s(&self, parts: &[usize]) -> f64 {
        let of_host = self.ranks_per_host;
        let inside = parts.chunks(of_host).map(|host| carried(host, 1));
        let inside = inside.fold(0.0, f64::max) / self.inside.bytes_per_s;
        let between = carried(parts, of_host) / self.between.bytes_per_s;
        let uplinks = self.uplink.map_or(0.0, |uplink| {
            carried(parts, of_host.saturating_mul(uplink.hosts)) / uplink.bytes_per_s
        });
        inside.max(between).max(uplinks)
    }

    /// Seconds for the log2(N) steps of ranks that exchange data with one other at a time. log2(H)
    /// steps are between hosts, and the rest inside them.
    #[must_use]
    pub fn latency_bound_s(&self) -> f64 {
        let steps = |parts: usize| f64::from(parts.next_power_of_two().ilog2());
        let between = steps(self.hosts());
        let inside = (steps(self.world_size) - between).max(0.0);
        between * self.between.latency_s + inside * self.inside.latency_s
    }
}

/// Most bytes that a row of `in_a_row` ranks sends to the others or receives from them. `parts` are
/// the elements for each rank.
fn carried(parts: &[usize], in_a_row: usize) -> f64 {
    let sum = |parts: &[usize]| parts.iter().map(|part| *part as f64).sum::<f64>();
    let all = sum(parts);
    let of_some = parts.chunks(in_a_row).map(|some| {
        let others = (parts.len() - some.len()) as f64;
        (some.len() as f64 * (all - sum(some))).max(others * sum(some))
    });
    of_some.fold(0.0, f64::max) * DType::F32.size_bytes() as f64
}

/// Converts seconds to virtual time.
pub(super) fn ticks(seconds: f64) -> u64 {
    (seconds * TICKS_PER_SECOND).round() as u64
}
