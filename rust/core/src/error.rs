//! Errors as facts: what happened, in which collective, and who is to blame.

use std::any::Any;
use std::fmt;
use std::io;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Result of anything that can fail in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Bound on each text of an error that travels, and on the description of a call: a bucket can have
/// hundreds of names, and an exception pages of text.
const TEXT_BYTES_MAX: usize = 4096;

/// A message says how long the operation took if it took that long: less would read as "0.0 s".
const WORTH_SAYING: Duration = Duration::from_millis(50);

/// A failure that every rank can report in the same words: it travels in abort frames.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Error {
    /// What happened.
    pub kind: ErrorKind,
    /// The rank that caused it, and its host, where one is known.
    pub blamed: Option<Blamed>,
    /// The collective during which it happened, such as `all_reduce 'dense/kernel' float32[98]`.
    pub collective: Option<String>,
    /// Ordinal of that collective.
    pub sequence: Option<u64>,
    /// How long the operation had been under way.
    pub elapsed: Option<Duration>,
}

/// A rank and the host it runs on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blamed {
    /// Index of the process in the group.
    pub rank: usize,
    /// Host name, or the address where the name is not known yet.
    pub host: String,
}

/// The kinds of failure; each is one exception class in Python.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ErrorKind {
    /// A setting cannot be used.
    Config {
        /// The sentence for the user.
        problem: String,
    },
    /// The group could not be formed.
    Rendezvous {
        /// The sentence for the user.
        problem: String,
    },
    /// A peer could not prove that it knows the job's token.
    Authentication {
        /// The sentence for the user.
        problem: String,
    },
    /// Ranks called different collectives at the same position.
    Mismatch {
        /// What the blamed rank called.
        theirs: String,
        /// What the other ranks called.
        others: String,
    },
    /// A rank has gone.
    PeerLost {
        /// How that was noticed.
        problem: String,
    },
    /// A rank is alive but did not take part in time.
    CollectiveTimeout {
        /// What was waited for.
        problem: String,
    },
    /// Somebody aborted the communicator, or it is closed.
    Aborted {
        /// The reason given.
        reason: String,
    },
    /// Bytes arrived that no correct peer sends, or the engine itself failed.
    Protocol {
        /// The sentence for the user.
        problem: String,
    },
    /// Bytes arrived other than they were sent, and were not used.
    Corrupted {
        /// Between whom, and what was seen.
        problem: String,
    },
    /// Collectives were called where no order among them is possible.
    Misuse {
        /// What was called where.
        problem: String,
    },
    /// The system refused memory, a thread or a descriptor.
    Exhausted {
        /// What there was no room for, and which limit to raise.
        problem: String,
    },
}

impl Error {
    /// An error of this kind with nothing else known.
    #[must_use]
    pub const fn new(kind: ErrorKind) -> Self {
        Self {
            kind,
            blamed: None,
            collective: None,
            sequence: None,
            elapsed: None,
        }
    }

    /// A setting cannot be used.
    #[must_use]
    pub fn config(problem: impl Into<String>) -> Self {
        Self::new(ErrorKind::Config {
            problem: problem.into(),
        })
    }

    /// The group could not be formed.
    #[must_use]
    pub fn rendezvous(problem: impl Into<String>) -> Self {
        Self::new(ErrorKind::Rendezvous {
            problem: problem.into(),
        })
    }

    /// A proof was wrong or missing.
    #[must_use]
    pub fn authentication(problem: impl Into<String>) -> Self {
        Self::new(ErrorKind::Authentication {
            problem: problem.into(),
        })
    }

    /// A rank has gone.
    #[must_use]
    pub fn peer_lost(problem: impl Into<String>) -> Self {
        Self::new(ErrorKind::PeerLost {
            problem: problem.into(),
        })
    }

    /// A rank did not take part in time.
    #[must_use]
    pub fn timeout(problem: impl Into<String>) -> Self {
        Self::new(ErrorKind::CollectiveTimeout {
            problem: problem.into(),
        })
    }

    /// Somebody aborted the communicator.
    #[must_use]
    pub fn aborted(reason: impl Into<String>) -> Self {
        Self::new(ErrorKind::Aborted {
            reason: reason.into(),
        })
    }

    /// A peer broke the protocol.
    #[must_use]
    pub fn protocol(problem: impl Into<String>) -> Self {
        Self::new(ErrorKind::Protocol {
            problem: problem.into(),
        })
    }

    /// Bytes arrived other than they were sent.
    #[must_use]
    pub fn corrupted(problem: impl Into<String>) -> Self {
        Self::new(ErrorKind::Corrupted {
            problem: problem.into(),
        })
    }

