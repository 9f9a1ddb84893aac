//! Messages between workers and servers.
//!
//! Messages may be lost, duplicated, delayed and reordered. A message without an answer is sent
//! again.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::changes::{Kept, PulledPart};
use super::identity::{Incarnation, Point, PushId, Term, Terms, Version};
use super::log::Entry;
use super::optimizer::Hyper;
use super::shard::Payload;
use super::snapshot::Snapshot;
use crate::error::{Breach, Result};

/// A message from a worker to a server.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WorkerRequest {
    /// Term that the worker knows; 0 if it knows none.
    pub term: Term,
    /// Index of the worker.
    pub worker: u32,
    /// The request itself.
    pub ask: Ask,
}

impl WorkerRequest {
    /// Checks the sender.
    ///
    /// # Errors
    /// `Protocol` if the request names another worker, or another worker's gradient.
    pub fn check_from(&self, worker: u32) -> Result<()> {
        let owner = match &self.ask {
            Ask::Submit { id, .. } | Ask::Stage { id, .. } => id.worker,
            Ask::Join { .. } | Ask::Pull { .. } | Ask::Alive(_) | Ask::Leave(_) => worker,
        };
        if self.worker != worker || owner != worker {
            let wanted = format!("a request of worker {worker}").into();
            return Err(Breach::Unexpected { wanted }.into());
        }
        Ok(())
    }
}

/// Kinds of request. All servers answer `Stage` and `Pull`; the other kinds go to the first server.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Ask {
    /// Makes the worker a member.
    Join {
        /// A random number for the attempt.
        nonce: u64,
        /// Incarnation of the worker before the servers were restored, if it had one.
        claim: Option<Incarnation>,
    },
    /// Asks for an update with a gradient that is staged on all servers, and for a [`Reply::Go`].
    Submit {
        /// Identity of the gradient.
        id: PushId,
        /// Oldest version of any server's weights with which the gradient was computed.
        base: Version,
        /// Learning rate and weight decay of the step.
        hyper: Hyper,
    },
    /// Asks for weights of at least this version.
    Pull {
        /// Number of the pull.
        round: u64,
        /// Lowest version that the worker accepts.
        at_least: Version,
        /// Weights of the server that the worker keeps, if it keeps some.
        kept: Option<Kept>,
    },
    /// Proves that the worker lives, so that it is not taken for lost.
    Alive(Incarnation),
    /// Ends the membership.
    Leave(Incarnation),
    /// Leaves a piece of a gradient at a server until the gradient is applied.
    Stage {
        /// Identity of the gradient.
        id: PushId,
        /// Version of this server's weights with which the gradient was computed.
        base: Version,
        /// Place among the pieces of the gradient.
        piece: Piece,
        /// This server's part of the piece.
        payload: Arc<Payload>,
    },
}

/// Place of a piece of a gradient. Workers send pieces while they compute the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// Index of the piece.
    pub index: u32,
    /// Number of pieces of the gradient, at most [`Piece::COUNT_MAX`].
    pub count: u32,
}

impl Piece {
    /// Limit of the number of pieces.
    pub const COUNT_MAX: u32 = 1 << 12;

    /// The only piece of a gradient.
    pub const WHOLE: Self = Self { index: 0, count: 1 };

    /// Returns whether there can be such a piece.
    #[must_use]
    pub const fn is_possible(self) -> bool {
        self.index < self.count && self.count <= Self::COUNT_MAX
    }
}

