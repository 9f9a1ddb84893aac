//! A parameter server over sockets: a [`server::Server`] in each server's process, a
//! [`worker::Worker`] in each worker's. What they do is `parameters`' business; here messages travel,
//! time passes, and snapshots reach a disk.
//!
//! Workers connect to all servers (`connector`), and server 0 to the others. A server lets in who
//! proves to be of its job (`access`), one living process for each worker, and both make a link of
//! their connections, as ranks do (`link`), once all are there (`gathering`): inside a host it is shared
//! memory. Each process has one thread
//! that waits for all its links and never for one of them (`channel`). A link that
//! ends, or on which nothing is heard, is made again; the protocol says again what had no answer. What
//! is long, a gradient or a pull of weights, is said once over each connection (`message` has it as
//! bytes).
//!
//! The program of a worker hands gradients over and goes on computing; what is pulled waits for it.

mod access;
mod channel;
mod connector;
mod disk;
mod gathering;
mod link;
mod liveness;
pub mod message;
pub mod model;
pub mod server;
mod values;
pub mod worker;
