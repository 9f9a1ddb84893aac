//! Facts: "fault F in phase P gives error E, blames R, within T", exact in virtual time.
//!
//! The rows have the names of the fault matrix of real processes (`tests/faults/matrix.py`) for a
//! group that has formed, and a few more rows need the virtual clock. Each row runs with 2, 3 and 5
//! ranks and with each rank at fault. A fault strikes at a byte of the collective, so it cannot
//! miss its phase.
//!
//! Only the matrix of real processes covers the forming of a group, real shared memory, and the
//! kernel's actions when a process ends. It also covers the detection of wrong checksums and of
//! truncated messages.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::faults::{Difference, Fault, Trigger};
use super::group::{self, Ended, FLUSH_LIMIT, Run, WAKE_MAX};
use super::process::Outcome;
use super::scenario::{Planned, Scenario};
use crate::world::random::Random;
use crate::world::time::{MICROSECOND, MILLISECOND, Moment, NEVER, SECOND, nanoseconds};
use gradring_core::drive::Limits;
use gradring_net::config::timing::Timing;
use gradring_proto::collective::{Call, Collective};
use gradring_proto::dtype::{DType, ReduceOp};
use gradring_proto::schedule::Algorithm;
use gradring_proto::schedule::algorithm_rules::Rules;
use gradring_proto::schedule::choice::Policy;
use gradring_proto::schedule::topology::Topology;
use gradring_proto::wire::signature::HEADER_BYTES;

const WORLD_SIZES: [usize; 3] = [2, 3, 5];
/// Seeds of each cell; in half of them, ranks share memory.
const SEEDS: u64 = 4;

/// Elements of the collective under test, in float32; a multiple of all world sizes.
const ELEMENTS: usize = 2520;
const BYTES: usize = 4 * ELEMENTS;
/// Capacity of a pipe. A rank is at most this far behind the byte at which a fault strikes, which
/// is much less than the distance to the end of a phase.
const PIPE_BYTES: usize = 300;
const _: () = assert!(PIPE_BYTES < BYTES / 8);
const DELAY_MAX: Moment = 50 * MICROSECOND;
/// Most time from the end of an unnoticed fault to the last result.
const COMPLETION: Duration = Duration::from_secs(1);

/// Longer than all limits of the monitor.
const LONG_TIMEOUT: Duration = Duration::from_secs(20);
/// Shorter than the silence after which a rank counts as lost.
const SHORT_TIMEOUT: Duration = Duration::from_secs(3);

/// Time for which ranks compute without a collective; the fault strikes at `IDLE_BEFORE`.
const IDLE: Moment = 15 * SECOND;
const IDLE_BEFORE: Moment = 3 * SECOND;
const IDLE_AFTER: Duration = Duration::from_secs(12);
/// Time from the end of the faulty rank's program to a fault at shutdown; some other ranks are
/// still there.
const SHUTDOWN_AFTER: Moment = 50 * MILLISECOND;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CollectivePhase {
    Idle,
    FirstSegment,
    ReduceScatter,
    AllGather,
    Shutdown,
}

use CollectivePhase::{AllGather, FirstSegment, Idle, ReduceScatter, Shutdown};

const MOVING: &[CollectivePhase] = &[FirstSegment, ReduceScatter, AllGather];
const WORKING: &[CollectivePhase] = &[Idle, FirstSegment, ReduceScatter, AllGather];

/// One fault in some phases, and its expected effect.
struct Row {
    fault: &'static str,
    phases: &'static [CollectivePhase],
    strikes: fn(&Cell) -> Fault,
    /// Limit of a stall.
    timeout: Duration,
    /// The collective under test; an all-reduce by default.
    calls: fn(&Cell) -> Collective,
    /// True if another collective follows although this one succeeds.
    continues: bool,
    /// Exception of every survivor; `None` if all results must be right.
    error: Option<&'static str>,
    /// Ranks that a survivor may blame.
    blames: fn(&Cell, usize) -> BTreeSet<usize>,
    /// Least and most time from the fault until a rank knows of it, or has its last result; the
    /// time that news take is added.
    within: fn(&Cell) -> (Duration, Duration),
}

