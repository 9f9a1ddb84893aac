//! Forming a group: ranks find each other and connect.
//!
//! `rendezvous` is one rank's way from its settings to connections with all others: it opens a
//! `listener`, joins rank 0 (`bootstrap`), gets the `roster`, and connects to those that `peers` says.
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
