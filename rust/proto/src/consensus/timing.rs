//! Waiting times of the consensus.

use std::time::Duration;

/// All waiting times.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timing {
    /// Time limit of a request; the sender's network enforces it.
    pub request: Duration,
    /// Pause between the outcome of a request and the next request to the same process.
    pub again: Duration,
    /// Delay of a proposal per position in the ring, so that members propose one after the other.
    pub stagger: Duration,
    /// Silence after which a proposer is replaced.
    pub quiet: Duration,
    /// Silence after which a quorum may leave a member out.
    pub grace: Duration,
    /// Time after which a quorum may leave out a member that answers but does not return from its
    /// step.
    pub busy: Duration,
    /// Silence after which a joiner is not taken in.
    pub joiner: Duration,
    /// Time after which processes that cannot be a quorum give up.
    pub minority: Duration,
    /// Time for which a quorum waits for joiners if there are too few workers.
    pub workers: Duration,
    /// Time without a reply of any member after which a joiner gives up.
    pub join: Duration,
    /// Interval in which a joiner repeats its request.
    pub remind: Duration,
    /// Time limit for connecting a roster; the owner of the member enforces it.
    pub connect: Duration,
    /// Time for which two processes that could not connect are in different groups, if a quorum
    /// allows it. It doubles with each further failure.
    pub quarantine: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            request: Duration::from_secs(2),
            again: Duration::from_millis(200),
            stagger: Duration::from_millis(300),
            quiet: Duration::from_secs(3),
            grace: Duration::from_secs(10),
            busy: Duration::from_secs(1800),
            joiner: Duration::from_secs(1),
            minority: Duration::from_secs(60),
            workers: Duration::from_secs(600),
            join: Duration::from_secs(60),
            remind: Duration::from_secs(1),
            connect: Duration::from_secs(20),
            quarantine: Duration::from_secs(4),
        }
    }
}
