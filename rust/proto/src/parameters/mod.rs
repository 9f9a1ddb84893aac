//! A parameter server: servers keep the weights, workers push gradients and pull weights.
//!
//! Pure code without sockets, threads or a clock: a [`Worker`](worker::Worker) in each worker, a
//! [`Server`](server::Server) in each server, and a [`Sequencer`](sequencer::Sequencer) in the
//! first of them. Their owners carry messages and pass the time in.
//!
//! *How.* A worker pulls the weights from all servers, computes, and stages its gradient, piece by
//! piece: each server keeps the part for its own weights. Once all servers have staged all pieces,
//! the worker submits the gradient to the sequencer. The sequencer decides when the gradient counts, and with
//! what weight (`queue` has all update rules). Each decision is an entry of a log. All servers
//! apply the entries in the order of the log, so they pass through the same versions. The worker
//! continues when the sequencer sends `Go`; here a rule holds a fast worker back. The first entry
//! of a log brings the initial weights, from a worker.
//!
//! *Never half.* An entry names only gradients that all servers have staged. Only a restart removes
//! a staged gradient from a server, and a restarted server is in no term.
//!
//! *Never twice.* In the log, the identities of one worker's pushes grow. An identity begins with
//! the incarnation. A worker that comes back and cannot know which of its gradients were applied
//! gets a new incarnation; one that has ended never counts again. So duplicates and late messages
//! are recognised.
//!
//! *Copies.* Each shard may have several copies, on different servers (`keepers`); all copies get
//! the same orders. A gradient is staged at all keepers before it is submitted.
//!
//! *A lost server* has forgotten its staged gradients, and the updates after its last snapshot. So
//! all servers begin a new term together (`restoring`). If each shard has a keeper that has the
//! newest version of any keeper, or can reach it, the term begins there, and these keepers send
//! snapshots to the others. Otherwise the term begins at the newest version of which all servers
//! have a snapshot. Messages of older terms are not believed. The sequencer does not let the log
//! run ahead of snapshots by more than two intervals, and no server removes a snapshot before all
//! have a later one. `Terms` records where each term began. A worker that learns of a new term
//! drops gradients that it computed with abandoned weights, and pushes the others again: their
//! identities show whether the log still has them. If there are copies, a worker keeps a gradient
//! until all keepers have applied it, so the loss of one server loses no gradient. The first server
//! writes a new term to its disk before any other process learns of it, and a restarted server does
//! not enter a term again. So a term has one log.
//!
//! *Waiting for workers.* A worker that outlived the restored servers claims its old incarnation.
//! The other workers then come back as quickly, if they live. If no worker claims one, all
//! processes are new. The term then begins like the first one: when all workers have joined, or a
//! time has passed.
//!
//! *A lost worker* has sent nothing for a while. It no longer counts, and its submitted gradients
//! that are in no entry are dropped, so no worker waits for it.
//!
//! *Pulls of rows.* A worker keeps weights of its last pull, and gets only the rows that have
//! changed since (`changes`), where the optimizer changes no others.
//!
//! *Workers that are away.* The sequencer can be told that nobody waits for some members until they
//! push again (`Sequencer::go_on_without`).
//!
//! *Limits.* Pulls from several servers may return different versions, except under a synchronous
//! rule without backups, where no version can follow while a member pulls that is not away. If all
//! copies of a shard are lost, so are the updates since the last common snapshot. If all servers
//! lose their disks, training continues from a worker's weights.

pub mod changes;
pub mod float;
pub mod floats;
pub mod identity;
pub mod keepers;
pub mod log;
pub mod message;
pub mod optimizer;
pub mod queue;
pub mod restoring;
pub mod rules;
pub mod sequencer;
pub mod server;
pub mod shard;
pub mod shards;
pub mod snapshot;
pub mod worker;
