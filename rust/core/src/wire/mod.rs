//! Messages between ranks, as bytes; no socket in sight.

pub(crate) mod codec;
pub mod contract;
pub(crate) mod control;
pub(crate) mod frame;
pub mod gossip;
pub(crate) mod handshake;
pub(crate) mod pairing;
pub mod state;
