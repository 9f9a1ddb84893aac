//! Records of past events, for statistics, timelines, error messages and inquiries.

pub mod board;
pub mod clock;
pub mod exposure;
pub mod flight_recorder;
pub mod journal;
pub(crate) mod neighbour_clock;
pub(crate) mod own_state;
pub mod record;
pub mod signals;
pub mod stats;