/// One row in one phase, with one rank at fault.
struct Cell {
    phase: CollectivePhase,
    world_size: usize,
    faulty: usize,
}

const USUAL: Timing = Timing::USUAL;
const AT_ONCE: fn(&Cell) -> (Duration, Duration) = |_| (Duration::ZERO, Duration::ZERO);
/// The last sign of life is up to one heartbeat older than the fault, and a check takes place once
/// in each heartbeat.
const SILENCE: fn(&Cell) -> (Duration, Duration) = |_| {
    (
        USUAL.silence - USUAL.heartbeat,
        USUAL.silence + USUAL.heartbeat,
    )
};
const STALL: fn(&Cell) -> (Duration, Duration) = |_| (SHORT_TIMEOUT, SHORT_TIMEOUT);

const FAULTY: fn(&Cell, usize) -> BTreeSet<usize> = |cell, _| BTreeSet::from([cell.faulty]);
/// Both ends of a connection: nobody can know which one is right.
const ENDS: fn(&Cell, usize) -> BTreeSet<usize> =
    |cell, _| BTreeSet::from([cell.faulty, cell.successor()]);

impl Row {
    /// Makes the row of a fault that survivors learn of from news alone.
    const fn new(
        fault: &'static str,
        phases: &'static [CollectivePhase],
        error: Option<&'static str>,
        strikes: fn(&Cell) -> Fault,
    ) -> Self {
        Self {
            fault,
            phases,
            strikes,
            timeout: LONG_TIMEOUT,
            calls: |_| Collective::AllReduce { op: ReduceOp::Sum },
            continues: false,
            error,
            blames: FAULTY,
            within: AT_ONCE,
        }
    }
}

const LOST: Option<&str> = Some("PeerLostError");
const TIMEOUT: Option<&str> = Some("CollectiveTimeoutError");
const PROTOCOL: Option<&str> = Some("ProtocolError");
const MISMATCH: Option<&str> = Some("MismatchError");
const ABORTED: Option<&str> = Some("AbortedError");

