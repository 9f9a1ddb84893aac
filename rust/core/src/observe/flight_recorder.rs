//! Flight recorder: the last collectives that this rank entered, and counters over all of them.
//!
//! Both change at the end of a collective, so they share one lock: recording takes no lock that
//! counting would not take anyway.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use crate::drive::{Measured, WaitRecord, Waiting};
use crate::observe::exposure::Exposure;
use crate::observe::stats::Stats;
use gradring_net::caller::Caller;
use gradring_proto::collective::Call;
use gradring_proto::lock::lock;
use gradring_proto::names::named;
use gradring_proto::schedule::Algorithm;
use gradring_proto::wire::signature::{Header, Signature};

/// Number of collectives kept by default: a few seconds of training.
pub const CAPACITY: usize = 4096;

/// The last collectives that this rank entered.
#[derive(Debug, Default)]
pub struct FlightRecorder {
    /// Generation of the group.
    pub generation: u32,
    memory: Mutex<Memory>,
    /// Ranks for which this rank waits.
    pub waits: WaitRecord,
    left_step: Mutex<Option<(u64, String)>>,
    /// Recorders of this rank's channels, each with the other rank.
    beside: Mutex<Vec<(usize, Arc<Self>)>>,
}

#[derive(Debug)]
struct Memory {
    entries: VecDeque<Entry>,
    capacity: usize,
    forgotten: u64,
    stats: Stats,
    exposure: Exposure,
}

/// One collective that this rank entered.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Generation of its group.
    pub generation: u32,
    /// Ordinal of the collective.
    pub sequence: u64,
    /// The step of the program that it belongs to; 0 for none.
    pub step: u64,
    /// The call.
    pub call: Arc<Call>,
    /// How it is performed.
    pub algorithm: Algorithm,
    /// Progress on this rank.
    pub state: State,
    /// Last to enter of the peers from which this rank receives.
    pub last: Option<u32>,
    /// Time of the call.
    pub launched: Instant,
    /// Time at which its turn came on this rank.
    pub started: Option<Instant>,
    /// Time at which all peers from which this rank receives had entered.
    pub entered: Option<Instant>,
    /// End, with or without success.
    pub ended: Option<Instant>,
    /// Last wait of the program for it, unless it was over at once.
    pub awaited: Option<(Instant, Instant)>,
    /// Place in the program that waits for it, if the wait took a while.
    pub place: Option<Arc<str>>,
}

named! {
    /// Progress of a collective on this rank.
    pub enum State {
        /// It waits for its turn.
        Queued: "queued",
        /// It is under way.
        Running: "running",
        /// It ended well.
        Done: "done",
        /// It ended with an error.
        Failed: "failed",
    }
}

impl Default for Memory {
    fn default() -> Self {
        Self {
            entries: VecDeque::new(),
            capacity: CAPACITY,
            forgotten: 0,
            stats: Stats::default(),
            exposure: Exposure::default(),
        }
    }
}

impl Entry {
    /// The signature header that was sent.
    #[must_use]
    pub fn header(&self) -> Header {
        Signature::of(&self.call, self.algorithm).header(self.generation, self.sequence, self.step)
    }
}

impl FlightRecorder {
    /// The generation of its group.
    pub(crate) const fn generation(&self) -> u32 {
        self.generation
    }

    /// Makes the recorder of a group of this generation.
    #[must_use]
    pub fn new(generation: u32) -> Self {
        Self {
            generation,
            ..Self::default()
        }
    }

    /// Records a collective that has got its place in the order and its step, and with `at_once`
    /// also its turn. Drops the oldest entries if there are too many.
    pub fn launched(
        &self,
        (sequence, step): (u64, u64),
        call: Arc<Call>,
        algorithm: Algorithm,
        at: Instant,
        at_once: bool,
    ) {
        let mut memory = lock(&self.memory);
        while memory.entries.len() >= memory.capacity {
            memory.entries.pop_front();
            memory.forgotten += 1;
        }
        memory.entries.push_back(Entry {
            generation: self.generation,
            sequence,
            step,
            call,
            algorithm,
            state: if at_once {
                State::Running
            } else {
                State::Queued
            },
            last: None,
            launched: at,
            started: at_once.then_some(at),
            entered: None,
            ended: None,
            awaited: None,
            place: None,
        });
    }

    /// Records where the program waits for a collective. Calls `caller` only once, and without the
    /// lock, since the answer may take long.
    pub fn locate(&self, sequence: u64, caller: &mut dyn Caller) {
        if self
            .find(sequence)
            .is_none_or(|entry| entry.place.is_some())
        {
            return;
        }
        let Some(place) = caller.place() else {
            return;
        };
        if let Some(entry) = lock(&self.memory).entry(sequence) {
            entry.place = Some(place.into());
        }
    }

