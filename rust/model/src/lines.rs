//! Lines on which pieces take turns: lines of hosts, uplinks of racks, and ports of ranks.

use super::network::{Network, TICKS_PER_SECOND, ticks};
use super::rank::Distance;

/// All lines, with the time at which each is next free.
pub(super) struct Lines<'a> {
    network: &'a Network,
    /// Lines by kind, direction and number: those of hosts, uplinks of racks, ports of ranks.
    lines: Vec<Line>,
    hosts: usize,
    racks: usize,
    ranks: usize,
}

#[derive(Clone, Copy)]
struct Line {
    ticks_per_byte: f64,
    free: u64,
    carried: u64,
}

/// A piece in transit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Journey {
    pub(super) sender: u32,
    pub(super) receiver: u32,
    pub(super) pipe: u32,
    pub(super) bytes: u32,
    pub(super) distance: Distance,
    /// Number of lines that its head has entered.
    stage: u8,
    /// Time at which its last byte leaves these lines.
    tail: u64,
}

impl Journey {
    pub(super) const fn new(
        (sender, receiver): (u32, u32),
        pipe: u32,
        bytes: u32,
        distance: Distance,
    ) -> Self {
        Self {
            sender,
            receiver,
            pipe,
            bytes,
            distance,
            stage: 0,
            tail: 0,
        }
    }
}

/// Next station of a piece.
pub(super) enum Next {
    /// Another line, which its head reaches at this time.
    Line(u64, Journey),
    /// The receiver, at which all of it has arrived at this time.
    Receiver(u64),
}

impl<'a> Lines<'a> {
    /// Lines of the first `ranks` ranks.
    pub(super) fn new(network: &'a Network, ranks: usize) -> Self {
        let hosts = ranks / network.ranks_per_host;
        let racks = network.rack(hosts - 1) + 1;
        let line = |bytes_per_s: f64| Line {
            ticks_per_byte: TICKS_PER_SECOND / bytes_per_s,
            free: 0,
            carried: 0,
        };
        let mut lines = vec![line(network.between.bytes_per_s); 2 * hosts];
        let uplink = network.uplink.map_or(f64::INFINITY, |up| up.bytes_per_s);
        lines.extend(vec![line(uplink); 2 * racks]);
        lines.extend(vec![line(network.inside.bytes_per_s); 2 * ranks]);
        Self {
            network,
            lines,
            hosts,
            racks,
            ranks,
        }
    }

    /// Lets the head of a piece enter the next of its lines, and returns the station after that.
    pub(super) fn enter(&mut self, now: u64, mut journey: Journey, slowness: f64) -> Next {
        let last = match journey.distance {
            Distance::Host | Distance::Rack => 1,
            Distance::Far => 3,
        };
        let index = self.index(journey);
        let line = &mut self.lines[index];
        let taken = (f64::from(journey.bytes) * line.ticks_per_byte * slowness).round() as u64;
        let start = now.max(line.free);
        line.free = start.saturating_add(taken);
        line.carried = line.carried.saturating_add(taken);
        if journey.stage == last {
            return Next::Receiver(line.free.max(journey.tail));
        }
        journey.stage += 1;
        let latency = if journey.stage == last {
            let path = match journey.distance {
                Distance::Host => self.network.inside,
                Distance::Rack | Distance::Far => self.network.between,
            };
            ticks(path.latency_s)
        } else {
            0
        };
        journey.tail = journey.tail.max(line.free).saturating_add(latency);
        Next::Line(start.saturating_add(latency), journey)
    }

    fn index(&self, journey: Journey) -> usize {
        let ends = [journey.sender, journey.receiver].map(|rank| rank as usize);
        let incoming = journey.stage > 0;
        let rank = ends[usize::from(incoming)];
        let host = self.network.host(rank);
        let (of_racks, of_ranks) = (2 * self.hosts, 2 * (self.hosts + self.racks));
        match (journey.distance, journey.stage) {
            (Distance::Host, _) => of_ranks + usize::from(incoming) * self.ranks + rank,
            (Distance::Rack, _) | (Distance::Far, 0 | 3) => {
                usize::from(incoming) * self.hosts + host
            }
            (Distance::Far, stage) => {
                let incoming = stage == 2;
                let host = self.network.host(ends[usize::from(incoming)]);
                of_racks + usize::from(incoming) * self.racks + self.network.rack(host)
            }
        }
    }

    /// Time in which the busiest line carries bytes.
    pub(super) fn busiest(&self) -> u64 {
        let carried = self.lines.iter().map(|line| line.carried);
        carried.max().unwrap_or(0)
    }
}
