//! Explanation in words of the choice of algorithms, for statistics.
//!
//! The words are made from the choices for every range of sizes, so they cannot contradict them.

use std::collections::BTreeMap;
use std::fmt;

use super::Algorithm;
use super::choice::{
    Cost, DIRECT_RANKS_MAX, MEASURED_BYTES_MAX, ONE_PACKET_BYTES_MAX, ONE_SHOT_BYTES_MAX, Policy,
    Reason,
};
use crate::collective::Call;

const TOO_MANY_RANKS: &str = "so many ranks are connected for rings, halving and doubling only";

/// Sizes from one bound to the next, for which all choices are the same.
struct Range {
    above: usize,
    up_to: Option<usize>,
    algorithm: Algorithm,
    reason: Reason,
}

impl Policy {
    /// Sizes and reason of each algorithm that sums of float32 use, or for which there is a rule.
    #[must_use]
    pub fn explain(&self) -> BTreeMap<&'static str, String> {
        let mut explained = BTreeMap::<_, String>::new();
        if self.topology.world_size() == 1 {
            return explained;
        }
        for &(algorithm, _) in self.rules.parts() {
            if let Some(obstacle) = self.obstacle(algorithm) {
                explained.insert(algorithm.name(), format!("never: {obstacle}"));
            }
        }
        for range in self.ranges() {
            let words = format!("{range}: {}", self.words(range.reason));
            explained
                .entry(range.algorithm.name())
                .and_modify(|known| *known = format!("{known}; {words}"))
                .or_insert(words);
        }
        explained
    }

    /// The choices for all sizes, from small to large.
    fn ranges(&self) -> Vec<Range> {
        let mut ranges = Vec::<Range>::new();
        let mut above = 0;
        let bounds = self.bounds().into_iter().map(Some);
        for up_to in bounds.chain([None]) {
            // Every choice that depends on the size changes at one of the bounds.
            let (algorithm, reason) = self.decide(&Call::float_sum(up_to.unwrap_or(usize::MAX)));
            match ranges.last_mut() {
                Some(last) if (last.algorithm, last.reason) == (algorithm, reason) => {
                    last.up_to = up_to;
                }
                _ => ranges.push(Range {
                    above,
                    up_to,
                    algorithm,
                    reason,
                }),
            }
            above = up_to.unwrap_or(above);
        }
        ranges
    }

    /// Sizes, in bytes of whole elements and in order, above which another choice may be made.
    fn bounds(&self) -> Vec<usize> {
        let equal: Vec<Option<usize>> = match self.measured {
            Some(measured) => {
                let (one_shot, two_steps) = (measured.one_shot, measured.two_steps);
                let star = |other: Cost| measured.star.and_then(|star| star.crossing(other));
                vec![
                    one_shot.crossing(two_steps),
                    star(one_shot),
                    star(two_steps),
                ]
            }
            None => vec![Some(ONE_SHOT_BYTES_MAX)],
        };
        let ruled = self.rules.parts().iter().map(|rule| rule.1);
        let mut bounds: Vec<usize> = ruled
            .filter(|&limit| limit < usize::MAX)
            .chain(equal.into_iter().flatten())
            .chain([ONE_PACKET_BYTES_MAX, MEASURED_BYTES_MAX])
            .chain(self.slot_bounds().into_iter().flatten())
            .chain([
                self.direct_bytes_max(),
                self.flat_bytes_max(),
                self.levels_bytes_max(),
            ])
            .chain([*self.doubled().end()])
            .chain(Some(*self.paired().end()).filter(|&limit| limit < usize::MAX))
            .map(|bytes| Call::float_sum(bytes).bytes())
            .collect();
        bounds.sort_unstable();
        bounds.dedup();
        bounds
    }

    /// Reason why an algorithm can never sum float32, if there is one.
    fn obstacle(&self, algorithm: Algorithm) -> Option<&'static str> {
        let call = Call::float_sum(0);
        if !self.connects(algorithm) && !self.reproducible {
            return Some(TOO_MANY_RANKS);
        }
        if !algorithm.performs(&call.collective, &self.topology) {
            return Some(
                "it needs several hosts, and several ranks on one of them or several hosts in a rack",
            );
        }
        (!self.sums_as_asked(algorithm, &call)).then_some("its sums are not reproducible")
    }

    fn words(&self, reason: Reason) -> String {
        match (reason, self.measured) {
            (Reason::Rule, _) => format!("algorithm={}", self.rules),
            (Reason::NoOther, _) => "there is no other".into(),
            (Reason::OnePacket, _) => "one packet".into(),
            (Reason::FewerSteps, None) => "fewer steps".into(),
            (Reason::FewerMessages, None) => "fewer messages".into(),
            (Reason::FewerMessages, Some(measured)) => format!(
                "measured {} against {} for one_shot and {} for {}",
                measured.star.unwrap_or(measured.one_shot),
                measured.one_shot,
                measured.two_steps,
                self.two_steps().name()
            ),
            (Reason::FewerSteps, Some(measured)) => format!(
                "measured {} against {} for {}",
                measured.one_shot,
                measured.two_steps,
                self.two_steps().name()
            ),
            (Reason::SharedHosts, _) => {
                let hosts = self.topology.hosts().len();
                format!("several ranks on one of {hosts} hosts")
            }
            (Reason::SharedRacks, _) => {
                let racks = self.topology.racks().len();
                format!("hosts in {racks} racks")
            }
            (Reason::SharedMemory, _) => "all ranks share memory".into(),
            (Reason::TwoRanks, _) => "2 ranks".into(),
            (Reason::Reproducible, _) => "sums in the order of ranks".into(),
            (Reason::FewRanks, _) => format!("at most {DIRECT_RANKS_MAX} ranks"),
            (Reason::SmallChunks, _) => {
                let chunk = self.direct_bytes_max() / self.topology.world_size();
                format!("chunks of at most {}", size(chunk))
            }
            (Reason::FewHalvings, _) => {
                let ranks = self.topology.world_size();
                format!("few steps for {ranks} ranks")
            }
            (Reason::FewDoublings, _) => {
                let ranks = self.topology.world_size();
                format!("fewest steps for {ranks} ranks")
            }
            (Reason::ManyRanks, _) => format!("more than {DIRECT_RANKS_MAX} ranks"),
        }
    }
}

