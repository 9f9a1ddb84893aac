//! Histories of a subject: those of many seeds, or a single one, shown with the faults that make it
//! fail.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::catch_unwind;

use gradring_proto::error::message_of;

/// Number of histories in an ordinary test.
const SEEDS: u64 = 2000;
/// Limit of the faults of any scenario.
const FAULTS_MAX: usize = 16;
/// Limit of the failed histories that are named.
const SHOWN_MAX: usize = 20;
/// Environment variables with the seed of one history to show.
const VARIABLES: [&str; 3] = ["SEED", "MEMBERS_SEED", "UPDATES_SEED"];

/// Result of a history.
#[derive(Debug, PartialEq)]
pub(crate) struct History {
    /// Scenario and events, if the history was traced.
    pub(crate) lines: Vec<String>,
    /// Situations for which the history is an example.
    pub(crate) examples: BTreeSet<String>,
    /// Error: the violated invariant.
    pub(crate) result: Result<(), String>,
}

/// Positions of faults that are left out of a history's scenario.
#[derive(Debug, Clone, Default)]
pub(crate) struct Without(BTreeSet<usize>);

impl Without {
    pub(crate) fn apply<Fault>(&self, faults: &mut Vec<Fault>) {
        let mut positions = 0..;
        faults.retain(|_| {
            positions
                .next()
                .is_none_or(|position| !self.0.contains(&position))
        });
    }
}

/// A subject, as the driver of histories uses it.
pub(crate) struct Every {
    /// One of [`VARIABLES`].
    pub(crate) variable: &'static str,
    pub(crate) make: fn(seed: u64, without: &Without, traced: bool) -> History,
}

impl Every {
    /// Makes histories, or shows one. Returns the number of histories for each example.
    ///
    /// # Panics
    /// If a history fails, or if one of `examples` never occurs.
    pub(crate) fn history(&self, examples: &[&str]) -> BTreeMap<String, u64> {
        if let Some(seed) = number(self.variable) {
            self.show(seed);
        }
        if VARIABLES.into_iter().any(|it| number(it).is_some()) {
            return BTreeMap::new();
        }
        let first = number("FIRST_SEED").unwrap_or(0);
        let count = number("SEEDS").unwrap_or(SEEDS);
        let (mut table, mut problems) = (BTreeMap::<String, u64>::new(), Vec::new());
        for seed in first..first + count {
            match self.attempt(seed, &Without::default()) {
                Ok(examples) => {
                    for row in examples {
                        *table.entry(row).or_default() += 1;
                    }
                }
                Err(problem) => problems.push((seed, problem)),
            }
        }
        for (row, histories) in &table {
            println!("{row:>55} {histories:>7}");
        }
        let (variable, wrong) = (self.variable, problems.len());
        println!("{count} histories from {variable}={first}, {wrong} went wrong");
        let line = |(seed, problem)| format!("  make simulate {variable}={seed}   # {problem}");
        let shown: Vec<_> = problems.into_iter().take(SHOWN_MAX).map(line).collect();
        let shown = shown.join("\n");
        assert!(
            wrong == 0,
            "{wrong} of {count} histories went wrong; to see one:\n{shown}"
        );
        let missing = examples.iter().filter(|it| !table.contains_key(**it));
        let missing: Vec<_> = missing.collect();
        assert!(
            count < SEEDS || missing.is_empty(),
            "no history has {missing:?}"
        );
        table
    }

    /// Shows a history line by line.
    ///
    /// # Panics
    /// If the history fails; the message names the faults that are needed for that.
    fn show(&self, seed: u64) {
        let history = (self.make)(seed, &Without::default(), true);
        for line in history.lines {
            println!("{line}");
        }
        let variable = self.variable;
        match history.result {
            Ok(()) => println!("{variable}={seed}: {:?}", history.examples),
            Err(problem) => {
                let needed = self.shrink(seed);
                panic!("{variable}={seed}: {problem}; it takes faults {needed:?} to go wrong");
            }
        }
    }

    /// Returns the examples of a history.
    ///
    /// # Errors
    /// The violated invariant.
    fn attempt(&self, seed: u64, without: &Without) -> Result<BTreeSet<String>, String> {
        let history = catch_unwind(|| (self.make)(seed, without, false))
            .map_err(|panic| format!("a panic: {}", message_of(&*panic)))?;
        history.result.map(|()| history.examples)
    }

    /// Returns the faults of a failing history that cannot be left out without making it pass.
    fn shrink(&self, seed: u64) -> Vec<usize> {
        let mut without = Without::default();
        for fault in 0..FAULTS_MAX {
            without.0.insert(fault);
            if self.attempt(seed, &without).is_ok() {
                without.0.remove(&fault);
            }
        }
        let needed = (0..FAULTS_MAX).filter(|fault| !without.0.contains(fault));
        needed.collect()
    }
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    let number = |text: String| text.parse().expect("a whole number");
    Some(text).filter(|text| !text.is_empty()).map(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a history of seven faults that fails if both 2 and 5 strike.
    fn needs_two_faults(_: u64, without: &Without, _: bool) -> History {
        let mut faults: Vec<usize> = (0..7).collect();
        without.apply(&mut faults);
        let is_wrong = [2, 5].iter().all(|fault| faults.contains(fault));
        History {
            lines: Vec::new(),
            examples: BTreeSet::new(),
            result: if is_wrong { Err("both".into()) } else { Ok(()) },
        }
    }

    #[test]
    fn a_history_that_goes_wrong_is_left_with_the_faults_that_it_needs() {
        let every = Every {
            variable: VARIABLES[0],
            make: needs_two_faults,
        };
        assert_eq!(every.shrink(7), [2, 5]);
    }
}
