//! Every history of a subject: those of many seeds, or one that is shown, and the faults that it needs
//! to go wrong.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::catch_unwind;

use gradring_proto::error::message_of;

/// Histories in an ordinary test.
const SEEDS: u64 = 2000;
/// No scenario has more faults.
const FAULTS_MAX: usize = 16;
/// Histories that went wrong and are named.
const SHOWN_MAX: usize = 20;
/// Each has the seed of one history that is to be shown.
const VARIABLES: [&str; 3] = ["SEED", "MEMBERS_SEED", "UPDATES_SEED"];

/// How a history went.
#[derive(Debug, PartialEq)]
pub(crate) struct History {
    /// The scenario, and what happened, if that is wanted.
    pub(crate) lines: Vec<String>,
    /// What it is an example of.
    pub(crate) examples: BTreeSet<String>,
    /// What should never have happened.
    pub(crate) result: Result<(), String>,
}

/// Faults that a history goes without, by their position in its scenario.
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

/// A subject, as those see it who make histories.
pub(crate) struct Every {
    /// One of `VARIABLES`.
    pub(crate) variable: &'static str,
    pub(crate) make: fn(seed: u64, without: &Without, traced: bool) -> History,
}

impl Every {
    /// Makes histories, or shows one; says how many were an example of what.
    ///
    /// # Panics
    /// When one goes wrong, and when none is one of `examples`.
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
    /// When it goes wrong; says which of its faults that takes.
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

    /// What a history is an example of.
    ///
    /// # Errors
    /// What should never have happened.
    fn attempt(&self, seed: u64, without: &Without) -> Result<BTreeSet<String>, String> {
        let history = catch_unwind(|| (self.make)(seed, without, false))
            .map_err(|panic| format!("a panic: {}", message_of(&*panic)))?;
        history.result.map(|()| history.examples)
    }

    /// The faults of a history that goes wrong, but for those without which it still does.
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

    /// Goes wrong where its faults 2 and 5 strike, of seven.
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
