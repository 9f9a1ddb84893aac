//! Connections that other ranks have made after the group had formed, until this one wants them.
//!
//! Only members of the group get in here, and each replaces its own earlier connection for the same
//! purpose, so there are at most so many as all of them may make.

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
    /// `None` once nobody will want them any more.
    connections: Mutex<Option<Connections>>,
    arrived: Condvar,
    /// Of those who do not wait inside of `wait`.
    wakers: Mutex<Vec<Arc<Waker>>>,
}

/// By who made them, what they are for, and the stream.
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
    /// Has `waker` called whenever a connection has come.
    pub(crate) fn wake_with(&self, waker: Arc<Waker>) {
        lock(&self.wakers).push(waker);
    }

    /// Lets a connection of `rank` in.
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

    /// The connections of `rank` in the order of streams, once all are here.
    pub(crate) fn take(
        &self,
        rank: usize,
        traffic: Traffic,
        streams: usize,
    ) -> Option<Vec<Connection>> {
        self.wait(rank, traffic, streams, Duration::ZERO)
    }

    /// As `take`, but waits for them, at most for `limit`.
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

    /// Lets go of all that is here, and of what comes.
    pub(crate) fn close(&self) {
        lock(&self.connections).take();
        lock(&self.wakers).clear();
        self.arrived.notify_all();
    }
}

/// Lets members in that connect later.
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
