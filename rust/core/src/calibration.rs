//! Calibration: measures a new group within milliseconds, so that it can choose algorithms.

use std::time::{Duration, Instant};

use crate::engine::Engine;
use gradring_net::caller::Interrupt;
use gradring_proto::buffer::Buffer;
use gradring_proto::collective::{Collective, Request};
use gradring_proto::dtype::{DType, ReduceOp};
use gradring_proto::error::{Damage, Result};
use gradring_proto::schedule::algorithm_rules::Rules;
use gradring_proto::schedule::choice::{Cost, MEASURED_SIZES, Measured, Policy};

/// Bytes and repetitions of the small and of the large reduction; the fastest time counts.
const SMALL: (usize, usize) = (MEASURED_SIZES.0, 8);
const LARGE: (usize, usize) = (MEASURED_SIZES.1, 4);

/// Bound on a credible time of one of these reductions, in seconds.
const LONGEST_S: f64 = 1e9;

/// Sent in place of a time by a rank that has no slots, or no heap.
const LACKING: f64 = 1.0;

/// Memory of a rank that others map, besides links.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shared {
    pub(crate) has_slots: bool,
    pub(crate) has_heap: bool,
}

/// Ordinals that no other collective has. Otherwise a rank that is still calibrating could take a
/// query about its peers' first collective for one about its own.
const FIRST_SEQUENCE: u64 = 1_000_000_001;

/// Measures the algorithms, and lets `engine` choose by the times of the slowest rank. All ranks
/// call it at the same point. The ranks use slots and heaps afterwards, if all have them.
pub(crate) fn measure(engine: &Engine, shared: Shared, interrupt: Interrupt<'_>) -> Result<()> {
    engine.count_from(FIRST_SEQUENCE);
    let policy = engine.policy();
    let algorithms = policy.measurable();
    let mut times = vec![0.0; 2 * algorithms.len()];
    for (&algorithm, times) in algorithms.iter().zip(times.chunks_exact_mut(2)) {
        engine.set_policy(Policy {
            rules: Rules::always(algorithm),
            ..policy.clone()
        });
        for (time, (bytes, repetitions)) in times.iter_mut().zip([SMALL, LARGE]) {
            *time = fastest(engine, bytes, repetitions, interrupt)?.as_secs_f64();
        }
    }
    engine.set_policy(policy.clone());
    let lacking = |has| if has { 0.0 } else { LACKING };
    times.extend([shared.has_slots, shared.has_heap].map(lacking));
    slowest(engine, &mut times, interrupt)?;
    let has_heaps = times.pop() == Some(0.0);
    let has_slots = times.pop() == Some(0.0);
    let costs = costs(&times).map_err(|error| engine.fail(error))?;
    engine.set_policy(Policy {
        measured: Some(Measured {
            one_shot: costs[0],
            two_steps: costs[1],
            star: costs.get(2).copied(),
        }),
        has_slots,
        has_heaps,
        ..policy
    });
    engine.count_from(1);
    Ok(())
}

/// Fits the cost of each algorithm to its times, in seconds, for the small and the large buffer.
/// Peers contributed to these times, so incredible ones are an error.
fn costs(times: &[f64]) -> Result<Vec<Cost>> {
    if let Some(wild) = times.iter().find(|time| !(0.0..LONGEST_S).contains(*time)) {
        return Err(Damage::WildTime { seconds: *wild }.into());
    }
    let seconds = Duration::from_secs_f64;
    let cost = |small, large| Cost::fitted((SMALL.0, seconds(small)), (LARGE.0, seconds(large)));
    let pairs = times.chunks_exact(2);
    Ok(pairs.map(|pair| cost(pair[0], pair[1])).collect())
}

fn fastest(
    engine: &Engine,
    bytes: usize,
    repetitions: usize,
    interrupt: Interrupt<'_>,
) -> Result<Duration> {
    let mut fastest = Duration::MAX;
    for _ in 0..repetitions {
        let started = Instant::now();
        let buffer = Buffer::zeroed(DType::U8, bytes);
        engine.run(all_reduce(buffer, ReduceOp::Sum), interrupt)?;
        fastest = fastest.min(started.elapsed());
    }
    Ok(fastest)
}

/// Replaces each of `times` by its maximum over all ranks.
fn slowest(engine: &Engine, times: &mut [f64], interrupt: Interrupt<'_>) -> Result<()> {
    // SAFETY: `times` outlives the blocking call and is not touched meanwhile.
    let buffer = unsafe { Buffer::contiguous(DType::F64, times.as_mut_ptr().cast(), times.len()) };
    engine.run(all_reduce(buffer, ReduceOp::Max), interrupt)
}

fn all_reduce(buffer: Buffer, op: ReduceOp) -> Request {
    Request {
        collective: Collective::AllReduce { op },
        buffer,
        name: "calibration".into(),
        shapes: String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_with_a_turned_bit_are_used_or_refused_and_never_a_panic() {
        let right = [8e-6, 30e-6, 9e-6, 25e-6];
        assert!(costs(&right).is_ok());
        for (place, bit) in (0..4).flat_map(|place| (0..64).map(move |bit| (place, bit))) {
            let mut times = right;
            times[place] = f64::from_bits(times[place].to_bits() ^ (1 << bit));
            // Bits 62 and 63 are the sign and the upper exponent: 1e-5 becomes more than a century.
            assert_eq!(costs(&times).is_err(), bit >= 62, "bit {bit} of {place}");
        }
        assert!(costs(&[f64::NAN; 4]).is_err());
        assert!(costs(&[f64::INFINITY; 4]).is_err());
    }
}
