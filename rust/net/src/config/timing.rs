//! Timing of the failure monitor: heartbeats, silence, and the steps of a diagnosis.

use std::time::Duration;

/// Time limits of failure detection in a group; equal on all ranks.
///
/// They follow from the protocol and from the speed of machines and networks, so they are no
/// settings. Tests and simulations use other values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// Interval between two heartbeats of a rank to its neighbours.
    pub heartbeat: Duration,
    /// Time without any message after which a neighbour counts as lost.
    pub silence: Duration,
    /// A broken data connection alone blames its peer only after this time: if the peer itself left
    /// because of another rank, its abort arrives first.
    pub link_grace: Duration,
    /// Time that a rank waits before it reports that it has not entered the collective in question.
    pub report_grace: Duration,
    /// A diagnosis ends after this time, whether or not all ranks have reported.
    pub diagnosis: Duration,
}

impl Timing {
    /// Default for all groups.
    pub const USUAL: Self = Self {
        heartbeat: Duration::from_secs(1),
        silence: Duration::from_secs(10),
        link_grace: Duration::from_millis(500),
        report_grace: Duration::from_millis(500),
        diagnosis: Duration::from_secs(2),
    };

    /// Returns the usual time limits with another `silence`. The heartbeat interval changes in
    /// proportion.
    #[must_use]
    pub fn with_silence(silence: Duration) -> Self {
        Self {
            heartbeat: silence / 10,
            silence,
            ..Self::USUAL
        }
    }
}
