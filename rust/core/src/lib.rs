//! gradring's core: collectives over TCP for a group of processes. Knows neither Python nor
//! TensorFlow.
//!
//! From the top down: a [`communicator::Communicator`] is a connected group; its
//! [`engine::Engine`] runs collectives in launch order; the executor performs one `schedule` (a
//! collective as data) over [`link`]s, reducing with the [`kernel`]s. `forming` forms the group,
//! `failure` notices failures and finds their causes, [`observe`] keeps what happened; `wire` says
//! what travels.

pub mod abort;
#[doc(hidden)]
pub mod agreement;
pub mod buffer;
mod calibration;
pub mod caller;
pub mod collective;
pub mod communicator;
pub mod config;
#[doc(hidden)]
pub mod drive;
pub mod dtype;
pub mod elastic;
pub mod engine;
pub mod error;
mod executor;
#[doc(hidden)]
pub mod failure;
mod forming;
#[cfg(feature = "testing")]
#[doc(hidden)]
pub mod fuzzing;
mod host;
pub mod kernel;
pub mod link;
pub mod lock;
mod names;
pub mod observe;
#[doc(hidden)]
pub mod parameters;
pub mod schedule;
#[doc(hidden)]
pub mod serving;
#[doc(hidden)]
pub mod timing;
pub mod wire;
pub mod work;

pub use failure::diagnosis::{Findings, Known, Problem, Statement, diagnose};
pub use forming::inquiry::inquire;
pub use forming::roster::Roster;