    /// Records the step that the program last left early, and the reason.
    pub fn left_step(&self, step: u64, by: String) {
        *lock(&self.left_step) = Some((step, by));
    }

    /// Step that the program last left early, with the reason.
    #[must_use]
    pub fn last_left_step(&self) -> Option<(u64, String)> {
        lock(&self.left_step).clone()
    }

    /// Ordinal of the collective that this rank launches next.
    #[must_use]
    pub fn next_sequence(&self) -> u64 {
        lock(&self.memory)
            .entries
            .back()
            .map_or(1, |entry| entry.sequence + 1)
    }

    /// The running collective, if there is one, and the one that ended last.
    #[must_use]
    pub fn now(&self) -> (Option<Entry>, Option<Entry>) {
        let memory = lock(&self.memory);
        let last = |wanted: fn(&Entry) -> bool| memory.entries.iter().rfind(|e| wanted(e)).cloned();
        (
            last(|entry| entry.state == State::Running),
            last(|entry| entry.ended.is_some()),
        )
    }

    /// Adds the recorder of a channel with `partner`.
    pub fn add_beside(&self, partner: usize, recorder: Arc<Self>) {
        recorder.keep(lock(&self.memory).capacity);
        lock(&self.beside).push((partner, recorder));
    }

    /// Entries of this rank's channels, each with the other rank.
    #[must_use]
    pub fn beside(&self) -> Vec<(usize, Vec<Entry>)> {
        let beside = lock(&self.beside);
        let entries = |(partner, recorder): &(usize, Arc<Self>)| (*partner, recorder.entries().0);
        beside.iter().map(entries).collect()
    }

    /// Call in a channel that has blocked the program for a while, if there is one, and the rank
    /// that it waits for.
    #[must_use]
    pub fn stuck_beside(&self) -> Option<(Entry, Waiting)> {
        lock(&self.beside).iter().find_map(|(partner, recorder)| {
            let (running, _) = recorder.now();
            let running = running?;
            let waiting = recorder.waits.now();
            let waiting = waiting.filter(|_| recorder.keeps(&running))?;
            let awaited = vec![*partner];
            Some((running, Waiting { awaited, ..waiting }))
        })
    }

    /// Returns `true` if the program is blocked by a running collective; otherwise it has begun it
    /// in advance. A call that starts at once blocks its caller to the end.
    #[must_use]
    pub fn keeps(&self, running: &Entry) -> bool {
        running.started == Some(running.launched) || self.is_awaited()
    }

    /// Records that the turn of a queued collective has come.
    pub fn started(&self, sequence: u64, at: Instant) {
        if let Some(entry) = lock(&self.memory).entry(sequence) {
            entry.state = State::Running;
            entry.started = Some(at);
        }
    }

    /// Records the success of a collective; `blocking` if the program was blocked all the time.
    pub fn ended(&self, sequence: u64, call: &Call, measured: &Measured, blocking: bool) {
        let mut memory = lock(&self.memory);
        memory.stats.add(call, measured);
        if blocking {
            memory.exposure.add(measured.started, measured.ended);
        }
        if let Some(entry) = memory.entry(sequence) {
            entry.state = State::Done;
            entry.started = Some(measured.started);
            if let Some((at, last)) = measured.everyone_entered {
                entry.entered = Some(at);
                entry.last = u32::try_from(last).ok();
            }
            entry.ended = Some(measured.ended);
        }
    }

    /// Records the end of a collective without measurements: a failure, or a group of one rank.
    pub fn over(&self, sequence: u64, state: State, started: Instant) {
        if let Some(entry) = lock(&self.memory).entry(sequence) {
            entry.state = state;
            entry.started = Some(started);
            entry.ended = Some(Instant::now());
        }
    }

    /// Records that the program begins to wait for an asynchronous collective.
    pub fn wait_begins(&self, at: Instant) {
        lock(&self.memory).exposure.enter(at);
    }

    /// Records that the program continues after a wait.
    pub fn wait_ends(&self, sequence: u64, from: Instant, to: Instant) {
        let mut memory = lock(&self.memory);
        memory.exposure.leave(to);
        if let Some(entry) = memory.entry(sequence) {
            entry.awaited = Some((from, to));
        }
    }

    /// Returns `true` while the program waits for an asynchronous collective.
    #[must_use]
    pub fn is_awaited(&self) -> bool {
        lock(&self.memory).exposure.is_any()
    }

