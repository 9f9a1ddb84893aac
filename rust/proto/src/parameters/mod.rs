//! A parameter server: servers keep the weights, workers push gradients and pull weights.
//!
//! Pure code without sockets, threads or a clock: a [`Worker`](worker::Worker) in each worker, a
//! [`Server`](server::Server) in each server, and a [`Sequencer`](sequencer::Sequencer) in the
//! first of them. Their owners carry messages and tell the time.
//!
//! *How.* A worker pulls the weights from all servers, computes, and stages its gradient: each
//! server keeps the part for its own weights. When all of them have theirs, the worker submits the
//! gradient to the sequencer, which decides when it counts, and how much (`queue`, where all update
//! rules are). The decision is an entry of a log. All servers apply the entries in the order of the
//! log, so they go through the same versions. The worker may go on when the sequencer says so: that
//! is where a rule holds a fast worker back. The first entry of a log brings the initial weights,
//! from a worker.
//!
//! *Never half.* An entry names gradients that all servers have. Only a restart takes a staged
//! gradient from a server, and then that server is in no term any more.
//!
//! *Never twice.* The log has the identities of one worker in growing order. They begin with the
//! incarnation, which is new whenever a worker comes back and cannot tell what became of its
//! gradients; an incarnation that has ended never counts again. So what comes twice or late is
//! known for what it is.
//!
//! *Copies.* Each shard may be kept by several servers (`keepers`), which all are told the same. A
//! gradient is staged at all keepers before it is submitted.
//!
//! *A lost server* has forgotten what was staged, and what it applied after its last snapshot. So
//! all servers go on together in a new term (`restoring`): from the last version that any keeper
//! has, if of each shard some keeper has it or can reach it, and others are filled from those; or
//! else from the last version of which all servers have a snapshot. Messages of older terms are not
//! believed. The sequencer does not let the log run ahead of snapshots by more than two intervals,
//! and no server removes one before all have a later one. `Terms` says where each began. A worker
//! that hears of a new term drops gradients that it computed with weights that were given up, and
//! pushes the others again: their identities tell whether the log still has them. With copies, it
//! keeps a gradient until all keepers have applied it, so no loss of one server loses any. The
//! first server writes a new term down before anybody else hears of it, and a server that was
//! restarted in a term does not take that one up again; so a term has one log.
//!
//! *Waiting for workers.* A worker that outlived the restored servers claims the incarnation that it had,
//! and the others are back as soon as it is. If nobody claims one, all processes have started anew: the
//! term begins as the first one does, when all workers are there or a time has passed.
//!
//! *A lost worker* is one of which nothing was heard for a while. It counts no more, and what it
//! submitted is dropped as far as it is in no entry, so nobody waits for it.
//!
//! *What is given up.* Pulls from several servers may meet different versions, unless the rule is
//! synchronous without backups; then no version can follow while a member pulls. Updates since the
//! last common snapshot are lost with the last copy of a shard. If all servers lose their disks,
//! training goes on from a worker's weights.

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
