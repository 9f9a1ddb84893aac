//! Errors as facts: the failure, its collective, and the rank to blame.

use std::any::Any;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

mod advice;
mod facts;

pub use facts::{
    Abort, BadRules, BadSegment, Breach, Breakage, Broken, Damage, Disorder, Garbled, Late, Lost,
    MAPPED, Missing, NotAgreed, NotFormed, NotServed, NotTrusted, Obstacle, Shortage, Suspicion,
    Text, Unusable, listed_ranks, ranks,
};

/// Result of anything that can fail in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Bound in bytes on each text of an error that travels, and on the description of a call. A bucket
/// can have hundreds of names, and an exception can have pages of text.
const TEXT_BYTES_MAX: usize = 4096;

/// Bound on the ranks that a message lists for a part of the world.
const PART_RANKS_MAX: usize = 64;

/// Shortest duration that a message mentions; a shorter one would read as "0.0 s".
const WORTH_SAYING: Duration = Duration::from_millis(50);

/// A failure that every rank reports in the same words; it travels in abort messages.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Error {
    /// Kind of the failure, with its fact.
    pub kind: ErrorKind,
    /// The rank that caused it, and its host, if known.
    pub blamed: Option<Blamed>,
    /// The collective during which it happened, such as `all_reduce 'dense/kernel' float32[98]`.
    pub collective: Option<String>,
    /// Ordinal of that collective.
    pub sequence: Option<u64>,
    /// Time from the start of the operation to the failure.
    pub elapsed: Option<Duration>,
    /// The part of the world in which it happened, if the group is not all of the world.
    #[serde(skip)]
    pub part: Option<Arc<Subgroup>>,
}

/// A group that was made from some ranks of another.
#[derive(Debug, PartialEq, Eq)]
pub struct Subgroup {
    /// Name that the program gave it.
    pub name: String,
    /// Ranks in the group of all, by rank in this group.
    pub world_ranks: Vec<usize>,
}

impl fmt::Display for Subgroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown: Vec<_> = self.world_ranks.iter().take(PART_RANKS_MAX).collect();
        write!(f, "{}, whose ranks from 0 on are ranks ", self.name)?;
        for (place, rank) in shown.iter().enumerate() {
            write!(f, "{}{rank}", if place > 0 { ", " } else { "" })?;
        }
        let more = if shown.len() < self.world_ranks.len() {
            ", ..."
        } else {
            ""
        };
        write!(f, "{more} of the world")
    }
}

/// A rank and the host it runs on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blamed {
    /// Index of the process in the group.
    pub rank: usize,
    /// Host name, or the address while the name is unknown.
    pub host: String,
}

