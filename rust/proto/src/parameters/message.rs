//! Messages between workers and servers.
//!
//! Every message may be lost, come twice, late, or after one that was sent later. What gets no answer
//! is said again.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::identity::{Incarnation, Point, PushId, Term, Terms, Version};
use super::log::Entry;
use super::optimizer::Hyper;
use super::shard::{Payload, Weights};
use super::snapshot::Snapshot;
use crate::error::{Breach, Result};

/// From a worker to a server.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Request {
    /// Of the worker; 0 if it does not know.
    pub term: Term,
    /// Its index.
    pub worker: u32,
    /// What it wants.
    pub ask: Ask,
}

impl Request {
    /// # Errors
    /// `Protocol` when it is from another worker, or about another one's gradient.
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

/// What a worker wants. Servers other than the first are asked to stage and to pull only.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Ask {
    /// To be a member.
    Join {
        /// A random number for the attempt.
        nonce: u64,
        /// Under which it was before the servers were restored.
        claim: Option<Incarnation>,
    },
    /// To apply what is staged on all servers, and to say when it may go on.
    Submit {
        /// Which gradient.
        id: PushId,
        /// The oldest version of any server's weights with which it was computed.
        base: Version,
        /// What goes with it.
        hyper: Hyper,
    },
    /// The weights, once they have this version at least.
    Pull {
        /// Which of its pulls.
        round: u64,
        /// From what version on.
        at_least: Version,
    },
    /// Not to be taken for lost.
    Alive(Incarnation),
    /// To be counted out.
    Leave(Incarnation),
    /// To keep this until it is applied.
    Stage {
        /// Which gradient.
        id: PushId,
        /// With which version of this server's weights it was computed.
        base: Version,
        /// The part for this server.
        payload: Arc<Payload>,
    },
}

/// From a server to a worker.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Reply {
    /// The servers are in another term: join it.
    OtherTerm(Terms),
    /// It is no member under this incarnation any more: join under a new one.
    NotMember(Term, Incarnation),
    /// It is a member.
    Joined {
        /// In which term.
        term: Term,
        /// Which attempt worked.
        nonce: u64,
        /// Under which incarnation.
        incarnation: Incarnation,
        /// The last of its pushes that counts.
        latest: u64,
        /// On how many servers each shard is, beside the first.
        replicas: usize,
    },
    /// The server has it.
    Staged(Term, PushId),
    /// It may pull, and compute the next gradient.
    Go {
        /// In which term.
        term: Term,
        /// Under which incarnation.
        incarnation: Incarnation,
        /// After which push.
        number: u64,
        /// From what version on; 0 asks for the initial weights.
        version: Version,
        /// Pushes up to this number have been applied or dropped.
        settled: u64,
        /// How many were dropped in this term.
        dropped: u64,
    },
    /// It was counted out, as it wanted: all that is in no update is dropped.
    Left {
        /// In which term.
        term: Term,
        /// Under which incarnation.
        incarnation: Incarnation,
        /// How many of its pushes were dropped in this term.
        dropped: u64,
    },
    /// What was pulled.
    Weights {
        /// Which pull.
        round: u64,
        /// Which weights.
        point: Point,
        /// Of each part.
        parts: Vec<Weights>,
    },
}

/// Where servers go on together.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Start {
    /// Of the statuses from which it follows.
    pub round: u64,
    /// Of which the last is the new one.
    pub terms: Terms,
    /// With which weights.
    pub point: Point,
    /// The last that led there, for those that have not applied all of them.
    pub entries: Vec<Entry>,
}

/// From the sequencer to a server.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Order {
    /// Say what you have.
    Prepare {
        /// A random number for the round.
        round: u64,
    },
    /// Go on from there.
    Install(Start),
    /// Apply these.
    Append {
        /// Of the sequencer.
        term: Term,
        /// The version before the first of them.
        after: Version,
        /// In order.
        entries: Vec<Entry>,
        /// The last push of each worker that needs not be kept, once these are applied.
        acknowledged: Vec<PushId>,
        /// All servers have a snapshot of this version, so none before it is needed.
        stable: Version,
    },
    /// Say all that you have there, for others.
    FetchState(Start),
    /// Go on from there, with what another server has.
    InstallSnapshot(Start, Arc<Snapshot>),
}

/// From a server to the sequencer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Report {
    /// What it has.
    Status {
        /// Of the order.
        round: u64,
        /// The last it knows.
        terms: Terms,
        /// Its snapshots.
        points: Vec<Point>,
        /// What it has in memory, which does not change until it goes on.
        at: Option<Point>,
        /// The last that led there.
        entries: Vec<Entry>,
    },
    /// It goes on in this term.
    Installed {
        /// Which.
        term: Term,
        /// The last push of each worker that the weights have.
        applied: Vec<PushId>,
        /// Its last snapshot.
        saved: Version,
    },
    /// It has applied entries up to this version, and a snapshot of that one.
    Applied {
        /// Of the sequencer.
        term: Term,
        /// What it has applied.
        version: Version,
        /// Its last snapshot.
        saved: Version,
    },
    /// It is in no term, or cannot go on in this one.
    Lost(Term),
    /// What others go on with.
    FetchedState {
        /// Of the start.
        round: u64,
        /// All of it.
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
            Request { term, worker, ask }
        };
        assert_eq!(request(1, 1).check_from(1), Ok(()));
        let wanted = "a request of worker 1".into();
        let refused = Err(Breach::Unexpected { wanted }.into());
        assert_eq!(request(1, 2).check_from(1), refused);
        assert_eq!(request(2, 1).check_from(1), refused);
        assert_eq!(request(2, 2).check_from(1), refused);
    }
}
