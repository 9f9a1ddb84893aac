//! Sessions between processes of a job, whatever they are for: what proves that a process belongs to
//! it (`credentials`), reaching another one (`connect`), letting others in (`listener`), and what is
//! said of those who were not (`turned_away`).

pub mod connect;
pub mod credentials;
pub mod listener;
mod pending;
pub mod turned_away;
