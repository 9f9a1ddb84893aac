//! A server's place among all servers, and its statistics.

use std::collections::BTreeMap;

use super::message::Counted;
use gradring_proto::parameters::identity::{Incarnation, Term, Version};

/// Index of a server and the addresses of all servers.
#[derive(Debug, Clone)]
pub struct ServerPlace {
    /// Index of this server.
    pub server: usize,
    /// `host:port` of each server.
    pub addresses: Vec<String>,
}

/// Statistics of a server. Numbers of bytes, connections and gradients are of all models, the rest
/// is that of the first.
#[derive(Debug, Clone, Default)]
pub struct Stats {
    /// Number of models: one for each optimizer of the program.
    pub models: usize,
    /// Number that grows whenever servers are restored.
    pub term: Term,
    /// Version of the weights: 1 for the initial ones, and 1 more for each update.
    pub version: Version,
    /// Hash of the applied log: equal for servers that have applied the same entries.
    pub history: u64,
    /// Last push in the log, by worker.
    pub applied: BTreeMap<u32, (Incarnation, u64)>,
    /// Version and history of each copy of another server's shard.
    pub replicas: Vec<(Version, u64)>,
    /// Gradients staged on this server.
    pub staged: usize,
    /// Bytes sent on all connections so far.
    pub bytes_sent: u64,
    /// Bytes received on all connections so far.
    pub bytes_received: u64,
    /// Open connections.
    pub connections: usize,
    /// Number of times that servers were restored.
    pub restored: u64,
    /// Workers that are members of the training.
    pub members: Vec<u32>,
    /// Workers that have left.
    pub left: Vec<u32>,
    /// Statistics of gradients since servers were restored; only in server 0.
    pub counted: Counted,
}
