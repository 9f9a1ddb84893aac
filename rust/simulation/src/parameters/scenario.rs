//! Scenario of a history, drawn from a seed: the update rule, the processes, and the faults.

use std::time::Duration;

use crate::world::faults::{self, Hits, Trigger};
use crate::world::network::Weather;
use crate::world::random::Random;
use crate::world::time::{MILLISECOND, Moment, SECOND};
use gradring_proto::parameters::keepers::Keepers;
use gradring_proto::parameters::rules::{Combine, Late, Overflow, Rules, Timing};

/// Period of all faults that no message triggers.
const WINDOW: Moment = 6 * SECOND;

/// All decisions about a history that are made before it begins.
#[derive(Debug)]
pub(super) struct Scenario {
    pub(super) rules: Rules,
    pub(super) keepers: Keepers,
    pub(super) faults: Vec<Fault>,
    pub(super) weather: Weather,
    /// Most time that a snapshot takes.
    pub(super) save_max: Moment,
    /// Most time that each worker computes.
    pub(super) paces: Vec<Moment>,
    /// Momentum of the optimizer. Without one, pulls may bring only rows.
    pub(super) momentum: f32,
}

/// A process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Who {
    Server(usize),
    Worker(usize),
}

impl Who {
    /// Number of the process: even for servers, odd for workers.
    pub(super) const fn process(self) -> usize {
        match self {
            Self::Server(server) => 2 * server,
            Self::Worker(worker) => 2 * worker + 1,
        }
    }
}

/// Kinds of messages that can trigger a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Join,
    Stage,
    Staged,
    Submit,
    Go,
    Pull,
    Weights,
    Append,
    Applied,
    Install,
    Installed,
    FetchState,
    FetchedState,
}

const KINDS: [Kind; 13] = [
    Kind::Join,
    Kind::Stage,
    Kind::Staged,
    Kind::Submit,
    Kind::Go,
    Kind::Pull,
    Kind::Weights,
    Kind::Append,
    Kind::Applied,
    Kind::Install,
    Kind::Installed,
    Kind::FetchState,
    Kind::FetchedState,
];

/// A fault that hits a process.
pub(super) type Fault = faults::Fault<Kind, Who, Harm>;

#[derive(Debug, Clone)]
pub(super) enum Harm {
    /// The process ends; a new one starts after a while. `None` loses a worker for ever.
    Kill(Option<Moment>),
    /// The process is stopped for a while.
    Stop(Moment),
    /// No message passes to or from the process for a while.
    Cut(Moment),
    /// All processes end at once, as in a power cut, and start again as at the beginning.
    Crash,
    /// The sequencer lets the workers that wait go on without the awaited ones.
    GoOn,
}

impl Harm {
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Kill(_) => "kill",
            Self::Stop(_) => "stop",
            Self::Cut(_) => "cut",
            Self::Crash => "crash of all",
            Self::GoOn => "no wait for some workers",
        }
    }
}

pub(super) fn timing() -> Timing {
    Timing {
        again: Duration::from_millis(300),
        silence: Duration::from_millis(2500),
        start: Duration::from_millis(4000),
        snapshot_every: 4,
    }
}

impl Scenario {
    pub(super) fn new(random: &mut Random) -> Self {
        let workers = 1 + random.below(4);
        let servers = 1 + random.below(3);
        let replicas = if random.once_in(2) {
            0
        } else {
            random.below(servers)
        };
        let mut paces = vec![100 * MILLISECOND; workers];
        if random.once_in(2) {
            paces[random.below(workers)] *= 4;
        }
        let quiet = random.once_in(3);
        let count = if random.once_in(4) {
            0
        } else {
            1 + random.below(4)
        };
        let faults = (0..count)
            .map(|_| any_fault(random, workers, servers))
            .collect();
        Self {
            rules: rules(random, workers),
            keepers: Keepers { servers, replicas },
            faults,
            weather: Weather {
                delay_max: random.pick(&[2, 20, 100]) * MILLISECOND,
                one_in: if quiet { [u64::MAX; 3] } else { [30, 20, 40] },
            },
            save_max: random.pick(&[1, 200, 1500]) * MILLISECOND,
            paces,
            momentum: random.pick(&[0.0, 0.0, 0.5]),
        }
    }

    /// Returns whether all workers are there whenever servers begin.
    pub(super) fn loses_nobody(&self) -> bool {
        let mut faults = self.faults.iter();
        faults.all(|fault| matches!(fault.harm, Harm::Crash))
    }
}

fn rules(random: &mut Random, workers: usize) -> Rules {
    let staleness = random.pick(&[Some(0), Some(0), Some(1), Some(3), None]);
    let aggregate = random.pick(&[1, 1, 2, 3]);
    Rules {
        workers: workers as u32,
        staleness,
        aggregate,
        queue_max: Some(aggregate + random.below(3)),
        overflow: random.pick(&[Overflow::Wait, Overflow::DropOldest, Overflow::DropNewest]),
        late: random.pick(&[Late::Keep, Late::Weight, Late::Drop]),
        late_after: Some(random.pick(&[0, workers as u64])),
        backup: if random.once_in(3) { 1 } else { 0 },
        combine: if random.once_in(2) {
            Combine::Mean
        } else {
            Combine::Sum
        },
        ..Rules::default()
    }
}

fn any_fault(random: &mut Random, workers: usize, servers: usize) -> Fault {
    let trigger = if random.once_in(3) {
        Trigger::At(random.between(0, WINDOW))
    } else {
        Trigger::Message {
            kind: random.pick(&KINDS),
            number: random.between(1, 40),
            hits: random.pick(&[Hits::Sender, Hits::Receiver]),
        }
    };
    let who = if random.once_in(2) {
        Who::Server(random.below(servers))
    } else {
        Who::Worker(random.below(workers))
    };
    let longest = random.pick(&[SECOND / 4, SECOND, 5 * SECOND]);
    let lasts = random.between(1, longest);
    let harm = match random.below(8) {
        0..4 => Harm::Kill((!random.once_in(5)).then_some(lasts)),
        4 => Harm::Stop(lasts),
        5 => Harm::Cut(lasts),
        6 => Harm::GoOn,
        _ => Harm::Crash,
    };
    Fault { trigger, who, harm }
}