fn rows() -> Vec<Row> {
    let killed = |cell: &Cell| Fault::Killed {
        trigger: cell.trigger(),
        end: true,
    };
    let stopped = |cell: &Cell| Fault::Stopped {
        trigger: cell.trigger(),
        lasts: NEVER,
    };
    let raised = |cell: &Cell| Fault::Aborts {
        trigger: cell.trigger(),
    };
    let exits = |cell: &Cell| Fault::Exits {
        trigger: cell.trigger(),
    };
    vec![
        Row::new("SIGKILL", WORKING, LOST, killed),
        Row::new("SIGKILL", &[Shutdown], None, killed),
        Row {
            within: SILENCE,
            ..Row::new("SIGSTOP", WORKING, LOST, stopped)
        },
        Row::new("SIGSTOP", &[Shutdown], None, stopped),
        Row {
            timeout: SHORT_TIMEOUT,
            // The stopped rank cannot answer the query, so the query takes its full time.
            within: |_| {
                let by = SHORT_TIMEOUT + USUAL.diagnosis;
                (by, by)
            },
            ..Row::new("SIGSTOP, noticed by a stall", MOVING, TIMEOUT, stopped)
        },
        Row {
            within: |cell| cell.unnoticed(PAUSE),
            ..Row::new("SIGSTOP, and SIGCONT in time", WORKING, None, |cell| {
                Fault::Stopped {
                    trigger: cell.trigger(),
                    lasts: nanoseconds(PAUSE),
                }
            })
        },
        Row::new("exception", WORKING, ABORTED, raised),
        Row::new("exception", &[Shutdown], None, raised),
        // A rank that has left is missed when its part is needed.
        Row {
            within: |_| (IDLE_AFTER, IDLE_AFTER),
            ..Row::new("sys.exit", &[Idle], LOST, exits)
        },
        Row::new("sys.exit", MOVING, LOST, exits),
        Row::new("sys.exit", &[Shutdown], None, exits),
        Row {
            within: SILENCE,
            // Both neighbours of the cut-off rank fell silent for this rank.
            blames: |cell, rank| match rank == cell.faulty {
                true => BTreeSet::from([cell.predecessor(), cell.successor()]),
                false => BTreeSet::from([cell.faulty]),
            },
            ..Row::new("host cut off", WORKING, LOST, |cell| Fault::CutOff {
                trigger: cell.trigger(),
                inbound: true,
                outbound: true,
                lasts: NEVER,
            })
        },
        Row {
            within: SILENCE,
            ..Row::new("host not heard", WORKING, LOST, |cell| Fault::CutOff {
                trigger: cell.trigger(),
                inbound: false,
                outbound: true,
                lasts: NEVER,
            })
        },
        Row {
            within: SILENCE,
            blames: ENDS,
            ..Row::new("link cut", &[Idle], LOST, |cell| Fault::ControlSilent {
                trigger: cell.trigger(),
                lasts: NEVER,
            })
        },
        Row {
            timeout: SHORT_TIMEOUT,
            within: STALL,
            blames: ENDS,
            ..Row::new("link cut", MOVING, TIMEOUT, |cell| Fault::DataSilent {
                trigger: cell.trigger(),
                to: cell.successor(),
                lasts: NEVER,
            })
        },
        // The rank that sees the end of the connection reports it over the other connections.
        Row::new("half-open link", &[Idle], LOST, |cell| Fault::ControlCut {
            trigger: cell.trigger(),
            half: true,
        }),
        Row {
            // Only the successor notices, and waits for a rank with a lower number to report first.
            within: |cell| {
                let grace = match cell.successor() < cell.faulty {
                    true => USUAL.link_grace,
                    false => USUAL.link_grace * 3 / 2,
                };
                (grace, grace)
            },
            ..Row::new("half-open link", MOVING, LOST, |cell| Fault::DataCut {
                trigger: cell.trigger(),
                to: cell.successor(),
                half: true,
            })
        },
        Row {
            within: |cell| cell.unnoticed(Duration::ZERO),
            ..Row::new("slow link", &[Idle], None, |cell| Fault::ControlSlow {
                trigger: cell.trigger(),
                delay: nanoseconds(USUAL.silence / 2),
            })
        },
        Row {
            timeout: SHORT_TIMEOUT,
            // The whole collective takes longer than the limit of a stall, and each piece takes
            // less.
            within: |_| {
                let pieces = u32::try_from(2 * BYTES / PIPE_BYTES + 2).expect("few");
                (SHORT_TIMEOUT, SHORT_TIMEOUT / 6 * pieces)
            },
            ..Row::new("slow link", MOVING, None, |cell| Fault::DataSlow {
                trigger: cell.trigger(),
                to: cell.successor(),
                delay: nanoseconds(SHORT_TIMEOUT / 6),
            })
        },
        Row {
            timeout: SHORT_TIMEOUT,
            // The root finishes early, and waits in the next collective for the slower ranks.
            calls: |cell| Collective::Broadcast { root: cell.root() },
            continues: true,
            within: |_| {
                let pieces = u32::try_from(BYTES / PIPE_BYTES + 2).expect("few");
                (SHORT_TIMEOUT, SHORT_TIMEOUT / 6 * pieces)
            },
            ..Row::new(
                "slow link, behind the root",
                &[FirstSegment],
                None,
                |cell| Fault::DataSlow {
                    trigger: cell.trigger(),
                    to: cell.successor(),
                    delay: nanoseconds(SHORT_TIMEOUT / 6),
                },
            )
        },
        Row {
            // The next message on this connection is a heartbeat.
            within: |_| (Duration::ZERO, USUAL.heartbeat),
            ..Row::new("corrupted frame", &[Idle], PROTOCOL, |cell| {
                Fault::ControlGarbled {
                    trigger: cell.trigger(),
                }
            })
        },
        Row::new("corrupted frame", &[FirstSegment], PROTOCOL, |cell| {
            cell.header_changed(0)
        }),
        Row::new(
            "corrupted frame, for another rank",
            &[FirstSegment],
            PROTOCOL,
            |cell| cell.header_changed(12),
        ),
        Row::new(
            "corrupted frame, another call",
            &[FirstSegment],
            PROTOCOL,
            |cell| cell.header_changed(24),
        ),
        Row::new("turned bit, with checksums", MOVING, PROTOCOL, |cell| {
            Fault::DataCorrupted {
                trigger: cell.trigger(),
                to: cell.successor(),
            }
        }),
        Row {
            blames: ENDS,
            ..Row::new("truncated frame", &[Idle], LOST, |cell| Fault::ControlCut {
                trigger: cell.trigger(),
                half: false,
            })
        },
        Row {
            within: |_| (USUAL.link_grace, USUAL.link_grace * 3 / 2),
            blames: ENDS,
            ..Row::new("truncated frame", MOVING, LOST, |cell| Fault::DataCut {
                trigger: cell.trigger(),
                to: cell.successor(),
                half: false,
            })
        },
        Row {
            blames: ODD,
            ..Row::new("wrong program", &[FirstSegment], MISMATCH, |cell| {
                cell.calls_another(Difference::Count)
            })
        },
        Row {
            blames: ODD,
            ..Row::new("wrong program, name", &[FirstSegment], MISMATCH, |cell| {
                cell.calls_another(Difference::Name)
            })
        },
        Row {
            timeout: SHORT_TIMEOUT,
            within: |_| {
                let by = SHORT_TIMEOUT + USUAL.report_grace;
                (by, by)
            },
            ..Row::new("late", &[FirstSegment], TIMEOUT, |cell| Fault::Late {
                trigger: cell.entering(),
                by: nanoseconds(3 * SHORT_TIMEOUT),
            })
        },
    ]
}

