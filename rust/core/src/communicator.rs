//! A connected group of ranks.

use std::sync::Arc;
use std::time::Duration;

use crate::collective::Request;
use crate::error::Result;
use crate::work::{Interrupt, Work};

/// How a rank joins its group.
#[derive(Debug, Clone)]
pub struct Config {
    /// This process's index.
    pub rank: usize,
    /// Number of processes.
    pub world_size: usize,
    /// `host:port` at which rank 0 listens.
    pub rendezvous: String,
    /// `host:port` at which this rank listens; by default a free port on the interface that
    /// reaches the rendezvous.
    pub listen: Option<String>,
    /// Shared secret of the job; empty for none.
    pub token: Vec<u8>,
    /// Bound on forming the group, and on every wait for a collective without progress.
    pub timeout: Duration,
}

/// A connected group of ranks with an order.
pub struct Communicator {}

impl Communicator {
    /// Joins the group.
    pub fn connect(_config: Config, _interrupt: Interrupt<'_>) -> Result<Arc<Self>> {
        todo!()
    }
    /// Number by which TensorFlow's ops find this communicator; never reused in a process.
    pub fn id(&self) -> u64 {
        todo!()
    }
    /// The open communicator of this number in this process.
    pub fn by_id(_id: u64) -> Option<Arc<Self>> {
        todo!()
    }
    /// This process's index.
    pub fn rank(&self) -> usize {
        todo!()
    }
    /// Number of processes.
    pub fn world_size(&self) -> usize {
        todo!()
    }
    /// Runs a collective to its end, on the calling thread when the engine is idle.
    pub fn run(&self, _request: Request, _interrupt: Interrupt<'_>) -> Result<()> {
        todo!()
    }
    /// Queues a collective; they run in the order of these calls.
    pub fn start(&self, _request: Request) -> Result<Work> {
        todo!()
    }
    /// Fails every pending and later work of every rank with this reason.
    pub fn abort(&self, _reason: &str) {
        todo!()
    }
}
