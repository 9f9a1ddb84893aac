//! Turns of two and of three ranks in all interleavings, with all values that weak memory may show.
//!
//! The contents of slots are loom cells, which notice every access that is not ordered. A sleep
//! that nobody ends is a deadlock, which loom reports.

use loom::cell::UnsafeCell;
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use super::*;

const RANKS: usize = 2;
/// Enough that each rank writes a slot again that the other has read.
const TURNS: u64 = 3;
/// Preemptions per run, as in the tests of pipes.
const PREEMPTIONS_MAX: usize = 3;

struct Rank {
    turns: [AtomicU64; 2],
    slots: [UnsafeCell<u64>; 2],
    asleep: AtomicU64,
    bell: Mutex<bool>,
    rung: Condvar,
}

fn rank() -> Rank {
    Rank {
        turns: [AtomicU64::new(0), AtomicU64::new(0)],
        slots: [UnsafeCell::new(0), UnsafeCell::new(0)],
        asleep: AtomicU64::new(0),
        bell: Mutex::new(false),
        rung: Condvar::new(),
    }
}

fn is_complete(ranks: &[Rank], turn: u64) -> bool {
    let published = |rank: &Rank| has_published(&rank.turns[(turn % 2) as usize], turn);
    ranks.iter().all(published)
}

fn wake_sleepers(ranks: &[Rank], turn: u64) {
    for rank in ranks {
        if takes_sleeper(&rank.asleep, turn) {
            *rank.bell.lock().unwrap() = true;
            rank.rung.notify_one();
        }
    }
}

fn run(ranks: &[Rank], own: usize, turns: u64) {
    for turn in 1..=turns {
        let parity = (turn % 2) as usize;
        // SAFETY: loom checks that nobody else accesses the cell.
        ranks[own].slots[parity].with_mut(|slot| unsafe { *slot = turn * 10 + own as u64 });
        publish(&ranks[own].turns[parity], turn);
        while !is_complete(ranks, turn) {
            announce_sleep(&ranks[own].asleep, turn);
            if !is_complete(ranks, turn) {
                let mut rung = ranks[own].bell.lock().unwrap();
                while !*rung {
                    rung = ranks[own].rung.wait(rung).unwrap();
                }
            }
            awake(&ranks[own].asleep);
            *ranks[own].bell.lock().unwrap() = false;
        }
        wake_sleepers(ranks, turn);
        for (other, rank) in ranks.iter().enumerate() {
            // SAFETY: loom checks that nobody writes the cell meanwhile.
            let value = rank.slots[parity].with(|slot| unsafe { *slot });
            assert_eq!(value, turn * 10 + other as u64);
        }
    }
}

fn explore(count: usize, turns: u64, preemptions: usize) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(move || {
        let ranks: Arc<Vec<Rank>> = Arc::new((0..count).map(|_| rank()).collect());
        let others: Vec<_> = (1..count)
            .map(|own| {
                let ranks = Arc::clone(&ranks);
                thread::spawn(move || run(&ranks, own, turns))
            })
            .collect();
        run(&ranks, 0, turns);
        others.into_iter().for_each(|other| other.join().unwrap());
    });
}

#[test]
fn two_ranks_read_what_the_other_wrote_in_each_turn() {
    explore(RANKS, TURNS, PREEMPTIONS_MAX);
}

#[test]
fn the_last_of_three_ranks_wakes_the_others() {
    explore(3, 1, 2);
}
