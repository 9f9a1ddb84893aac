//! Sessions between processes of a job, whatever they are for: what proves that a process belongs to
//! it (`credentials`), reaching another one (`connect`), and letting others in (`listener`).

pub(crate) mod connect;
pub(crate) mod credentials;
pub(crate) mod listener;
mod pending;
