//! gradring's core: collectives over TCP for a group of processes.

pub mod buffer;
pub mod collective;
pub mod communicator;
pub mod dtype;
pub mod error;
pub mod work;
