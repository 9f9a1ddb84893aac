//! Simulation of all ranks, by events in the order of time.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, VecDeque};
use std::rc::Rc;

use super::Timing;
use super::lines::{Journey, Lines, Next};
use super::network::{NEVER, Network, TICKS_PER_SECOND, ticks};
use super::rank::{Distance, Rank, Target};
use super::traffic::Traffic;
use gradring_core::executor::{Outline, Way, Work};
use gradring_net::caller::Interrupt;
use gradring_proto::collective::Call;
use gradring_proto::error::{Error, Result, Unusable};
use gradring_proto::schedule::Algorithm;
use gradring_proto::schedule::symmetry::Symmetry;

/// Most pieces of a simulation, which takes a minute or two.
const SIMULATED_MAX: usize = 1 << 28;
/// Most pieces kept in memory, about 25 bytes each.
const KEPT_MAX: usize = 1 << 26;
/// Number of events between two calls of the caller's interrupt.
const EVENTS_UNASKED: u64 = 1 << 18;

/// Simulates a collective by `algorithm` on `network`.
pub(super) fn simulate(
    traffic: &Traffic,
    algorithm: Algorithm,
    network: &Network,
    interrupt: Interrupt<'_>,
) -> Result<Timing> {
    let topology = network.topology();
    let call = traffic.call(0, network.world_size);
    if !algorithm.performs(&call.collective, &topology) {
        return Err(Unusable::NotThere {
            algorithm: algorithm.name().into(),
            collective: call.collective.name().into(),
        }
        .into());
    }
    let symmetry = Outline::symmetry(&call, algorithm, &topology);
    simulate_as(traffic, algorithm, network, symmetry, interrupt)
}

/// Simulates a collective in which ranks have this symmetry.
pub(super) fn simulate_as(
    traffic: &Traffic,
    algorithm: Algorithm,
    network: &Network,
    symmetry: Symmetry,
    interrupt: Interrupt<'_>,
) -> Result<Timing> {
    let topology = network.topology();
    let world_size = network.world_size;
    let simulated = match symmetry {
        Symmetry::None => world_size,
        Symmetry::Rotation => network.period(),
    };
    let mut asked = move || match interrupt.interrupts() {
        true => Err(Error::aborted("the caller gave up")),
        false => Ok(()),
    };
    let of = |traffic: &Traffic, rank| {
        let call = traffic.call(rank, world_size);
        Rc::new(Outline::of(&call, algorithm, rank, &topology))
    };
    // Every other rank has about as many pieces, and uneven parts have about as many in total.
    let typical = of(&traffic.even(), 0).len();
    let kept = if symmetry == Symmetry::None {
        simulated
    } else {
        1
    };
    if typical * simulated > SIMULATED_MAX || typical * kept > KEPT_MAX {
        return Err(too_large(traffic, network, typical * simulated));
    }
    let mut outlines = Vec::new();
    for rank in 0..kept {
        asked()?;
        outlines.push(of(traffic, rank));
    }
    let cluster = Cluster {
        network,
        symmetry,
        simulated,
        outlines,
    };
    let mut simulation = Simulation::new(&cluster);
    simulation.run(&mut asked)?;
    if simulation.now == NEVER {
        return Err(Unusable::TooLongToSimulate {
            collective: traffic.name().into(),
            bytes: traffic.bytes(),
            world_size,
        }
        .into());
    }
    Ok(simulation.timing())
}

fn too_large(traffic: &Traffic, network: &Network, pieces: usize) -> Error {
    let world_size = network.world_size;
    let call = Call::float_sum(traffic.bytes());
    let (symmetric, parts) = match traffic {
        Traffic::AllReduce { .. } => {
            let blocks = Outline::blocks(&call, &network.topology());
            ("a ring", blocks * world_size)
        }
        Traffic::AllToAll { .. } => ("one with equal splits", world_size),
    };
    Unusable::TooLargeToSimulate {
        collective: traffic.name().into(),
        bytes: call.bytes(),
        world_size,
        pieces,
        symmetric: symmetric.into(),
        even: call.count.next_multiple_of(parts) * call.dtype.size_bytes(),
    }
    .into()
}

