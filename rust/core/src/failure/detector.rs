//! Decisions of the failure monitor: a function of messages, suspicions and time. It has no socket,
//! thread or clock, so it can be simulated.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::drive::{Suspicion, Waiting};
use crate::failure::diagnosis::Diagnosis;
use crate::observe::clock;
use crate::observe::journal::Journal;
use crate::observe::neighbour_clock::NeighbourClock;
use gradring_net::abort::AbortSwitch;
use gradring_net::config::timing::Timing;
use gradring_proto::error::{Breach, Broken, Damage, Error, Lost, shortened};
pub use gradring_proto::wire::control::{Entered, LogLine, Message, Report, Waits};
use gradring_proto::wire::gossip::Tick;

/// Number of first heartbeats, which come at shorter intervals so that clocks are soon compared.
const FIRST_HEARTBEATS: u32 = 8;
const FIRST_HEARTBEAT_INTERVAL: Duration = Duration::from_millis(50);
/// Most messages about the status of ranks that a rank sends or forwards per second. In larger
/// groups each rank's gossip is rarer.
const GOSSIP_PER_SECOND: u32 = 64;
/// Number of ranks above which a broken data connection blames its peer later, by
/// `LINK_GRACE_PER_RANK` for each further rank. The abort goes from neighbour to neighbour, and
/// ranks may share a few cores.
const LINK_GRACE_RANKS: usize = 16;
const LINK_GRACE_PER_RANK: Duration = Duration::from_millis(10);
/// Interval between calls of `keep_time` while a diagnosis is open or a data connection is broken.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Finds failures in the group, on behalf of one rank.
///
/// Raises the rank's abort switch. Messages to neighbours are left in a queue.
pub(crate) struct Detector {
    journal: Arc<Journal>,
    abort: Arc<AbortSwitch>,
    neighbours: Vec<Neighbour>,
    to_tell: Vec<(Audience, Message)>,
    diagnosis: Option<Diagnosis>,
    /// `true` if this rank has to name the cause, because its engine waits for it.
    own_diagnosis: bool,
    diagnosis_until: Instant,
    /// Time until which this rank's own engine may still enter the collective in question.
    report_due: Option<Instant>,
    /// Peers whose data connection broke, with the breakage and the time from which they count as
    /// lost.
    broken: Vec<(usize, Broken, Instant)>,
    /// Pairs of a rank and the peer to which its data connection broke, as the rank noticed.
    broken_links: BTreeSet<(usize, usize)>,
    /// Neighbours that said goodbye.
    left: BTreeSet<usize>,
    /// Time of the last `keep_time`.
    kept_at: Instant,
    beat_at: Instant,
    beats: u32,
    gossip_at: Instant,
    timing: Timing,
    /// Shows a line of the log to people; used on rank 0.
    on_log_line: fn(String),
    /// Number of the last log line of each rank.
    log_lines: BTreeMap<usize, u64>,
}

/// Receivers of a message. Neighbours are numbered in the order in which the detector got them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Audience {
    Neighbour(usize),
    AllBut(Option<usize>),
}

struct Neighbour {
    rank: usize,
    /// `true` once its connection has ended.
    ended: bool,
    received_at: Instant,
    clock: NeighbourClock,
}

impl Detector {
    /// Makes the detector of a rank whose neighbours on the ring have these ranks.
    pub(crate) fn new(
        journal: Arc<Journal>,
        abort: Arc<AbortSwitch>,
        neighbours: &[usize],
        now: Instant,
        timing: Timing,
        on_log_line: fn(String),
    ) -> Self {
        let neighbour = |&rank| Neighbour {
            rank,
            ended: false,
            received_at: now,
            clock: NeighbourClock::default(),
        };
        Self {
            journal,
            abort,
            neighbours: neighbours.iter().map(neighbour).collect(),
            to_tell: Vec::new(),
            diagnosis: None,
            own_diagnosis: false,
            diagnosis_until: now,
            report_due: None,
            broken: Vec::new(),
            broken_links: BTreeSet::new(),
            left: BTreeSet::new(),
            kept_at: now,
            beat_at: now,
            beats: 0,
            gossip_at: now,
            timing,
            on_log_line,
            log_lines: BTreeMap::new(),
        }
    }