    /// The counters so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let memory = lock(&self.memory);
        Stats {
            exposed: memory.exposure.total(),
            ..memory.stats.clone()
        }
    }

    /// Keeps this many collectives from now on.
    pub fn keep(&self, capacity: usize) {
        let mut memory = lock(&self.memory);
        memory.capacity = capacity.max(1);
        while memory.entries.len() > memory.capacity {
            memory.entries.pop_front();
            memory.forgotten += 1;
        }
        memory.entries.shrink_to_fit();
        drop(memory);
        for (_, recorder) in &*lock(&self.beside) {
            recorder.keep(capacity);
        }
    }

    /// Kept entries, oldest first, and the number of dropped ones.
    #[must_use]
    pub fn entries(&self) -> (Vec<Entry>, u64) {
        let memory = lock(&self.memory);
        (memory.entries.iter().cloned().collect(), memory.forgotten)
    }

    /// Drops all entries, and counts from zero.
    pub fn forget(&self) {
        let mut memory = lock(&self.memory);
        let capacity = memory.capacity;
        *memory = Memory {
            capacity,
            ..Memory::default()
        };
    }

    /// The collective of this ordinal, if it was entered and is still kept.
    #[must_use]
    pub fn find(&self, sequence: u64) -> Option<Entry> {
        lock(&self.memory).entry(sequence).cloned()
    }
}

impl Memory {
    /// Entries have consecutive ordinals.
    fn entry(&mut self, sequence: u64) -> Option<&mut Entry> {
        let first = self.entries.front()?.sequence;
        let index = usize::try_from(sequence.checked_sub(first)?).ok()?;
        self.entries.get_mut(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gradring_proto::collective::{Collective, Name};
    use gradring_proto::dtype::{DType, ReduceOp};

    fn call() -> Arc<Call> {
        Arc::new(Call {
            collective: Collective::AllReduce { op: ReduceOp::Sum },
            dtype: DType::F32,
            count: 1,
            name: Name::default(),
            shapes: String::new(),
            is_mapped: false,
        })
    }

    #[test]
    fn the_oldest_are_forgotten_and_the_others_are_found_by_their_ordinal() {
        let recorder = FlightRecorder::default();
        recorder.keep(3);
        let now = Instant::now();
        for sequence in 1..=5 {
            recorder.launched((sequence, 0), call(), Algorithm::Ring, now, false);
        }
        recorder.over(4, State::Failed, now);
        let (entries, forgotten) = recorder.entries();
        let kept: Vec<_> = entries.iter().map(|e| (e.sequence, e.state)).collect();
        assert_eq!(
            kept,
            [(3, State::Queued), (4, State::Failed), (5, State::Queued)]
        );
        assert_eq!(forgotten, 2);
        assert!(recorder.find(2).is_none());
        assert_eq!(recorder.find(5).map(|entry| entry.sequence), Some(5));
        assert!(recorder.find(6).is_none());
    }

    struct Program(Option<&'static str>);

    impl Caller for Program {
        fn interrupts(&mut self) -> bool {
            false
        }

        fn place(&mut self) -> Option<String> {
            Some(self.0.take().expect("nobody asks twice").into())
        }
    }

    #[test]
    fn the_place_of_a_wait_is_asked_for_once_and_kept() {
        let recorder = FlightRecorder::default();
        recorder.launched((1, 0), call(), Algorithm::Ring, Instant::now(), false);
        let mut program = Program(Some("train.py:31"));
        for sequence in [2, 1, 1] {
            recorder.locate(1, &mut || false);
            recorder.locate(sequence, &mut program);
        }
        let place = recorder.find(1).and_then(|entry| entry.place);
        assert_eq!(place.as_deref(), Some("train.py:31"));
    }

    #[test]
    fn a_wait_is_counted_for_the_peer_that_entered_last() {
        let recorder = FlightRecorder::default();
        let started = Instant::now();
        let ms = |ms| started + std::time::Duration::from_millis(ms);
        let call = call();
        recorder.launched((1, 0), Arc::clone(&call), Algorithm::OneShot, started, true);
        let measured = Measured {
            algorithm: "one_shot",
            bytes_sent: 4,
            started,
            everyone_entered: Some((ms(6), 2)),
            ended: ms(7),
        };
        recorder.ended(1, &call, &measured, true);
        let stats = recorder.stats();
        assert_eq!(stats.lateness[&2].total, ms(6) - started);
        assert_eq!(stats.exposed, ms(7) - started);
        let entry = recorder.find(1).unwrap();
        assert_eq!((entry.state, entry.last), (State::Done, Some(2)));
        assert_eq!(entry.entered, Some(ms(6)));
    }
}
