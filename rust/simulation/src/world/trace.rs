//! Trace of a history, line by line, if it is wanted.

use std::cell::RefCell;

use super::time::Clock;

pub(crate) struct Trace {
    clock: Clock,
    lines: Option<RefCell<Vec<String>>>,
}

impl Trace {
    pub(crate) fn new(clock: Clock, wanted: bool) -> Self {
        Self {
            clock,
            lines: wanted.then(RefCell::default),
        }
    }

    pub(crate) fn say(&self, what: impl FnOnce() -> String) {
        if let Some(lines) = &self.lines {
            let seconds = self.clock.now() as f64 / 1e9;
            lines
                .borrow_mut()
                .push(format!("{seconds:12.6} s  {}", what()));
        }
    }

    pub(crate) fn take(&self) -> Vec<String> {
        self.lines.as_ref().map(RefCell::take).unwrap_or_default()
    }
}
