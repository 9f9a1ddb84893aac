//! Histories of a parameter server: workers push and pull, servers apply and save, over a network and
//! among faults that chance is responsible for.
//!
//! What runs is the core's `parameters`. The scenario says who is there and what goes wrong, the training
//! lets it happen, and the record says what must be true.

mod disk;
mod record;
mod scenario;
mod training;

/// What a history was an example of.
///
/// # Errors
/// What should never have happened.
pub(crate) fn outcome(seed: u64) -> Result<Vec<&'static str>, String> {
    let (training, result) = training::run(seed, false);
    result?;
    Ok(training.record.examples())
}

/// A history line by line, and what should not have happened in it.
pub(crate) fn replay(seed: u64) -> (Vec<String>, Result<(), String>) {
    let (training, result) = training::run(seed, true);
    let mut lines = vec![format!("{:?}", training.scenario)];
    lines.extend(training.world.trace.take());
    (lines, result)
}
