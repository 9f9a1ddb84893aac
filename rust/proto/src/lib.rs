//! Decisions and messages of gradring's processes, as functions of messages and time.
//!
//! [`schedule`] has collectives as data, [`kernel`] their arithmetic, [`wire`] the messages,
//! [`consensus`] the choice of an elastic job's next group, and [`parameters`] the protocol of
//! parameter servers. `clippy.toml` refuses sockets, threads, clocks and the environment in this
//! crate.

// Tests use threads, sockets and clocks around the code that they test.
#![cfg_attr(test, allow(clippy::disallowed_methods, clippy::disallowed_types))]

pub mod buffer;
pub mod collective;
pub mod consensus;
pub mod dtype;
pub mod error;
pub mod kernel;
pub mod lock;
pub mod names;
pub mod parameters;
pub mod schedule;
pub mod settings;
pub mod wire;