/// The simulated ranks and their network.
struct Cluster<'a> {
    network: &'a Network,
    symmetry: Symmetry,
    /// Number of simulated ranks, which stand for all.
    simulated: usize,
    /// Outlines of each rank, or one for all.
    outlines: Vec<Rc<Outline>>,
}

impl Cluster<'_> {
    fn outline(&self, rank: usize) -> &Rc<Outline> {
        self.outlines.get(rank).unwrap_or(&self.outlines[0])
    }

    fn rank(&self, rank: usize) -> Rank {
        let outline = self.outline(rank);
        let targets = outline.pipes().iter();
        let targets = targets.filter(|route| route.way == Way::Out);
        let targets = targets.map(|route| self.target(rank, route.peer)).collect();
        Rank::new(Rc::clone(outline), targets, self.network.slowness(rank))
    }

    /// Receiver and pipe at the other end of a pipe to `peer`, as the outline of `rank` numbers it.
    fn target(&self, rank: usize, peer: usize) -> Target {
        let (network, world_size) = (self.network, self.network.world_size);
        let peer = self.symmetry.peer(rank, peer, world_size);
        let sender = self.symmetry.seen_from(peer, rank, world_size);
        let receiver = peer % self.simulated;
        let pipe = self.outline(receiver).pipe_from(sender);
        let (from, to) = (network.host(rank), network.host(peer));
        Target {
            rank: receiver as u32,
            pipe: pipe.expect("what is sent is received"),
            distance: if from == to {
                Distance::Host
            } else if network.rack(from) == network.rack(to) {
                Distance::Rack
            } else {
                Distance::Far
            },
        }
    }
}

/// An event in time. At equal times, the event that was planned first comes first.
struct Event {
    at: u64,
    order: u64,
    what: What,
}

enum What {
    /// A rank has finished its present work.
    Worked(u32),
    /// A piece has reached a line.
    Travelled(Journey),
    /// A piece has reached a rank through a pipe.
    Arrived(u32, u32),
}

impl Ord for Event {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.order).cmp(&(self.at, self.order))
    }
}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Event {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Event {}

struct Simulation<'a> {
    network: &'a Network,
    ranks: Vec<Rank>,
    lines: Lines<'a>,
    processors: Vec<Processors>,
    /// Planned events, the next one on top.
    events: BinaryHeap<Event>,
    order: u64,
    now: u64,
    pieces: u64,
}

/// Processors of a host.
struct Processors {
    idle: usize,
    /// Ranks that wait for a processor.
    queue: VecDeque<u32>,
}

impl<'a> Simulation<'a> {
    fn new(cluster: &Cluster<'a>) -> Self {
        let network = cluster.network;
        let processors = || Processors {
            idle: network.cores.unwrap_or(network.ranks_per_host),
            queue: VecDeque::new(),
        };
        let hosts = cluster.simulated / network.ranks_per_host;
        Self {
            network,
            ranks: (0..cluster.simulated)
                .map(|rank| cluster.rank(rank))
                .collect(),
            lines: Lines::new(network, cluster.simulated),
            processors: (0..hosts).map(|_| processors()).collect(),
            events: BinaryHeap::new(),
            order: 0,
            now: 0,
            pieces: 0,
        }
    }

    /// Runs until all ranks are done, or the time is `NEVER`.
    fn run(&mut self, asked: &mut impl FnMut() -> Result<()>) -> Result<()> {
        for rank in 0..self.ranks.len() as u32 {
            self.begin(rank);
        }
        let mut unasked = 0..EVENTS_UNASKED;
        asked()?;
        while let Some(event) = self.events.pop() {
            self.now = event.at;
            if self.now == NEVER {
                return Ok(());
            }
            if unasked.next().is_none() {
                unasked = 0..EVENTS_UNASKED;
                asked()?;
            }
            match event.what {
                What::Worked(rank) => self.end(rank),
                What::Travelled(journey) => self.travel(journey),
                What::Arrived(rank, pipe) => {
                    self.ranks[rank as usize].receive(pipe);
                    self.begin(rank);
                }
            }
        }
        assert!(
            self.ranks.iter().all(Rank::is_done),
            "schedules are proved to end"
        );
        Ok(())
    }

