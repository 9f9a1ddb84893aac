//! The monitor's thread: carries messages between the detector and the control connections, and
//! calls the detector when time is due.

use std::io::{Read, Write};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::detector::{Audience, Detector};
use super::neighbour::Neighbour;
use super::requests::{MonitorRequest, Requests};
use crate::observe::journal::Journal;
use crate::observe::{record, signals};
use gradring_net::config::timing::Timing;
use gradring_net::link::poll::{self, WakeUp};
use gradring_net::link::tcp::connection::Connection;
use gradring_proto::wire::control;

/// Time limit for sending the last messages.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);

/// State of the monitor's thread, over control connections of any kind.
pub struct MonitorThread<S> {
    detector: Detector,
    neighbours: Vec<Neighbour<S>>,
    requests: Arc<Requests>,
    journal: Arc<Journal>,
    /// `true` once the record was written because of the group's failure.
    written: bool,
    /// Number of requests for a record (SIGUSR2) that this monitor has seen.
    asked: u64,
    /// Thread that writes a requested record.
    writing: Option<JoinHandle<()>>,
}

impl<S: Read + Write> MonitorThread<S> {
    /// Makes the monitor over `neighbours`, given as (rank, non-blocking control connection).
    pub fn new(
        journal: Arc<Journal>,
        requests: Arc<Requests>,
        neighbours: Vec<(usize, S)>,
        now: Instant,
        timing: Timing,
        on_log_line: fn(String),
    ) -> Self {
        let ranks: Vec<usize> = neighbours.iter().map(|(rank, _)| *rank).collect();
        let abort = Arc::clone(&requests.abort);
        let streams = neighbours.into_iter().map(|(_, stream)| stream);
        Self {
            detector: Detector::new(
                Arc::clone(&journal),
                abort,
                &ranks,
                now,
                timing,
                on_log_line,
            ),
            neighbours: streams.map(Neighbour::new).collect(),
            requests,
            journal,
            written: false,
            asked: signals::asked(),
            writing: None,
        }
    }

    /// Does everything that can be done now. Returns `false` once this rank leaves.
    pub fn turn(&mut self, clock: impl Fn() -> Instant) -> bool {
        for request in self.requests.take() {
            match request {
                MonitorRequest::Investigate(suspicion) => {
                    self.detector.investigate(suspicion, clock())
                }
                MonitorRequest::Spread(cause) => self.detector.spread(cause),
                MonitorRequest::Gossip => self.detector.gossip(clock()),
                MonitorRequest::LogLine(text) => self.detector.log_line(text),
                MonitorRequest::Close => {
                    self.detector.leave();
                    self.hand_out();
                    self.flush();
                    self.write_record();
                    return false;
                }
            }
        }
        for index in 0..self.neighbours.len() {
            self.listen(index, &clock);
        }
        self.detector.keep_time(clock());
        self.hand_out();
        // The disk may be slow, so messages go first.
        self.flush();
        self.write_record();
        true
    }

    /// Time of the next turn, if nothing happens before.
    pub fn next_turn(&self, now: Instant) -> Instant {
        self.detector.next_poll(now)
    }

    /// Sends as much as the connections take. Returns `true` if there is more.
    pub fn flush(&mut self) -> bool {
        self.neighbours.iter_mut().for_each(Neighbour::flush);
        let mut neighbours = self.neighbours.iter();
        neighbours.any(|neighbour| neighbour.outgoing().is_some())
    }

    fn listen(&mut self, index: usize, clock: &impl Fn() -> Instant) {
        let (detector, neighbour) = (&mut self.detector, &mut self.neighbours[index]);
        let end = neighbour.receive(|| detector.sign_of_life(index, clock()));
        loop {
            match neighbour.next_message() {
                Ok(Some(message)) => detector.receive(message, index, clock()),
                Ok(None) => break,
                Err(error) => detector.garbled(index, error),
            }
        }
        if let Some(how) = end {
            detector.ended(index, how);
        }
    }

    /// Hands the detector's messages to the neighbours that they are for.
    fn hand_out(&mut self) {
        let mut not_sent = None;
        for (audience, message) in self.detector.take_messages() {
            let bytes = match control::encode(&message) {
                Ok(bytes) => bytes,
                Err(error) => {
                    not_sent = Some(error);
                    continue;
                }
            };
            for (index, neighbour) in self.neighbours.iter_mut().enumerate() {
                let meant = match audience {
                    Audience::Neighbour(only) => index == only,
                    Audience::AllBut(except) => Some(index) != except,
                };
                if meant {
                    neighbour.tell(&bytes);
                }
            }
        }
        if let Some(error) = not_sent {
            self.detector.not_sent(error);
            self.hand_out();
        }
    }

    /// Writes the flight record once when the group has failed, and after every request.
    fn write_record(&mut self) {
        let asked = signals::asked();
        let cause = self.requests.abort.cause();
        let is_writing = self.writing.as_ref().is_some_and(|it| !it.is_finished());
        if self.asked != asked && !is_writing {
            self.asked = asked;
            // A slow disk must not silence a healthy rank, so another thread writes.
            let (journal, cause) = (Arc::clone(&self.journal), cause.clone());
            let write = move || record::write_down(&journal, cause.as_ref(), "SIGUSR2");
            let thread = thread::Builder::new().name("gradring-record".into());
            self.writing = thread.spawn(write).ok();
        }
        if !self.written
            && let Some(cause) = cause
        {
            self.written = true;
            self.finish_writing();
            record::write_down(&self.journal, Some(&cause), "error");
        }
    }

    fn finish_writing(&mut self) {
        if let Some(thread) = self.writing.take() {
            drop(thread.join());
        }
    }
}

impl MonitorThread<Connection> {
    /// Monitors the group until this rank leaves.
    pub(super) fn run(mut self, wake_up: &WakeUp) {
        loop {
            wake_up.reset();
            if !self.turn(Instant::now) {
                return self.send_last(wake_up);
            }
            self.sleep(wake_up);
        }
    }

    fn send_last(&mut self, wake_up: &WakeUp) {
        let until = Instant::now() + FLUSH_LIMIT;
        while self.flush() && Instant::now() < until {
            self.sleep(wake_up);
        }
        self.finish_writing();
    }

    fn sleep(&self, wake_up: &WakeUp) {
        let now = Instant::now();
        let limit = self.next_turn(now).saturating_duration_since(now);
        let sockets = self.neighbours.iter().flat_map(|neighbour| {
            let reading = neighbour.incoming().map(poll::readable);
            let writing = neighbour.outgoing().map(poll::writable);
            reading.into_iter().chain(writing)
        });
        poll::wait(sockets.chain([wake_up.awaited()]), limit);
    }
}