/// Kinds of failure with their facts. [`Self::exception`] names the exception class in Python.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, thiserror::Error)]
pub enum ErrorKind {
    /// A setting cannot be used.
    #[error(transparent)]
    Config(#[from] Unusable),
    /// The group could not be formed.
    #[error(transparent)]
    Rendezvous(#[from] NotFormed),
    /// A peer could not prove that it belongs to the job.
    #[error(transparent)]
    Authentication(#[from] NotTrusted),
    /// Ranks called different collectives at the same position.
    #[error("one rank called {theirs}; the others called {others}")]
    Mismatch {
        /// Call of the blamed rank.
        theirs: Text,
        /// Call of the other ranks.
        others: Text,
    },
    /// A rank is lost.
    #[error(transparent)]
    PeerLost(#[from] Lost),
    /// A rank is alive but did not take part in time.
    #[error(transparent)]
    CollectiveTimeout(#[from] Late),
    /// The communicator was aborted, or is closed.
    #[error(transparent)]
    Aborted(#[from] Abort),
    /// Bytes arrived that no correct peer sends, or the engine itself failed.
    #[error(transparent)]
    Protocol(#[from] Breach),
    /// Bytes changed on their way, and were not used.
    #[error(transparent)]
    Corrupted(#[from] Damage),
    /// Collectives were called where no order among them is possible.
    #[error(transparent)]
    Misuse(#[from] Disorder),
    /// The system refused memory, a thread or a descriptor.
    #[error(transparent)]
    Exhausted(#[from] Shortage),
    /// The job continues without this process, or not at all.
    #[error(transparent)]
    Membership(#[from] NotAgreed),
    /// Parameter servers do not serve a worker.
    #[error(transparent)]
    Parameters(#[from] NotServed),
}

/// Every fact converts into an error of its kind.
impl<Fact: Into<ErrorKind>> From<Fact> for Error {
    fn from(fact: Fact) -> Self {
        Self::new(fact.into())
    }
}

impl Error {
    /// An error of this kind without further details.
    #[must_use]
    pub const fn new(kind: ErrorKind) -> Self {
        Self {
            kind,
            blamed: None,
            collective: None,
            sequence: None,
            elapsed: None,
            part: None,
        }
    }

    /// An abort by the program, or by a person.
    #[must_use]
    pub fn aborted(reason: &str) -> Self {
        let reason = reason.into();
        Abort::ByProgram { reason }.into()
    }

    /// A lack of memory for `bytes` bytes of `what`.
    #[must_use]
    pub fn no_memory(bytes: usize, what: &str) -> Self {
        let what = what.into();
        Shortage::NoMemory { bytes, what }.into()
    }

    /// A failure of the system to start a thread.
    #[must_use]
    pub fn no_thread(error: &io::Error) -> Self {
        let error = Text::of(error);
        Shortage::NoThread { error }.into()
    }

    /// A failure of the system to make an eventfd.
    #[must_use]
    pub fn no_wake_up(error: &io::Error) -> Self {
        Self::out_of_resources(error, "cannot wait for connections").unwrap_or_else(|| {
            let error = Text::of(error);
            Shortage::NoWakeUp { error }.into()
        })
    }

    /// The shortage that `error` reports, if it reports one; `what` describes the operation that
    /// failed.
    #[must_use]
    pub fn out_of_resources(error: &io::Error, what: &str) -> Option<Self> {
        let code = error.raw_os_error()?;
        let (what, error) = (what.into(), Text::of(error));
        Some(match code {
            libc::EMFILE => Shortage::NoFile { what, error }.into(),
            libc::ENFILE => Shortage::NoFileOfHost { what, error }.into(),
            libc::ENOMEM | libc::ENOBUFS => Shortage::NoBuffers { what, error }.into(),
            _ => return None,
        })
    }

    /// A panic in a part of this program.
    #[must_use]
    pub fn panicked(part: &str, panic: &str) -> Self {
        let (part, panic) = (part.into(), panic.into());
        Breach::Panicked { part, panic }.into()
    }

    /// The same error, blaming `rank` on `host`.
    #[must_use]
    pub fn blaming(mut self, rank: usize, host: impl Into<String>) -> Self {
        self.blamed = Some(Blamed {
            rank,
            host: host.into(),
        });
        self
    }

    /// The same error, placed in a collective.
    #[must_use]
    pub fn during(mut self, collective: impl Into<String>, sequence: u64) -> Self {
        self.collective = Some(collective.into());
        self.sequence = Some(sequence);
        self
    }

    /// The same error, with the time the operation had taken.
    #[must_use]
    pub const fn after(mut self, elapsed: Duration) -> Self {
        self.elapsed = Some(elapsed);
        self
    }

    /// The same error, of a group that is this part of the world.
    #[must_use]
    pub fn within(mut self, part: Option<&Arc<Subgroup>>) -> Self {
        self.part = part.cloned();
        self
    }

    /// Rank of the blamed process in the group of all ranks.
    #[must_use]
    pub fn blamed_of_world(&self) -> Option<usize> {
        let rank = self.blamed.as_ref()?.rank;
        let part = self.part.as_ref();
        part.map_or(Some(rank), |part| part.world_ranks.get(rank).copied())
    }

    /// The failure as text, without advice.
    #[must_use]
    pub fn happened(&self) -> impl fmt::Display + '_ {
        Happened(self)
    }

    /// The same error with its other texts shortened and cleaned like [`Text`], because they may
    /// come from an untrusted peer.
    #[must_use]
    pub(crate) fn fit_to_travel(mut self) -> Self {
        let host = self.blamed.as_mut().map(|blamed| &mut blamed.host);
        for text in [host, self.collective.as_mut()].into_iter().flatten() {
            *text = shortened(text);
        }
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Happened(self).fmt(f)?;
        match self.advice() {
            "" => Ok(()),
            advice => write!(f, "; {advice}"),
        }
    }
}

/// The part of a message before the advice.
struct Happened<'a>(&'a Error);

impl fmt::Display for Happened<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(error) = self;
        if let (Some(collective), Some(sequence)) = (&error.collective, error.sequence) {
            write!(f, "{collective} (collective #{sequence}): ")?;
        }
        match (&error.kind, &error.blamed) {
            (ErrorKind::Mismatch { theirs, others }, Some(Blamed { rank, host })) => {
                write!(
                    f,
                    "rank {rank} on {host} called {theirs}; the others called {others}"
                )?;
            }
            // Either end may have changed the bytes, or the network between them.
            (ErrorKind::Corrupted(_), _)
            // The sentence names the ranks itself.
            | (ErrorKind::Rendezvous(NotFormed::MissingRanks { .. }), _) => {
                write!(f, "{}", error.kind)?;
            }
            (kind, blamed) => {
                if let Some(Blamed { rank, host }) = blamed {
                    write!(f, "rank {rank} on {host}: ")?;
                }
                write!(f, "{kind}")?;
            }
        }
        if let Some(elapsed) = error.elapsed.filter(|&elapsed| elapsed >= WORTH_SAYING) {
            write!(f, " (after {:.1} s)", elapsed.as_secs_f64())?;
        }
        if let Some(part) = &error.part {
            write!(f, " (in {part})")?;
        }
        Ok(())
    }
}

impl ErrorKind {
    /// Name of the exception class in `gradring.errors` for this kind.
    #[must_use]
    pub const fn exception(&self) -> &'static str {
        match self {
            Self::Config(_) => "ConfigError",
            Self::Rendezvous(_) => "RendezvousError",
            Self::Authentication(_) => "AuthenticationError",
            Self::Mismatch { .. } => "MismatchError",
            Self::PeerLost(_) => "PeerLostError",
            Self::CollectiveTimeout(_) => "CollectiveTimeoutError",
            Self::Aborted(_) => "AbortedError",
            Self::Protocol(_) | Self::Corrupted(_) => "ProtocolError",
            Self::Misuse(_) => "GradringError",
            Self::Exhausted(_) => "ConfigError",
            Self::Membership(_) => "RendezvousError",
            Self::Parameters(fact) => fact.exception(),
        }
    }
}

/// Exceptions after which an elastic job may continue with another group.
pub const SURVIVABLE: [&str; 4] = [
    "AbortedError",
    "CollectiveTimeoutError",
    "PeerLostError",
    "ProtocolError",
];

impl std::error::Error for Error {}

/// The beginning and the end of a text, of at most `TEXT_BYTES_MAX` bytes together, with control
/// characters replaced, except for line breaks. The end matters because the last of many shapes may
/// be the one that differs.
pub fn shortened(text: &str) -> String {
    const GAP: &str = " ... ";
    let printable = |c: char| if c.is_control() && c != '\n' { '?' } else { c };
    if text.len() <= TEXT_BYTES_MAX {
        return text.chars().map(printable).collect();
    }
    let half = (TEXT_BYTES_MAX - GAP.len()) / 2;
    let end = (0..=half).rev().find(|&end| text.is_char_boundary(end));
    let start = (text.len() - half..).find(|&start| text.is_char_boundary(start));
    let (head, tail) = (
        &text[..end.unwrap_or_default()],
        &text[start.unwrap_or(text.len())..],
    );
    let parts = head.chars().chain(GAP.chars()).chain(tail.chars());
    parts.map(printable).collect()
}

/// Message of a panic.
#[must_use]
pub fn message_of(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_that_travel_are_short_and_harmless() {
        let error = Error::aborted(&"\u{1b}[2Jx".repeat(10_000)).blaming(1, "h\u{7}");
        let error = error.fit_to_travel();
        let ErrorKind::Aborted(Abort::ByProgram { reason }) = &error.kind else {
            panic!("the kind stays");
        };
        assert!(reason.len() <= TEXT_BYTES_MAX && reason.starts_with("?[2Jx?[2J"));
        assert_eq!(error.blamed.unwrap().host, "h?");
        assert_eq!(shortened("two\nlines \u{e9}"), "two\nlines \u{e9}");
        let cut = shortened(&"\u{e9}".repeat(100_000));
        assert!(cut.len() <= TEXT_BYTES_MAX && cut.contains("\u{e9} ... \u{e9}"));
        assert_eq!(shortened(&cut), cut);
        let shapes = format!("{}[7]", "[3,3,512,512] ".repeat(500));
        assert!(shortened(&shapes).ends_with("[3,3,512,512] [7]"));
    }

    #[test]
    fn a_message_names_collective_rank_host_time_and_advice() {
        let broken = Broken::closed();
        let error = Error::from(Lost::LinkEnded { broken })
            .blaming(2, "node-b")
            .during("all_reduce 'w' float32[4]", 7)
            .after(Duration::from_millis(1500));
        assert_eq!(
            error.to_string(),
            "all_reduce 'w' float32[4] (collective #7): rank 2 on node-b: the connection to it was closed by \
             the other side (after 1.5 s); look at that rank's own output for the cause, and restart the job"
        );
        let at_once = error.after(Duration::ZERO).to_string();
        assert!(at_once.contains("the other side; look"), "{at_once}");
    }

    #[test]
    fn an_error_of_a_part_says_who_its_ranks_are_in_the_world() {
        let part = Arc::new(Subgroup {
            name: "group 'odd'".into(),
            world_ranks: (0..100).map(|rank| 2 * rank + 1).collect(),
        });
        let error = Error::from(Lost::Left).blaming(1, "node-b");
        assert_eq!(error.blamed_of_world(), Some(1));
        let error = error.within(Some(&part));
        assert_eq!(error.blamed_of_world(), Some(3));
        let text = error.to_string();
        assert!(text.starts_with("rank 1 on node-b: "), "{text}");
        let whose = " (in group 'odd', whose ranks from 0 on are ranks 1, 3, 5, ";
        assert!(text.contains(whose), "{text}");
        assert!(text.contains(", 127, ... of the world); "), "{text}");
    }

    #[test]
    fn what_the_system_is_out_of_is_named_with_the_limit_to_raise() {
        let limits = [
            (libc::EMFILE, "(ulimit -n)"),
            (libc::ENFILE, "(sysctl fs.file-max)"),
            (libc::ENOMEM, "(ulimit -v, or the limit of its container)"),
            (libc::ENOBUFS, "(ulimit -v, or the limit of its container)"),
        ];
        for (code, limit) in limits {
            let refused = io::Error::from_raw_os_error(code);
            let error = Error::out_of_resources(&refused, "cannot listen").unwrap();
            let text = error.to_string();
            assert!(text.starts_with("cannot listen: "), "{text}");
            assert!(text.contains(limit), "{text}");
            assert_eq!(error.kind.exception(), "ConfigError");
            assert_eq!(Error::no_wake_up(&refused).kind.exception(), "ConfigError");
        }
        let others = io::Error::from_raw_os_error(libc::EACCES);
        assert!(Error::out_of_resources(&others, "cannot listen").is_none());
        let text = Error::no_wake_up(&others).to_string();
        assert!(
            text.ends_with("seccomp profile of the container or sandbox"),
            "{text}"
        );
        let unknown = io::Error::other("no number");
        assert!(Error::out_of_resources(&unknown, "cannot listen").is_none());
    }
}