    /// Takes the queued messages to neighbours, in order.
    pub(crate) fn take_messages(&mut self) -> impl Iterator<Item = (Audience, Message)> {
        self.to_tell.drain(..)
    }

    /// Latest time of the next `keep_time`.
    pub(crate) fn next_poll(&self, now: Instant) -> Instant {
        let urgent =
            self.diagnosis.is_some() || !self.broken.is_empty() || self.report_due.is_some();
        if urgent && self.abort.cause().is_none() {
            now + POLL_INTERVAL
        } else {
            self.next_beat()
        }
    }

    /// Sends all ranks the cause of the group's failure.
    pub(crate) fn spread(&mut self, cause: Error) {
        self.flood(Message::abort(cause), None);
    }

    /// Sends all ranks the status of this rank.
    pub(crate) fn gossip(&mut self, now: Instant) {
        self.gossip_at = now;
        let Journal {
            rank,
            recorder,
            board,
            ..
        } = &*self.journal;
        let (running, _) = recorder.now();
        let moves_in = running.filter(|_| recorder.waits.take_moved());
        let moves_in = moves_in.map(|running| running.sequence);
        let gossip = board.next_gossip(*rank, &recorder.stats(), moves_in, now);
        self.flood(Message::Gossip(gossip), None);
    }

    /// Sends a log line to rank 0.
    pub(crate) fn log_line(&mut self, text: String) {
        let rank = self.journal.rank;
        let number = self.log_lines.entry(rank).or_default();
        *number += 1;
        let log_line = LogLine {
            rank,
            number: *number,
            text,
        };
        self.flood(Message::LogLine(log_line), None);
    }

    /// Says goodbye, because this rank leaves in good order.
    pub(crate) fn leave(&mut self) {
        self.flood(Message::Goodbye, None);
    }

    /// Handles a suspicion of this rank's engine.
    pub(crate) fn investigate(&mut self, suspicion: Suspicion, now: Instant) {
        match suspicion {
            Suspicion::LinkBroken { peer, broken } => {
                // If two ranks lose each other, one of them blames first and the other receives
                // that. It is the rank that noticed first, or the lower rank if both notice before
                // a message arrives.
                let rank = self.journal.rank;
                let many = self.journal.hosts.len().saturating_sub(LINK_GRACE_RANKS);
                let base =
                    self.timing.link_grace + LINK_GRACE_PER_RANK * u32::try_from(many).unwrap_or(0);
                let grace = if self.broken_links.contains(&(peer, rank)) {
                    2 * base
                } else if rank < peer {
                    base
                } else {
                    base + self.timing.link_grace / 2
                };
                self.link_broken((rank, peer), None);
                self.broken.push((peer, broken, now + grace));
            }
            Suspicion::Garbled { peer, how } => {
                let cause = Error::from(Breach::Garbled { how });
                self.fail(cause.blaming(peer, self.host(peer)));
            }
            Suspicion::Corrupted {
                peer,
                broken,
                call,
                sequence,
            } => {
                let (theirs, rank) = (self.host(peer), self.journal.rank);
                let cause = Error::from(Damage::OnLink {
                    from: peer,
                    from_host: theirs.into(),
                    to: rank,
                    to_host: self.host(rank).into(),
                    broken,
                });
                let cause = cause.blaming(peer, theirs);
                self.fail(cause.during(&*call, sequence));
            }
            Suspicion::HeadersDiffer {
                peer,
                sequence,
                theirs,
                ..
            } => {
                if let Some(diagnosis) = self.open_own_diagnosis(sequence, now) {
                    diagnosis.about_header(peer, theirs);
                }
            }
            Suspicion::Stalled {
                awaited,
                sequence,
                idle,
            } => {
                if let Some(diagnosis) = self.open_own_diagnosis(sequence, now) {
                    diagnosis.about_stall(awaited, idle);
                }
            }
        }
    }