/// If two ranks disagree, rank 0 counts as right.
const ODD: fn(&Cell, usize) -> BTreeSet<usize> = |cell, _| match cell.world_size {
    2 => BTreeSet::from([1]),
    _ => BTreeSet::from([cell.faulty]),
};

/// Shorter than every silence that is noticed: the last sign of life may be one heartbeat older.
const PAUSE: Duration = USUAL.silence.saturating_sub(Duration::from_secs(2));

impl Cell {
    const fn successor(&self) -> usize {
        (self.faulty + 1) % self.world_size
    }

    /// Root of a broadcast that passes through the faulty rank, or begins there if there are two
    /// ranks.
    const fn root(&self) -> usize {
        match self.world_size {
            2 => self.faulty,
            _ => self.predecessor(),
        }
    }

    const fn predecessor(&self) -> usize {
        (self.faulty + self.world_size - 1) % self.world_size
    }

    /// Trigger in the middle of the phase.
    const fn trigger(&self) -> Trigger {
        let half = BYTES / self.world_size * (self.world_size - 1);
        let (number, sent, after) = match self.phase {
            Idle => (1, 0, IDLE_BEFORE),
            FirstSegment => (1, HEADER_BYTES + 1, 0),
            ReduceScatter => (1, HEADER_BYTES + half / 2, 0),
            AllGather => (1, HEADER_BYTES + half + half / 2, 0),
            Shutdown => (2, 0, SHUTDOWN_AFTER),
        };
        Trigger {
            rank: self.faulty,
            number,
            sent,
            after,
        }
    }

    /// Trigger at the moment when the faulty rank is about to enter the collective.
    const fn entering(&self) -> Trigger {
        Trigger {
            sent: 0,
            after: 0,
            ..self.trigger()
        }
    }

    const fn header_changed(&self, byte: usize) -> Fault {
        Fault::HeaderChanged {
            trigger: self.entering(),
            to: self.successor(),
            byte,
        }
    }

    const fn calls_another(&self, how: Difference) -> Fault {
        Fault::CallsAnother {
            trigger: self.entering(),
            how,
        }
    }

    /// Least and most time until all ranks have their last result, if nobody notices a fault of
    /// this length.
    fn unnoticed(&self, lasts: Duration) -> (Duration, Duration) {
        let least = match self.phase {
            Idle => IDLE_AFTER,
            _ => lasts,
        };
        (least, least + COMPLETION)
    }

