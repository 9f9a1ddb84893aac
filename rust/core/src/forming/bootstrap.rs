//! Connections between rank 0, the coordinator, and all other ranks while the group forms.
//!
//! A rank that fails or ends before the group is complete makes it fail for all ranks. Rank 0
//! notices this on the connection on which that rank joined, and sends all ranks the same first
//! cause. No rank leaves before that, so no rank is blamed for leaving after another one has
//! failed.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use gradring_net::link::poll;
use gradring_net::link::tcp::connection::Connection;
use gradring_net::link::tcp::deadline_stream::DeadlineStream;
use gradring_proto::error::{Error, NotFormed, Result};
use gradring_proto::wire::handshake::{self, GroupId, RosterMember};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Messages of rank 0 to the members that have joined.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    /// All ranks have joined and form this group; connect with them.
    Formed {
        group: GroupId,
        members: Vec<RosterMember>,
    },
    /// All ranks are connected.
    Complete,
    /// The group does not form.
    Failed(Error),
}

/// Messages of members to rank 0.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[expect(
    clippy::large_enum_variant,
    reason = "there is one failure, at the end"
)]
pub enum Status {
    /// This rank is connected with all others.
    Ready,
    /// This rank cannot continue.
    Failed(Error),
}

/// One rank's end of these connections.
pub(crate) enum Bootstrap {
    /// Rank 0, with all members that have joined, by rank.
    Coordinator(BTreeMap<usize, Joined>),
    /// Another rank.
    Member(Coordinator),
    /// A rank that has not joined yet.
    Outside,
}

/// A member that has joined, as rank 0 sees it.
pub(crate) struct Joined {
    pub member: RosterMember,
    line: Line,
    ready: bool,
}

/// A connection with rank 0.
struct Line {
    stream: Connection,
    /// Time limit of one message.
    conversation_limit: Duration,
}

/// Rank 0, as another rank sees it.
pub(crate) struct Coordinator {
    line: Line,
    name: String,
    complete: bool,
    /// `true` once rank 0 has sent the failure, or has ended.
    has_failed: bool,
}

impl Joined {
    pub(crate) const fn new(
        member: RosterMember,
        stream: Connection,
        conversation_limit: Duration,
    ) -> Self {
        Self {
            member,
            line: Line {
                stream,
                conversation_limit,
            },
            ready: false,
        }
    }
}

impl Coordinator {
    pub(crate) const fn new(
        stream: Connection,
        name: String,
        conversation_limit: Duration,
    ) -> Self {
        Self {
            line: Line {
                stream,
                conversation_limit,
            },
            name,
            complete: false,
            has_failed: false,
        }
    }

    fn poll(&mut self) -> Result<()> {
        match self.line.receive::<Answer>() {
            None => return Ok(()),
            Some(Ok(Answer::Complete)) => {
                self.complete = true;
                return Ok(());
            }
            Some(Ok(Answer::Failed(cause))) => {
                self.has_failed = true;
                return Err(cause);
            }
            Some(Ok(Answer::Formed { .. }) | Err(_)) => {}
        }
        self.has_failed = true;
        Err(Error::from(NotFormed::CoordinatorEnded).blaming(0, &self.name))
    }
}

impl Bootstrap {
    /// Reads messages that have arrived. Fails with the first cause if a rank has failed or ended.
    pub(crate) fn poll(&mut self) -> Result<()> {
        match self {
            Self::Outside => Ok(()),
            Self::Member(coordinator) => coordinator.poll(),
            Self::Coordinator(joined) => joined.iter_mut().try_for_each(|(&rank, peer)| match peer
                .line
                .receive()
            {
                None => Ok(()),
                Some(Ok(Status::Ready)) => {
                    peer.ready = true;
                    Ok(())
                }
                Some(Ok(Status::Failed(cause))) => Err(cause),
                Some(Err(_)) => {
                    let ended = Error::from(NotFormed::MemberEnded);
                    Err(ended.blaming(rank, &peer.member.host))
                }
            }),
        }
    }

    /// Sends the roster to all members that have joined.
    pub(crate) fn announce(&mut self, group: GroupId, members: Vec<RosterMember>) {
        self.tell_joined(&Answer::Formed { group, members });
    }

    /// Reports to rank 0 that this rank is connected with all others.
    pub(crate) fn be_ready(&mut self) {
        if let Self::Member(coordinator) = self {
            // If rank 0 has ended, the next poll notices.
            let _ = coordinator.line.say(&Status::Ready);
        }
    }

    /// Returns `true` once all ranks are connected. Rank 0 informs the others of it.
    pub(crate) fn is_complete(&mut self) -> bool {
        match self {
            Self::Coordinator(joined) => {
                let complete = joined.values().all(|peer| peer.ready);
                if complete {
                    self.tell_joined(&Answer::Complete);
                }
                complete
            }
            Self::Member(coordinator) => coordinator.complete,
            Self::Outside => false,
        }
    }

    /// Error for a group that is not complete in time.
    pub(crate) fn late(&self) -> Error {
        let (rank, name) = match self {
            Self::Coordinator(joined) => joined
                .iter()
                .find(|(_, peer)| !peer.ready)
                .map_or((0, ""), |(&rank, peer)| (rank, &peer.member.host)),
            Self::Member(coordinator) => (0, coordinator.name.as_str()),
            Self::Outside => (0, ""),
        };
        Error::from(NotFormed::NotFinished).blaming(rank, name)
    }

    /// Makes the group fail for all ranks. Returns the first cause.
    pub(crate) fn fail(&mut self, error: Error) -> Error {
        if let Self::Member(coordinator) = self
            && !coordinator.has_failed
        {
            let status = Status::Failed(error.clone());
            // Rank 0 answers with the cause within milliseconds.
            let until = Instant::now() + coordinator.line.conversation_limit;
            if coordinator.line.say(&status).is_err() {
                return error;
            }
            while let Some(left) = until.checked_duration_since(Instant::now()) {
                if let Err(cause) = self.poll() {
                    return cause;
                }
                self.wait(left);
            }
            let Self::Member(coordinator) = self else {
                return error;
            };
            return Error::from(NotFormed::CoordinatorSilent).blaming(0, &coordinator.name);
        }
        self.tell_joined(&Answer::Failed(error.clone()));
        error
    }

    /// Sleeps until a message arrives, at most for `limit`.
    pub(crate) fn wait(&self, limit: Duration) {
        let streams: Vec<&Connection> = match self {
            Self::Coordinator(joined) => joined.values().map(|peer| &peer.line.stream).collect(),
            Self::Member(coordinator) => vec![&coordinator.line.stream],
            Self::Outside => return,
        };
        if streams.iter().any(|stream| stream.has_buffered()) {
            return;
        }
        poll::wait(streams.into_iter().map(poll::readable), limit);
    }

    fn tell_joined(&mut self, answer: &Answer) {
        if let Self::Coordinator(joined) = self {
            for peer in joined.values_mut() {
                // the next poll notices a rank that has ended, or the rank needs no answer.
                let _ = peer.line.say(answer);
            }
        }
    }
}

impl Line {
    fn say(&mut self, message: &impl Serialize) -> Result<()> {
        handshake::write_message(&mut self.attend(), message)
    }

    /// The next message, if there is one or the connection has ended.
    fn receive<T: DeserializeOwned>(&mut self) -> Option<Result<T>> {
        let speaks = self.stream.is_readable();
        speaks.then(|| handshake::read_message(&mut self.attend()))
    }

    fn attend(&mut self) -> DeadlineStream<'_> {
        DeadlineStream::new(&mut self.stream, Instant::now() + self.conversation_limit)
    }
}
