//! Scenario of a history, drawn from a seed: its processes and its faults.

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::world::faults::{self, Hits, Trigger};
use crate::world::network::Weather;
use crate::world::random::Random;
use crate::world::time::{MILLISECOND, Moment, NEVER, SECOND};
use gradring_proto::consensus::timing::Timing;

/// All decisions about a history that are made before it begins.
#[derive(Debug)]
pub(super) struct Scenario {
    /// Number of hosts of the first group. A host's number is its address.
    pub(super) founders: usize,
    /// Start times of processes on further hosts, whose numbers follow those of the founders.
    pub(super) joiners: Vec<Moment>,
    pub(super) workers: RangeInclusive<usize>,
    pub(super) faults: Vec<Fault>,
    pub(super) weather: Weather,
    /// True if a member that connects notices at once that its peer is dead; otherwise it waits for
    /// a timeout.
    pub(super) sees_deaths: bool,
    /// True if the only fault is the death of a process that has just accepted a roster.
    pub(super) is_death_after_acceptance: bool,
}

/// Kinds of messages that can trigger a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Gather,
    Install,
    Watch,
    Join,
    Ready,
    Complete,
}

/// A fault that hits a host.
pub(super) type Fault = faults::Fault<Kind, usize, Harm>;

/// Effect of a fault.
#[derive(Debug, Clone)]
pub(super) enum Harm {
    /// The process ends, and its address refuses connections.
    Kill,
    /// The process ends, and a new one starts at its address after a while.
    Replace(Moment),
    /// The host falls silent for ever.
    Vanish,
    /// The process is stopped for a while.
    Stop(Moment),
    /// The process leaves with a goodbye.
    Leave,
    /// The group fails, though all its members live.
    Break,
    /// Steps of the process take longer for a while: extra time and duration.
    Slow(Moment, Moment),
    /// No message passes between hosts of different parts for a while.
    Divide(Vec<usize>, Moment),
    /// The same, but each host can reach all others again after a time of its own.
    Fray(Vec<usize>, Vec<Moment>),
    /// No message passes from the host to some others for a while.
    Mute(Vec<bool>, Moment),
}

impl Harm {
    pub(super) const fn lasts(&self) -> Moment {
        match self {
            Self::Stop(lasts)
            | Self::Divide(_, lasts)
            | Self::Mute(_, lasts)
            | Self::Replace(lasts) => *lasts,
            Self::Slow(_, lasts) => *lasts,
            Self::Fray(..) => FRAYED_MAX,
            _ => 0,
        }
    }

    /// Returns whether the fault makes a live process silent.
    pub(super) fn is_silence(&self) -> bool {
        matches!(
            self,
            Self::Vanish | Self::Stop(_) | Self::Divide(..) | Self::Fray(..) | Self::Mute(..)
        )
    }

    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::Replace(_) => "replace",
            Self::Vanish => "vanish",
            Self::Stop(_) => "stop",
            Self::Leave => "leave",
            Self::Break => "break",
            Self::Slow(..) => "slow",
            Self::Divide(..) => "divide",
            Self::Fray(..) => "fray",
            Self::Mute(..) => "mute",
        }
    }
}

/// Time after which a frayed network is whole again.
const FRAYED_MAX: Moment = 60 * SECOND;
/// Period of all faults that no message triggers.
const WINDOW: Moment = 30 * SECOND;

/// Times in the proportions of real ones, but shorter, so that a history includes many of them.
pub(super) fn timing() -> Timing {
    let milliseconds = Duration::from_millis;
    Timing {
        request: milliseconds(1000),
        again: milliseconds(250),
        stagger: milliseconds(300),
        quiet: milliseconds(2500),
        grace: milliseconds(4000),
        busy: milliseconds(20_000),
        joiner: milliseconds(1500),
        minority: milliseconds(20_000),
        workers: milliseconds(15_000),
        join: milliseconds(15_000),
        remind: milliseconds(2000),
        connect: milliseconds(4000),
        quarantine: milliseconds(1000),
    }
}

impl Scenario {
    pub(super) fn new(random: &mut Random) -> Self {
        let mut founders = 2 + random.below(5);
        let mut joiners: Vec<_> = (0..random.below(4))
            .map(|_| random.between(0, WINDOW))
            .collect();
        let mut least = 1 + random.below(2);
        let mut most = founders + random.below(4);
        let quiet = random.once_in(3);
        let aim = random.below(5);
        let mut faults = Vec::new();
        match aim {
            0 => {
                (founders, joiners, least, most) = (4 + random.below(3), Vec::new(), 1, 8);
                faults = lost_majority(random, founders);
            }
            1 => {
                (founders, least, most) = (2 + random.below(2), 1, 8);
                let start = random.between(0, SECOND);
                joiners = (0..4)
                    .map(|_| start + random.between(0, SECOND / 5))
                    .collect();
                faults = lost_growth(random, founders);
            }
            2 => {
                (founders, joiners, least, most) = (3 + random.below(4), Vec::new(), 1, 8);
                faults = lost_acceptor(random, founders);
            }
            _ => {}
        }
        let hosts = founders + joiners.len();
        let more = if aim < 3 {
            random.below(2)
        } else {
            random.below(6)
        };
        let is_death_after_acceptance = aim == 2 && more == 0 && quiet;
        faults.extend((0..more).map(|_| any_fault(random, hosts, founders)));
        Self {
            founders,
            joiners,
            workers: least..=most,
            faults,
            weather: Weather {
                delay_max: random.pick(&[2, 20, 150]) * MILLISECOND,
                one_in: if quiet { [u64::MAX; 3] } else { [30, 20, 40] },
            },
            sees_deaths: !is_death_after_acceptance && random.once_in(2),
            is_death_after_acceptance,
        }
    }