    /// A small collective and the one under test, both along the ring. A third one follows if the
    /// second has to fail, or if some ranks continue after it.
    fn scenario(&self, row: &Row, shares_memory: bool) -> Scenario {
        let hosts = (0..self.world_size).map(|rank| if shares_memory { 0 } else { rank });
        let topology = Topology::by_host(hosts);
        let policy = Policy {
            rules: Rules::always(Algorithm::Ring),
            ..Policy::new(topology.clone())
        };
        let idle = self.phase == Idle;
        let planned = |number| {
            let (count, collective) = match number {
                1 => (ELEMENTS, (row.calls)(self)),
                _ => (9, Collective::AllReduce { op: ReduceOp::Sum }),
            };
            Planned {
                call: Call {
                    collective,
                    dtype: DType::F32,
                    count,
                    name: "x".into(),
                    shapes: format!("[{count}]"),
                    is_mapped: false,
                },
                policy: Policy {
                    topology: Arc::clone(&policy.topology),
                    ..policy.clone()
                },
                computing: vec![if idle && number == 1 { IDLE } else { 0 }; self.world_size],
                together: false,
            }
        };
        Scenario {
            topology,
            limits: Limits {
                timeout: row.timeout,
                stall_warning: row.timeout / 2,
            },
            pipe_bytes: PIPE_BYTES,
            delay_max: DELAY_MAX,
            shares_memory,
            collectives: (0..if row.error.is_some() || row.continues {
                3
            } else {
                2
            })
                .map(planned)
                .collect(),
            faults: vec![(row.strikes)(self)],
            lingering: (0..self.world_size)
                .map(|rank| self.lingering(rank))
                .collect(),
        }
    }

    /// Time in which news cross the group three times, for the query, the answers and the cause,
    /// and time of one turn of the monitor.
    fn news(&self) -> Duration {
        let hop = DELAY_MAX + WAKE_MAX;
        let poll = Duration::from_millis(20);
        Duration::from_nanos(3 * self.world_size as Moment * hop) + poll
    }

    /// Returns how the run contradicts the row, or `None`.
    fn problem(&self, row: &Row, run: &Run) -> Option<String> {
        let [Some(struck)] = run.struck[..] else {
            return Some("the fault did not strike".into());
        };
        if let Err(problem) = run.verify() {
            return Some(problem);
        }
        let survivors = run.ranks.iter().enumerate();
        let survivors = survivors.filter(|(_, ended)| ended.survives);
        let wrong = survivors.clone().find_map(|(rank, ended)| {
            let problem = self.problem_of(rank, ended, row, struck)?;
            Some(format!("rank {rank} {problem}"))
        });
        let last = survivors.filter_map(|(_, ended)| ended.outcome.as_ref());
        let last = last.map(|(moment, _)| moment.saturating_sub(struck)).max();
        let late = || self.untimely(row, Duration::from_nanos(last?));
        wrong.or_else(|| match (row.error, self.phase) {
            (None, Idle | FirstSegment | ReduceScatter | AllGather) => late(),
            _ => None,
        })
    }

    /// Returns how a survivor's outcome contradicts the row, or `None`.
    fn problem_of(&self, rank: usize, ended: &Ended, row: &Row, struck: Moment) -> Option<String> {
        let since = |moment: Moment| Duration::from_nanos(moment.saturating_sub(struck));
        let Some((moment, outcome)) = &ended.outcome else {
            return Some("never ended".into());
        };
        match (outcome, row.error) {
            (Outcome::Done, None) => {}
            (Outcome::Failed(error), Some(expected)) => {
                let blamed = error.blamed.as_ref().map(|blamed| blamed.rank);
                let right = blamed.is_some_and(|it| (row.blames)(self, rank).contains(&it));
                if error.kind.exception() != expected || !right {
                    return Some(format!("got another error: {error}"));
                }
                let known = ended.aborted.map_or(Duration::MAX, since);
                let untimely = self.untimely(row, known);
                if untimely.is_some() {
                    return untimely;
                }
                let delay = since(*moment).saturating_sub(known.max(self.computes(row, rank)));
                if delay > self.news() {
                    return Some(format!("was told {delay:?} later: {error}"));
                }
            }
            (outcome, _) => return Some(format!("ended with {outcome:?}")),
        }
        let leaves = moment + self.lingering(rank) + FLUSH_LIMIT + nanoseconds(self.news());
        let stays = ended.left.is_none_or(|left| left > leaves);
        stays.then(|| "did not leave in time".into())
    }

