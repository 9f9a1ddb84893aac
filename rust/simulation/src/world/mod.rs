//! World of a simulated history: events wait in a queue on the virtual clock, and what is left to
//! chance comes from a seed. Groups, members and parameter servers are its subjects, which say what a
//! process does with a message or a timer.

use std::collections::BTreeMap;
use std::rc::Rc;

use random::Random;
use time::{Clock, MILLISECOND, Moment, NEVER};
use trace::Trace;

pub(crate) mod pipes;
pub(crate) mod random;
pub(crate) mod time;
pub(crate) mod trace;

/// Something that happens at a moment.
pub(crate) trait Happens {
    /// The number of the process to which it happens, if it happens to one.
    fn process(&self) -> Option<usize>;
}

/// What is simulated.
pub(crate) trait Subject {
    type Event: Happens;
    /// Bound on the events of a history.
    const EVENTS_MAX: u64;

    fn world(&mut self) -> &mut World<Self::Event>;

    /// The end of time.
    fn limit(&self) -> Moment;

    /// Does what an event makes a process do.
    ///
    /// # Errors
    /// What should never have happened.
    fn happen(&mut self, event: Self::Event) -> Result<(), String>;

    /// Whether nothing more is to come.
    fn is_over(&self) -> bool {
        false
    }
}

/// Lets happen what waits, to the end of a history or to the end of time.
///
/// # Errors
/// What should never have happened.
pub(crate) fn run<S: Subject>(subject: &mut S) -> Result<(), String> {
    let mut limit = subject.limit();
    while let Some(event) = subject.world().next(limit) {
        if subject.world().events > S::EVENTS_MAX {
            return Err("it never ends".into());
        }
        subject.happen(event)?;
        if subject.is_over() {
            break;
        }
        limit = subject.limit();
    }
    Ok(())
}

/// The queue, the clock, and chance.
pub(crate) struct World<Event> {
    pub(crate) clock: Clock,
    pub(crate) random: Random,
    pub(crate) trace: Rc<Trace>,
    pub(crate) events: u64,
    /// What happens next, by time, and in the order in which it was added.
    queue: BTreeMap<(Moment, u64), Event>,
    added: u64,
    /// By process: until when it is stopped.
    stopped: Vec<Moment>,
}

impl<Event: Happens> World<Event> {
    pub(crate) fn new(processes: usize, random: Random, traced: bool) -> Self {
        let clock = Clock::new();
        Self {
            trace: Rc::new(Trace::new(clock.clone(), traced)),
            clock,
            random,
            events: 0,
            queue: BTreeMap::new(),
            added: 0,
            stopped: vec![0; processes],
        }
    }

    pub(crate) fn at(&mut self, moment: Moment, event: Event) {
        self.added += 1;
        self.queue.insert((moment, self.added), event);
    }

    pub(crate) fn after(&mut self, delay: Moment, event: Event) {
        self.at(self.clock.now() + delay, event);
    }

    /// Stops a process for a while, or for good.
    pub(crate) fn stop(&mut self, process: usize, lasts: Moment) {
        let until = self.clock.now().saturating_add(lasts);
        self.stopped[process] = self.stopped[process].max(until);
    }

    pub(crate) fn is_stopped(&self, process: usize) -> bool {
        self.stopped[process] > self.clock.now()
    }

    /// Whether something waits, though perhaps for later than the end of time.
    pub(crate) fn has_more(&self) -> bool {
        !self.queue.is_empty()
    }

    /// The next event, unless it comes after the end of time.
    fn next(&mut self, limit: Moment) -> Option<Event> {
        loop {
            let waiting = self.queue.first_entry()?;
            let (moment, _) = *waiting.key();
            if moment > limit {
                return None;
            }
            let event = waiting.remove();
            self.clock.advance_to(moment);
            self.events += 1;
            match event.process().map(|process| self.stopped[process]) {
                // What waits for a stopped process comes when it goes on.
                Some(until) if until > moment => {
                    let later = until.saturating_add(self.random.between(0, MILLISECOND));
                    if until < NEVER {
                        self.at(later, event);
                    }
                }
                _ => return Some(event),
            }
        }
    }
}
