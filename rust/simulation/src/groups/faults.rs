//! Faults of a run, and whom the survivors may blame for it.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::world::pipes::{End, PipeId, Pipes};
use crate::world::random::Random;
use crate::world::time::{MILLISECOND, Moment, NEVER, SECOND, nanoseconds};
use gradring_net::config::timing::Timing;
use gradring_proto::collective::{Call, Collective};
use gradring_proto::dtype::DType;
use gradring_proto::wire::contract::HEADER_BYTES;

/// When a fault strikes: some time after a rank has begun to compute for a collective, and has sent
/// so much of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Trigger {
    pub(super) rank: usize,
    /// Position of the collective, counted from 0.
    pub(super) number: usize,
    /// What it must have sent its successor in this collective before.
    pub(super) sent: usize,
    pub(super) after: Moment,
}

impl Trigger {
    pub(super) fn is(&self, rank: usize, number: usize) -> bool {
        self.rank == rank && self.number == number
    }
}

/// How a call differs from what it should be.
#[derive(Debug, Clone, Copy)]
pub(super) enum Difference {
    Name,
    Count,
    Barrier,
}

impl Difference {
    pub(super) fn change(self, call: &mut Call) {
        match self {
            // Another count of an all-to-all would be refused before anything is sent.
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
                    // As it is, so that ranks differ in the shape of a row alone.
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
                };
            }
            _ => call.name = "y".into(),
        }
    }
}

/// Something that goes wrong. The rank of the trigger is at fault.
#[derive(Debug, Clone)]
pub(super) enum Fault {
    /// Its process ends.
    Killed { trigger: Trigger, end: bool },
    /// Its process is stopped, for good or for a while.
    Stopped { trigger: Trigger, lasts: Moment },
    /// Its program ends, and the communicator is closed in whatever it is doing.
    Exits { trigger: Trigger },
    /// Its program aborts the communicator.
    Aborts { trigger: Trigger },
    /// It closes its communicator before the last collectives.
    LeavesEarly { trigger: Trigger },
    /// It calls something else.
    CallsAnother { trigger: Trigger, how: Difference },
    /// It computes for longer than others.
    Late { trigger: Trigger, by: Moment },
    /// Its data connection to a peer is reset, for both or for the peer alone.
    DataCut {
        trigger: Trigger,
        to: usize,
        half: bool,
    },
    /// Its data connection to a peer passes nothing any more, for good or for a while.
    DataSilent {
        trigger: Trigger,
        to: usize,
        lasts: Moment,
    },
    /// Its data connection to a peer takes so long for each piece.
    DataSlow {
        trigger: Trigger,
        to: usize,
        delay: Moment,
    },
    /// Bytes change on its data connection to a peer, and the link there notices.
    DataCorrupted { trigger: Trigger, to: usize },
    /// The first bytes of a collective change on the way to a peer.
    HeaderChanged {
        trigger: Trigger,
        to: usize,
        byte: usize,
    },
    /// The control connection to its successor ends, for both or for the successor alone.
    ControlCut { trigger: Trigger, half: bool },
    /// The control connection to its successor takes so long for each piece.
    ControlSlow { trigger: Trigger, delay: Moment },
    /// The control connection to its successor passes nothing any more, for good or for a while.
    ControlSilent { trigger: Trigger, lasts: Moment },
    /// A byte changes on the control connection to its successor.
    ControlGarbled { trigger: Trigger },
    /// Nothing reaches it, or nothing comes from it, or both.
    CutOff {
        trigger: Trigger,
        inbound: bool,
        outbound: bool,
        lasts: Moment,
    },
    /// Nothing passes between two parts of the group.
    Partition {
        trigger: Trigger,
        part: Vec<bool>,
        lasts: Moment,
    },
}

impl Fault {
    /// One at random. Those that only `facts.rs` has are not drawn, so that a seed stays what it was.
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
        // Shorter than whatever is noticed, or for good, or anything between.
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

    /// How long it goes on by itself, as far as that delays others.
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

    /// Whether it is over before anybody may take notice.
    pub(super) fn passes(&self, timeout: Duration) -> bool {
        let bearable = match self {
            Self::Late { .. } | Self::DataSilent { .. } => timeout,
            Self::ControlSilent { .. } => Timing::USUAL.silence,
            _ => timeout.min(Timing::USUAL.silence),
        };
        // A second for the heartbeat that had not been sent, and for the way.
        let margin = Duration::from_millis(1500);
        (1..nanoseconds(bearable.saturating_sub(margin))).contains(&self.lasts())
            || matches!(self, Self::Late { by, .. } if *by < nanoseconds(timeout) - SECOND / 2)
            || matches!(self, Self::DataSlow { .. } | Self::ControlSlow { .. })
    }

    /// Whether survivors may end with different causes, because no news can settle it.
    pub(super) const fn divides(&self) -> bool {
        matches!(
            self,
            Self::CutOff { .. }
                | Self::Partition { .. }
                | Self::ControlCut { half: false, .. }
                | Self::ControlSilent { .. }
        )
    }

    /// How long it takes until every survivor knows of it, whatever it does; nothing if that
    /// depends on what they do.
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

    /// The ranks that survivors may blame.
    pub(super) fn culprits(&self, world_size: usize) -> BTreeSet<usize> {
        let rank = self.trigger().rank;
        let successor = (rank + 1) % world_size;
        match self {
            Self::DataCut {
                to, half: false, ..
            } => BTreeSet::from([rank, *to]),
            // Both ends say that all is well. Nearly always one of them is blamed, but what those
            // between them say can outweigh it.
            Self::DataSilent { .. } => (0..world_size).collect(),
            Self::ControlCut { half: false, .. } | Self::ControlSilent { .. } => {
                BTreeSet::from([rank, successor])
            }
            // Of two ranks, the first is taken to be right.
            Self::CallsAnother { .. } if world_size == 2 => BTreeSet::from([1]),
            // Who hears nothing cannot tell whose silence it is, and may be heard again.
            Self::CutOff { inbound, lasts, .. } if *inbound || *lasts < NEVER => {
                (0..world_size).collect()
            }
            Self::Partition { .. } => (0..world_size).collect(),
            _ => BTreeSet::from([rank]),
        }
    }

    /// The exceptions that survivors may get.
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

    /// Strikes, where it strikes the network.
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
            // The length of the next message: no correct one is so long.
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
