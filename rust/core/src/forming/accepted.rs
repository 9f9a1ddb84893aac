//! Connections that other ranks made after the group had formed, until this rank takes them.
//!
//! Only members of the group get in here. Each replaces its own earlier connection for the same
//! purpose, so the number of connections is bounded.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::forming::access::GroupAccess;
use gradring_net::abort::Waker;
use gradring_net::link::tcp::connection::Connection;
pub(crate) use gradring_net::session::listener::Service;
use gradring_proto::error::Result;
use gradring_proto::lock::{self, lock};
use gradring_proto::wire::handshake::{Hello, Purpose, Traffic};

/// Connections that wait for this rank.
pub(crate) struct AcceptedConnections {
    /// `None` once this rank takes no more connections.
    connections: Mutex<Option<Connections>>,
    arrived: Condvar,
    /// Wakers of threads that do not block in `wait`.
    wakers: Mutex<Vec<Arc<Waker>>>,
}

/// Connections by initiator, traffic and stream.
type Connections = BTreeMap<(usize, Traffic, usize), Connection>;

impl Default for AcceptedConnections {
    fn default() -> Self {
        Self {
            connections: Mutex::new(Some(Connections::new())),
            arrived: Condvar::new(),
            wakers: Mutex::default(),
        }
    }
}

impl AcceptedConnections {
    /// Calls `waker` whenever a connection has arrived.
    pub(crate) fn wake_with(&self, waker: Arc<Waker>) {
        lock(&self.wakers).push(waker);
    }

    /// Stores a connection of `rank`.
    pub(crate) fn enter(
        &self,
        rank: usize,
        traffic: Traffic,
        stream: usize,
        connection: Connection,
    ) {
        if let Some(connections) = &mut *lock(&self.connections) {
            connections.insert((rank, traffic, stream), connection);
        }
        self.arrived.notify_all();
        for waker in &*lock(&self.wakers) {
            waker();
        }
    }

    /// Takes the connections of `rank` in the order of streams, once all have arrived.
    pub(crate) fn take(
        &self,
        rank: usize,
        traffic: Traffic,
        streams: usize,
    ) -> Option<Vec<Connection>> {
        self.wait(rank, traffic, streams, Duration::ZERO)
    }

    /// Takes connections like `take`, but waits for them, at most for `limit`.
    pub(crate) fn wait(
        &self,
        rank: usize,
        traffic: Traffic,
        streams: usize,
        limit: Duration,
    ) -> Option<Vec<Connection>> {
        let are_here = |connections: &Connections| {
            (0..streams).all(|stream| connections.contains_key(&(rank, traffic, stream)))
        };
        let mut connections = lock(&self.connections);
        if !limit.is_zero() {
            connections = lock::wait_while(&self.arrived, connections, limit, |connections| {
                connections.as_ref().is_some_and(|them| !are_here(them))
            });
        }
        let connections = connections.as_mut().filter(|them| are_here(them))?;
        let connection = |stream| connections.remove(&(rank, traffic, stream));
        (0..streams).map(connection).collect()
    }

    /// Drops all connections, including those that arrive later.
    pub(crate) fn close(&self) {
        lock(&self.connections).take();
        lock(&self.wakers).clear();
        self.arrived.notify_all();
    }
}

/// Service for members that connect after the group has formed.
pub(crate) struct OnDemand {
    pub(crate) access: Arc<GroupAccess>,
    pub(crate) accepted: Arc<AcceptedConnections>,
}

impl Service for OnDemand {
    fn serves(&self, purpose: &Purpose) -> bool {
        matches!(purpose, Purpose::OnDemand { .. })
    }

    fn admit(&self, hello: &Hello, deadline: Instant) -> Result<()> {
        self.access.check(hello, deadline)
    }

    fn serve(&self, hello: Hello, connection: Connection, _deadline: Instant) -> Result<()> {
        if let Purpose::OnDemand { traffic, stream } = hello.purpose {
            self.accepted.enter(hello.rank, traffic, stream, connection);
        }
        Ok(())
    }
}
