//! Connections that other ranks have made after the group had formed, until this one wants them.
//!
//! Only members of the group get in here, and each replaces its own earlier connection for the same
//! purpose, so there are at most so many as all of them may make.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use crate::abort::Waker;
use crate::link::tcp::connection::Connection;
use crate::lock::{self, lock};
use crate::wire::handshake::Traffic;

/// Connections that wait for this rank.
#[derive(Default)]
pub(crate) struct Lobby {
    /// By who made them, what they are for, and the stream.
    connections: Mutex<BTreeMap<(usize, Traffic, usize), Connection>>,
    arrived: Condvar,
    /// Of those who do not wait inside of `wait`.
    wakers: Mutex<Vec<Arc<Waker>>>,
}

impl Lobby {
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
        lock(&self.connections).insert((rank, traffic, stream), connection);
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
        take(&mut lock(&self.connections), rank, traffic, streams)
    }

    /// As `take`, but waits for them, at most for `limit`.
    pub(crate) fn wait(
        &self,
        rank: usize,
        traffic: Traffic,
        streams: usize,
        limit: Duration,
    ) -> Option<Vec<Connection>> {
        let mut connections = lock::wait_while(
            &self.arrived,
            lock(&self.connections),
            limit,
            |connections| !are_here(connections, rank, traffic, streams),
        );
        take(&mut connections, rank, traffic, streams)
    }
}

type Connections = BTreeMap<(usize, Traffic, usize), Connection>;

fn are_here(connections: &Connections, rank: usize, traffic: Traffic, streams: usize) -> bool {
    (0..streams).all(|stream| connections.contains_key(&(rank, traffic, stream)))
}

fn take(
    connections: &mut Connections,
    rank: usize,
    traffic: Traffic,
    streams: usize,
) -> Option<Vec<Connection>> {
    if !are_here(connections, rank, traffic, streams) {
        return None;
    }
    let connection = |stream| connections.remove(&(rank, traffic, stream));
    (0..streams).map(connection).collect()
}
