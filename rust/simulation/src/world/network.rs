//! Network between processes: messages are randomly late, lost or doubled, and never pass a line
//! that is cut.

use std::ops::Range;

use super::time::{MICROSECOND, MILLISECOND, Moment, SECOND};
use super::{Happens, World};

/// Delay of a message to the sender itself.
const LOCAL: Moment = MICROSECOND;
/// Least delay of other messages, and most delay of slow ones.
const LEAST: Moment = MILLISECOND / 10;
const SLOW_MAX: Moment = 3 * SECOND;
/// Most delay between a message and its duplicate.
const TWICE_MAX: Moment = 5 * SECOND;

/// Treatment of messages where no line is cut.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Weather {
    /// Most delay of a message that is neither lost nor slow.
    pub(crate) delay_max: Moment,
    /// One message in this many is lost, doubled, or slow.
    pub(crate) one_in: [u64; 3],
}

impl Weather {
    pub(crate) const CALM: Self = Self {
        delay_max: MILLISECOND,
        one_in: [u64::MAX; 3],
    };
}

/// Periods in which a line passes nothing, in one direction.
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

/// Lines between all processes, one for each direction.
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
    /// Sends a message, which may arrive late, twice or never.
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

    /// Returns whether a message sent now gets through; a later cut can still stop it.
    pub(crate) fn passes(&mut self, from: usize, to: usize) -> bool {
        !self.is_cut(from, to) && !self.random.once_in(self.lines.weather.one_in[0])
    }

    pub(crate) fn is_cut(&self, from: usize, to: usize) -> bool {
        self.cuts(from, to).contain(self.now())
    }

    /// Returns whether a line to or from this process was cut since `moment`.
    pub(crate) fn was_cut_since(&self, process: usize, moment: Moment) -> bool {
        let mut lines = (0..self.lines.processes)
            .flat_map(|other| [self.cuts(process, other), self.cuts(other, process)]);
        lines.any(|cuts| cuts.0.iter().any(|cut| cut.end > moment))
    }

    /// Cuts the line from one process to another until `until`.
    pub(crate) fn cut(&mut self, from: usize, to: usize, until: Moment) {
        let now = self.now();
        self.lines.cuts[from * self.lines.processes + to].add(now, until);
    }

    /// Cuts each line for which `until` returns the end of its cut.
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