    fn plan(&mut self, at: u64, what: What) {
        let order = self.order;
        self.order += 1;
        self.events.push(Event { at, order, what });
    }

    /// Starts the next work of a rank if the rank is idle and ready; without a free processor it
    /// queues for one.
    fn begin(&mut self, rank: u32) {
        let of_rank = &mut self.ranks[rank as usize];
        if of_rank.is_busy || !of_rank.is_ready() {
            return;
        }
        of_rank.is_busy = true;
        let processors = &mut self.processors[self.network.host(rank as usize)];
        if processors.idle == 0 {
            processors.queue.push_back(rank);
            return;
        }
        processors.idle -= 1;
        self.work(rank);
    }

    /// Lets a rank with a processor work on the piece whose turn it is.
    fn work(&mut self, rank: u32) {
        let of_rank = &mut self.ranks[rank as usize];
        let piece = of_rank.outline.piece(of_rank.turn().1);
        let network = self.network;
        let moving = network.copy_s_per_byte;
        let (once, per_byte) = match piece.work {
            Work::Move => (network.message_s, moving),
            Work::MoveAndFold => (network.message_s, moving + network.fold_s_per_byte),
            Work::Fold => (0.0, network.fold_s_per_byte),
        };
        let seconds = (once + per_byte * f64::from(piece.bytes)) * of_rank.slowness;
        let taken = ticks(seconds);
        of_rank.worked = of_rank.worked.saturating_add(taken);
        self.plan(self.now.saturating_add(taken), What::Worked(rank));
    }

    /// Ends the work of a rank on the piece whose turn it was.
    fn end(&mut self, rank: u32) {
        let of_rank = &mut self.ranks[rank as usize];
        let (pipe, piece) = of_rank.turn();
        of_rank.pass();
        of_rank.is_busy = false;
        if of_rank.is_done() {
            of_rank.finished = self.now;
        }
        let bytes = of_rank.outline.piece(piece).bytes;
        // Outgoing pipes come first.
        if let Some(&target) = of_rank.targets.get(pipe as usize) {
            self.pieces += 1;
            let ends = (rank, target.rank);
            self.travel(Journey::new(ends, target.pipe, bytes, target.distance));
        }
        let processors = &mut self.processors[self.network.host(rank as usize)];
        processors.idle += 1;
        if let Some(next) = processors.queue.pop_front() {
            processors.idle -= 1;
            self.work(next);
        }
        self.begin(rank);
    }

    /// Lets a piece enter the next of its lines.
    fn travel(&mut self, journey: Journey) {
        let ends = [journey.sender, journey.receiver];
        let slowness = ends.map(|rank| self.ranks[rank as usize].slowness);
        let slowness = slowness[0].max(slowness[1]);
        match self.lines.enter(self.now, journey, slowness) {
            Next::Line(at, journey) => self.plan(at, What::Travelled(journey)),
            Next::Receiver(at) => self.plan(at, What::Arrived(journey.receiver, journey.pipe)),
        }
    }

    fn timing(&self) -> Timing {
        let finished = || self.ranks.iter().map(|rank| rank.finished);
        let last = finished().max().unwrap_or(0);
        let worked = self.ranks.iter().map(|rank| rank.worked).max().unwrap_or(0);
        let seconds = |ticks: u64| ticks as f64 / TICKS_PER_SECOND;
        let part = |ticks: u64| ticks as f64 / last.max(1) as f64;
        // The simulated ranks stand for all.
        let each = (self.network.world_size / self.ranks.len()) as u64;
        Timing {
            seconds: seconds(last),
            first_seconds: seconds(finished().min().unwrap_or(0)),
            pieces: self.pieces * each,
            busiest_line: part(self.lines.busiest()),
            busiest_rank: part(worked),
        }
    }
}