    /// Collectives were called where no order among them is possible.
    #[must_use]
    pub fn misuse(problem: impl Into<String>) -> Self {
        Self::new(ErrorKind::Misuse {
            problem: problem.into(),
        })
    }

    /// There is no memory for so many bytes.
    #[must_use]
    pub(crate) fn no_memory(bytes: usize, what: &str) -> Self {
        let problem = format!(
            "has no memory for {bytes} bytes of {what}: reduce smaller buckets, or give its process \
             more (ulimit -v, or the limit of its container)"
        );
        Self::new(ErrorKind::Exhausted { problem })
    }

    /// The system has no room for a thread.
    #[must_use]
    pub(crate) fn no_thread(error: &io::Error) -> Self {
        let problem = format!(
            "cannot start a thread ({error}): raise the number of its user's processes (ulimit -u), or \
             the limit of its container on processes or memory"
        );
        Self::new(ErrorKind::Exhausted { problem })
    }

    /// What `error` means if it says that the system is out of something that `what` needs.
    #[must_use]
    pub(crate) fn out_of_resources(error: &io::Error, what: &str) -> Option<Self> {
        let limit = match error.raw_os_error()? {
            libc::EMFILE => "raise the number of files that its process may have open (ulimit -n)",
            libc::ENFILE => {
                "raise the number of files that its host may have open (sysctl fs.file-max)"
            }
            libc::ENOMEM | libc::ENOBUFS => {
                "give its process more memory (ulimit -v, or the limit of its container)"
            }
            _ => return None,
        };
        let problem = format!("{what}: {error}: {limit}");
        Some(Self::new(ErrorKind::Exhausted { problem }))
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

    /// The same error with every text cut to a length that fits into a message, and without
    /// characters that would garble a terminal or a log: it may come from anybody.
    #[must_use]
    pub(crate) fn fit_to_travel(mut self) -> Self {
        let texts = match &mut self.kind {
            ErrorKind::Config { problem }
            | ErrorKind::Rendezvous { problem }
            | ErrorKind::Authentication { problem }
            | ErrorKind::PeerLost { problem }
            | ErrorKind::CollectiveTimeout { problem }
            | ErrorKind::Protocol { problem }
            | ErrorKind::Corrupted { problem }
            | ErrorKind::Misuse { problem }
            | ErrorKind::Exhausted { problem } => [Some(problem), None],
            ErrorKind::Aborted { reason } => [Some(reason), None],
            ErrorKind::Mismatch { theirs, others } => [Some(theirs), Some(others)],
        };
        let host = self.blamed.as_mut().map(|blamed| &mut blamed.host);
        let facts = [host, self.collective.as_mut()];
        for text in texts.into_iter().chain(facts).flatten() {
            *text = shortened(text);
        }
        self
    }

    fn advice(&self) -> &'static str {
        match self.kind {
            ErrorKind::Config { .. } => "correct the setting and start again",
            ErrorKind::Rendezvous { .. } => {
                "check that every rank was started with the same world size and rendezvous address, \
                 and that no firewall is between them"
            }
            ErrorKind::Authentication { .. } => {
                "give every rank the same GRADRING_TOKEN or GRADRING_TOKEN_FILE, and with TLS a \
                 certificate for its own name or address from a common authority"
            }
            ErrorKind::Mismatch { .. } => {
                "make every rank call the same collectives, with the same shapes, in the same order"
            }
            ErrorKind::PeerLost { .. } => {
                "look at that rank's own output for the cause, and restart the job"
            }
            // Nobody is to blame for a wait that its caller made short.
            ErrorKind::CollectiveTimeout { .. } if self.blamed.is_none() => {
                "it goes on: wait again, or ask gradring doctor for whom it waits"
            }
            ErrorKind::CollectiveTimeout { .. } => {
                "look at what that rank is doing; if it is only slow, raise stall_timeout (GRADRING_STALL_TIMEOUT_S)"
            }
            ErrorKind::Aborted { .. } => "make a new communicator to go on",
            ErrorKind::Protocol { .. } => {
                "check that all ranks run the same version of gradring and that nothing else uses its ports"
            }
            ErrorKind::Corrupted { .. } => {
                "no rank used those bytes: restart the job; if it happens again, look at the memory, \
                 network cards and cables of these hosts"
            }
            ErrorKind::Misuse { .. } => {
                "call the collectives of a communicator from one thread, or give each thread a \
                 communicator of its own; in a signal handler, set a flag or call close()"
            }
            ErrorKind::Exhausted { .. } => "raise that limit and start again",
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let (Some(collective), Some(sequence)) = (&self.collective, self.sequence) {
            write!(f, "{collective} (collective #{sequence}): ")?;
        }
        match (&self.kind, &self.blamed) {
            (ErrorKind::Mismatch { theirs, others }, Some(Blamed { rank, host })) => {
                write!(
                    f,
                    "rank {rank} on {host} called {theirs}; the others called {others}"
                )?;
            }
            (ErrorKind::Mismatch { theirs, others }, None) => {
                write!(f, "one rank called {theirs}; the others called {others}")?;
            }
            // Either end may have done it, or what is between them.
            (ErrorKind::Corrupted { problem }, _) => f.write_str(problem)?,
            (kind, blamed) => {
                if let Some(Blamed { rank, host }) = blamed {
                    write!(f, "rank {rank} on {host}: ")?;
                }
                f.write_str(kind.problem())?;
            }
        }
        if let Some(elapsed) = self.elapsed.filter(|&elapsed| elapsed >= WORTH_SAYING) {
            write!(f, " (after {:.1} s)", elapsed.as_secs_f64())?;
        }
        write!(f, "; {}", self.advice())
    }
}

impl ErrorKind {
    /// Name of the exception class in `gradring.errors` that stands for this kind.
    #[must_use]
    pub const fn exception(&self) -> &'static str {
        match self {
            Self::Config { .. } => "ConfigError",
            Self::Rendezvous { .. } => "RendezvousError",
            Self::Authentication { .. } => "AuthenticationError",
            Self::Mismatch { .. } => "MismatchError",
            Self::PeerLost { .. } => "PeerLostError",
            Self::CollectiveTimeout { .. } => "CollectiveTimeoutError",
            Self::Aborted { .. } => "AbortedError",
            Self::Protocol { .. } | Self::Corrupted { .. } => "ProtocolError",
            Self::Misuse { .. } => "GradringError",
            Self::Exhausted { .. } => "ConfigError",
        }
    }

