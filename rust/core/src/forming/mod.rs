//! How ranks find each other and connect.
//!
//! `rendezvous` is one rank's way from its settings to connections with all others: it opens a
//! `listener`, joins rank 0 (`meeting`), gets the `roster`, and calls those that `pairs` says.

pub(crate) mod inquiry;
pub(crate) mod listener;
pub(crate) mod meeting;
pub(crate) mod pairs;
pub(crate) mod rendezvous;
pub(crate) mod roster;
pub(crate) mod turned_away;
