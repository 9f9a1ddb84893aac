//! Connections whose handshake is not over, which can be ended from outside.

use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use gradring_proto::lock::lock;

/// The connections in their handshake.
#[derive(Default)]
pub(crate) struct Pending {
    /// In the order of their arrival.
    connections: Mutex<Vec<PendingConnection>>,
}

struct PendingConnection {
    number: u64,
    since: Instant,
    /// To end the conversation from outside.
    tcp: TcpStream,
}

/// A connection's slot among the pending ones, given back when dropped.
pub(crate) struct Slot {
    pending: Arc<Pending>,
    number: u64,
}

impl Pending {
    fn connections(&self) -> MutexGuard<'_, Vec<PendingConnection>> {
        lock(&self.connections)
    }

    pub(crate) fn has_room(&self, slots: usize) -> bool {
        self.connections().len() < slots
    }

    pub(crate) fn add(self: &Arc<Self>, tcp: &TcpStream) -> std::io::Result<Slot> {
        let tcp = tcp.try_clone()?;
        let mut connections = self.connections();
        let number = connections
            .last()
            .map_or(0, |connection| connection.number + 1);
        connections.push(PendingConnection {
            number,
            since: Instant::now(),
            tcp,
        });
        Ok(Slot {
            pending: Arc::clone(self),
            number,
        })
    }

    /// Ends the connections that began longer ago than `limit`; their threads notice.
    pub(crate) fn end_older_than(&self, limit: Duration) {
        for connection in self
            .connections()
            .iter()
            .filter(|connection| connection.since.elapsed() >= limit)
        {
            // One who has gone already needs not be sent away.
            let _ = connection.tcp.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.pending
            .connections()
            .retain(|connection| connection.number != self.number);
    }
}
