//! Network between ranks, as numbers.

use super::traffic::Traffic;
use gradring_proto::dtype::DType;
use gradring_proto::schedule::topology::Topology;

/// Units of virtual time in a second: a byte takes 80 of them at 100 Gbit/s.
pub(super) const TICKS_PER_SECOND: f64 = 1e12;
/// Virtual time that is not simulated any more: 213 days.
pub(super) const NEVER: u64 = u64::MAX;

/// Equal hosts with equally many ranks, and what is between and in them.
#[derive(Debug, Clone, PartialEq)]
pub struct Network {
    /// Number of ranks: a multiple of `ranks_per_host`.
    pub world_size: usize,
    /// Ranks on each host, in a row.
    pub ranks_per_host: usize,
    /// Between two hosts; the rate is that of each host's line in each direction.
    pub between: Path,
    /// Between two ranks of a host; the rate is that of each rank in each direction.
    pub inside: Path,
    /// What hosts of one rack share on their way to others, if anything does.
    pub uplink: Option<Uplink>,
    /// Processors of each host; without a number, as many as it has ranks.
    pub cores: Option<usize>,
    /// Seconds of a processor for each piece, to send or to receive it.
    pub message_s: f64,
    /// Seconds of a processor for each byte, to send or to receive it.
    pub copy_s_per_byte: f64,
    /// Seconds of a processor for each byte that is reduced, beside those to receive it.
    pub fold_s_per_byte: f64,
    /// Ranks that need so many times as long for everything: their processor and what they send and
    /// receive.
    pub stragglers: Vec<(usize, f64)>,
}

/// A way between two ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Path {
    /// Seconds until the first byte arrives.
    pub latency_s: f64,
    /// Bytes for each second.
    pub bytes_per_s: f64,
}

/// What the hosts of a rack share, in each direction.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Uplink {
    /// Hosts in a rack, in a row; the last rack may have fewer.
    pub hosts: usize,
    /// Bytes for each second.
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

    /// The rack of a host.
    pub(super) fn rack(&self, host: usize) -> usize {
        self.uplink.map_or(0, |uplink| host / uplink.hosts)
    }

    pub(super) const fn hosts(&self) -> usize {
        self.world_size / self.ranks_per_host
    }

    /// How many times as long a rank needs.
    pub(super) fn slowness(&self, rank: usize) -> f64 {
        let of_rank = self.stragglers.iter().filter(|(slow, _)| *slow == rank);
        of_rank.map(|(_, factor)| *factor).product()
    }

    /// After how many ranks everything is as before, if ranks do the same but with others.
    pub(super) fn period(&self) -> usize {
        let period = self.ranks_per_host * self.uplink.map_or(1, |uplink| uplink.hosts);
        let even = self.world_size.is_multiple_of(period) && self.stragglers.is_empty();
        if even { period } else { self.world_size }
    }

    /// Seconds that the collective does not go below, because lines, uplinks and ports have to carry
    /// its bytes.
    #[must_use]
    pub fn bandwidth_bound_s(&self, traffic: &Traffic) -> f64 {
        match traffic {
            Traffic::AllReduce { bytes } => self.sum_bound_s(*bytes),
            Traffic::AllToAll { .. } => self.exchange_bound_s(&traffic.parts(self.world_size)),
        }
    }

    /// Each line has to carry 2(H-1)/H of an all-reduce's bytes for H hosts, each uplink so for racks,
    /// and each rank's port for the ranks of one host.
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

    /// What each rank has for the others elsewhere has to leave its port, line and uplink, and what
    /// they have for it has to come in. `parts` are the elements that each rank has for each.
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

    /// Seconds for the log2(N) steps that ranks need who talk to one other at a time: log2(H) between
    /// hosts, and the rest inside them.
    #[must_use]
    pub fn latency_bound_s(&self) -> f64 {
        let steps = |parts: usize| f64::from(parts.next_power_of_two().ilog2());
        let between = steps(self.hosts());
        let inside = (steps(self.world_size) - between).max(0.0);
        between * self.between.latency_s + inside * self.inside.latency_s
    }
}

/// Most bytes that so many ranks in a row send to the others, or get from them, of those whose
/// `parts` these are.
fn carried(parts: &[usize], in_a_row: usize) -> f64 {
    let sum = |parts: &[usize]| parts.iter().map(|part| *part as f64).sum::<f64>();
    let all = sum(parts);
    let of_some = parts.chunks(in_a_row).map(|some| {
        let others = (parts.len() - some.len()) as f64;
        (some.len() as f64 * (all - sum(some))).max(others * sum(some))
    });
    of_some.fold(0.0, f64::max) * DType::F32.size_bytes() as f64
}

/// Virtual time for something.
pub(super) fn ticks(seconds: f64) -> u64 {
    (seconds * TICKS_PER_SECOND).round() as u64
}
