//! Decisions and messages of gradring's processes, as functions of messages and time.
//!
//! [`schedule`] has collectives as data, [`kernel`] their arithmetic, [`wire`] what travels,
//! [`consensus`] who is in the next group of an elastic job, and [`parameters`] what parameter servers
//! do. Nothing here can name a socket, a thread, a clock or the environment: `clippy.toml` refuses it.

// Tests have threads, sockets and clocks at the ends of what they test.
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
