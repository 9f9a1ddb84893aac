//! Requests and replies of the processes of an elastic job.

use serde::{Deserialize, Serialize};

use super::quorum::{Ballot, Id, Peer, Roster};

/// The roster that a process accepted last, and its knowledge of that roster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptedView {
    /// The accepted roster.
    pub roster: Roster,
    /// True if the process knows that all members were connected and had the state of the training.
    pub is_established: bool,
}

/// Facts that stay true; every request for a promise and every promise carries them.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct News {
    /// Processes that are proved dead.
    pub dead: Vec<Id>,
    /// Processes that want to join.
    pub joiners: Vec<Peer>,
    /// Addresses to which the sender could not connect lately.
    pub unreached: Vec<String>,
}

/// A request with its sender and receiver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Envelope {
    /// The sender.
    pub from: Peer,
    /// Id of the receiver; `None` from a joiner, which knows addresses only.
    pub to: Option<Id>,
    /// The request itself.
    pub request: MemberRequest,
}

/// A request to another process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum MemberRequest {
    /// Asks for a promise to take part in no lower ballot.
    Gather {
        /// Number of the proposal.
        ballot: Ballot,
        /// The roster from which the proposer would decide.
        base: AcceptedView,
        /// Facts that the proposer knows.
        news: News,
    },
    /// Asks to accept this roster.
    Install(Roster),
    /// Asks whether the receiver is still at the roster of this ballot, whose members connect.
    Watch(Ballot),
    /// Asks to let the sender join.
    Join,
    /// The sender has left for good.
    Leave,
    /// All members of the roster of this ballot have reached the end of the training.
    Finish(Ballot),
}

/// The reply to a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// The process takes part in no lower ballot any more.
    Promise {
        /// Number of the proposal.
        ballot: Ballot,
        /// The roster at which the process is; `None` for a joiner.
        view: Option<AcceptedView>,
        /// Facts that the process knows.
        news: News,
    },
    /// The process lives, but has to return from its step or from connecting first.
    Busy,
    /// The process has promised this higher ballot.
    Behind(Ballot),
    /// The newer roster of the two processes lacks one of them. The reply has the receiver's
    /// roster.
    Elsewhere(AcceptedView),
    /// The process has accepted the roster of this ballot, and promised nothing higher.
    Accepted(Ballot),
    /// The process has noted the request. The reply may have its members, for a joiner to ask.
    Noted(Vec<Peer>),
    /// Another process answers at the address, so the process that was meant is dead.
    OtherProcess,
}

/// The outcome of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// A reply.
    Reply(Reply),
    /// Nothing listens at the address.
    Refused,
    /// No reply in time.
    Silent,
    /// The process at the address refuses the sender, for this reason. That proves nothing about
    /// the process that was meant, because another job may use its address by mistake.
    TurnedAway(String),
}

/// The next action of a member's owner.
#[derive(Debug, PartialEq)]
pub enum Step {
    /// Send this request to an address, and report the outcome.
    Send(String, Envelope),
    /// Connect with the members of this roster, and report the result.
    Connect(Roster),
    /// The others have continued without this process. It may join them under a new id.
    Excluded,
    /// The training is over, and no further group is needed.
    Finished,
    /// The process cannot continue, for this reason.
    Failed(crate::error::Error),
    /// Nothing is due before this time, unless a message arrives.
    Wait(Option<std::time::Instant>),
}
