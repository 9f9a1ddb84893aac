//! Sessions between processes of a job, whatever they are for: what proves that a process belongs to
//! it (`credentials`), reaching another one (`connect`), and letting others in (`listener`).

pub mod connect;
pub mod credentials;
pub mod listener;
mod pending;
