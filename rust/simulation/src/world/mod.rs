//! World of a simulated history: a queue of events on the virtual clock, and random decisions from
//! a seed. Its subjects are groups, members and parameter servers, which define the reactions of a
//! process to messages and timers.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Instant;

use network::{Lines, Weather};
use random::Random;
use time::{Clock, MILLISECOND, Moment, NEVER};
use trace::Trace;

pub(crate) mod every;
pub(crate) mod faults;
pub(crate) mod network;
pub(crate) mod pipes;
pub(crate) mod random;
pub(crate) mod time;
pub(crate) mod trace;

/// An event.
pub(crate) trait Happens {
    /// Number of the process to which the event happens, if there is one.
    fn process(&self) -> Option<usize>;
}

/// A simulated system.
pub(crate) trait Subject {
    type Event: Happens;
    /// Limit of the number of events of a history.
    const EVENTS_MAX: u64;

    fn world(&mut self) -> &mut World<Self::Event>;

    /// Moment at which a history must have ended.
    fn limit(&self) -> Moment;

    /// Performs an event.
    ///
    /// # Errors
    /// The violated invariant.
    fn happen(&mut self, event: Self::Event) -> Result<(), String>;

    /// Returns whether no further event can change the outcome.
    fn is_over(&self) -> bool {
        false
    }
}

/// Performs the events of a history until it is over, or until its limit.
///
/// # Errors
/// The violated invariant.
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

/// Queue of events, clock, and source of random decisions.
pub(crate) struct World<Event> {
    pub(crate) clock: Clock,
    pub(crate) random: Random,
    pub(crate) trace: Rc<Trace>,
    events: u64,
    /// Future events by time, and at one moment in the order in which they were added.
    queue: BTreeMap<(Moment, u64), Waiting<Event>>,
    added: u64,
    /// Place of each alarm in the queue, by its number.
    alarms: BTreeMap<usize, (Moment, u64)>,
    /// Moment until which each process is stopped.
    stopped: Vec<Moment>,
    lines: Lines,
}

struct Waiting<Event> {
    event: Event,
    origin: Origin,
}

/// Origin of an event.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    Nowhere,
    /// A message from a process.
    Process(usize),
    /// An alarm of this number.
    Alarm(usize),
}

impl<Event: Happens> World<Event> {
    pub(crate) fn new(processes: usize, weather: Weather, random: Random, traced: bool) -> Self {
        let clock = Clock::new();
        Self {
            trace: Rc::new(Trace::new(clock.clone(), traced)),
            clock,
            random,
            events: 0,
            queue: BTreeMap::new(),
            added: 0,
            alarms: BTreeMap::new(),
            stopped: vec![0; processes],
            lines: Lines::new(processes, weather),
        }
    }

    pub(crate) fn now(&self) -> Moment {
        self.clock.now()
    }

    /// The present time as the code under test receives it.
    pub(crate) fn instant(&self) -> Instant {
        self.clock.instant()
    }

    pub(crate) fn say(&self, what: impl FnOnce() -> String) {
        self.trace.say(what);
    }

    pub(crate) fn at(&mut self, moment: Moment, event: Event) {
        let origin = Origin::Nowhere;
        self.add(moment, Waiting { event, origin });
    }

    /// Sets an alarm, and replaces the earlier one of the same number.
    pub(crate) fn set_alarm(&mut self, alarm: usize, moment: Moment, event: Event) {
        self.clear_alarm(alarm);
        let origin = Origin::Alarm(alarm);
        self.add(moment.max(self.now() + 1), Waiting { event, origin });
    }

    pub(crate) fn clear_alarm(&mut self, alarm: usize) {
        if let Some(waits) = self.alarms.remove(&alarm) {
            self.queue.remove(&waits);
        }
    }

    pub(crate) fn after(&mut self, delay: Moment, event: Event) {
        self.at(self.now() + delay, event);
    }

    fn message_after(&mut self, delay: Moment, from: usize, event: Event) {
        let origin = Origin::Process(from);
        self.add(self.now() + delay, Waiting { event, origin });
    }

