//! gradring's core: collectives over TCP for a group of processes. Knows neither Python nor
//! TensorFlow.
//!
//! From the top down: a [`communicator::Communicator`] is a connected group; its
//! [`engine::Engine`] runs collectives in launch order; the executor performs one `schedule` (a
//! collective as data) over [`link`]s, reducing with the [`kernel`]s. `group` forms the group and
//! watches over it; `wire` says what travels.

pub mod abort;
pub mod buffer;
mod calibration;
pub mod collective;
pub mod communicator;
pub mod dtype;
pub mod engine;
pub mod error;
mod executor;
#[doc(hidden)]
pub mod fuzzing;
mod group;
pub mod kernel;
pub mod link;
pub mod schedule;
#[cfg(test)]
mod simulation;
pub mod trace;
pub mod wire;
pub mod work;

pub use group::inquiry::inquire;
pub use group::roster::Roster;
