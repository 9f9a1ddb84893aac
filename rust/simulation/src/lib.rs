//! Groups, members and parameter servers on a virtual clock, among faults.
//!
//! One seed is one history of a subject: its processes and its faults. All events happen on one
//! thread, one after the other (`world`), so a seed always gives the same history. Each subject has
//! its scenarios, the reactions of its processes to messages and timers, and the invariants of its
//! histories:
//!
//! * `groups`: executor, stall detector and monitor of every rank, over links.
//! * `membership`: processes of an elastic job that agree on the members of each next group.
//! * `parameters`: workers and servers of a training with parameter servers.
//!
//! `make simulate SEEDS=100000` makes many histories of each, `make simulate SEED=7` shows one.

#![cfg(test)]

mod groups;
mod membership;
mod parameters;
mod world;

use std::collections::BTreeSet;

use world::every::Without;

#[test]
fn survivors_see_what_the_facts_say() {
    let (count, problems) = groups::contradictions();
    println!("{count} runs, {} contradict a fact", problems.len());
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
}

#[test]
fn every_run_ends_right_or_with_one_cause() {
    groups::EVERY.history(&[]);
}

#[test]
fn every_history_of_members_has_one_group_at_a_time_and_an_end() {
    let drawn = arrows(include_str!("../../../docs/internals/elastic.md"));
    let drawn: Vec<&str> = drawn.iter().map(String::as_str).collect();
    let found = membership::EVERY.history(&[&membership::EXAMPLES[..], &drawn].concat());
    let mut moves = found.keys().filter(|row| row.contains("-->"));
    assert!(
        moves.all(|row| drawn.contains(&row.as_str())),
        "docs/internals/elastic.md lacks an arrow: {found:?}"
    );
}

#[test]
fn every_history_of_updates_has_each_gradient_once_and_goes_on() {
    parameters::EVERY.history(&parameters::EXAMPLES);
}

#[test]
fn a_seed_always_gives_the_same_history() {
    for subject in [groups::EVERY, membership::EVERY, parameters::EVERY] {
        for seed in 0..20 {
            let make = || (subject.make)(seed, &Without::default(), true);
            let (first, second) = (make(), make());
            assert!(first.lines.len() > 1);
            assert_eq!(first, second, "seed {seed}");
        }
    }
}

/// Arrows between the states of a process in the diagram of a page.
fn arrows(page: &str) -> Vec<String> {
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
    let row = |(from, to)| format!("{from} --> {to}");
    arrows.into_iter().map(row).collect()
}
