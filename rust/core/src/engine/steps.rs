//! Steps of the program, to which collectives belong.
//!
//! Ranks compare the number of the step. Names and shapes are the same in every step. Without the
//! number, a rank that left a step early would continue one step apart from the others without
//! notice.
//!
//! A step counts from its first collective, so ranks may do anything between collectives. A step
//! that an exception ended before its first collective counts too, since other ranks may still be
//! in theirs. Collectives outside of steps belong to the previous step. Step 0 means none.

/// Counts the steps of this rank.
#[derive(Debug, Default)]
pub(super) struct Steps {
    number: u64,
    /// `true` if the next collective is the first of a step.
    begins: bool,
    open: Option<Open>,
    /// Execution of a graph that last launched a collective.
    execution: Option<i64>,
}

/// A step that the program has marked and not ended.
#[derive(Debug)]
struct Open {
    /// Value of `Steps::begins` before the step.
    begins: bool,
    /// Number of collectives launched before the step.
    launched: u64,
    collective_exit: bool,
}

impl Steps {
    /// Returns the step of a collective that is launched now.
    pub(super) fn launch(&mut self) -> u64 {
        self.number += u64::from(std::mem::take(&mut self.begins));
        self.number
    }

    /// Begins a marked step after `launched` collectives.
    pub(super) fn begin(&mut self, launched: u64, collective_exit: bool) {
        self.open = Some(Open {
            begins: std::mem::replace(&mut self.begins, true),
            launched,
            collective_exit,
        });
    }

    /// Ends the marked step. Returns its number, and how many collectives it launched.
    pub(super) fn end(&mut self, launched: u64, early: bool) -> (u64, u64) {
        let Some(open) = self.open.take() else {
            return (self.number, 0);
        };
        let launched = launched - open.launched;
        if early {
            self.number += u64::from(launched == 0);
            self.begins = true;
        } else if launched == 0 {
            self.begins = open.begins;
        }
        (self.number, launched)
    }

    /// Assigns later collectives to this execution of a graph, which is a step unless the program
    /// marks its steps.
    pub(super) fn execute(&mut self, execution: i64) {
        let is_new = self.execution.replace(execution) != Some(execution);
        self.begins |= is_new && self.open.is_none();
    }

    /// Returns `true` if the program promised that all ranks leave the current step early, or none.
    pub(super) fn collective_exit(&self) -> bool {
        self.open.as_ref().is_some_and(|open| open.collective_exit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_counts_from_its_first_collective_on() {
        let mut steps = Steps::default();
        assert_eq!(steps.launch(), 0, "outside of steps");
        steps.begin(1, false);
        assert_eq!(steps.end(1, false), (0, 0));
        assert_eq!(steps.launch(), 0, "the step before had no collective");
        steps.begin(2, false);
        assert_eq!((steps.launch(), steps.launch()), (1, 1));
        assert_eq!(steps.end(4, false), (1, 2));
        assert_eq!(steps.launch(), 1, "belongs to the step before it");
    }

    #[test]
    fn a_step_that_was_left_early_counts_and_nothing_follows_in_it() {
        for launched in [0, 1] {
            let mut steps = Steps::default();
            steps.begin(0, false);
            (0..launched).for_each(|_| assert_eq!(steps.launch(), 1));
            assert_eq!(steps.end(launched, true), (1, launched));
            assert_eq!(steps.launch(), 2);
        }
    }

    #[test]
    fn executions_are_steps_where_the_program_says_nothing() {
        let mut steps = Steps::default();
        for _ in 0..2 {
            steps.execute(7);
            assert_eq!(steps.launch(), 1);
        }
        steps.execute(8);
        assert_eq!(steps.launch(), 2);
        steps.begin(3, true);
        assert!(steps.collective_exit());
        for execution in 0..2 {
            steps.execute(execution);
            assert_eq!(steps.launch(), 3);
        }
        steps.end(5, false);
        assert!(!steps.collective_exit());
    }
}
