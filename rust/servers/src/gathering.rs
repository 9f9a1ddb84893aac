//! Gathering of connections: a link has one connection for each stream, and is made when the last
//! connection has arrived.
//!
//! Only clients of the job have connections here, and each client those of one link: a later
//! attempt replaces the connections of an earlier one. So their number is bounded.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use gradring_net::link::tcp::connection::Connection;
use gradring_proto::wire::handshake::ClientKind;

/// Time limit of the next connection of a link: as long as that of a handshake.
const NEXT_LIMIT: Duration = Duration::from_secs(5);

/// Incomplete links, by the name of the client.
#[derive(Default)]
pub(super) struct Gathering(BTreeMap<String, Gathered>);

struct Gathered {
    client: ClientKind,
    attempt: u64,
    /// Connections by stream; `None` if the stream is admitted and its connection has not arrived.
    connections: BTreeMap<usize, Option<Connection>>,
    /// When the last stream was admitted or arrived.
    since: Instant,
}

impl Gathering {
    /// Admits a stream, and returns `false` if this attempt already has it. Drops any other attempt
    /// of the client.
    pub(super) fn expect(
        &mut self,
        client: &ClientKind,
        attempt: u64,
        stream: usize,
        now: Instant,
    ) -> bool {
        let others = self.0.remove(&client.name());
        let others = others.filter(|it| it.is_of(client, attempt));
        let mut gathered = others.unwrap_or_else(|| Gathered {
            client: client.clone(),
            attempt,
            connections: BTreeMap::new(),
            since: now,
        });
        let is_new = !gathered.connections.contains_key(&stream);
        if is_new {
            gathered.connections.insert(stream, None);
            gathered.since = now;
        }
        self.0.insert(client.name(), gathered);
        is_new
    }

    /// Adds the connection of an admitted stream; returns all connections in the order of streams
    /// if it was the last one. A connection whose attempt is over is closed.
    pub(super) fn add(
        &mut self,
        client: &ClientKind,
        attempt: u64,
        (stream, streams): (usize, usize),
        connection: Connection,
        now: Instant,
    ) -> Option<Vec<Connection>> {
        let name = client.name();
        let gathered = self.0.get_mut(&name);
        let gathered = gathered.filter(|it| it.is_of(client, attempt))?;
        gathered.connections.insert(stream, Some(connection));
        gathered.since = now;
        if gathered.connections.values().flatten().count() < streams {
            return None;
        }
        let gathered = self.0.remove(&name)?;
        Some(gathered.connections.into_values().flatten().collect())
    }

    /// Closes all connections of an attempt, because one of its streams has failed.
    pub(super) fn forget(&mut self, client: &ClientKind, attempt: u64) {
        self.0.retain(|_, it| !it.is_of(client, attempt));
    }

    /// Closes the incomplete links of which a connection has ended or the next one is overdue.
    /// Returns their clients.
    pub(super) fn give_up(&mut self, now: Instant) -> Vec<ClientKind> {
        let mut given_up = Vec::new();
        self.0.retain(|_, gathered| {
            let continues = gathered.may_go_on(now);
            if !continues {
                given_up.push(gathered.client.clone());
            }
            continues
        });
        given_up
    }
}

impl Gathered {
    fn is_of(&self, client: &ClientKind, attempt: u64) -> bool {
        self.client == *client && self.attempt == attempt
    }

    fn may_go_on(&self, now: Instant) -> bool {
        // Clients send nothing before all connections are there, so a readable one has ended or
        // breaks the protocol.
        let mut connections = self.connections.values().flatten();
        !connections.any(Connection::is_readable)
            && now.saturating_duration_since(self.since) < NEXT_LIMIT
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Write as _};
    use std::net::{Ipv4Addr, TcpListener, TcpStream};

    use gradring_net::link::poll;

    use super::*;

    const STREAMS: usize = 3;

    fn worker(index: usize, process: u64) -> ClientKind {
        ClientKind::Worker {
            index,
            process: (process, 1, "host".into()),
            model: [0; 32],
        }
    }

