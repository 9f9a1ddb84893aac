//! Requests and replies of the processes of an elastic job.

use serde::{Deserialize, Serialize};

use super::quorum::{Ballot, Id, Peer, Roster};

/// Where a process stands: the roster that it accepted last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptedView {
    /// Which.
    pub roster: Roster,
    /// Whether it knows that all members were connected and had the state of the training.
    pub is_established: bool,
}

/// What everybody tells with whatever it says: facts that stay true.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct News {
    /// Processes that are proved dead.
    pub dead: Vec<Id>,
    /// Processes that want to join.
    pub joiners: Vec<Peer>,
    /// Addresses to which the sender could not connect lately.
    pub unreached: Vec<String>,
}

/// A request on its way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Envelope {
    /// Who asks.
    pub from: Peer,
    /// Who is meant; a joiner knows addresses only.
    pub to: Option<Id>,
    /// What it asks.
    pub request: Request,
}

/// What a process asks another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Promise to take part in nothing below this ballot.
    Gather {
        /// Which.
        ballot: Ballot,
        /// What the proposer would decide from.
        base: AcceptedView,
        /// What it knows.
        news: News,
    },
    /// Accept this roster.
    Install(Roster),
    /// Say whether it is still at the roster of this ballot, whose members connect.
    Watch(Ballot),
    /// Take the sender in.
    Join,
    /// The sender has left for good.
    Leave,
    /// All members of the roster of this ballot have come to the end of the training.
    Finish(Ballot),
}

/// The answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// It takes part in nothing below this ballot any more.
    Promise {
        /// Which.
        ballot: Ballot,
        /// Where it is; nothing for a joiner.
        view: Option<AcceptedView>,
        /// What it knows.
        news: News,
    },
    /// It lives, and has to come back from its step or from connecting first.
    Busy,
    /// It has promised this higher ballot.
    Behind(Ballot),
    /// It is at a roster without the sender, or knows of none with both.
    Elsewhere(AcceptedView),
    /// It has accepted the roster of this ballot, and promised nothing higher.
    Accepted(Ballot),
    /// It has taken notice. Its members, whom a joiner can ask as well.
    Noted(Vec<Peer>),
    /// It is not the process that was meant, which therefore is dead.
    OtherProcess,
}

/// What became of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// An answer.
    Reply(Reply),
    /// Nobody listens at the address.
    Refused,
    /// No answer in time.
    Silent,
    /// One that answered does not count the sender in, for this reason. That proves nothing about the
    /// process that was meant: another one may have its address by mistake.
    TurnedAway(String),
}

/// What the owner of a member has to do.
#[derive(Debug, PartialEq)]
pub enum Step {
    /// Send this to an address, and tell what became of it.
    Send(String, Envelope),
    /// Connect with the members of this roster, and tell whether that worked.
    Connect(Roster),
    /// The others went on without this process: it may join them under a new id.
    Excluded,
    /// The training is over, and nobody needs another group.
    Finished,
    /// There is no way to go on.
    Failed(crate::error::Error),
    /// Nothing to do until then, or until something is heard.
    Wait(Option<std::time::Instant>),
}
