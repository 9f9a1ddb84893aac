//! Simulation of all ranks: events in the order of their time.

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

/// Most pieces that are simulated: a minute or two.
const SIMULATED_MAX: usize = 1 << 28;
/// Most pieces that are kept, about 25 bytes each.
const KEPT_MAX: usize = 1 << 26;
/// How many events pass before the caller is asked again.
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

/// The same where ranks are alike as `symmetry` says.
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
    // About as many as of any other rank, and with other parts about as many for all.
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
    let (alike, parts) = match traffic {
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
        alike: alike.into(),
        even: call.count.next_multiple_of(parts) * call.dtype.size_bytes(),
    }
    .into()
}

/// What is simulated.
struct Cluster<'a> {
    network: &'a Network,
    symmetry: Symmetry,
    /// How many ranks stand for all.
    simulated: usize,
    /// Of each rank, or one for all.
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

    /// Where a pipe to `peer`, as the outline of `rank` calls it, leads.
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

/// What happens, and when. What was foreseen first comes first.
struct Event {
    at: u64,
    order: u64,
    what: What,
}

enum What {
    /// A rank has done what it was busy with.
    Worked(u32),
    /// A piece has come to a line.
    Travelled(Journey),
    /// A piece has come to a rank, through a pipe.
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
    /// The next one first.
    events: BinaryHeap<Event>,
    order: u64,
    now: u64,
    pieces: u64,
}

/// Those of a host.
struct Processors {
    idle: usize,
    /// Ranks that want one.
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

    /// Until all ranks are done, or it is `NEVER`.
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

    /// A rank begins with what it can do, if it is idle and there is a processor.
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

    /// A rank that has a processor does what its turn is.
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

    /// A rank has done what its turn was.
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

    /// A piece has come to a line.
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
        // Those that are simulated stand for all.
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