/// A message from a server to a worker.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Reply {
    /// The servers are in another term. The worker joins it.
    OtherTerm(Terms),
    /// The worker is no member under this incarnation any more. It joins under a new one.
    NotMember(Term, Incarnation),
    /// The worker is a member.
    Joined {
        /// Term of the membership.
        term: Term,
        /// Nonce of the attempt that succeeded.
        nonce: u64,
        /// Incarnation of the membership.
        incarnation: Incarnation,
        /// Number of the last push that is applied or dropped, as all before it are.
        latest: u64,
        /// Number of copies of each shard beside the first.
        replicas: usize,
    },
    /// The server keeps the piece with this index.
    Staged(Term, PushId, u32),
    /// The worker may pull, and compute the next gradient.
    Go {
        /// Current term.
        term: Term,
        /// Incarnation of the worker.
        incarnation: Incarnation,
        /// Number of the worker's last push that was submitted.
        number: u64,
        /// Lowest version to pull; 0 asks for the initial weights instead.
        version: Version,
        /// All pushes up to this number have been applied or dropped.
        settled: u64,
        /// Number of pushes of this incarnation that were dropped in this term.
        dropped: u64,
    },
    /// The membership has ended at the worker's request. Its pushes that are in no update are
    /// dropped.
    Left {
        /// Current term.
        term: Term,
        /// Incarnation that has ended.
        incarnation: Incarnation,
        /// Number of pushes of this incarnation that were dropped in this term.
        dropped: u64,
    },
    /// Answers [`Ask::Pull`].
    Weights {
        /// Number of the pull.
        round: u64,
        /// Point of the weights.
        point: Point,
        /// Round of the start with which the server began its term.
        start: u64,
        /// Weights to which the rows belong that have changed; `None` if all parts are whole.
        base: Option<Kept>,
        /// Weights of each part.
        parts: Vec<PulledPart>,
    },
}

/// The point from which all servers continue in a new term.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Start {
    /// Round of the statuses from which the start was computed.
    pub round: u64,
    /// All terms; the last one is the new term.
    pub terms: Terms,
    /// Point of the weights.
    pub point: Point,
    /// Last entries before the point, for servers that have not applied all of them.
    pub entries: Vec<Entry>,
}

/// A message from the sequencer to a server.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Order {
    /// Asks for a [`Report::Status`].
    Prepare {
        /// A random number for the round.
        round: u64,
    },
    /// Continue from this start.
    Install(Start),
    /// Append these entries to the log, and apply them.
    Append {
        /// Term of the sequencer.
        term: Term,
        /// Version before the first entry.
        after: Version,
        /// The entries in the order of the log.
        entries: Vec<Entry>,
        /// Last push of each worker that need not be kept once the entries are applied.
        acknowledged: Vec<PushId>,
        /// A version of which all servers have a snapshot, so older snapshots are superfluous.
        stable: Version,
    },
    /// Asks for the whole state at this start, for servers that lack it.
    FetchState(Start),
    /// Continue from this start, with a snapshot that another server has sent.
    InstallSnapshot(Start, Arc<Snapshot>),
}

/// A message from a server to the sequencer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Report {
    /// State of the server.
    Status {
        /// Round of the order.
        round: u64,
        /// The last terms that it knows.
        terms: Terms,
        /// Points of its snapshots.
        points: Vec<Point>,
        /// Point of its state in memory, which does not change before the next start.
        at: Option<Point>,
        /// The last entries before that point.
        entries: Vec<Entry>,
    },
    /// The server has begun this term.
    Installed {
        /// The new term.
        term: Term,
        /// Last push of each worker in the weights.
        applied: Vec<PushId>,
        /// Version of its last snapshot.
        saved: Version,
    },
    /// Progress of the server in the log.
    Applied {
        /// Term of the sequencer.
        term: Term,
        /// Version of the last entry that it has applied.
        version: Version,
        /// Version of its last snapshot.
        saved: Version,
    },
    /// The server is in no term, or cannot continue in this one.
    Lost(Term),
    /// Answers [`Order::FetchState`].
    FetchedState {
        /// Round of the start.
        round: u64,
        /// The whole state.
        state: Arc<Snapshot>,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_about_the_gradient_of_another_worker_is_refused() {
        let request = |worker, owner| {
            let id = PushId {
                worker: owner,
                incarnation: Incarnation::default(),
                number: 1,
            };
            let hyper = Hyper {
                learning_rate: 0.1,
                weight_decay: 0.0,
            };
            let (term, base) = (1, 0);
            let ask = Ask::Submit { id, base, hyper };
            WorkerRequest { term, worker, ask }
        };
        assert_eq!(request(1, 1).check_from(1), Ok(()));
        let wanted = "a request of worker 1".into();
        let refused = Err(Breach::Unexpected { wanted }.into());
        assert_eq!(request(1, 2).check_from(1), refused);
        assert_eq!(request(2, 1).check_from(1), refused);
        assert_eq!(request(2, 2).check_from(1), refused);
    }
}