    fn problem(&self) -> &str {
        match self {
            Self::Config { problem }
            | Self::Rendezvous { problem }
            | Self::Authentication { problem }
            | Self::PeerLost { problem }
            | Self::CollectiveTimeout { problem }
            | Self::Protocol { problem }
            | Self::Corrupted { problem }
            | Self::Misuse { problem }
            | Self::Exhausted { problem } => problem,
            Self::Aborted { reason } => reason,
            Self::Mismatch { theirs, .. } => theirs,
        }
    }
}

impl std::error::Error for Error {}

/// The first `TEXT_BYTES_MAX` bytes of a text, on one line as far as it was on one.
pub(crate) fn shortened(text: &str) -> String {
    let end = (0..=text.len().min(TEXT_BYTES_MAX))
        .rev()
        .find(|&end| text.is_char_boundary(end))
        .unwrap_or(0);
    let printable = |c: char| if c.is_control() && c != '\n' { '?' } else { c };
    let mut short: String = text[..end].chars().map(printable).collect();
    if end < text.len() {
        short.push_str(" ...");
    }
    short
}

/// What a panic said.
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
        let error = Error::aborted("\u{1b}[2Jx".repeat(10_000)).blaming(1, "h\u{7}");
        let error = error.fit_to_travel();
        let ErrorKind::Aborted { reason } = &error.kind else {
            panic!("the kind stays");
        };
        assert!(reason.len() <= TEXT_BYTES_MAX + 4 && reason.starts_with("?[2Jx?[2J"));
        assert_eq!(error.blamed.unwrap().host, "h?");
        assert_eq!(shortened("two\nlines \u{e9}"), "two\nlines \u{e9}");
        let cut = shortened(&"\u{e9}".repeat(100_000));
        assert!(cut.len() <= TEXT_BYTES_MAX + 4 && cut.ends_with("\u{e9} ..."));
    }

    #[test]
    fn a_message_names_collective_rank_host_time_and_advice() {
        let error = Error::peer_lost("the connection was closed")
            .blaming(2, "node-b")
            .during("all_reduce 'w' float32[4]", 7)
            .after(Duration::from_millis(1500));
        assert_eq!(
            error.to_string(),
            "all_reduce 'w' float32[4] (collective #7): rank 2 on node-b: the connection was closed \
             (after 1.5 s); look at that rank's own output for the cause, and restart the job"
        );
        let at_once = error.after(Duration::ZERO).to_string();
        assert!(at_once.contains("was closed; look"), "{at_once}");
    }
}
