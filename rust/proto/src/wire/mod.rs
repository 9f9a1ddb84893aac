//! Messages between processes, as bytes, without any socket.

pub mod codec;
pub mod control;
pub mod frame;
pub mod gossip;
pub mod handshake;
pub mod pairing;
pub mod signature;
pub mod state;
