//! Scenario of a run, drawn from a seed: the group, its collectives, and the faults.

use std::sync::Arc;
use std::time::Duration;

use super::faults::Fault;
use super::values;
use crate::world::random::Random;
use crate::world::time::{MICROSECOND, MILLISECOND, Moment, SECOND};
use gradring_core::drive::Limits;
use gradring_proto::collective::Call;
use gradring_proto::dtype::DType;
use gradring_proto::schedule::Algorithm;
use gradring_proto::schedule::algorithm_rules::Rules;
use gradring_proto::schedule::choice::Policy;
use gradring_proto::schedule::topology::Topology;

const LINGERS_MAX: Moment = 3 * SECOND;

/// All decisions about a run that are made before it begins.
pub(super) struct Scenario {
    pub(super) topology: Topology,
    pub(super) limits: Limits,
    pub(super) pipe_bytes: usize,
    pub(super) delay_max: Moment,
    /// True if ranks of one host share memory.
    pub(super) shares_memory: bool,
    pub(super) collectives: Vec<Planned>,
    pub(super) faults: Vec<Fault>,
    /// Time for which each rank stays after its program has ended; random if empty.
    pub(super) lingering: Vec<Moment>,
}

/// A collective that all ranks run, unless a fault prevents it.
pub(super) struct Planned {
    /// The call of a rank that is not the root.
    pub(super) call: Call,
    pub(super) policy: Policy,
    /// Time for which each rank computes before it launches the collective.
    pub(super) computing: Vec<Moment>,
    /// True if the collective is launched together with the one before.
    pub(super) together: bool,
}

impl Scenario {
    pub(super) fn new(random: &mut Random) -> Self {
        let world_size = 2 + random.below(7);
        let hosts = 1 + random.below(3);
        let host: Vec<usize> = (0..world_size).map(|_| random.below(hosts)).collect();
        let topology = Topology::by_host(host.iter());
        let topology = match hosts {
            // The number of draws never changes, so that a seed keeps its history.
            3 => topology.in_racks(|rank| (host[rank] / 2).to_string()),
            _ => topology,
        };
        let large = random.once_in(100) && world_size <= 4;
        let timeout = Duration::from_secs(random.pick(&[3, 6, 20]));
        let wire_dtype = random.pick(&[None, None, None, Some(DType::Bf16), Some(DType::F16)]);
        let policy = Policy {
            reproducible: random.once_in(4),
            wire_dtype,
            ..Policy::new(topology.clone())
        };
        let count = if large { 2 } else { 2 + random.below(8) };
        let idle = random.once_in(4).then(|| random.below(count));
        let collectives: Vec<Planned> = (0..count)
            .map(|number| planned(random, &policy, large, idle == Some(number)))
            .collect();
        let pipe_bytes = if large {
            random.pick(&[32 << 10, 256 << 10, 1 << 20])
        } else {
            random.pick(&[200, 3000, 64 << 10])
        };
        let faults = random.pick(&[0, 1, 1, 1, 1, 1, 1, 2]);
        let faults = (0..faults).map(|_| Fault::new(random, world_size, count, timeout));
        Self {
            faults: faults.collect(),
            limits: Limits {
                timeout,
                stall_warning: timeout / 2,
            },
            pipe_bytes,
            delay_max: random.pick(&[50 * MICROSECOND, MILLISECOND, 20 * MILLISECOND]),
            shares_memory: random.once_in(2),
            topology,
            collectives,
            lingering: Vec::new(),
        }
    }

    /// Time for which `rank` stays in the group after its program has ended.
    pub(super) fn lingers(&self, rank: usize, random: &mut Random) -> Moment {
        self.lingering.get(rank).copied().unwrap_or_else(|| {
            let most = random.pick(&[0, 20 * MILLISECOND, LINGERS_MAX]);
            random.between(0, most)
        })
    }

    /// Returns a line that describes the run.
    pub(super) fn summary(&self) -> String {
        format!(
            "hosts {:?}, {} collectives, timeout {:?}, pipes of {} B, delays up to {} us, {}; {:?}",
            self.topology.hosts(),
            self.collectives.len(),
            self.limits.timeout,
            self.pipe_bytes,
            self.delay_max / MICROSECOND,
            if self.shares_memory {
                "shared memory"
            } else {
                "no shared memory"
            },
            self.faults,
        )
    }

    pub(super) fn world_size(&self) -> usize {
        self.topology.world_size()
    }

    /// Peers with which `rank` shares memory.
    pub(super) fn sharing(&self, rank: usize) -> Vec<bool> {
        let host = |rank| self.topology.position(rank).0;
        let shares = |peer| self.shares_memory && peer != rank && host(peer) == host(rank);
        (0..self.world_size()).map(shares).collect()
    }

    /// The call of `rank` at this position, counted from 0; `None` if the rank has left by then.
    pub(super) fn call_of(&self, rank: usize, number: usize) -> Option<Call> {
        let mut call = self.collectives.get(number)?.call.clone();
        for fault in &self.faults {
            match fault {
                Fault::LeavesEarly { trigger }
                    if trigger.rank == rank && number >= trigger.number =>
                {
                    return None;
                }
                Fault::CallsAnother { trigger, how } if trigger.is(rank, number) => {
                    how.change(&mut call);
                }
                _ => {}
            }
        }
        Some(values::call_of(rank, self.world_size(), call))
    }

    /// The right call of `rank` at this position, without any fault.
    pub(super) fn owed(&self, rank: usize, number: usize) -> Call {
        values::call_of(
            rank,
            self.world_size(),
            self.collectives[number].call.clone(),
        )
    }

    /// Time for which `rank` computes before it launches the collective at this position.
    pub(super) fn computing(&self, rank: usize, number: usize) -> Moment {
        let late = self.faults.iter().filter_map(|fault| match fault {
            Fault::Late { trigger, by } if trigger.is(rank, number) => Some(*by),
            _ => None,
        });
        self.collectives[number].computing[rank] + late.sum::<Moment>()
    }

    /// Bytes of this collective's first header that change on the way from `rank`, each with its
    /// peer.
    pub(super) fn changed_headers(
        &self,
        rank: usize,
        number: usize,
    ) -> impl Iterator<Item = (usize, usize)> {
        self.faults.iter().filter_map(move |fault| match fault {
            Fault::HeaderChanged { trigger, to, byte } if trigger.is(rank, number) => {
                Some((*to, *byte))
            }
            _ => None,
        })
    }

    /// Most time that all computing can take together.
    pub(super) fn computing_max(&self) -> Moment {
        let longest = |planned: &Planned| planned.computing.iter().max().copied();
        self.collectives.iter().filter_map(longest).sum()
    }
}

fn planned(random: &mut Random, policy: &Policy, large: bool, idle: bool) -> Planned {
    let world_size = policy.topology.world_size();
    let longest = random.pick(&[100 * MICROSECOND, 2 * MILLISECOND, 50 * MILLISECOND]);
    let base = if idle { 12 * SECOND } else { 0 };
    // One algorithm for each of the first draws, and the default rules for two further ones.
    let rules = match Algorithm::ALL.get(random.below(Algorithm::ALL.len() + 2)) {
        Some(&algorithm) => Rules::always(algorithm),
        None => Rules::default(),
    };
    Planned {
        call: values::random_call(random, world_size, large),
        policy: Policy {
            topology: Arc::clone(&policy.topology),
            rules,
            ..policy.clone()
        },
        computing: (0..world_size)
            .map(|_| base + random.between(0, longest))
            .collect(),
        together: !idle && random.once_in(3),
    }
}