    fn untimely(&self, row: &Row, after: Duration) -> Option<String> {
        let (least, most) = (row.within)(self);
        let (least, most) = (least.saturating_sub(self.news()), most + self.news());
        let wrong = after < least || after > most;
        wrong.then(|| format!("was ready after {after:?}, not {least:?} to {most:?}"))
    }

    /// Time after the fault in which a rank computes and receives no news.
    fn computes(&self, row: &Row, rank: usize) -> Duration {
        match (row.strikes)(self).lasts() {
            _ if self.phase == Idle => IDLE_AFTER,
            lasts if rank == self.faulty && lasts < NEVER => Duration::from_nanos(lasts),
            _ => Duration::ZERO,
        }
    }

    /// Time for which a rank stays: some leave before a fault at shutdown, some at about that time,
    /// some later.
    const fn lingering(&self, rank: usize) -> Moment {
        if rank == self.faulty {
            2 * SHUTDOWN_AFTER
        } else {
            rank as Moment * SHUTDOWN_AFTER / 2
        }
    }
}

/// Checks every fact. Returns the number of runs and the contradictions, and prints the trace of
/// the first.
pub(crate) fn contradictions() -> (usize, Vec<String>) {
    let (mut count, mut problems) = (0, Vec::new());
    for row in rows() {
        for cell in row.cells() {
            for seed in 0..SEEDS {
                let run = |traced| {
                    let scenario = cell.scenario(&row, seed % 2 == 1);
                    group::run(scenario, Random::new(seed), traced)
                };
                count += 1;
                let Some(problem) = cell.problem(&row, &run(false)) else {
                    continue;
                };
                if problems.is_empty() {
                    println!("{}", run(true).trace.join("\n"));
                }
                problems.push(format!("{}, {cell}, seed {seed}: {problem}", row.fault));
            }
        }
    }
    (count, problems)
}

impl Row {
    fn cells(&self) -> impl Iterator<Item = Cell> {
        let groups = self
            .phases
            .iter()
            .flat_map(|&phase| WORLD_SIZES.map(|size| (phase, size)));
        groups.flat_map(|(phase, world_size)| {
            (0..world_size).map(move |faulty| Cell {
                phase,
                world_size,
                faulty,
            })
        })
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            phase,
            world_size,
            faulty,
        } = self;
        write!(f, "{phase:?}, rank {faulty} of {world_size}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the contradiction of a changed row about a killed rank, or `None`.
    fn contradiction(change: impl Fn(&mut Row)) -> Option<String> {
        let mut row = rows().into_iter().next()?;
        change(&mut row);
        let cell = row.cells().last()?;
        let run = group::run(cell.scenario(&row, false), Random::new(0), false);
        cell.problem(&row, &run)
    }

    #[test]
    fn what_a_row_says_wrongly_is_contradicted() {
        type Change = fn(&mut Row);
        assert_eq!(contradiction(|_| ()), None);
        let wrong: [(Change, &str); 5] = [
            (|row| row.error = TIMEOUT, "got another error"),
            (|row| row.error = None, "ended with Failed"),
            (
                |row| row.blames = |_, _| BTreeSet::new(),
                "got another error",
            ),
            (|row| row.within = STALL, "was ready after"),
            (
                |row| {
                    row.strikes = |cell| Fault::Exits {
                        trigger: Trigger {
                            number: 9,
                            ..cell.trigger()
                        },
                    };
                },
                "the fault did not strike",
            ),
        ];
        for (change, problem) in wrong {
            let found = contradiction(change).expect(problem);
            assert!(found.contains(problem), "{found}");
        }
    }
}
