//! How ranks find each other, know each other, and notice that one has gone.

pub(crate) mod clocks;
pub(crate) mod door;
pub(crate) mod inquest;
pub(crate) mod inquiry;
pub(crate) mod liveness;
pub(crate) mod meeting;
pub(crate) mod pairs;
pub(crate) mod rendezvous;
pub(crate) mod roster;
pub(crate) mod turned_away;
pub(crate) mod watched;

pub(crate) use roster::host_name;