    /// Records that something has arrived from a neighbour, so it is alive.
    pub(crate) fn sign_of_life(&mut self, from: usize, now: Instant) {
        self.neighbours[from].received_at = now;
    }

    /// Handles a message from a neighbour.
    pub(crate) fn receive(&mut self, message: Message, from: usize, now: Instant) {
        match message {
            Message::Heartbeat(tick) => self.compare_clocks(tick, from),
            Message::Gossip(gossip) => {
                let Journal {
                    rank,
                    hosts,
                    recorder,
                    board,
                    ..
                } = &*self.journal;
                if gossip.rank < hosts.len()
                    && gossip.rank != *rank
                    && board.receive(gossip.clone())
                {
                    let (running, _) = recorder.now();
                    if gossip.moves_in.is_some()
                        && gossip.moves_in < running.map(|running| running.sequence)
                    {
                        recorder.waits.note_earlier_move(now);
                    }
                    self.flood(Message::Gossip(gossip), Some(from));
                }
            }
            Message::LogLine(log_line) => {
                if self.is_news(&log_line) {
                    if self.journal.rank == 0 {
                        (self.on_log_line)(shortened(&log_line.text));
                    }
                    self.flood(Message::LogLine(log_line), Some(from));
                }
            }
            Message::Goodbye => {
                self.left.insert(self.neighbours[from].rank);
            }
            Message::Query { sequence } => self.open_diagnosis(sequence, Some(from), now),
            Message::Report(report) => {
                self.open_diagnosis(report.sequence, Some(from), now);
                let diagnosis = self.diagnosis.as_mut();
                if diagnosis.is_some_and(|diagnosis| diagnosis.receive(report.clone())) {
                    self.flood(Message::Report(report), Some(from));
                }
            }
            Message::LinkBroken { rank, peer } => {
                let world_size = self.journal.hosts.len();
                if rank < world_size && peer < world_size {
                    self.link_broken((rank, peer), Some(from));
                }
            }
            Message::Abort(cause) => {
                if self.abort.raise(cause.clone()) {
                    self.flood(Message::Abort(cause), Some(from));
                }
            }
        }
    }

    /// Fails the group because a neighbour has sent an undecodable message.
    pub(crate) fn garbled(&mut self, from: usize, error: Error) {
        let rank = self.neighbours[from].rank;
        self.fail(error.blaming(rank, self.host(rank)));
    }

    /// Fails the group because a message could not be encoded. The others receive this error
    /// instead, which is short.
    pub(crate) fn not_sent(&mut self, error: Error) {
        let rank = self.journal.rank;
        let cause = error.blaming(rank, self.host(rank));
        self.abort.raise(cause.clone());
        self.spread(cause);
    }

    /// Handles the end of the connection to a neighbour.
    pub(crate) fn ended(&mut self, neighbour: usize, how: Lost) {
        let Neighbour { rank, ended, .. } = &mut self.neighbours[neighbour];
        *ended = true;
        let rank = *rank;
        if !self.left.contains(&rank) {
            self.fail(self.lost(rank, how));
        }
    }

    /// Does everything that is due by `now`.
    pub(crate) fn keep_time(&mut self, now: Instant) {
        self.forgive_own_silence(now);
        if now >= self.next_beat() {
            self.beat_at = now;
            self.beats = self.beats.saturating_add(1);
            self.beat(now);
        }
        let world_size = self.journal.hosts.len();
        let crowd = u32::try_from(world_size).unwrap_or(u32::MAX) / GOSSIP_PER_SECOND;
        if now >= self.gossip_at + self.timing.heartbeat * crowd.max(1) {
            self.gossip(now);
        }
        if self.abort.cause().is_none()
            && let Some(cause) = self.lost_by(now).or_else(|| self.diagnosed(now))
        {
            self.fail(cause);
        }
    }

