//! State of a rank, for inquiries at its listener.

use std::collections::BTreeSet;
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};

use crate::observe::flight_recorder::{Entry, FlightRecorder};
use gradring_net::abort::AbortSwitch;
use gradring_net::host::host_name;
use gradring_proto::error::shortened;
use gradring_proto::lock::{self, lock};
use gradring_proto::wire::handshake::GroupId;
use gradring_proto::wire::state::{Collective, Phase, State};

/// State of one rank, for observers outside. Threads of the listener read it, never the engine, so
/// it is available even while Python is stuck.
pub(crate) struct OwnState {
    rank: usize,
    world_size: usize,
    generation: u32,
    joined: Mutex<BTreeSet<usize>>,
    agreed: Mutex<Agreed>,
    agreement: Condvar,
    formed: OnceLock<GroupState>,
    /// Phase of a process of an elastic job while it has no group.
    between: Option<Phase>,
}

/// Knowledge of the group's identity.
#[derive(Clone, Copy)]
enum Agreed {
    NotYet,
    On(GroupId),
    /// The listener closed before the group was known.
    Never,
}

struct GroupState {
    group: GroupId,
    members: Vec<(String, String)>,
    recorder: Arc<FlightRecorder>,
    abort: Arc<AbortSwitch>,
}

impl OwnState {
    pub(crate) fn new(rank: usize, world_size: usize, generation: u32) -> Self {
        Self {
            rank,
            world_size,
            generation,
            joined: Mutex::default(),
            agreed: Mutex::new(Agreed::NotYet),
            agreement: Condvar::new(),
            formed: OnceLock::new(),
            between: None,
        }
    }

    /// State of a process without a group that admits no members. It is in an elastic job, or waits
    /// outside of one.
    pub(crate) fn between_groups(is_outside: bool) -> Self {
        Self {
            between: Some(Phase::Between { is_outside }),
            ..Self::new(0, 1, 0)
        }
    }

    /// Records a rank that has joined; on rank 0 only.
    pub(crate) fn has_joined(&self, rank: usize) {
        lock(&self.joined).insert(rank);
    }

    /// Records the group that all ranks have joined.
    pub(crate) fn has_agreed(&self, group: GroupId) {
        self.settle(Agreed::On(group));
    }

    /// Releases the threads that wait for the group's identity.
    pub(crate) fn gives_up(&self) {
        self.settle(Agreed::Never);
    }

    /// Waits for the identity of the group, at most for `limit`. Members that have it connect to
    /// those that do not have it yet.
    pub(crate) fn group(&self, limit: Duration) -> Option<GroupId> {
        let not_yet = |agreed: &mut Agreed| matches!(agreed, Agreed::NotYet);
        let agreed = *lock::wait_while(&self.agreement, lock(&self.agreed), limit, not_yet);
        match agreed {
            Agreed::On(group) => Some(group),
            Agreed::NotYet | Agreed::Never => None,
        }
    }

    fn settle(&self, outcome: Agreed) {
        let mut agreed = lock(&self.agreed);
        if matches!(*agreed, Agreed::NotYet) {
            *agreed = outcome;
        }
        drop(agreed);
        self.agreement.notify_all();
    }

    /// Records that the group has formed: later answers come from its flight recorder.
    pub(crate) fn has_formed(
        &self,
        members: Vec<(String, String)>,
        recorder: Arc<FlightRecorder>,
        abort: Arc<AbortSwitch>,
    ) {
        // A group forms once.
        let _ = self.formed.set(GroupState {
            group: self.group(Duration::ZERO).unwrap_or(GroupId::NONE),
            members,
            recorder,
            abort,
        });
    }

    /// Returns `true` for a process of an elastic job that has no group.
    pub(crate) const fn is_between_groups(&self) -> bool {
        self.between.is_some()
    }

    /// Returns `true` once no member is let in any more.
    pub(crate) fn is_formed(&self) -> bool {
        self.between.is_some() || self.formed.get().is_some()
    }

    pub(crate) fn state(&self) -> State {
        State {
            rank: self.rank,
            world_size: self.world_size,
            host: host_name(),
            process_id: std::process::id(),
            version: env!("CARGO_PKG_VERSION").into(),
            phase: match (&self.between, self.formed.get()) {
                (Some(between), _) => between.clone(),
                (None, Some(formed)) => formed.phase(),
                (None, None) => self.forming(),
            },
        }
    }

    fn forming(&self) -> Phase {
        let joined = lock(&self.joined);
        let known = self.rank == 0;
        let missing = (1..self.world_size).filter(|rank| known && !joined.contains(rank));
        Phase::Forming {
            missing: missing.collect(),
            generation: self.generation,
        }
    }
}

impl GroupState {
    fn phase(&self) -> Phase {
        let (entered, ended) = self.recorder.now();
        let waiting = entered.as_ref().and_then(|_| self.recorder.waits.now());
        let stuck = self.recorder.stuck_beside().filter(|_| entered.is_none());
        let (beside, there) = stuck.unzip();
        let collective = |entry: &Entry, since: Option<Instant>| Collective {
            sequence: entry.sequence,
            call: match entry.step {
                0 => shortened(&entry.call.to_string()),
                step => format!("{} in step {step}", shortened(&entry.call.to_string())),
            },
            age: since.unwrap_or(entry.launched).elapsed(),
        };
        Phase::Formed {
            group: self.group,
            members: self.members.clone(),
            beside: beside.map(|entry| Box::new(collective(&entry, entry.started))),
            awaited: waiting
                .or(there)
                .map(|waiting| waiting.awaited)
                .unwrap_or_default(),
            entered: entered.map(|entry| collective(&entry, entry.started)),
            ended: ended.map(|entry| collective(&entry, entry.ended)),
            failed: self.abort.cause().map(|cause| cause.to_string()),
        }
    }
}
