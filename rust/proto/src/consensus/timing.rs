//! Times of the consensus: how long it waits for what.

use std::time::Duration;

/// All of its times.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timing {
    /// A request without an answer has failed; its sender's network sees to that.
    pub request: Duration,
    /// Between the answer to a request, or its failure, and the next one to the same process.
    pub again: Duration,
    /// Each member waits so much longer than the one before it in the ring before it proposes.
    pub stagger: Duration,
    /// A proposer of which nothing is heard for so long is replaced.
    pub quiet: Duration,
    /// A member that gives no answer for so long may be left out by a quorum.
    pub grace: Duration,
    /// A member that answers but does not come back from its step for so long, likewise.
    pub busy: Duration,
    /// A joiner that gives no answer for so long is not taken in.
    pub joiner: Duration,
    /// Processes that cannot be a quorum for so long give up.
    pub minority: Duration,
    /// So long a quorum waits for joiners, if there are too few workers.
    pub workers: Duration,
    /// A joiner that no member answers for so long gives up.
    pub join: Duration,
    /// A joiner reminds the members of itself in this interval.
    pub remind: Duration,
    /// Members of a roster connect for at most so long; the owner of the member sees to that.
    pub connect: Duration,
    /// Two processes that could not connect are not in one group for so long, if a quorum allows it;
    /// twice as long each time that they fail again.
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
