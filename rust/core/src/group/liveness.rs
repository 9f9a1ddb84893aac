//! The watch: one sleeping thread per communicator that notices what goes wrong in the group.
//!
//! It owns a control connection to each neighbour on the ring. Over these go a heartbeat per
//! second, questions and testimonies (see `inquest`), and aborts, which every rank passes on, so
//! they reach all ranks around either side of a lost one.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::abort::AbortSwitch;
use crate::engine::{Stall, Supervisor, Suspicion, message_of};
use crate::error::{Error, shortened};
use crate::group::clocks::NeighbourClock;
use crate::group::inquest::Inquest;
use crate::link::connection::Connection;
use crate::link::poll::{self, Interested, WakeUp};
use crate::trace::journal::Journal;
use crate::trace::{clock, signals};
use crate::wire::control::{self, Entered, Message, Remark, Testimony};
use crate::wire::pulse::Tick;

const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// The first heartbeats follow each other faster, so that clocks can be compared soon.
const FIRST_HEARTBEATS: u32 = 8;
const FIRST_HEARTBEAT_INTERVAL: Duration = Duration::from_millis(50);
/// Pulses that a rank passes on or sends in a second, at most: in larger groups they are rarer.
const PULSES_PER_SECOND: u32 = 64;
/// A neighbour that is silent for so long is lost.
const PEER_TIMEOUT: Duration = Duration::from_secs(10);
/// A broken data connection alone blames its peer only after this time: if the peer itself left
/// because of another rank, its abort arrives first.
const LINK_GRACE: Duration = Duration::from_millis(500);
/// A rank that has not entered the collective in question waits so long before it says so.
const TESTIMONY_GRACE: Duration = Duration::from_millis(500);
/// An inquest closes after this time, whoever has spoken.
const INQUEST_LIMIT: Duration = Duration::from_secs(2);
/// Bound on `investigate` and on flushing the last messages.
const JUDGEMENT_LIMIT: Duration = Duration::from_secs(5);
const FLUSH_LIMIT: Duration = Duration::from_secs(1);
/// How often the watch looks whether a collective in question has been entered.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// The watch of one communicator.
pub(crate) struct Liveness {
    desk: Arc<Desk>,
    rank: usize,
    hosts: Vec<String>,
    on_warning: fn(String),
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Where other threads leave requests for the watch.
struct Desk {
    requests: Mutex<Vec<Requested>>,
    /// Wakes the watch; None when it has ended.
    wake_up: Mutex<Option<Arc<WakeUp>>>,
    abort: Arc<AbortSwitch>,
}

enum Requested {
    Investigate(Suspicion),
    Spread(Error),
    Pulse,
    Remark(String),
    Close,
}

impl Liveness {
    /// Starts watching over `neighbours`, given as (rank, control connection).
    pub(crate) fn start(
        journal: Arc<Journal>,
        neighbours: Vec<(usize, Connection)>,
        abort: Arc<AbortSwitch>,
        on_warning: fn(String),
    ) -> std::io::Result<Self> {
        let wake_up = Arc::new(WakeUp::new()?);
        let desk = Arc::new(Desk {
            requests: Mutex::default(),
            wake_up: Mutex::new(Some(Arc::clone(&wake_up))),
            abort,
        });
        let now = Instant::now();
        let neighbours = neighbours
            .into_iter()
            .map(|(rank, mut stream)| {
                stream.be_nonblocking()?;
                stream.tcp().set_nodelay(true)?;
                Ok(Neighbour {
                    rank,
                    stream: Some(stream),
                    inbox: Vec::new(),
                    outbox: Vec::new(),
                    heard_at: now,
                    left: false,
                    garbled: false,
                    clock: NeighbourClock::default(),
                })
            })
            .collect::<std::io::Result<_>>()?;
        let watch = Watch {
            rank: journal.rank,
            hosts: journal.hosts.clone(),
            neighbours,
            desk: Arc::clone(&desk),
            wake_up,
            journal: Arc::clone(&journal),
            written: false,
            asked: signals::asked(),
            inquest: None,
            own_inquest: false,
            inquest_until: now,
            testimony_due: None,
            broken: Vec::new(),
            left: BTreeSet::new(),
            beat_at: now,
            beats: 0,
            pulse_at: now,
            on_warning,
            remarks: BTreeMap::new(),
        };
        let thread = std::thread::Builder::new()
            .name("gradring-watch".into())
            .spawn(move || {
                let abort = Arc::clone(&watch.desk.abort);
                guarded(&abort, || watch.run());
            })?;
        Ok(Self {
            desk,
            rank: journal.rank,
            hosts: journal.hosts.clone(),
            on_warning,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Ends the group for all on account of `error`, unless what made this rank fail turns out to
    /// be another's failure; returns the cause.
    pub(crate) fn first_cause(&self, error: Error) -> Error {
        let earlier = self.desk.abort.wait(LINK_GRACE);
        earlier.unwrap_or_else(|| {
            self.abort(error.clone());
            self.desk.abort.cause().unwrap_or(error)
        })
    }

    /// Tells everybody how this rank is doing, now.
    pub(crate) fn pulse(&self) {
        self.desk.request(Requested::Pulse);
    }

    /// Shows people a warning, here and on rank 0.
    pub(crate) fn remark(&self, text: String) {
        (self.on_warning)(text.clone());
        if self.rank != 0 {
            self.desk.request(Requested::Remark(text));
        }
    }

    /// Says goodbye and ends the watch.
    pub(crate) fn close(&self) {
        self.desk.request(Requested::Close);
        if let Some(thread) = lock(&self.thread).take() {
            // A watch that panicked has nothing left to say.
            let _ = thread.join();
        }
        drop(lock(&self.desk.wake_up).take());
    }
}

impl Supervisor for Liveness {
    fn investigate(&self, suspicion: Suspicion) -> Error {
        let fallback = format!("the group could not find the cause of: {suspicion:?}");
        self.desk.request(Requested::Investigate(suspicion));
        self.desk.abort.wait(JUDGEMENT_LIMIT).unwrap_or_else(|| {
            let cause = Error::protocol(fallback);
            self.abort(cause.clone());
            cause
        })
    }

    fn abort(&self, cause: Error) {
        if self.desk.abort.raise(cause.clone()) {
            self.desk.request(Requested::Spread(cause));
        }
    }

    fn warn(&self, stall: &Stall<'_>) {
        let late: Vec<String> = stall
            .awaited
            .iter()
            .map(|&rank| format!("rank {rank} on {}", self.hosts[rank]))
            .collect();
        let problem = if stall.entered {
            "entered, but sending nothing (waiting for another rank, perhaps)"
        } else {
            "not entered"
        };
        let call = shortened(&stall.call.to_string());
        (self.on_warning)(format!(
            "rank {} has waited {:.1} s in {call} (collective #{}) for {}: {problem}; look at what \
             it is doing; after {:.0} s this fails",
            self.rank,
            stall.idle.as_secs_f64(),
            stall.sequence,
            late.join(", "),
            stall.timeout.as_secs_f64(),
        ));
    }
}

impl Drop for Liveness {
    fn drop(&mut self) {
        self.close();
    }
}

impl Desk {
    fn request(&self, requested: Requested) {
        let Some(wake_up) = lock(&self.wake_up).clone() else {
            return;
        };
        lock(&self.requests).push(requested);
        wake_up.wake();
    }

    fn take(&self) -> Vec<Requested> {
        std::mem::take(&mut *lock(&self.requests))
    }
}

/// State of the watch's thread.
struct Watch {
    wake_up: Arc<WakeUp>,
    rank: usize,
    hosts: Vec<String>,
    neighbours: Vec<Neighbour>,
    desk: Arc<Desk>,
    journal: Arc<Journal>,
    /// Whether the record was written because the group has failed.
    written: bool,
    /// How often the process had been asked for its record when this watch last looked.
    asked: u64,
    inquest: Option<Inquest>,
    /// Whether this rank is to give the verdict, because its engine waits for it.
    own_inquest: bool,
    inquest_until: Instant,
    /// Until when to wait for this rank's own engine to enter the collective in question.
    testimony_due: Option<Instant>,
    /// Peers whose data connection broke, the reason, and from when on they count as lost.
    broken: Vec<(usize, String, Instant)>,
    /// Neighbours that said goodbye.
    left: BTreeSet<usize>,
    beat_at: Instant,
    beats: u32,
    pulse_at: Instant,
    on_warning: fn(String),
    /// By rank, the last remark that it has made.
    remarks: BTreeMap<usize, u64>,
}

struct Neighbour {
    rank: usize,
    /// `None` once the connection has ended.
    stream: Option<Connection>,
    inbox: Vec<u8>,
    outbox: Vec<u8>,
    heard_at: Instant,
    left: bool,
    /// Whether it has sent what cannot be understood: what follows means nothing, but it still
    /// has to be told the cause.
    garbled: bool,
    clock: NeighbourClock,
}

impl Watch {
    fn run(mut self) {
        loop {
            self.wake_up.reset();
            for requested in self.desk.take() {
                match requested {
                    Requested::Investigate(suspicion) => self.investigate(suspicion),
                    Requested::Spread(cause) => self.flood(&Message::abort(cause), None),
                    Requested::Pulse => self.pulse(Instant::now()),
                    Requested::Remark(text) => self.remark(text),
                    Requested::Close => {
                        self.write_record();
                        return self.leave();
                    }
                }
            }
            for index in 0..self.neighbours.len() {
                self.listen(index);
            }
            self.keep_time(Instant::now());
            self.write_record();
            for neighbour in &mut self.neighbours {
                neighbour.flush();
            }
            self.sleep();
        }
    }

    fn sleep(&self) {
        let urgent =
            self.inquest.is_some() || !self.broken.is_empty() || self.testimony_due.is_some();
        let limit = if urgent && self.aborted().is_none() {
            LOOK_INTERVAL
        } else {
            self.next_beat().saturating_duration_since(Instant::now())
        };
        let sockets = self.neighbours.iter().flat_map(|neighbour| {
            let stream = neighbour.stream.as_ref();
            let fd = stream.map(|stream| stream.as_fd().as_raw_fd());
            let writes = !neighbour.outbox.is_empty();
            fd.into_iter().flat_map(move |fd| {
                let write = writes.then(|| Interested::writable(fd));
                std::iter::once(Interested::readable(fd)).chain(write)
            })
        });
        poll::wait(sockets, &self.wake_up, limit);
    }

    fn next_beat(&self) -> Instant {
        let first = self.beats < FIRST_HEARTBEATS;
        self.beat_at
            + if first {
                FIRST_HEARTBEAT_INTERVAL
            } else {
                HEARTBEAT_INTERVAL
            }
    }

    /// Tells each neighbour that this rank is alive, and what its clock says.
    fn beat(&mut self) {
        let to_first = self.journal.clock();
        for neighbour in &mut self.neighbours {
            if neighbour.stream.is_some() {
                let tick = Tick {
                    sent_ns: clock::now_ns(),
                    lag_ns: neighbour.clock.lag_ns(),
                    to_first,
                };
                let bytes = control::encode(&Message::Heartbeat(tick));
                neighbour.outbox.extend_from_slice(&bytes);
            }
        }
    }

    /// Tells everybody how this rank is doing.
    fn pulse(&mut self, now: Instant) {
        self.pulse_at = now;
        let stats = self.journal.recorder.stats();
        let pulse = self.journal.board.next_pulse(self.rank, &stats, now);
        self.flood(&Message::Pulse(pulse), None);
    }

    fn remark(&mut self, text: String) {
        let number = self.remarks.entry(self.rank).or_default();
        *number += 1;
        let remark = Remark {
            rank: self.rank,
            number: *number,
            text,
        };
        self.flood(&Message::Remark(remark), None);
    }

    /// Whether a remark is a new one of another rank.
    fn is_news(&mut self, remark: &Remark) -> bool {
        if remark.rank == self.rank || remark.rank >= self.hosts.len() {
            return false;
        }
        let known = self.remarks.entry(remark.rank).or_default();
        let news = remark.number > *known;
        *known = remark.number.max(*known);
        news
    }

    /// Writes the flight record when the group has failed, once, and whenever somebody asks.
    fn write_record(&mut self) {
        let asked = signals::asked();
        if std::mem::replace(&mut self.asked, asked) != asked {
            self.journal.write(self.aborted().as_ref(), "SIGUSR2");
        }
        if !self.written
            && let Some(cause) = self.aborted()
        {
            self.written = true;
            self.journal.write(Some(&cause), "error");
        }
    }

    fn aborted(&self) -> Option<Error> {
        self.desk.abort.cause()
    }

    /// Raises the switch here and tells everybody.
    fn fail(&mut self, cause: Error) {
        if self.desk.abort.raise(cause.clone()) {
            self.flood(&Message::abort(cause), None);
        }
    }

    /// Sends to all neighbours but the connection it came from.
    fn flood(&mut self, message: &Message, except: Option<usize>) {
        let bytes = control::encode(message);
        for (index, neighbour) in self.neighbours.iter_mut().enumerate() {
            if Some(index) != except && neighbour.stream.is_some() {
                neighbour.outbox.extend_from_slice(&bytes);
            }
        }
    }

    fn investigate(&mut self, suspicion: Suspicion) {
        match suspicion {
            Suspicion::LinkBroken { peer, reason } => {
                self.broken
                    .push((peer, reason, Instant::now() + LINK_GRACE));
            }
            Suspicion::Garbled { peer, problem } => {
                self.fail(Error::protocol(problem).blaming(peer, &self.hosts[peer]));
            }
            Suspicion::Corrupted {
                peer,
                reason,
                call,
                sequence,
            } => {
                let problem = format!(
                    "the connection from rank {peer} on {} to rank {} on {} {reason}",
                    self.hosts[peer], self.rank, self.hosts[self.rank]
                );
                let cause = Error::corrupted(problem).blaming(peer, &self.hosts[peer]);
                self.fail(cause.during(shortened(&call), sequence));
            }
            Suspicion::HeadersDiffer { peer, sequence } => {
                self.open_inquest(sequence, None);
                self.own_inquest = true;
                if let Some(inquest) = &mut self.inquest {
                    inquest.about_header(peer);
                }
            }
            Suspicion::Stalled {
                awaited,
                sequence,
                idle,
            } => {
                self.open_inquest(sequence, None);
                self.own_inquest = true;
                if let Some(inquest) = &mut self.inquest {
                    inquest.about_stall(awaited, idle);
                }
            }
        }
    }

    /// One inquest is enough for a group: the first question asked is the one answered.
    fn open_inquest(&mut self, sequence: u64, from: Option<usize>) {
        if self.inquest.is_some() {
            return;
        }
        let now = Instant::now();
        self.inquest = Some(Inquest::new(sequence, self.hosts.len()));
        self.inquest_until = now + INQUEST_LIMIT;
        self.testimony_due = Some(now + TESTIMONY_GRACE);
        self.flood(&Message::Inquest { sequence }, from);
    }

    fn hear(&mut self, message: Message, from: usize) {
        match message {
            Message::Heartbeat(tick) => {
                let neighbour = &mut self.neighbours[from];
                let heard_ns = clock::unix_ns(neighbour.heard_at);
                neighbour.clock.hear(tick, heard_ns);
                // Clocks are compared along the ring, so a rank asks its predecessor.
                let predecessor = (self.rank + self.hosts.len() - 1) % self.hosts.len();
                if self.rank != 0
                    && neighbour.rank == predecessor
                    && let Some(offset) = neighbour.clock.to_first()
                {
                    self.journal.set_clock(offset);
                }
            }
            Message::Pulse(pulse) => {
                if pulse.rank < self.hosts.len()
                    && pulse.rank != self.rank
                    && self.journal.board.hear(pulse.clone())
                {
                    self.flood(&Message::Pulse(pulse), Some(from));
                }
            }
            Message::Remark(remark) => {
                if self.is_news(&remark) {
                    if self.rank == 0 {
                        (self.on_warning)(shortened(&remark.text));
                    }
                    self.flood(&Message::Remark(remark), Some(from));
                }
            }
            Message::Goodbye => {
                self.neighbours[from].left = true;
                self.left.insert(self.neighbours[from].rank);
            }
            Message::Inquest { sequence } => self.open_inquest(sequence, Some(from)),
            Message::Testimony(testimony) => {
                self.open_inquest(testimony.sequence, Some(from));
                let inquest = self.inquest.as_mut();
                if inquest.is_some_and(|inquest| inquest.hear(testimony.clone())) {
                    self.flood(&Message::Testimony(testimony), Some(from));
                }
            }
            Message::Abort(cause) => {
                if self.desk.abort.raise(cause.clone()) {
                    self.flood(&Message::Abort(cause), Some(from));
                }
            }
        }
    }

    fn listen(&mut self, index: usize) {
        let neighbour = &mut self.neighbours[index];
        let end = neighbour.receive();
        while !self.neighbours[index].garbled {
            match control::decode(&mut self.neighbours[index].inbox) {
                Ok(Some(message)) => self.hear(message, index),
                Ok(None) => break,
                Err(error) => {
                    let rank = self.neighbours[index].rank;
                    self.neighbours[index].garbled = true;
                    return self.fail(error.blaming(rank, &self.hosts[rank]));
                }
            }
        }
        let (rank, left) = (self.neighbours[index].rank, self.neighbours[index].left);
        if let (Some(reason), false) = (end, left) {
            self.fail(self.lost(rank, &format!("its control connection {reason}")));
        }
    }

    fn lost(&self, rank: usize, problem: &str) -> Error {
        Error::peer_lost(problem).blaming(rank, &self.hosts[rank])
    }

    /// Whatever is due because time has passed.
    fn keep_time(&mut self, now: Instant) {
        if now >= self.next_beat() {
            self.beat_at = now;
            self.beats = self.beats.saturating_add(1);
            self.beat();
        }
        let crowd = u32::try_from(self.hosts.len()).unwrap_or(u32::MAX) / PULSES_PER_SECOND;
        if now >= self.pulse_at + HEARTBEAT_INTERVAL * crowd.max(1) {
            self.pulse(now);
        }
        if self.aborted().is_some() {
            return;
        }
        let silent = self.neighbours.iter().find(|neighbour| {
            neighbour.stream.is_some()
                && !neighbour.left
                && now >= neighbour.heard_at + PEER_TIMEOUT
        });
        if let Some(rank) = silent.map(|neighbour| neighbour.rank) {
            let seconds = PEER_TIMEOUT.as_secs();
            let problem = format!(
                "no sign of life for {seconds} s; it is stopped, or the network to it is cut"
            );
            return self.fail(self.lost(rank, &problem));
        }
        let broken = self
            .broken
            .iter()
            .find(|(peer, _, due)| now >= *due || self.left.contains(peer));
        if let Some((peer, reason, _)) = broken {
            let problem = if self.left.contains(peer) {
                "has closed its communicator while others still use it".into()
            } else {
                format!("the connection to it {reason}")
            };
            return self.fail(self.lost(*peer, &problem));
        }
        self.testify(now);
        if let Some(inquest) = &self.inquest
            && self.own_inquest
            && (inquest.complete() || now >= self.inquest_until)
        {
            let verdict = inquest.verdict(&self.hosts);
            self.fail(verdict);
        }
    }

    /// Says what this rank did at the position in question, as soon as there is something to say.
    fn testify(&mut self, now: Instant) {
        let (Some(inquest), Some(due)) = (&mut self.inquest, self.testimony_due) else {
            return;
        };
        let entry = self.journal.recorder.find(inquest.sequence);
        if entry.is_none() && now < due {
            return;
        }
        let testimony = Testimony {
            rank: self.rank,
            sequence: inquest.sequence,
            entered: entry.map(|entry| Entered {
                header: entry.header().to_vec(),
                call: shortened(&entry.call.to_string()),
            }),
            waits: self.journal.recorder.waiting().and_then(|waiting| {
                let awaited = *waiting.awaited.first()?;
                Some((awaited, waiting.since.elapsed()))
            }),
        };
        inquest.hear(testimony.clone());
        self.testimony_due = None;
        self.flood(&Message::Testimony(testimony), None);
    }

    /// Says goodbye and sends what is left to send.
    fn leave(&mut self) {
        self.flood(&Message::Goodbye, None);
        let until = Instant::now() + FLUSH_LIMIT;
        while self.neighbours.iter().any(Neighbour::has_more_to_send) && Instant::now() < until {
            for neighbour in &mut self.neighbours {
                neighbour.flush();
            }
            if self.neighbours.iter().any(Neighbour::has_more_to_send) {
                self.sleep();
            }
        }
    }
}

impl Neighbour {
    fn has_more_to_send(&self) -> bool {
        self.stream.is_some() && !self.outbox.is_empty()
    }

    fn flush(&mut self) {
        while let (Some(stream), false) = (&mut self.stream, self.outbox.is_empty()) {
            match stream.write(&self.outbox) {
                Ok(written) => drop(self.outbox.drain(..written)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // The receiving side of this connection reports its end.
                Err(_) => self.outbox.clear(),
            }
        }
    }

    /// Takes in what has arrived; returns how the connection ended, if it did.
    fn receive(&mut self) -> Option<String> {
        let mut bytes = [0; 4096];
        loop {
            let reason = match self.stream.as_mut()?.read(&mut bytes) {
                Ok(0) => "was closed: its process has ended".into(),
                Ok(_) if self.garbled => continue,
                Ok(received) => {
                    self.inbox.extend_from_slice(&bytes[..received]);
                    self.heard_at = Instant::now();
                    continue;
                }
                Err(error) => match error.kind() {
                    ErrorKind::Interrupted => continue,
                    ErrorKind::WouldBlock => return None,
                    ErrorKind::ConnectionReset => "was reset: its process has ended".into(),
                    _ => format!("broke: {error}"),
                },
            };
            self.stream = None;
            return Some(reason);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs the watch; if it panics, this rank's works fail, and the others see its connections end.
fn guarded(abort: &AbortSwitch, run: impl FnOnce()) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(run)) {
        let what = message_of(&*panic);
        let problem = format!("the watch over the group failed: {what}; please report this");
        abort.raise(Error::protocol(problem));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_the_watch_fails_the_works() {
        let abort = AbortSwitch::default();
        guarded(&abort, || panic!("a defect of the watch"));
        let cause = abort.cause().unwrap();
        assert!(
            cause.to_string().contains("a defect of the watch"),
            "{cause}"
        );
    }
}