    pub(super) fn hosts(&self) -> usize {
        self.founders + self.joiners.len()
    }
}

/// A majority continues without the others, and then all or most of it dies. The others see these
/// deaths, but not the survivors of the majority.
fn lost_majority(random: &mut Random, founders: usize) -> Vec<Fault> {
    let start = random.between(SECOND, 3 * SECOND);
    let parts = (0..founders).map(|_| random.below(2)).collect();
    let dies: Vec<_> = (0..founders).map(|_| random.once_in(2)).collect();
    let soon = |random: &mut Random| random.between(4 * SECOND, 14 * SECOND);
    let back = dies
        .iter()
        .map(|dies| if *dies { soon(random) } else { FRAYED_MAX });
    let harm = Harm::Fray(parts, back.collect());
    let at = |at, who, harm| Fault {
        trigger: Trigger::At(at),
        who,
        harm,
    };
    let mut faults = vec![at(start, 0, harm)];
    for host in (0..founders).filter(|host| dies[*host]) {
        faults.push(at(start + soon(random), host, Harm::Kill));
    }
    faults
}

/// A group admits more joiners than it has members, and is separated from them meanwhile.
fn lost_growth(random: &mut Random, founders: usize) -> Vec<Fault> {
    let hosts = founders + 4;
    let kinds = [Kind::Install, Kind::Install, Kind::Ready, Kind::Complete];
    let sent = |random: &mut Random, harm| {
        let (kind, number) = (random.pick(&kinds), random.between(1, 10));
        Fault {
            trigger: Trigger::Message {
                kind,
                number,
                hits: Hits::Sender,
            },
            who: 0,
            harm,
        }
    };
    // Host 0 proposes, and may be in either part.
    let side = random.below(2);
    let parts = (0..hosts).map(|host| {
        if host == 0 {
            side
        } else {
            usize::from(host < founders)
        }
    });
    let parts = parts.collect();
    let back = (0..hosts).map(|host| {
        if host == 0 {
            random.between(1, 5 * SECOND)
        } else {
            FRAYED_MAX
        }
    });
    let harm = Harm::Fray(parts, back.collect());
    let mut faults = vec![sent(random, harm)];
    if random.once_in(2) {
        faults.push(sent(random, Harm::Kill));
    }
    faults
}

/// The group fails, and a process that accepts the next roster dies before it has connected.
fn lost_acceptor(random: &mut Random, founders: usize) -> Vec<Fault> {
    let at = random.between(SECOND, 3 * SECOND);
    let number = random.between(1, founders as u64 - 1);
    let fault = |trigger, harm| Fault {
        trigger,
        who: 0,
        harm,
    };
    vec![
        fault(Trigger::At(at), Harm::Break),
        fault(
            Trigger::Message {
                kind: Kind::Install,
                number,
                hits: Hits::Answerer,
            },
            Harm::Kill,
        ),
    ]
}

fn any_fault(random: &mut Random, hosts: usize, founders: usize) -> Fault {
    let kinds = [
        Kind::Gather,
        Kind::Install,
        Kind::Install,
        Kind::Watch,
        Kind::Join,
        Kind::Ready,
        Kind::Complete,
    ];
    let message = |random: &mut Random, hits| Trigger::Message {
        kind: random.pick(&kinds),
        number: random.between(1, 12),
        hits,
    };
    let trigger = match random.below(4) {
        0 | 1 => Trigger::At(random.between(0, WINDOW)),
        2 => message(random, Hits::Sender),
        _ => message(random, Hits::Answerer),
    };
    let host = if random.once_in(4) {
        random.below(hosts)
    } else {
        random.below(founders)
    };
    let lasts = match random.below(3) {
        0 => random.between(1, 3 * SECOND),
        1 => random.between(1, 15 * SECOND),
        _ => random.between(10 * SECOND, 60 * SECOND),
    };
    let harm = match random.below(12) {
        0 | 1 => Harm::Kill,
        2 => Harm::Replace(random.between(1, 5 * SECOND)),
        3 => Harm::Vanish,
        4 | 5 => Harm::Stop(lasts),
        6 => Harm::Leave,
        7 => Harm::Break,
        8 => Harm::Slow(random.between(SECOND, 25 * SECOND), lasts),
        9 => {
            let parts = 2 + random.below(2);
            let lasts = if random.once_in(4) { NEVER } else { lasts };
            Harm::Divide((0..hosts).map(|_| random.below(parts)).collect(), lasts)
        }
        10 => Harm::Divide(
            (0..hosts).map(|it| usize::from(it == host)).collect(),
            lasts,
        ),
        _ => Harm::Mute((0..hosts).map(|_| random.once_in(2)).collect(), lasts),
    };
    Fault {
        trigger,
        who: host,
        harm,
    }
}
