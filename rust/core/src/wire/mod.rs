//! What travels between ranks, as bytes; no socket in sight.

pub mod contract;
pub(crate) mod control;
pub(crate) mod frame;
pub(crate) mod handshake;
pub(crate) mod pairing;
pub mod pulse;
pub(crate) mod segment;
pub mod state;
