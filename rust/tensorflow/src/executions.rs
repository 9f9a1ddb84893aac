//! Executions of graphs with collectives in flight: one at a time, because otherwise their order
//! could differ from rank to rank.

use std::collections::{BTreeMap, VecDeque};

/// Number of executions remembered for each communicator: more than the threads of a process that
/// run graphs.
const RECENT: usize = 64;

/// An execution of a graph with collectives on a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Execution {
    pub(crate) communicator: u64,
    /// Generation of the communicator's group.
    pub(crate) generation: u32,
    /// Step id, which TensorFlow draws at random.
    pub(crate) number: i64,
}

/// Collectives in flight, and recent executions.
#[derive(Debug)]
pub(crate) struct Executions {
    /// Executions and names of collectives, by handle, until their Wait has ended. An entry without
    /// a Wait stays until the next execution.
    in_flight: BTreeMap<i64, (Execution, String)>,
    /// Last executions that started a collective, by communicator, the newest last.
    recent: BTreeMap<u64, VecDeque<i64>>,
}

impl Executions {
    pub(crate) const fn new() -> Self {
        Self {
            in_flight: BTreeMap::new(),
            recent: BTreeMap::new(),
        }
    }

    /// Records that `execution` starts the collective `name`.
    ///
    /// # Errors
    /// A reason to abort the group: another execution has a collective in flight, or has started
    /// one since this execution did. Either both run at the same time, or one has failed and this
    /// rank has left its step early.
    pub(crate) fn enter(&mut self, execution: Execution, name: &str) -> Result<(), String> {
        let recent = self.recent.entry(execution.communicator).or_default();
        if recent.back() == Some(&execution.number) {
            return Ok(());
        }
        let resumed = recent.contains(&execution.number);
        if recent.len() == RECENT {
            recent.pop_front();
        }
        recent.push_back(execution.number);
        let other = self
            .in_flight
            .values()
            .find(|(other, _)| {
                (other.communicator, other.generation)
                    == (execution.communicator, execution.generation)
            })
            .cloned();
        // If another has a collective in flight, the group is aborted. Collectives of an earlier
        // group ended with that group. So no entry of this communicator is needed any more.
        self.in_flight
            .retain(|_, (other, _)| other.communicator != execution.communicator);
        match other {
            Some((_, other)) => Err(format!(
                "a tf.function started '{name}' before '{other}' of another call had been waited \
                 for: either that call has failed between its reductions and the program went on, \
                 or two threads run functions that reduce at the same time, whose order differs \
                 from rank to rank. {ADVICE}"
            )),
            None if resumed => Err(format!(
                "a tf.function started '{name}' after another call had reduced in the middle of \
                 its own: two threads run functions that reduce at the same time, whose order \
                 differs from rank to rank. {ADVICE}"
            )),
            None => Ok(()),
        }
    }

    pub(crate) fn started(&mut self, handle: i64, execution: Execution, name: &str) {
        self.in_flight.insert(handle, (execution, name.to_owned()));
    }

    /// Forgets a collective whose Wait has ended.
    pub(crate) fn ended(&mut self, handle: i64) {
        self.in_flight.remove(&handle);
    }
}

const ADVICE: &str = "Give each thread a communicator of its own, and call no function that \
                      reduces from a tf.py_function; if every rank leaves a step alike, run it \
                      inside `with communicator.step(abort_on_exception=False)`";

#[cfg(test)]
mod tests {
    use super::*;

    fn of(communicator: u64, number: i64) -> Execution {
        Execution {
            communicator,
            generation: 1,
            number,
        }
    }

    #[test]
    fn executions_follow_each_other() {
        let mut executions = Executions::new();
        for number in 0..3 {
            for handle in 0..2 {
                assert_eq!(executions.enter(of(1, number), "a"), Ok(()));
                executions.started(handle, of(1, number), "a");
            }
            assert_eq!(executions.enter(of(2, 7), "a"), Ok(()), "others' order");
            (0..2).for_each(|handle| executions.ended(handle));
        }
    }

    #[test]
    fn what_is_in_flight_for_another_execution_is_named() {
        let mut executions = Executions::new();
        assert_eq!(executions.enter(of(1, 1), "a"), Ok(()));
        executions.started(1, of(1, 1), "a");
        let problem = executions.enter(of(1, 2), "b").unwrap_err();
        assert!(problem.contains("started 'b' before 'a'"), "{problem}");
    }

    #[test]
    fn what_a_group_has_left_in_flight_is_nothing_to_the_next_one() {
        let mut executions = Executions::new();
        assert_eq!(executions.enter(of(1, 1), "a"), Ok(()));
        executions.started(1, of(1, 1), "a");
        let next = Execution {
            generation: 2,
            ..of(1, 2)
        };
        assert_eq!(executions.enter(next, "b"), Ok(()));
    }

    #[test]
    fn an_execution_that_was_interrupted_by_another_does_not_go_on() {
        let mut executions = Executions::new();
        assert_eq!(executions.enter(of(1, 1), "a"), Ok(()));
        assert_eq!(executions.enter(of(1, 2), "b"), Ok(()));
        assert!(executions.enter(of(1, 1), "a").is_err());
    }
}
