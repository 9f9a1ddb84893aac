//! What happened, for statistics, timelines and error messages.

pub mod board;
pub mod clock;
pub mod exposure;
pub mod flight_recorder;
pub mod journal;
pub mod record;
pub mod signals;
pub mod stats;
