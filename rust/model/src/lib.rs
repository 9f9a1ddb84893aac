//! Cost model of collectives: executes the plans of all ranks in virtual time, over links given as
//! numbers, without bytes and threads.
//!
//! The schedules, the blocks and the dependencies between operations are *real*: they are those of
//! the executor. So are the rules that choose an algorithm. The rates and delays of a [`Network`]
//! are *modelled*:
//!
//! * A rank does one thing at a time: each piece that it sends, receives or folds takes its
//!   processor.
//! * Pieces between hosts take turns on the line of the sending host, on the uplinks of racks, and
//!   on the line of the receiving host. Pieces inside a host take turns on the ports of the two
//!   ranks. Each piece passes on while it comes in, as packets do.
//! * A piece that has arrived waits at the receiver for its turn, in memory without a bound.
//!
//! Losses, congestion, full sockets and headers are not modelled.

use std::time::Duration;

use gradring_net::caller::Interrupt;
use gradring_proto::error::{Error, Result};
use gradring_proto::schedule::Algorithm;
use gradring_proto::schedule::algorithm_rules::Rules;
use gradring_proto::schedule::choice::{Cost, MEASURED_SIZES, Measured, Policy};

mod lines;
mod network;
mod rank;
mod simulate;
mod traffic;

pub use network::{Network, Path, Uplink};
pub use traffic::Traffic;

/// Result of a simulation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timing {
    /// Seconds until the last rank has its result.
    pub seconds: f64,
    /// Seconds until the first rank has its result.
    pub first_seconds: f64,
    /// Number of pieces that travelled between all ranks.
    pub pieces: u64,
    /// Share of the time in which the busiest line or port carries bytes.
    pub busiest_line: f64,
    /// Share of the time in which the busiest rank computes, copies or folds.
    pub busiest_rank: f64,
}

/// Simulates a collective by `algorithm`, and returns its time.
///
/// # Errors
/// `Config` if the algorithm does not perform this collective there, or is too large to be
/// simulated; the abort if the caller gives up.
pub fn time(
    traffic: &Traffic,
    algorithm: Algorithm,
    network: &Network,
    interrupt: Interrupt<'_>,
) -> Result<Timing> {
    simulate::simulate(traffic, algorithm, network, interrupt)
}

/// Returns the policy of a group on `network`: its choice by `rules`, and by the costs that a new
/// group would measure.
///
/// # Errors
/// The same as `time`.
pub fn policy(rules: Rules, network: &Network, interrupt: Interrupt<'_>) -> Result<Policy> {
    let mut policy = Policy {
        rules,
        ..Policy::new(network.topology())
    };
    if !policy.is_mesh() {
        return Ok(policy);
    }
    let mut cost = |algorithm| {
        let mut at = |bytes: usize| -> Result<_, Error> {
            let timing = time(&Traffic::AllReduce { bytes }, algorithm, network, interrupt)?;
            Ok((bytes, Duration::from_secs_f64(timing.seconds)))
        };
        let (small, large) = MEASURED_SIZES;
        Ok::<_, Error>(Cost::fitted(at(small)?, at(large)?))
    };
    let costs: Result<Vec<Cost>> = policy.measurable().into_iter().map(&mut cost).collect();
    let costs = costs?;
    policy.measured = Some(Measured {
        one_shot: costs[0],
        two_steps: costs[1],
        star: costs.get(2).copied(),
    });
    Ok(policy)
}

#[cfg(test)]
mod tests;