    /// Discounts time in which this process was stopped, by Ctrl-Z or with its machine. That time
    /// proves nothing about the others: this process received nothing, and the whole job may have
    /// been stopped.
    fn forgive_own_silence(&mut self, now: Instant) {
        let stopped = now.saturating_duration_since(self.kept_at);
        self.kept_at = now;
        // A monitor that runs keeps time at each of its heartbeats.
        if stopped < self.timing.silence / 2 {
            return;
        }
        for neighbour in &mut self.neighbours {
            neighbour.received_at = now;
        }
        for (_, _, due) in &mut self.broken {
            *due += stopped;
        }
        self.diagnosis_until += stopped;
    }

    fn next_beat(&self) -> Instant {
        let first = self.beats < FIRST_HEARTBEATS;
        self.beat_at
            + if first {
                FIRST_HEARTBEAT_INTERVAL.min(self.timing.heartbeat)
            } else {
                self.timing.heartbeat
            }
    }

    /// Sends each neighbour a heartbeat with the time on this rank's clock.
    fn beat(&mut self, now: Instant) {
        let to_first = self.journal.clock();
        for (index, neighbour) in self.neighbours.iter().enumerate() {
            let tick = Tick {
                sent_ns: clock::unix_ns(now),
                lag_ns: neighbour.clock.lag_ns(),
                to_first,
            };
            let heartbeat = Message::Heartbeat(tick);
            self.to_tell.push((Audience::Neighbour(index), heartbeat));
        }
    }

    fn compare_clocks(&mut self, tick: Tick, from: usize) {
        let neighbour = &mut self.neighbours[from];
        let received_ns = clock::unix_ns(neighbour.received_at);
        neighbour.clock.receive(tick, received_ns);
        let Journal { rank, hosts, .. } = &*self.journal;
        // Clocks are compared along the ring, so a rank uses its predecessor's.
        let predecessor = (rank + hosts.len() - 1) % hosts.len();
        if *rank != 0
            && neighbour.rank == predecessor
            && let Some(offset) = neighbour.clock.to_first()
        {
            self.journal.set_clock(offset);
        }
    }

    /// Returns `true` for a new log line of another rank.
    fn is_news(&mut self, log_line: &LogLine) -> bool {
        if log_line.rank == self.journal.rank || log_line.rank >= self.journal.hosts.len() {
            return false;
        }
        let known = self.log_lines.entry(log_line.rank).or_default();
        let news = log_line.number > *known;
        *known = log_line.number.max(*known);
        news
    }

    /// Raises the switch here, and sends the cause to all ranks.
    fn fail(&mut self, cause: Error) {
        if self.abort.raise(cause.clone()) {
            self.spread(cause);
        }
    }

    /// Sends a message to all neighbours except the one it came from.
    fn flood(&mut self, message: Message, except: Option<usize>) {
        self.to_tell.push((Audience::AllBut(except), message));
    }

    /// Records that a rank has lost its data connection to a peer; forwards the news once.
    fn link_broken(&mut self, (rank, peer): (usize, usize), from: Option<usize>) {
        if self.broken_links.insert((rank, peer)) {
            self.flood(Message::LinkBroken { rank, peer }, from);
        }
    }

    /// Opens a diagnosis for this rank's engine; `None` if an earlier position is in question.
    fn open_own_diagnosis(&mut self, sequence: u64, now: Instant) -> Option<&mut Diagnosis> {
        self.open_diagnosis(sequence, None, now);
        self.own_diagnosis = true;
        let diagnosis = self.diagnosis.as_mut();
        diagnosis.filter(|diagnosis| diagnosis.sequence == sequence)
    }

