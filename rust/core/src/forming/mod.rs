//! Forming a group: ranks find each other and connect.
//!
//! `rendezvous` leads one rank from its settings to connections with all others. It opens a
//! `listener`, joins rank 0 (`bootstrap`), receives the `roster`, and connects to its `peers`.
//! Ranks that need a connection later make it lazily (`on_demand`).

pub(crate) mod accepted;
pub(crate) mod access;
pub mod bootstrap;
pub(crate) mod inquiry;
pub(crate) mod listener;
pub(crate) mod membership;
pub(crate) mod on_demand;
pub(crate) mod peers;
pub mod rendezvous;
pub(crate) mod roster;
