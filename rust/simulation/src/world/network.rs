//! Network between processes: messages are slow, lost, or come twice as chance will have it, and not
//! at all where a line is cut.

use std::ops::Range;

use super::time::{MICROSECOND, MILLISECOND, Moment, SECOND};
use super::{Happens, World};

/// A message to oneself takes so long.
const LOCAL: Moment = MICROSECOND;
/// Least and most that the others take.
const LEAST: Moment = MILLISECOND / 10;
const SLOW_MAX: Moment = 3 * SECOND;
/// The second of two comes so much later, at most.
const TWICE_MAX: Moment = 5 * SECOND;

/// How messages fare where no line is cut.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Weather {
    /// Longest that a message takes, if it arrives at all and is not one of the slow ones.
    pub(crate) delay_max: Moment,
    /// One message in so many is lost, comes twice, or is slow.
    pub(crate) one_in: [u64; 3],
}

impl Weather {
    pub(crate) const CALM: Self = Self {
        delay_max: MILLISECOND,
        one_in: [u64::MAX; 3],
    };
}

/// When nothing passes on a line, in one direction.
#[derive(Debug, Clone, Default)]
pub(crate) struct Cuts(Vec<Range<Moment>>);

impl Cuts {
    pub(crate) fn add(&mut self, from: Moment, until: Moment) {
        self.0.push(from..until);
    }

    pub(crate) fn contain(&self, moment: Moment) -> bool {
        self.0.iter().any(|cut| cut.contains(&moment))
    }
}

/// Lines from each process to each.
pub(super) struct Lines {
    processes: usize,
    weather: Weather,
    cuts: Vec<Cuts>,
}

impl Lines {
    pub(super) fn new(processes: usize, weather: Weather) -> Self {
        Self {
            processes,
            weather,
            cuts: vec![Cuts::default(); processes * processes],
        }
    }
}

impl<Event: Happens + Clone> World<Event> {
    /// Sends a message, which may arrive.
    pub(crate) fn send(&mut self, from: usize, to: usize, message: Event) {
        if from == to {
            self.message_after(LOCAL, from, message);
        } else if self.passes(from, to) {
            let delay = self.delay();
            if self.random.once_in(self.lines.weather.one_in[1]) {
                let second = delay + self.random.between(0, TWICE_MAX);
                self.message_after(second, from, message.clone());
            }
            self.message_after(delay, from, message);
        }
    }
}

impl<Event: Happens> World<Event> {
    pub(crate) fn delay(&mut self) -> Moment {
        let Weather { delay_max, one_in } = self.lines.weather;
        match self.random.once_in(one_in[2]) {
            true => self.random.between(delay_max, SLOW_MAX),
            false => self.random.between(LEAST, delay_max),
        }
    }

    /// Whether a message gets through, as far as can be told when it is sent.
    pub(crate) fn passes(&mut self, from: usize, to: usize) -> bool {
        !self.is_cut(from, to) && !self.random.once_in(self.lines.weather.one_in[0])
    }

    pub(crate) fn is_cut(&self, from: usize, to: usize) -> bool {
        self.cuts(from, to).contain(self.now())
    }

    /// Whether a line to or from this process was cut since then.
    pub(crate) fn was_cut_since(&self, process: usize, moment: Moment) -> bool {
        let mut lines = (0..self.lines.processes)
            .flat_map(|other| [self.cuts(process, other), self.cuts(other, process)]);
        lines.any(|cuts| cuts.0.iter().any(|cut| cut.end > moment))
    }

    /// Nothing passes from one process to another until then.
    pub(crate) fn cut(&mut self, from: usize, to: usize, until: Moment) {
        let now = self.now();
        self.lines.cuts[from * self.lines.processes + to].add(now, until);
    }

    /// Cuts the lines between all pairs of different processes that are cut off each other, until the
    /// moment that `until` says for these.
    pub(crate) fn cut_where(&mut self, until: impl Fn(usize, usize) -> Option<Moment>) {
        for from in 0..self.lines.processes {
            for to in (0..self.lines.processes).filter(|&to| to != from) {
                if let Some(until) = until(from, to) {
                    self.cut(from, to, until);
                }
            }
        }
    }

    fn cuts(&self, from: usize, to: usize) -> &Cuts {
        &self.lines.cuts[from * self.lines.processes + to]
    }
}
