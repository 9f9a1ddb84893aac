//! Faults of a run, and the ranks that survivors may blame for each.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::world::pipes::{End, PipeId, Pipes};
use crate::world::random::Random;
use crate::world::time::{MILLISECOND, Moment, NEVER, SECOND, nanoseconds};
use gradring_net::config::timing::Timing;
use gradring_proto::collective::{Call, Collective};
use gradring_proto::dtype::DType;
use gradring_proto::wire::signature::HEADER_BYTES;

/// Trigger of a fault: `after` a rank has begun to compute for a collective and has sent `sent`
/// bytes of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Trigger {
    pub(super) rank: usize,
    /// Position of the collective, counted from 0.
    pub(super) number: usize,
    /// Bytes that the rank must have sent to its successor in this collective.
    pub(super) sent: usize,
    pub(super) after: Moment,
}

impl Trigger {
    pub(super) fn is(&self, rank: usize, number: usize) -> bool {
        self.rank == rank && self.number == number
    }
}

/// Difference between a rank's call and the right one.
#[derive(Debug, Clone, Copy)]
pub(super) enum Difference {
    Name,
    Count,
    Barrier,
}

impl Difference {
    pub(super) fn change(self, call: &mut Call) {
        match self {
            // An all-to-all checks its count before it sends, so its count stays.
            Self::Count
                if !matches!(call.collective, Collective::Barrier | Collective::AllToAll) =>
            {
                call.count += 1;
                call.shapes = format!("[{}]", call.count);
                match &mut call.collective {
                    Collective::AllGather { counts } | Collective::ReduceScatter { counts, .. } => {
                        counts[0] += 1;
                    }
                    Collective::Gather { chunk, .. } | Collective::Scatter { chunk, .. } => {
                        *chunk += 1;
                    }
                    // The count stays as it was, so ranks differ only in the shape of a row.
                    Collective::AllToAllV { .. } => call.count -= 1,
                    _ => {}
                }
            }
            Self::Barrier if !matches!(call.collective, Collective::Barrier) => {
                *call = Call {
                    collective: Collective::Barrier,
                    dtype: DType::U8,
                    count: 1,
                    name: call.name.clone(),
                    shapes: String::new(),
                    is_mapped: false,
                };
            }
            _ => call.name = "y".into(),
        }
    }
}

/// A fault. Fields of a variant refer to the rank of the trigger, which is at fault.
#[derive(Debug, Clone)]
pub(super) enum Fault {
    /// The process ends.
    Killed { trigger: Trigger, end: bool },
    /// The process is stopped, for ever or for a while.
    Stopped { trigger: Trigger, lasts: Moment },
    /// The program ends, and closes the communicator in whatever state it is.
    Exits { trigger: Trigger },
    /// The program aborts the communicator.
    Aborts { trigger: Trigger },
    /// The program closes its communicator before the last collectives.
    LeavesEarly { trigger: Trigger },
    /// The program makes a different call.
    CallsAnother { trigger: Trigger, how: Difference },
    /// The program computes for longer than the other ranks.
    Late { trigger: Trigger, by: Moment },
    /// The data connection to a peer is reset, for both ends or for the peer alone.
    DataCut {
        trigger: Trigger,
        to: usize,
        half: bool,
    },
    /// The data connection to a peer delivers nothing, for ever or for a while.
    DataSilent {
        trigger: Trigger,
        to: usize,
        lasts: Moment,
    },
    /// The data connection to a peer delivers each piece `delay` later.
    DataSlow {
        trigger: Trigger,
        to: usize,
        delay: Moment,
    },
    /// Bytes change on the data connection to a peer, and the peer's link detects the change.
    DataCorrupted { trigger: Trigger, to: usize },
    /// One of the first bytes of a collective changes on the way to a peer.
    HeaderChanged {
        trigger: Trigger,
        to: usize,
        byte: usize,
    },
    /// The control connection to the successor ends, for both ends or for the successor alone.
    ControlCut { trigger: Trigger, half: bool },
    /// The control connection to the successor delivers each piece `delay` later.
    ControlSlow { trigger: Trigger, delay: Moment },
    /// The control connection to the successor delivers nothing, for ever or for a while.
    ControlSilent { trigger: Trigger, lasts: Moment },
    /// A byte changes on the control connection to the successor.
    ControlGarbled { trigger: Trigger },
    /// All connections to the rank, from the rank, or both deliver nothing.
    CutOff {
        trigger: Trigger,
        inbound: bool,
        outbound: bool,
        lasts: Moment,
    },
    /// No connection between two parts of the group delivers anything.
    Partition {
        trigger: Trigger,
        part: Vec<bool>,
        lasts: Moment,
    },
}

