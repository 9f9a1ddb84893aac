//! Cost model of collectives: the plans of all ranks, in virtual time over links that are numbers,
//! without bytes and threads.
//!
//! *What is real.* The schedules, the blocks and what waits for what are those of the executor, as
//! are the rules by which an algorithm is chosen. *What is modelled* is what a [`Network`] says:
//!
//! * a rank does one thing at a time: a piece that it sends, receives or folds takes its processor;
//! * pieces between hosts take turns on the line of the host that sends, on the uplinks of racks, and
//!   on the line of the host that receives; those inside a host on the ports of the two ranks. Each
//!   piece passes on while it comes in, as packets do;
//! * what has arrived waits at the receiver until its turn has come, in as much room as it needs.
//!
//! Not modelled are losses, congestion, sockets that are full, and headers.

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

/// What was found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timing {
    /// Until the last rank has its result.
    pub seconds: f64,
    /// Until the first one has.
    pub first_seconds: f64,
    /// How many pieces have travelled, between all ranks.
    pub pieces: u64,
    /// The part of the time in which the busiest line or port carries something.
    pub busiest_line: f64,
    /// The part of the time in which the busiest rank computes, copies or folds.
    pub busiest_rank: f64,
}

/// How long a collective takes by `algorithm`.
///
/// # Errors
/// `Config` for an algorithm that does not do it there and for one too large to be simulated, and what a
/// caller that gives up gets.
pub fn time(
    traffic: &Traffic,
    algorithm: Algorithm,
    network: &Network,
    interrupt: Interrupt<'_>,
) -> Result<Timing> {
    simulate::simulate(traffic, algorithm, network, interrupt)
}

/// How a group would choose on `network`: by `rules`, and by times as a new group measures them.
///
/// # Errors
/// As `time`.
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
