//! Groups, members and parameter servers on a virtual clock, with faults that chance is hard on them
//! with.
//!
//! One seed is one history of a subject: who is there, and what goes wrong. Everything happens on one
//! thread, one event after the other (`world`), so a seed always gives the same history. Each subject
//! has its scenarios, says what its processes do with messages and timers, and checks what must hold:
//!
//! * `groups`: the executor, the stall and the monitor of every rank, over links;
//! * `membership`: processes of an elastic job that agree on the members of each next group;
//! * `parameters`: workers and servers of a training that is not synchronous.
//!
//! `make simulate SEEDS=100000` makes many histories of each, `make simulate SEED=7` shows one.

#![cfg(test)]

mod groups;
mod membership;
mod parameters;
mod world;

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::panic::catch_unwind;

    use super::*;
    use gradring_core::error::message_of;

    /// Runs in an ordinary test.
    const SEEDS: u64 = 2000;

    fn number(variable: &str) -> Option<u64> {
        let text = std::env::var(variable)
            .ok()
            .filter(|text| !text.is_empty())?;
        Some(text.parse().expect("a whole number"))
    }

    #[test]
    fn survivors_see_what_the_facts_say() {
        let (count, problems) = groups::contradictions();
        println!("{count} runs, {} contradict a fact", problems.len());
        assert!(problems.is_empty(), "\n{}", problems.join("\n"));
    }

    #[test]
    fn every_run_ends_right_or_with_one_cause() {
        if let Some(seed) = number("SEED") {
            return groups::replay(seed);
        }
        if number("MEMBERS_SEED").or(number("UPDATES_SEED")).is_some() {
            return;
        }
        let first = number("FIRST_SEED").unwrap_or(0);
        let count = number("SEEDS").unwrap_or(SEEDS);
        let mut table = BTreeMap::<(&str, String), u64>::new();
        let mut problems = Vec::new();
        for seed in first..first + count {
            match groups::outcome(seed) {
                Ok(row) => *table.entry(row).or_default() += 1,
                Err(problem) => problems.push(format!("  make simulate SEED={seed}   # {problem}")),
            }
        }
        for ((fault, outcome), runs) in &table {
            println!("{fault:>16}  {outcome:<24} {runs:>7}");
        }
        println!(
            "{count} runs from seed {first}, {} went wrong",
            problems.len()
        );
        let shown = problems.len().min(20);
        assert!(
            problems.is_empty(),
            "{} of {count} runs went wrong; to see one:\n{}",
            problems.len(),
            problems[..shown].join("\n")
        );
    }

    /// What histories of an elastic job must be examples of, or they are no test of its agreement.
    const EXAMPLES: [&str; 29] = [
        "a death after acceptance, made good within 1 s",
        "a death after acceptance, made good within 2 s",
        "a death between two messages",
        "a group did not connect",
        "a joiner found nobody",
        "a joiner's death",
        "a loss while connecting",
        "a loss while re-forming",
        "a majority was spared",
        "a member was busy",
        "a minority stopped",
        "a roster was half installed",
        "a stop longer than all limits",
        "another process answered",
        "both parts of a divided network tried",
        "divide",
        "gave its id up to join anew",
        "grew",
        "joiners took the ranks of others",
        "leave",
        "mute",
        "replace",
        "shrank",
        "slow",
        "stop",
        "too few workers were left",
        "two losses",
        "two proposals met",
        "went on without silent members",
    ];

    #[test]
    fn every_history_of_members_has_one_group_at_a_time_and_an_end() {
        if let Some(seed) = number("MEMBERS_SEED") {
            let (lines, result) = membership::replay(seed);
            for line in lines {
                println!("{line}");
            }
            let ending = result.unwrap_or_else(|problem| panic!("seed {seed}: {problem}"));
            println!("seed {seed}: {ending}");
            return;
        }
        if number("SEED").or(number("UPDATES_SEED")).is_some() {
            return;
        }
        let first = number("FIRST_SEED").unwrap_or(0);
        let count = number("SEEDS").unwrap_or(SEEDS);
        let mut table = BTreeMap::<&str, u64>::new();
        let mut moves = BTreeSet::new();
        let mut problems = Vec::new();
        for seed in first..first + count {
            match catch_unwind(|| membership::outcome(seed)) {
                Ok(Ok(outcome)) => {
                    for row in outcome.examples.into_iter().chain([outcome.ending]) {
                        *table.entry(row).or_default() += 1;
                    }
                    moves.extend(outcome.moves);
                }
                Ok(Err(problem)) => problems.push((seed, problem)),
                Err(panic) => problems.push((seed, format!("a panic: {}", message_of(&*panic)))),
            }
        }
        for (row, histories) in &table {
            println!("{row:>55} {histories:>7}");
        }
        println!(
            "{count} histories of members from seed {first}, {} went wrong",
            problems.len()
        );
        let line = |(seed, problem)| format!("  make simulate MEMBERS_SEED={seed}   # {problem}");
        let wrong = problems.len();
        let shown: Vec<_> = problems.into_iter().take(20).map(line).collect();
        let shown = shown.join("\n");
        assert!(
            wrong == 0,
            "{wrong} of {count} histories went wrong; to see one:\n{shown}"
        );
        let missing = EXAMPLES
            .iter()
            .filter(|example| !table.contains_key(*example));
        let missing: Vec<_> = missing.collect();
        assert!(
            count < SEEDS || missing.is_empty(),
            "no history has {missing:?}"
        );
        let drawn = arrows(include_str!("../../../docs/elastic.md"));
        assert!(
            moves.is_subset(&drawn),
            "docs/elastic.md lacks an arrow: {moves:?}"
        );
        assert!(
            count < SEEDS || moves == drawn,
            "docs/elastic.md has more arrows than {moves:?}"
        );
    }

    /// The arrows between the states of a process in the page's diagram.
    fn arrows(page: &str) -> BTreeSet<(&str, &str)> {
        let diagram = page
            .split("## States of a process")
            .nth(1)
            .expect("the page has it");
        let diagram = diagram.split("```").nth(1).expect("a block of text");
        let mut from = "";
        let mut arrows = BTreeSet::new();
        for line in diagram.lines().filter(|line| line.contains("-->")) {
            let (before, after) = line.split_once("-->").expect("it is there");
            let to = after
                .split_whitespace()
                .next()
                .expect("an arrow leads somewhere");
            if !before.trim().is_empty() {
                from = before.trim();
            }
            arrows.insert((from, to));
        }
        arrows.retain(|(from, _)| *from != "(new)");
        arrows
    }

    /// What histories of a parameter server must be examples of, or they are no test of its protocol.
    const EXAMPLES_OF_UPDATES: [&str; 18] = [
        "a copy was filled from another server",
        "a gradient was not worth pushing",
        "a late gradient counted less",
        "a late gradient was dropped",
        "a lost worker's gradient was dropped",
        "a server was killed",
        "a server went on with what it had",
        "a snapshot was restored",
        "a straggler was folded in",
        "a worker was killed",
        "an update was taken back",
        "cut",
        "initial weights came twice",
        "kill",
        "nothing was lost with a server",
        "stop",
        "the queue was full",
        "the servers were restored",
    ];

    #[test]
    fn every_history_of_updates_has_each_gradient_once_and_goes_on() {
        if let Some(seed) = number("UPDATES_SEED") {
            let (lines, result) = parameters::replay(seed);
            for line in lines {
                println!("{line}");
            }
            result.unwrap_or_else(|problem| panic!("seed {seed}: {problem}"));
            return;
        }
        if number("SEED").or(number("MEMBERS_SEED")).is_some() {
            return;
        }
        let first = number("FIRST_SEED").unwrap_or(0);
        let count = number("SEEDS").unwrap_or(SEEDS);
        let mut table = BTreeMap::<&str, u64>::new();
        let mut problems = Vec::new();
        for seed in first..first + count {
            match catch_unwind(|| parameters::outcome(seed)) {
                Ok(Ok(examples)) => {
                    for example in examples {
                        *table.entry(example).or_default() += 1;
                    }
                }
                Ok(Err(problem)) => problems.push((seed, problem)),
                Err(panic) => problems.push((seed, format!("a panic: {}", message_of(&*panic)))),
            }
        }
        for (row, histories) in &table {
            println!("{row:>55} {histories:>7}");
        }
        println!(
            "{count} histories of updates from seed {first}, {} went wrong",
            problems.len()
        );
        let line = |(seed, problem)| format!("  make simulate UPDATES_SEED={seed}   # {problem}");
        let wrong = problems.len();
        let shown: Vec<_> = problems.into_iter().take(20).map(line).collect();
        let shown = shown.join("\n");
        assert!(
            wrong == 0,
            "{wrong} of {count} histories went wrong; to see one:\n{shown}"
        );
        let missing = EXAMPLES_OF_UPDATES
            .iter()
            .filter(|example| !table.contains_key(*example));
        let missing: Vec<_> = missing.collect();
        assert!(
            count < SEEDS || missing.is_empty(),
            "no history has {missing:?}"
        );
    }

    #[test]
    fn a_seed_always_gives_the_same_history() {
        for seed in 0..20 {
            let (first, second) = (membership::replay(seed), membership::replay(seed));
            assert!(first.0.len() > 1);
            assert_eq!(first, second, "seed {seed}");
            let (first, second) = (parameters::replay(seed), parameters::replay(seed));
            assert!(first.0.len() > 1);
            assert_eq!(first, second, "seed {seed}");
        }
    }

    #[test]
    fn a_seed_always_gives_the_same_run() {
        for seed in 0..20 {
            let (first, second) = (groups::trace(seed), groups::trace(seed));
            assert!(!first.0.is_empty());
            assert_eq!(first, second, "seed {seed}");
        }
    }
}
