//! What happened, for statistics and for error messages.

pub mod activity;
pub mod flight_recorder;
pub mod stats;