    /// A connection and its other end.
    fn pair() -> (Connection, TcpStream) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        (Connection::new(accepted).unwrap(), other)
    }

    fn port(stream: &TcpStream) -> u16 {
        stream.local_addr().unwrap().port()
    }

    /// Waits for pending bytes, and returns whether the other end was closed.
    fn is_closed(other: &TcpStream) -> bool {
        poll::wait([poll::readable(other)], Duration::from_secs(20));
        other.set_nonblocking(true).unwrap();
        match other.peek(&mut [0]) {
            Ok(count) => count == 0,
            Err(error) => error.kind() != ErrorKind::WouldBlock,
        }
    }

    struct Fixture {
        gathering: Gathering,
        now: Instant,
    }

    impl Fixture {
        fn new() -> Self {
            Self {
                gathering: Gathering::default(),
                now: Instant::now(),
            }
        }

        /// Admits and adds a stream. Returns its other end, and all connections of the link if it
        /// was the last.
        fn add(
            &mut self,
            client: &ClientKind,
            attempt: u64,
            stream: usize,
        ) -> (TcpStream, Option<Vec<Connection>>) {
            let (connection, other) = pair();
            assert!(self.expect(client, attempt, stream));
            let which = (stream, STREAMS);
            let all = self
                .gathering
                .add(client, attempt, which, connection, self.now);
            (other, all)
        }

        fn expect(&mut self, client: &ClientKind, attempt: u64, stream: usize) -> bool {
            self.gathering.expect(client, attempt, stream, self.now)
        }
    }

    #[test]
    fn streams_that_come_in_any_order_are_handed_out_in_theirs_once_all_are_there() {
        let mut fixture = Fixture::new();
        let (second, none) = fixture.add(&worker(0, 7), 1, 1);
        assert!(none.is_none());
        // Streams of other clients do not count.
        let (_other, none) = fixture.add(&worker(1, 8), 1, 0);
        assert!(none.is_none());
        let (third, none) = fixture.add(&worker(0, 7), 1, 2);
        assert!(none.is_none());
        let (first, all) = fixture.add(&worker(0, 7), 1, 0);
        let all = all.expect("all are there");
        let peers = all
            .iter()
            .map(|it| it.tcp().peer_addr().unwrap().port())
            .collect::<Vec<_>>();
        assert_eq!(peers, [&first, &second, &third].map(port));
        assert_eq!(fixture.gathering.0.len(), 1);
    }

    #[test]
    fn a_stream_is_let_in_once_in_each_attempt_even_before_it_is_here() {
        let mut fixture = Fixture::new();
        let (first, _) = fixture.add(&worker(0, 7), 1, 0);
        assert!(!fixture.expect(&worker(0, 7), 1, 0));
        assert!(fixture.expect(&worker(0, 7), 1, 1));
        assert!(!fixture.expect(&worker(0, 7), 1, 1));
        assert!(fixture.expect(&worker(1, 7), 1, 1));
        // The refused streams have changed nothing.
        let (_other, none) = fixture.add(&worker(0, 7), 1, 2);
        assert!(none.is_none());
        assert!(fixture.expect(&worker(0, 7), 2, 1));
        assert!(is_closed(&first));
    }

    #[test]
    fn a_stream_whose_attempt_is_over_is_closed_and_ends_no_other() {
        let mut fixture = Fixture::new();
        assert!(fixture.expect(&worker(0, 7), 1, 1));
        let (_other, _) = fixture.add(&worker(0, 7), 2, 0);
        let (connection, late) = pair();
        let which = (1, STREAMS);
        let gathering = &mut fixture.gathering;
        let none = gathering.add(&worker(0, 7), 1, which, connection, fixture.now);
        assert!(none.is_none() && is_closed(&late));
        gathering.forget(&worker(0, 7), 1);
        assert_eq!(gathering.0.len(), 1);
        gathering.forget(&worker(0, 7), 2);
        assert_eq!(gathering.0.len(), 0);
    }

    #[test]
    fn a_later_attempt_and_a_later_process_close_what_came_before() {
        let mut fixture = Fixture::new();
        let (first, _) = fixture.add(&worker(0, 7), 1, 0);
        let (second, _) = fixture.add(&worker(0, 7), 2, 1);
        assert!(is_closed(&first));
        let (third, _) = fixture.add(&worker(0, 8), 2, 2);
        assert!(is_closed(&second));
        for stream in [0, 1] {
            let (_other, all) = fixture.add(&worker(0, 8), 2, stream);
            assert_eq!(all.is_some(), stream == 1);
        }
        assert!(is_closed(&third));
        assert_eq!(fixture.gathering.0.len(), 0);
    }

    #[test]
    fn a_link_whose_client_has_ended_or_speaks_too_early_is_given_up_at_once() {
        let mut fixture = Fixture::new();
        let (stays, _) = fixture.add(&worker(0, 7), 1, 0);
        let (goes, _) = fixture.add(&worker(0, 7), 1, 2);
        let (mut speaks, _) = fixture.add(&worker(1, 8), 1, 0);
        let (quiet, _) = fixture.add(&worker(2, 9), 1, 0);
        assert_eq!(fixture.gathering.give_up(fixture.now), []);
        drop(goes);
        speaks.write_all(&[1]).unwrap();
        let gathered = fixture.gathering.0.values();
        let arriving = gathered.flat_map(|it| it.connections.values().flatten().last());
        for connection in arriving.take(2) {
            poll::wait([poll::readable(connection)], Duration::from_secs(60));
        }
        let given_up = fixture.gathering.give_up(fixture.now);
        assert_eq!(given_up, [worker(0, 7), worker(1, 8)]);
        assert!(is_closed(&stays) && is_closed(&speaks));
        assert!(!fixture.expect(&worker(2, 9), 1, 0));
        drop(quiet);
    }

    #[test]
    fn a_link_of_which_nothing_more_comes_is_given_up_in_time() {
        let mut fixture = Fixture::new();
        let (first, _) = fixture.add(&worker(0, 7), 1, 0);
        fixture.now += NEXT_LIMIT / 2;
        let (second, _) = fixture.add(&worker(0, 7), 1, 1);
        let early = fixture.now + NEXT_LIMIT - Duration::from_millis(1);
        assert_eq!(fixture.gathering.give_up(early), []);
        let late = fixture.now + NEXT_LIMIT;
        assert_eq!(fixture.gathering.give_up(late), [worker(0, 7)]);
        assert!(is_closed(&first) && is_closed(&second));
    }
}
