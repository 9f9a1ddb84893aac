//! Connections during their handshake, which another thread can end.

use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use gradring_proto::lock::lock;

/// Connections during their handshake.
#[derive(Default)]
pub(crate) struct Pending {
    /// In order of arrival.
    connections: Mutex<Vec<PendingConnection>>,
}

struct PendingConnection {
    number: u64,
    since: Instant,
    /// Duplicate of the socket, with which another thread ends the handshake.
    tcp: TcpStream,
}

/// Slot of a pending connection; freed when dropped.
pub(crate) struct Slot {
    pending: Arc<Pending>,
    number: u64,
}

impl Pending {
    fn connections(&self) -> MutexGuard<'_, Vec<PendingConnection>> {
        lock(&self.connections)
    }

    pub(crate) fn has_capacity(&self, slots: usize) -> bool {
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

    /// Shuts down the connections older than `limit`, which ends the handshakes in their threads.
    pub(crate) fn end_older_than(&self, limit: Duration) {
        for connection in self
            .connections()
            .iter()
            .filter(|connection| connection.since.elapsed() >= limit)
        {
            // The peer may have disconnected already.
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