impl Cost {
    /// The size at which both cost the same.
    fn crossing(&self, other: Self) -> Option<usize> {
        let latency = other.latency.as_secs_f64() - self.latency.as_secs_f64();
        let bytes = latency / (self.seconds_per_byte - other.seconds_per_byte);
        (bytes.is_finite() && bytes >= 0.0).then_some(bytes as usize)
    }
}

/// Text such as `8.1 us + 0.60 ns/B`.
impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (latency_us, per_byte_ns) = (
            self.latency.as_secs_f64() * 1e6,
            self.seconds_per_byte * 1e9,
        );
        write!(f, "{latency_us:.1} us + {per_byte_ns:.2} ns/B")
    }
}

/// Text such as `above 21.3 KiB, up to 1 MiB`.
impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.above, self.up_to) {
            (0, None) => f.write_str("always"),
            (0, Some(up_to)) => write!(f, "up to {}", size(up_to)),
            (above, None) => write!(f, "above {}", size(above)),
            (above, Some(up_to)) => write!(f, "above {}, up to {}", size(above), size(up_to)),
        }
    }
}

/// A number of bytes to one decimal, such as `21.3 KiB`.
fn size(bytes: usize) -> String {
    let units = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    let Some((unit, factor)) = units.into_iter().find(|&(_, factor)| bytes >= factor) else {
        return format!("{bytes} B");
    };
    let rounded = format!("{:.1}", bytes as f64 / factor as f64);
    format!("{} {unit}", rounded.strip_suffix(".0").unwrap_or(&rounded))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::algorithm_rules::Rules;
    use super::super::choice::Measured;
    use super::super::topology::Topology;
    use super::*;

    fn explained(policy: &Policy) -> Vec<(&'static str, String)> {
        policy.explain().into_iter().collect()
    }

    #[test]
    fn sizes_and_measured_times_are_told() {
        let cost = |latency_us, seconds_per_byte| Cost {
            latency: Duration::from_micros(latency_us),
            seconds_per_byte,
        };
        let mut policy = Policy::new(Topology::by_host([0, 0, 1, 1].into_iter()));
        policy.measured = Some(Measured {
            one_shot: cost(10, 3e-9),
            two_steps: cost(40, 1e-9),
            star: None,
        });
        let one_shot = "up to 1 KiB: one packet; above 1 KiB, up to 14.6 KiB: measured 10.0 us + 3.00 ns/B against 40.0 us + 1.00 ns/B \
                        for direct";
        assert_eq!(
            explained(&policy),
            [
                (
                    "direct",
                    "above 14.6 KiB, up to 128 KiB: at most 8 ranks".into()
                ),
                (
                    "hierarchical",
                    "above 128 KiB: several ranks on one of 2 hosts".into()
                ),
                ("one_shot", one_shot.to_owned()),
            ]
        );
    }

    #[test]
    fn a_rule_that_cannot_be_followed_is_told() {
        let mut policy = Policy::new(Topology::one_host(4));
        policy.rules = Rules::parse("ring:1KiB,hierarchical").unwrap();
        assert_eq!(
            explained(&policy),
            [
                ("direct", "above 4 KiB: at most 8 ranks".to_owned()),
                (
                    "hierarchical",
                    "never: it needs several hosts, and several ranks on one of them or several hosts in a rack".into()
                ),
                ("one_shot", "above 1 KiB, up to 4 KiB: fewer steps".into()),
                (
                    "ring",
                    "up to 1 KiB: algorithm=ring:1024,hierarchical".into()
                ),
            ]
        );
        policy.reproducible = true;
        let reproducible = policy.explain();
        assert_eq!(reproducible["ring"], "never: its sums are not reproducible");
        assert_eq!(
            reproducible["direct"],
            "above 4 KiB: sums in the order of ranks"
        );
    }

    #[test]
    fn times_cross_where_both_are_equal_if_they_do() {
        let cost = |latency_us, per_byte_ns: f64| Cost {
            latency: Duration::from_micros(latency_us),
            seconds_per_byte: per_byte_ns * 1e-9,
        };
        for (one, other, crossing) in [
            (cost(10, 3.0), cost(40, 1.0), Some(15_000)),
            (cost(40, 1.0), cost(10, 3.0), Some(15_000)),
            (cost(40, 3.0), cost(10, 1.0), None),
            (cost(40, 1.0), cost(10, 1.0), None),
            (cost(10, 1.0), cost(40, 1.0), None),
        ] {
            let found = one.crossing(other);
            assert_eq!(found.map(|bytes| bytes.div_ceil(10) * 10), crossing);
        }
    }

    #[test]
    fn small_chunks_and_missing_links_are_told() {
        let policy = Policy::new(Topology::one_host(16));
        let direct = policy.explain()["direct"].clone();
        assert!(direct.ends_with(": chunks of at most 64 KiB"), "{direct}");
        for (ranks, reproducible, text) in
            [(65, false, TOO_MANY_RANKS), (65, true, ""), (64, false, "")]
        {
            let mut policy = Policy::new(Topology::one_host(ranks));
            policy.reproducible = reproducible;
            let obstacle = policy.obstacle(Algorithm::Direct);
            assert_eq!(obstacle.unwrap_or_default(), text);
        }
    }

    #[test]
    fn what_is_told_is_what_is_chosen() {
        for ranks in [2, 4, 9, 64, 65] {
            for hosts in [1, 3] {
                let mut policy = Policy::new(Topology::by_host((0..ranks).map(|r| r % hosts)));
                let cost = |latency_us, seconds_per_byte| Cost {
                    latency: Duration::from_micros(latency_us),
                    seconds_per_byte,
                };
                let measured = Measured {
                    one_shot: cost(900, 9e-9),
                    two_steps: cost(1000, 5e-9),
                    star: Some(cost(100, 20e-9)),
                };
                for (rules, measured) in [
                    ("auto", None),
                    ("auto", Some(measured)),
                    ("one_shot:100,ring:64KiB,hierarchical", None),
                ] {
                    policy.measured = measured;
                    policy.rules = Rules::parse(rules).unwrap();
                    let ranges = policy.ranges();
                    for bytes in
                        (0..24).flat_map(|power| [(1 << power) - 1, 1 << power, 3 << power])
                    {
                        let call = Call::float_sum(bytes);
                        let explained = ranges
                            .iter()
                            .find(|range| range.up_to.is_none_or(|up_to| call.bytes() <= up_to))
                            .unwrap();
                        assert_eq!(explained.algorithm, policy.choose(&call), "{rules} {bytes}");
                    }
                }
            }
        }
    }
}