    /// Opens a diagnosis unless one for the same or an earlier position is open. One is enough for
    /// a group: if ranks at different positions query at the same time, all ranks report on the
    /// earliest.
    fn open_diagnosis(&mut self, sequence: u64, from: Option<usize>, now: Instant) {
        let open = self.diagnosis.as_ref();
        if open.is_some_and(|diagnosis| diagnosis.sequence <= sequence) {
            return;
        }
        self.diagnosis = Some(Diagnosis::new(sequence, self.journal.hosts.len()));
        self.diagnosis_until = now + self.timing.diagnosis;
        self.report_due = Some(now + self.timing.report_grace);
        self.flood(Message::Query { sequence }, from);
    }

    fn host(&self, rank: usize) -> &str {
        &self.journal.hosts[rank]
    }

    fn lost(&self, rank: usize, how: Lost) -> Error {
        Error::from(how).blaming(rank, self.host(rank))
    }

    /// Returns the loss of a peer that is certain by now.
    fn lost_by(&self, now: Instant) -> Option<Error> {
        let silent = self.neighbours.iter().find(|neighbour| {
            !neighbour.ended
                && !self.left.contains(&neighbour.rank)
                && now >= neighbour.received_at + self.timing.silence
        });
        if let Some(neighbour) = silent {
            let silence = self.timing.silence;
            return Some(self.lost(neighbour.rank, Lost::Silent { silence }));
        }
        let mut broken = self.broken.iter();
        let (peer, broken, _) =
            broken.find(|(peer, _, due)| now >= *due || self.left.contains(peer))?;
        let how = match self.left.contains(peer) {
            true => Lost::Left,
            false => Lost::LinkEnded {
                broken: broken.clone(),
            },
        };
        Some(self.lost(*peer, how))
    }

    /// Returns the cause found by the diagnosis, once it is over and if this rank has to name it.
    fn diagnosed(&mut self, now: Instant) -> Option<Error> {
        self.report(now);
        let diagnosis = self.diagnosis.as_ref().filter(|_| self.own_diagnosis)?;
        (diagnosis.complete() || now >= self.diagnosis_until)
            .then(|| diagnosis.cause(&self.journal.hosts))
    }

    /// Reports on this rank at the position in question, once it has entered or its grace is over.
    fn report(&mut self, now: Instant) {
        let (Some(diagnosis), Some(due)) = (&mut self.diagnosis, self.report_due) else {
            return;
        };
        let recorder = &self.journal.recorder;
        let entry = recorder.find(diagnosis.sequence);
        if entry.is_none() && now < due {
            return;
        }
        // A rank past this position waits for ranks that are not, so its wait explains nothing.
        let (running, _) = recorder.now();
        let running = running.filter(|running| running.sequence <= diagnosis.sequence);
        let here = running.and_then(|running| Some((running, recorder.waits.now()?)));
        let keeps = (here.iter()).any(|(running, _)| recorder.keeps(running));
        let may_be_beside = !keeps && (entry.is_none() || here.is_some());
        let stuck = recorder.stuck_beside().filter(|_| may_be_beside);
        let waits = |waiting: Waiting, beside: Option<String>, in_advance| Waits {
            awaited: waiting.awaited,
            idle: now.saturating_duration_since(waiting.since),
            beside,
            in_advance,
        };
        let waits = match (stuck, here) {
            (Some((there, waiting)), _) => Some(waits(
                waiting,
                Some(shortened(&there.call.to_string())),
                false,
            )),
            (None, Some((_, waiting))) => Some(waits(waiting, None, !keeps)),
            (None, None) => None,
        };
        let report = Report {
            rank: self.journal.rank,
            sequence: diagnosis.sequence,
            entered: entry.as_ref().map(|entry| Entered {
                header: entry.header().to_vec(),
                call: shortened(&entry.call.to_string()),
                step: entry.step,
                left: recorder
                    .last_left_step()
                    .map(|(step, by)| (step, shortened(&by))),
            }),
            waits,
        };
        diagnosis.receive(report.clone());
        self.report_due = None;
        self.flood(Message::Report(report), None);
    }
}

#[cfg(test)]
mod tests;