impl Fault {
    /// Draws a fault. Faults that only `facts.rs` uses are never drawn, so that a seed keeps its
    /// history.
    pub(super) fn new(
        random: &mut Random,
        world_size: usize,
        collectives: usize,
        timeout: Duration,
    ) -> Self {
        let trigger = Trigger {
            rank: random.below(world_size),
            number: random.below(collectives),
            sent: 0,
            after: match random.below(4) {
                0 => 0,
                1 => random.between(0, MILLISECOND),
                2 => random.between(0, 60 * MILLISECOND),
                _ => random.between(0, 11 * SECOND),
            },
        };
        let to = (trigger.rank + 1 + random.below(world_size - 1)) % world_size;
        let timeout = nanoseconds(timeout);
        // Shorter than any silence that is noticed, or for ever, or anything in between.
        let unnoticed = timeout.min(nanoseconds(Timing::USUAL.silence)) - 2 * SECOND;
        let lasts = match random.below(3) {
            0 => random.between(1, unnoticed),
            1 => NEVER,
            _ => random.between(1, 15 * SECOND),
        };
        let at_once = Trigger {
            after: 0,
            ..trigger
        };
        match random.below(14) {
            0 => Self::Killed {
                trigger,
                end: random.once_in(2),
            },
            1 => Self::Stopped { trigger, lasts },
            2 => Self::Aborts { trigger },
            3 => Self::LeavesEarly { trigger: at_once },
            4 => Self::CallsAnother {
                trigger: at_once,
                how: random.pick(&[Difference::Name, Difference::Count, Difference::Barrier]),
            },
            5 => Self::Late {
                trigger: at_once,
                by: if random.once_in(2) {
                    timeout - random.between(1, 2) * SECOND
                } else {
                    timeout + random.between(1, 6 * SECOND)
                },
            },
            6 | 7 => Self::DataCut {
                trigger,
                to,
                half: random.once_in(2),
            },
            8 => Self::DataSilent { trigger, to, lasts },
            9 => Self::HeaderChanged {
                trigger: at_once,
                to,
                byte: random.below(HEADER_BYTES),
            },
            10 => match random.below(3) {
                0 => Self::ControlCut {
                    trigger,
                    half: false,
                },
                1 => Self::ControlSilent { trigger, lasts },
                _ => Self::ControlGarbled { trigger },
            },
            11 | 12 => {
                let inbound = random.once_in(2);
                Self::CutOff {
                    trigger,
                    inbound,
                    outbound: !inbound || random.once_in(2),
                    lasts,
                }
            }
            _ => Self::Partition {
                trigger,
                part: (0..world_size).map(|_| random.once_in(2)).collect(),
                lasts,
            },
        }
    }

    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Killed { .. } => "killed",
            Self::Stopped { .. } => "stopped",
            Self::Exits { .. } => "exits",
            Self::Aborts { .. } => "aborts",
            Self::LeavesEarly { .. } => "leaves early",
            Self::CallsAnother { .. } => "calls another",
            Self::Late { .. } => "late",
            Self::DataCut { half: false, .. } => "data cut",
            Self::DataCut { half: true, .. } => "data half-open",
            Self::DataSilent { .. } => "data silent",
            Self::DataSlow { .. } => "data slow",
            Self::DataCorrupted { .. } => "data corrupted",
            Self::HeaderChanged { .. } => "header changed",
            Self::ControlCut { half: false, .. } => "control cut",
            Self::ControlCut { half: true, .. } => "control half-open",
            Self::ControlSlow { .. } => "control slow",
            Self::ControlSilent { .. } => "control silent",
            Self::ControlGarbled { .. } => "control garbled",
            Self::CutOff { .. } => "cut off",
            Self::Partition { .. } => "partition",
        }
    }

    pub(super) const fn trigger(&self) -> Trigger {
        match self {
            Self::Killed { trigger, .. }
            | Self::Stopped { trigger, .. }
            | Self::Exits { trigger }
            | Self::Aborts { trigger }
            | Self::LeavesEarly { trigger }
            | Self::CallsAnother { trigger, .. }
            | Self::Late { trigger, .. }
            | Self::DataCut { trigger, .. }
            | Self::DataSilent { trigger, .. }
            | Self::DataSlow { trigger, .. }
            | Self::DataCorrupted { trigger, .. }
            | Self::HeaderChanged { trigger, .. }
            | Self::ControlCut { trigger, .. }
            | Self::ControlSlow { trigger, .. }
            | Self::ControlSilent { trigger, .. }
            | Self::ControlGarbled { trigger }
            | Self::CutOff { trigger, .. }
            | Self::Partition { trigger, .. } => *trigger,
        }
    }

    /// Duration of the fault, if the fault delays other ranks.
    pub(super) const fn lasts(&self) -> Moment {
        match self {
            Self::Late { by, .. } => *by,
            Self::Stopped { lasts, .. }
            | Self::DataSilent { lasts, .. }
            | Self::ControlSilent { lasts, .. }
            | Self::CutOff { lasts, .. }
            | Self::Partition { lasts, .. } => *lasts,
            _ => 0,
        }
    }

    /// Returns whether the fault ends before any rank may notice it.
    pub(super) fn passes(&self, timeout: Duration) -> bool {
        let bearable = match self {
            Self::Late { .. } | Self::DataSilent { .. } => timeout,
            Self::ControlSilent { .. } => Timing::USUAL.silence,
            _ => timeout.min(Timing::USUAL.silence),
        };
        // Margin for a heartbeat that was not sent yet, and for its delivery.
        let margin = Duration::from_millis(1500);
        (1..nanoseconds(bearable.saturating_sub(margin))).contains(&self.lasts())
            || matches!(self, Self::Late { by, .. } if *by < nanoseconds(timeout) - SECOND / 2)
            || matches!(self, Self::DataSlow { .. } | Self::ControlSlow { .. })
    }

    /// Returns whether survivors may have different causes, because news cannot reach all of them.
    pub(super) const fn divides(&self) -> bool {
        matches!(
            self,
            Self::CutOff { .. }
                | Self::Partition { .. }
                | Self::ControlCut { half: false, .. }
                | Self::ControlSilent { .. }
        )
    }

    /// Time after which every survivor knows of the fault, whatever it does; `None` if the time
    /// depends on their calls.
    pub(super) const fn is_known_after(&self) -> Option<Duration> {
        match self {
            Self::Killed { .. } | Self::Aborts { .. } | Self::ControlCut { .. } => {
                Some(Timing::USUAL.link_grace)
            }
            Self::Stopped { lasts: NEVER, .. } | Self::ControlSilent { lasts: NEVER, .. } => {
                Some(Timing::USUAL.silence)
            }
            _ => None,
        }
    }

    /// Ranks that survivors may blame.
    pub(super) fn culprits(&self, world_size: usize) -> BTreeSet<usize> {
        let rank = self.trigger().rank;
        let successor = (rank + 1) % world_size;
        match self {
            Self::DataCut {
                to, half: false, ..
            } => BTreeSet::from([rank, *to]),
            // Both ends of the connection report that all is well. Usually one of them is blamed,
            // but the reports of the ranks between them can outweigh theirs.
            Self::DataSilent { .. } => (0..world_size).collect(),
            Self::ControlCut { half: false, .. } | Self::ControlSilent { .. } => {
                BTreeSet::from([rank, successor])
            }
            // If two ranks disagree, rank 0 counts as right.
            Self::CallsAnother { .. } if world_size == 2 => BTreeSet::from([1]),
            // A rank that receives nothing cannot know which rank is silent, and its own messages
            // may arrive again later.
            Self::CutOff { inbound, lasts, .. } if *inbound || *lasts < NEVER => {
                (0..world_size).collect()
            }
            Self::Partition { .. } => (0..world_size).collect(),
            _ => BTreeSet::from([rank]),
        }
    }

    /// Exceptions that survivors may get.
    pub(super) const fn exceptions(&self) -> &'static [&'static str] {
        match self {
            Self::Killed { .. }
            | Self::Exits { .. }
            | Self::LeavesEarly { .. }
            | Self::DataCut { .. }
            | Self::ControlCut { .. }
            | Self::ControlSilent { .. } => &["PeerLostError"],
            Self::Aborts { .. } => &["AbortedError"],
            Self::CallsAnother { .. } => &["MismatchError"],
            Self::Late { .. } | Self::DataSilent { .. } => &["CollectiveTimeoutError"],
            Self::DataCorrupted { .. }
            | Self::HeaderChanged { .. }
            | Self::ControlGarbled { .. } => &["ProtocolError"],
            Self::DataSlow { .. } | Self::ControlSlow { .. } => &[],
            Self::Stopped { .. } | Self::CutOff { .. } | Self::Partition { .. } => {
                &["PeerLostError", "CollectiveTimeoutError"]
            }
        }
    }

    /// Changes the network, if the fault is one of the network.
    pub(super) fn harm(&self, network: &mut Pipes, world_size: usize, now: Moment) {
        let Trigger { rank, .. } = self.trigger();
        let until = |lasts: Moment| now.saturating_add(lasts);
        let data = |to| PipeId::Data { from: rank, to };
        let control = |back| PipeId::Control { first: rank, back };
        match self {
            Self::DataCut { to, half, .. } => {
                network.end_by_sender(data(*to), End::Reset);
                if !half {
                    network.end_by_receiver(data(*to));
                }
            }
            Self::DataSilent { to, lasts, .. } => {
                network.cut(data(*to), until(*lasts));
            }
            Self::DataSlow { to, delay, .. } => {
                network.slow_down(data(*to), *delay);
            }
            Self::DataCorrupted { to, .. } => network.end_by_sender(data(*to), End::Corrupted),
            Self::ControlSlow { delay, .. } => network.slow_down(control(false), *delay),
            Self::ControlCut { half: true, .. } => {
                network.end_by_sender(control(false), End::Closed);
            }
            Self::ControlCut { half: false, .. } => {
                for back in [false, true] {
                    network.end_by_sender(control(back), End::Reset);
                    network.end_by_receiver(control(back));
                }
            }
            Self::ControlSilent { lasts, .. } => {
                network.cut(control(false), until(*lasts));
                network.cut(control(true), until(*lasts));
            }
            // Changes the length of the next message to more than any correct message has.
            Self::ControlGarbled { .. } => network.garble(control(false), 3),
            Self::CutOff {
                inbound,
                outbound,
                lasts,
                ..
            } => {
                for id in network.all() {
                    let (from, to) = id.ends(world_size);
                    if (from == rank && *outbound) || (to == rank && *inbound) {
                        network.cut(id, until(*lasts));
                    }
                }
            }
            Self::Partition { part, lasts, .. } => {
                for id in network.all() {
                    let (from, to) = id.ends(world_size);
                    if part[from] != part[to] {
                        network.cut(id, until(*lasts));
                    }
                }
            }
            _ => {}
        }
    }
}
