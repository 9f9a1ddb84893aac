//! Parameter servers over sockets: a [`server::Server`] in each server's process, a
//! [`worker::Worker`] in each worker's. The protocol is pure code in `gradring_proto::parameters`;
//! this crate carries its messages, reads the clock, and writes snapshots to disk.
//!
//! A job has a model for each optimizer of its program. A process has a server or worker for each
//! model, with links of their own (`job`, `model_server`).
//!
//! Workers connect to all servers (`connector`), and server 0 connects to the other servers. A
//! server admits only processes of its job, and one live process for each worker (`access`). Once
//! all connections of a link have arrived (`gathering`), both ends build a link from them, as ranks
//! do (`link`): shared memory inside a host, TCP between hosts. One thread of each process polls
//! all its links and never blocks on one of them (`channel`).
//!
//! A link that ends or falls silent is replaced by a new one, and the protocol repeats messages
//! that got no answer. Long messages, which are gradients and pulls of weights, are sent once over
//! each connection (`message` encodes them).
//!
//! A worker's program hands its gradients over and continues to compute; pulled weights wait until
//! the program asks for them.

mod access;
mod channel;
mod circles;
mod connector;
mod disk;
mod gathering;
mod job;
mod link;
mod liveness;
pub mod message;
pub mod model;
mod model_server;
pub mod server;
mod status;
pub mod values;
pub mod worker;
