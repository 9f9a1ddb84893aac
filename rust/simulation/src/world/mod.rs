//! World of a simulated history: events wait in a queue on the virtual clock, and what is left to
//! chance comes from a seed. Groups, members and parameter servers are its subjects, which say what a
//! process does with a message or a timer.

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
    events: u64,
    /// What happens next, by time, and in the order in which it was added.
    queue: BTreeMap<(Moment, u64), Waiting<Event>>,
    added: u64,
    /// By number of an alarm: where it waits.
    alarms: BTreeMap<usize, (Moment, u64)>,
    /// By process: until when it is stopped.
    stopped: Vec<Moment>,
    lines: Lines,
}

struct Waiting<Event> {
    event: Event,
    origin: Origin,
}

/// Where an event comes from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    Nowhere,
    /// It is a message from a process.
    Process(usize),
    /// It is an alarm with this number.
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

    /// The present as the code under test wants it.
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

    /// Sets an alarm instead of the one that had its number.
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

    /// Stops a process for a while, or for good.
    pub(crate) fn stop(&mut self, process: usize, lasts: Moment) {
        let until = self.now().saturating_add(lasts);
        self.stopped[process] = self.stopped[process].max(until);
    }

    pub(crate) fn is_stopped(&self, process: usize) -> bool {
        self.stopped[process] > self.now()
    }

    /// Whether something waits, though perhaps for later than the end of time.
    pub(crate) fn has_more(&self) -> bool {
        !self.queue.is_empty()
    }

    /// The next event, unless it comes after the end of time.
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
                // What waits for a stopped process comes when it goes on.
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

    /// What happens to a process.
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

    /// All that happens, in its order.
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
