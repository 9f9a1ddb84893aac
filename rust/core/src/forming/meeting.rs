//! Rank 0 and all others, connected while the group forms.
//!
//! Whoever fails, or ends, before the group is complete makes it fail for all: rank 0 hears of it
//! over the connection on which that rank joined, and tells everybody the same first cause.
//! Nobody leaves before that, so nobody is blamed for leaving on account of another.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::error::{Error, NotFormed, Result};
use crate::link::poll;
use crate::link::tcp::connection::Connection;
use crate::link::tcp::patient::Patient;
use crate::wire::handshake::{self, GroupId, Member};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// What rank 0 tells those who joined.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// All have joined, as this group; connect with them.
    Formed {
        group: GroupId,
        members: Vec<Member>,
    },
    /// All are connected.
    Complete,
    /// The group does not form.
    Failed(Error),
}

/// What those who joined tell rank 0.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Status {
    /// This rank is connected with all.
    Ready,
    /// This rank cannot go on.
    Failed(Error),
}

/// One rank's side of the meeting.
pub(crate) enum Meeting {
    /// Rank 0's, with everybody who has joined, by rank.
    Host(BTreeMap<usize, Guest>),
    /// Another rank's.
    Guest(Host),
    /// That of a rank that has not joined yet.
    Outside,
}

/// A rank that has joined, as rank 0 sees it.
pub(crate) struct Guest {
    pub member: Member,
    line: Line,
    ready: bool,
}

/// A connection with rank 0.
struct Line {
    stream: Connection,
    /// How long one message may take.
    conversation_limit: Duration,
}

/// Rank 0, as another rank sees it.
pub(crate) struct Host {
    line: Line,
    name: String,
    complete: bool,
    /// Whether what made this rank fail was rank 0's word.
    told: bool,
}

impl Guest {
    pub(crate) const fn new(
        member: Member,
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

impl Host {
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
            told: false,
        }
    }

    fn look(&mut self) -> Result<()> {
        match self.line.hear::<Answer>() {
            None => return Ok(()),
            Some(Ok(Answer::Complete)) => {
                self.complete = true;
                return Ok(());
            }
            Some(Ok(Answer::Failed(cause))) => {
                self.told = true;
                return Err(cause);
            }
            Some(Ok(Answer::Formed { .. }) | Err(_)) => {}
        }
        self.told = true;
        Err(Error::from(NotFormed::HostEnded).blaming(0, &self.name))
    }
}

impl Meeting {
    /// Takes in what has been said; fails with the first cause if somebody has failed or ended.
    pub(crate) fn look(&mut self) -> Result<()> {
        match self {
            Self::Outside => Ok(()),
            Self::Guest(host) => host.look(),
            Self::Host(guests) => {
                guests
                    .iter_mut()
                    .try_for_each(|(&rank, guest)| match guest.line.hear() {
                        None => Ok(()),
                        Some(Ok(Status::Ready)) => {
                            guest.ready = true;
                            Ok(())
                        }
                        Some(Ok(Status::Failed(cause))) => Err(cause),
                        Some(Err(_)) => {
                            let ended = Error::from(NotFormed::GuestEnded);
                            Err(ended.blaming(rank, &guest.member.host))
                        }
                    })
            }
        }
    }

    /// Sends everybody who has joined the roster.
    pub(crate) fn announce(&mut self, group: GroupId, members: Vec<Member>) {
        self.tell_guests(&Answer::Formed { group, members });
    }

    /// Says that this rank is connected with all.
    pub(crate) fn be_ready(&mut self) {
        if let Self::Guest(host) = self {
            // If rank 0 has gone, the next look tells.
            let _ = host.line.say(&Status::Ready);
        }
    }

    /// Whether all ranks are connected, of which rank 0 informs the others.
    pub(crate) fn is_complete(&mut self) -> bool {
        match self {
            Self::Host(guests) => {
                let complete = guests.values().all(|guest| guest.ready);
                if complete {
                    self.tell_guests(&Answer::Complete);
                }
                complete
            }
            Self::Guest(host) => host.complete,
            Self::Outside => false,
        }
    }

    /// The error for a group whose time is over before it is complete.
    pub(crate) fn late(&self) -> Error {
        let (rank, name) = match self {
            Self::Host(guests) => guests
                .iter()
                .find(|(_, guest)| !guest.ready)
                .map_or((0, ""), |(&rank, guest)| (rank, &guest.member.host)),
            Self::Guest(host) => (0, host.name.as_str()),
            Self::Outside => (0, ""),
        };
        Error::from(NotFormed::NotFinished).blaming(rank, name)
    }

    /// Makes the group fail for all; returns the first cause.
    pub(crate) fn fail(&mut self, error: Error) -> Error {
        if let Self::Guest(host) = self
            && !host.told
        {
            let status = Status::Failed(error.clone());
            // Rank 0's word on the cause takes it milliseconds.
            let until = Instant::now() + host.line.conversation_limit;
            if host.line.say(&status).is_err() {
                return error;
            }
            while let Some(left) = until.checked_duration_since(Instant::now()) {
                if let Err(cause) = self.look() {
                    return cause;
                }
                self.wait(left);
            }
            let Self::Guest(host) = self else {
                return error;
            };
            return Error::from(NotFormed::HostSilent).blaming(0, &host.name);
        }
        self.tell_guests(&Answer::Failed(error.clone()));
        error
    }

    /// Sleeps until somebody says something, at most for `limit`.
    pub(crate) fn wait(&self, limit: Duration) {
        let streams: Vec<&Connection> = match self {
            Self::Host(guests) => guests.values().map(|guest| &guest.line.stream).collect(),
            Self::Guest(host) => vec![&host.line.stream],
            Self::Outside => return,
        };
        if streams.iter().any(|stream| stream.has_buffered()) {
            return;
        }
        poll::wait(streams.into_iter().map(poll::readable), limit);
    }

    fn tell_guests(&mut self, answer: &Answer) {
        if let Self::Host(guests) = self {
            for guest in guests.values_mut() {
                // A rank that has gone meanwhile is noticed by the next look, or needs no answer.
                let _ = guest.line.say(answer);
            }
        }
    }
}

impl Line {
    fn say(&mut self, message: &impl Serialize) -> Result<()> {
        handshake::write_message(&mut self.attend(), message)
    }

    /// The next message, if there is one or the connection has ended.
    fn hear<T: DeserializeOwned>(&mut self) -> Option<Result<T>> {
        let speaks = self.stream.is_readable();
        speaks.then(|| handshake::read_message(&mut self.attend()))
    }

    fn attend(&mut self) -> Patient<'_> {
        Patient::new(&mut self.stream, Instant::now() + self.conversation_limit)
    }
}