    fn add(&mut self, moment: Moment, waiting: Waiting<Event>) {
        self.added += 1;
        if let Origin::Alarm(alarm) = waiting.origin {
            self.alarms.insert(alarm, (moment, self.added));
        }
        self.queue.insert((moment, self.added), waiting);
    }

    /// Stops a process for a while, or for ever.
    pub(crate) fn stop(&mut self, process: usize, lasts: Moment) {
        let until = self.now().saturating_add(lasts);
        self.stopped[process] = self.stopped[process].max(until);
    }

    pub(crate) fn is_stopped(&self, process: usize) -> bool {
        self.stopped[process] > self.now()
    }

    /// Returns whether any event waits, perhaps for a time after the limit.
    pub(crate) fn has_more(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Takes the next event, unless it is after the limit.
    fn next(&mut self, limit: Moment) -> Option<Event> {
        loop {
            let first = self.queue.first_entry()?;
            let (moment, _) = *first.key();
            if moment > limit {
                return None;
            }
            let waiting = first.remove();
            self.clock.advance_to(moment);
            self.events += 1;
            let Some(process) = waiting.event.process() else {
                return Some(waiting.event);
            };
            let until = self.stopped[process];
            if until > moment {
                // Events for a stopped process wait until the process resumes.
                let later = until.saturating_add(self.random.between(0, MILLISECOND));
                if until < NEVER {
                    self.add(later, waiting);
                }
                continue;
            }
            match waiting.origin {
                Origin::Process(from) if self.is_cut(from, process) => {}
                _ => return Some(waiting.event),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An event of a process.
    #[derive(Debug, Clone, PartialEq)]
    struct Note(usize, &'static str);

    impl Happens for Note {
        fn process(&self) -> Option<usize> {
            Some(self.0)
        }
    }

    fn world() -> World<Note> {
        World::new(3, Weather::CALM, Random::new(7), false)
    }

    /// Texts of all events, in order.
    fn notes(mut world: World<Note>) -> Vec<&'static str> {
        std::iter::from_fn(|| world.next(NEVER).map(|note| note.1)).collect()
    }

    #[test]
    fn events_happen_by_time_and_then_in_the_order_in_which_they_were_added() {
        let mut world = world();
        for (moment, what) in [(2, "third"), (1, "first"), (1, "second")] {
            world.at(moment, Note(0, what));
        }
        assert_eq!(notes(world), ["first", "second", "third"]);
    }

    #[test]
    fn a_stopped_process_gets_everything_when_it_goes_on_unless_that_is_never() {
        let mut world = world();
        world.stop(0, MILLISECOND);
        world.stop(1, NEVER);
        for process in 0..3 {
            let what = ["late", "never", "at once"][process];
            world.set_alarm(process, 1, Note(process, what));
        }
        assert!(world.is_stopped(0));
        assert!(!world.is_stopped(2));
        assert_eq!(notes(world), ["at once", "late"]);
    }

    #[test]
    fn an_alarm_takes_the_place_of_the_one_before() {
        let mut world = world();
        world.set_alarm(4, 5, Note(0, "old"));
        world.set_alarm(4, 9, Note(0, "new"));
        world.set_alarm(5, 7, Note(0, "other"));
        world.set_alarm(6, 8, Note(0, "cleared"));
        world.clear_alarm(6);
        assert_eq!(notes(world), ["other", "new"]);
    }

    #[test]
    fn messages_do_not_pass_a_line_that_is_cut_when_they_are_sent_or_arrive() {
        let mut world = world();
        world.send(0, 1, Note(1, "under way"));
        world.cut_where(|from, to| (from == 0 && to == 1).then_some(MILLISECOND * 5));
        world.send(0, 1, Note(1, "cut"));
        world.send(1, 0, Note(0, "back"));
        assert!(world.is_cut(0, 1));
        assert!(!world.is_cut(1, 0));
        assert!(world.was_cut_since(1, MILLISECOND));
        assert!(!world.was_cut_since(2, 0));
        assert_eq!(notes(world), ["back"]);
    }
}
