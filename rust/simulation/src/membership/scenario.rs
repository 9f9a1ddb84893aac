//! Scenario of a history, as its seed will have it: who is there, and what goes wrong.

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::world::faults::{self, Hits, Trigger};
use crate::world::network::Weather;
use crate::world::random::Random;
use crate::world::time::{MILLISECOND, Moment, NEVER, SECOND};
use gradring_proto::consensus::timing::Timing;

/// Everything about a history that is settled before it begins.
#[derive(Debug)]
pub(super) struct Scenario {
    /// Hosts of the first group. All hosts are numbered, and a host's number is its address.
    pub(super) founders: usize,
    /// Hosts on which a process starts later, and when; each number follows the last one.
    pub(super) joiners: Vec<Moment>,
    pub(super) workers: RangeInclusive<usize>,
    pub(super) faults: Vec<Fault>,
    pub(super) weather: Weather,
    /// Whether who connects with a dead process sees that at once, or only that it takes too long.
    pub(super) sees_deaths: bool,
    /// Whether all that goes wrong is the death of one that has just accepted a roster.
    pub(super) is_death_after_acceptance: bool,
}

/// Kinds of messages whose sending can trigger a fault.
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

/// Something that goes wrong.
#[derive(Debug, Clone)]
pub(super) enum Harm {
    /// The process ends, and its address refuses.
    Kill,
    /// It ends, and a new process starts at its address after a while.
    Replace(Moment),
    /// The host is never heard of again.
    Vanish,
    /// The process is stopped for a while.
    Stop(Moment),
    /// It says goodbye.
    Leave,
    /// The group fails, though nobody is lost.
    Break,
    /// Its steps take so long for a while.
    Slow(Moment, Moment),
    /// Nothing passes between hosts of different parts for a while.
    Divide(Vec<usize>, Moment),
    /// The same, but hosts are back for all others after times of their own.
    Fray(Vec<usize>, Vec<Moment>),
    /// Nothing passes from the host to some others for a while.
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

    /// Whether somebody is silent who is not dead.
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

/// A divided network with hosts that are back earlier is whole after so long.
const FRAYED_MAX: Moment = 60 * SECOND;
/// Faults strike in this time, unless messages trigger them.
const WINDOW: Moment = 30 * SECOND;

/// Shorter than in earnest, in proportion, so that a history has room for many of them.
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

/// A majority goes on without the others and then dies, nearly or wholly; the others see that, but
/// not those that are left of it.
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

/// A group takes joiners in, who outnumber it, and is torn from them meanwhile.
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
    // The first of them proposes, and is on either side.
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

/// The group fails, and one of those that accept the next roster dies before it has connected.
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
