//! To which step of the program a collective belongs.
//!
//! Ranks compare this number. Names and shapes repeat in every step, so without it a rank that has
//! left a step early would go on one step apart from the others without notice.
//!
//! A step counts from its first collective on, so a rank may do what it likes between collectives;
//! a step that an exception ended before that counts too, since the others may not have left theirs.
//! Collectives outside of steps belong to the one before them. 0 stands for none.

/// Counts the steps of this rank.
#[derive(Debug, Default)]
pub(super) struct Steps {
    number: u64,
    /// Whether the next collective is the first of a step.
    begins: bool,
    open: Option<Open>,
    /// The execution of a graph that launched something last.
    execution: Option<i64>,
}

/// A step that the program is in, by its own words.
#[derive(Debug)]
struct Open {
    /// `Steps::begins` before it.
    begins: bool,
    /// Collectives launched before it.
    launched: u64,
    collective_exit: bool,
}

impl Steps {
    /// The step of a collective that is launched now.
    pub(super) fn launch(&mut self) -> u64 {
        self.number += u64::from(std::mem::take(&mut self.begins));
        self.number
    }

    /// The program begins a step, `launched` collectives after the start.
    pub(super) fn begin(&mut self, launched: u64, collective_exit: bool) {
        self.open = Some(Open {
            begins: std::mem::replace(&mut self.begins, true),
            launched,
            collective_exit,
        });
    }

    /// The program has ended its step, or left it early; returns its number, and how many
    /// collectives it launched.
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

    /// What is launched next belongs to this execution of a graph, which is a step unless the
    /// program says what its steps are.
    pub(super) fn execute(&mut self, execution: i64) {
        let is_new = self.execution.replace(execution) != Some(execution);
        self.begins |= is_new && self.open.is_none();
    }

    /// Whether the program says that all ranks leave the current step early, or none.
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
