//! Timing of the failure monitor: heartbeats, silence, and the steps of a diagnosis.

use std::time::Duration;

/// The times by which a rank finds out what goes wrong in its group; equal on all ranks.
///
/// They are what the protocol needs on machines and networks as they are, so they are no settings.
/// Tests and simulations hand in others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// How often a rank tells its neighbours that it is alive.
    pub heartbeat: Duration,
    /// A neighbour that is silent for so long is lost.
    pub silence: Duration,
    /// A broken data connection alone blames its peer only after this time: if the peer itself left
    /// because of another rank, its abort arrives first.
    pub link_grace: Duration,
    /// A rank that has not entered the collective in question waits so long before it says so.
    pub report_grace: Duration,
    /// A diagnosis ends after this time, whether or not all ranks have reported.
    pub diagnosis: Duration,
}

impl Timing {
    /// Those of every group that is told nothing else.
    pub const USUAL: Self = Self {
        heartbeat: Duration::from_secs(1),
        silence: Duration::from_secs(10),
        link_grace: Duration::from_millis(500),
        report_grace: Duration::from_millis(500),
        diagnosis: Duration::from_secs(2),
    };

    /// The usual ones, but for the silence after which a neighbour is lost, in which there are as
    /// many heartbeats as usual.
    #[must_use]
    pub fn with_silence(silence: Duration) -> Self {
        Self {
            heartbeat: silence / 10,
            silence,
            ..Self::USUAL
        }
    }
}
