//! How N processes become a group, within a deadline.
//!
//! Rank 0 listens at the rendezvous address. Every other rank opens its own door, joins at rank
//! 0 with the address of that door, and gets the roster when all have joined. Then every rank
//! connects for data to every other rank (to its successor on the ring, if they are many), once for
//! each stream, and for control to its successor, and waits for the same from the others.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs as _};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::communicator::Config;
use crate::error::{Error, Result};
use crate::group::door::{Admission, Caller, Door, HANDSHAKE_LIMIT};
use crate::group::roster::{Roster, this_member};
use crate::schedule::choice::MESH_RANKS_MAX;
use crate::wire::handshake::{self, Hello, Member, Purpose};
use crate::work::{INTERRUPT_INTERVAL, Interrupt};

/// Pause between two attempts to reach a rank that does not listen yet.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// Bound on one attempt to connect, so that a lost packet costs seconds and not minutes.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Callers that were turned away and are named in an error.
const TURNED_AWAY_MAX: usize = 5;

/// A formed group, as seen by one rank of several.
pub(crate) struct Formed {
    pub roster: Roster,
    /// By rank: connections on which this rank sends, and on which it receives, one per stream.
    pub data_to: BTreeMap<usize, Vec<TcpStream>>,
    pub data_from: BTreeMap<usize, Vec<TcpStream>>,
    /// Connections to the neighbours on the ring, with their ranks.
    pub control: Vec<(usize, TcpStream)>,
}

/// Rank 0's answer to those who joined, when all have or the time is over.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Formed(Vec<Member>),
    Failed(Error),
}

/// Forms the group; for world sizes above one.
pub(crate) fn form(config: &Config, interrupt: Interrupt<'_>) -> Result<Formed> {
    let started = Instant::now();
    let mut forming = Forming {
        config,
        deadline: started + config.timeout,
        interrupt,
        turned_away: Vec::new(),
    };
    forming
        .run()
        .map_err(|error| error.after(started.elapsed()))
}

struct Forming<'a> {
    config: &'a Config,
    deadline: Instant,
    interrupt: Interrupt<'a>,
    turned_away: Vec<String>,
}

impl Forming<'_> {
    fn run(&mut self) -> Result<Formed> {
        let (door, roster) = if self.config.rank == 0 {
            self.gather()?
        } else {
            self.join()?
        };
        self.check_plans(&roster)?;
        let (rank, world_size) = (self.config.rank, self.config.world_size);
        let (successor, predecessor) = (
            (rank + 1) % world_size,
            (rank + world_size - 1) % world_size,
        );
        let streams = self.config.streams;
        let mut data_to: BTreeMap<usize, Vec<TcpStream>> = BTreeMap::new();
        for (peer, stream) in each_stream(receivers(rank, world_size), streams) {
            let connection = self.call(&roster, peer, &Purpose::Data { stream })?;
            data_to.entry(peer).or_default().push(connection);
        }
        let control_to_successor = self.call(&roster, successor, &Purpose::Control)?;
        let expected: Vec<_> = each_stream(senders(rank, world_size), streams).collect();
        let (mut data_from, mut control_from_predecessor) = (BTreeMap::new(), None);
        loop {
            let missing = expected.iter().find(|data| !data_from.contains_key(*data));
            let (late, what) = match (missing, control_from_predecessor.take()) {
                (None, Some(control_from_predecessor)) => {
                    return Ok(Formed {
                        roster,
                        data_to,
                        data_from: by_rank(data_from),
                        control: vec![
                            (successor, control_to_successor),
                            (predecessor, control_from_predecessor),
                        ],
                    });
                }
                (missing, control) => {
                    control_from_predecessor = control;
                    match missing {
                        Some((peer, stream)) => (*peer, format!("stream {stream} of {streams}")),
                        None => (predecessor, "control".into()),
                    }
                }
            };
            let Some((hello, stream)) = self.next_caller(&door)? else {
                let member = &roster.members()[late];
                let problem = format!(
                    "joined from {} but did not connect to rank {rank} in time ({what} is missing){}",
                    member.address,
                    self.turned_away_note()
                );
                return Err(Error::rendezvous(problem).blaming(late, &member.host));
            };
            match hello.purpose {
                Purpose::Data { stream: index } => {
                    data_from.insert((hello.rank, index), stream);
                }
                Purpose::Control => control_from_predecessor = Some(stream),
                Purpose::Join(_) => {}
            }
        }
    }

    /// All ranks see the same roster, and come to the same judgement.
    fn check_plans(&self, roster: &Roster) -> Result<()> {
        let plan = &roster.members()[0].plan;
        let mut others = (1..).zip(&roster.members()[1..]);
        match others.find(|(_, member)| member.plan != *plan) {
            None => Ok(()),
            Some((rank, member)) => {
                let problem = format!("was started with {}, rank 0 with {plan}", member.plan);
                Err(Error::config(problem).blaming(rank, &member.host))
            }
        }
    }

    /// Rank 0: waits for everybody and sends the roster.
    fn gather(&mut self) -> Result<(Door, Roster)> {
        let Config {
            world_size,
            rendezvous,
            ..
        } = self.config;
        let door = Door::open(rendezvous, self.admission())?;
        let mut joined: BTreeMap<usize, (Member, TcpStream)> = BTreeMap::new();
        while joined.len() < world_size - 1 {
            match self.next_caller(&door) {
                Ok(Some((hello, stream))) => {
                    // Nobody connects to a neighbour before it has the roster.
                    if let Purpose::Join(member) = hello.purpose {
                        joined.insert(hello.rank, (member, stream));
                    }
                }
                outcome => {
                    let error = outcome.err().unwrap_or_else(|| self.missing(&joined));
                    for (_, stream) in joined.values_mut() {
                        // A rank that has gone meanwhile needs no answer.
                        let _ = handshake::write_message(stream, &Answer::Failed(error.clone()));
                    }
                    return Err(error);
                }
            }
        }
        let mut members = vec![this_member(self.announced(door.address), self.config)];
        members.extend(joined.values().map(|(member, _)| member.clone()));
        let answer = Answer::Formed(members.clone());
        for (rank, (member, stream)) in &mut joined {
            handshake::write_message(stream, &answer)
                .map_err(|error| error.blaming(*rank, &member.host))?;
        }
        Ok((door, Roster::new(members)))
    }

    /// Everybody else: opens a door, announces it to rank 0, and waits for the roster.
    fn join(&mut self) -> Result<(Door, Roster)> {
        let address = &self.config.rendezvous;
        let mut stream = self.reach(0, address, address)?;
        let own_ip = stream
            .local_addr()
            .map_err(|error| Error::rendezvous(format!("no local address: {error}")))?
            .ip();
        let listen = match &self.config.listen {
            Some(listen) => listen.clone(),
            None => SocketAddr::new(own_ip, 0).to_string(),
        };
        let door = Door::open(&listen, self.admission())?;
        let announced = self.announced(reachable(door.address, own_ip));
        let purpose = Purpose::Join(this_member(announced, self.config));
        self.greet(&mut stream, 0, address, purpose)?;
        self.await_readable(&stream)?;
        let answer = handshake::read_message(&mut stream).map_err(|_| {
            Error::rendezvous("it ended before the group was complete").blaming(0, address)
        })?;
        match answer {
            Answer::Formed(members) if members.len() == self.config.world_size => {
                Ok((door, Roster::new(members)))
            }
            Answer::Formed(_) => Err(Error::protocol("rank 0 sent a roster of another size")),
            Answer::Failed(error) => Err(error),
        }
    }

    /// The address that others should use for this rank.
    fn announced(&self, door: SocketAddr) -> String {
        let given = self.config.announce.clone();
        given.unwrap_or_else(|| door.to_string())
    }

    fn admission(&self) -> Admission {
        Admission {
            rank: self.config.rank,
            world_size: self.config.world_size,
            streams: self.config.streams,
            token: self.config.token.clone(),
        }
    }

    /// The next member that calls, or `None` when the time is over.
    fn next_caller(&mut self, door: &Door) -> Result<Option<(Hello, TcpStream)>> {
        loop {
            match door.callers.recv_timeout(INTERRUPT_INTERVAL) {
                Ok(Caller::Member(hello, stream)) => return Ok(Some((hello, stream))),
                Ok(Caller::TurnedAway(note)) => self.turned_away.push(note),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    self.check_interrupt()?;
                }
            }
            if Instant::now() >= self.deadline {
                return Ok(None);
            }
        }
    }

    /// Connects to a rank for one purpose.
    fn call(&mut self, roster: &Roster, rank: usize, purpose: &Purpose) -> Result<TcpStream> {
        let member = &roster.members()[rank];
        let mut stream = self.reach(rank, &member.host, &member.address)?;
        self.greet(&mut stream, rank, &member.host, purpose.clone())?;
        Ok(stream)
    }

    /// Opens a connection, trying again until the deadline: the other side may start later.
    fn reach(&mut self, rank: usize, host: &str, address: &str) -> Result<TcpStream> {
        loop {
            let reason = match connect(address, self.deadline) {
                Ok(stream) => return Ok(stream),
                Err(error) => error,
            };
            self.check_interrupt()?;
            if Instant::now() + RETRY_INTERVAL >= self.deadline {
                let own = self.config.rank;
                let problem = format!("rank {own} cannot reach it at {address}: {reason}");
                return Err(Error::rendezvous(problem).blaming(rank, host));
            }
            std::thread::sleep(RETRY_INTERVAL);
        }
    }

    fn greet(
        &self,
        stream: &mut TcpStream,
        rank: usize,
        host: &str,
        purpose: Purpose,
    ) -> Result<()> {
        let limit = Some(HANDSHAKE_LIMIT);
        stream
            .set_nodelay(true)
            .and_then(|()| stream.set_read_timeout(limit))
            .and_then(|()| stream.set_write_timeout(limit))
            .map_err(|error| Error::rendezvous(format!("a socket fails: {error}")))?;
        let hello = Hello::new(self.config.rank, self.config.world_size, purpose)?;
        handshake::call(stream, hello, &self.config.token)
            .map_err(|error| error.blaming(rank, host))
    }

    /// Waits until a connection has something to read, or has ended.
    fn await_readable(&mut self, stream: &TcpStream) -> Result<()> {
        let limit = |timeout| {
            stream
                .set_read_timeout(Some(timeout))
                .map_err(|error| Error::rendezvous(format!("a socket fails: {error}")))
        };
        limit(INTERRUPT_INTERVAL)?;
        // Rank 0 gives up at about the same time, and knows better who is missing.
        let deadline = self.deadline + HANDSHAKE_LIMIT;
        while stream
            .peek(&mut [0])
            .is_err_and(|error| is_timeout(error.kind()))
        {
            self.check_interrupt()?;
            if Instant::now() >= deadline {
                let problem = "it accepted this rank but sent no roster in time";
                return Err(Error::rendezvous(problem).blaming(0, &self.config.rendezvous));
            }
        }
        limit(HANDSHAKE_LIMIT)
    }

    fn check_interrupt(&mut self) -> Result<()> {
        if (self.interrupt)() {
            let reason = "was interrupted while the group was forming";
            return Err(Error::aborted(reason).blaming(self.config.rank, "this host"));
        }
        Ok(())
    }

    fn missing(&self, joined: &BTreeMap<usize, (Member, TcpStream)>) -> Error {
        let world_size = self.config.world_size;
        let missing: Vec<usize> = (1..world_size)
            .filter(|rank| !joined.contains_key(rank))
            .collect();
        let names: Vec<String> = missing.iter().map(usize::to_string).collect();
        let problem = format!(
            "rank {} of {world_size} did not join rank 0 at {} within {:.0} s{}",
            names.join(", "),
            self.config.rendezvous,
            self.config.timeout.as_secs_f64(),
            self.turned_away_note(),
        );
        Error::rendezvous(problem).blaming(missing[0], "an unknown host")
    }

    /// What those who were turned away would like the user to know.
    fn turned_away_note(&self) -> String {
        match self.turned_away.len() {
            0 => String::new(),
            count => {
                let shown = &self.turned_away[..count.min(TURNED_AWAY_MAX)];
                format!("; turned away: {}", shown.join("; "))
            }
        }
    }
}

/// The ranks to which `rank` sends: all others, or its successor if they are too many.
pub(crate) fn receivers(rank: usize, world_size: usize) -> Vec<usize> {
    let distances = if world_size <= MESH_RANKS_MAX {
        world_size - 1
    } else {
        1
    };
    (1..=distances)
        .map(|distance| (rank + distance) % world_size)
        .collect()
}

/// The ranks that send to `rank`.
fn senders(rank: usize, world_size: usize) -> Vec<usize> {
    (0..world_size)
        .filter(|&peer| peer != rank && receivers(peer, world_size).contains(&rank))
        .collect()
}

/// Every stream of every peer, by rank and index.
fn each_stream(peers: Vec<usize>, streams: usize) -> impl Iterator<Item = (usize, usize)> {
    let of_peer = move |peer| (0..streams).map(move |stream| (peer, stream));
    peers.into_iter().flat_map(of_peer)
}

/// The connections of each rank, in the order of their indices.
fn by_rank(data: BTreeMap<(usize, usize), TcpStream>) -> BTreeMap<usize, Vec<TcpStream>> {
    let mut by_rank: BTreeMap<usize, Vec<TcpStream>> = BTreeMap::new();
    for ((peer, _), stream) in data {
        by_rank.entry(peer).or_default().push(stream);
    }
    by_rank
}

fn connect(address: &str, deadline: Instant) -> std::io::Result<TcpStream> {
    let mut outcome = Err(std::io::Error::other("the name has no address"));
    for resolved in address.to_socket_addrs()? {
        let limit = deadline
            .saturating_duration_since(Instant::now())
            .clamp(Duration::from_millis(10), CONNECT_LIMIT);
        outcome = TcpStream::connect_timeout(&resolved, limit);
        if let Ok(stream) = &outcome {
            // A loopback port on which nobody listens can connect to itself.
            if stream.local_addr()? != stream.peer_addr()? {
                return outcome;
            }
            outcome = Err(std::io::ErrorKind::ConnectionRefused.into());
        }
    }
    outcome
}

/// The address at which other hosts find a door.
fn reachable(door: SocketAddr, own_ip: IpAddr) -> SocketAddr {
    if door.ip().is_unspecified() {
        SocketAddr::new(own_ip, door.port())
    } else {
        door
    }
}

fn is_timeout(kind: std::io::ErrorKind) -> bool {
    use std::io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(kind, WouldBlock | TimedOut | Interrupted)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;
    use crate::communicator::TransportChoice;
    use crate::error::ErrorKind;
    use crate::schedule::choice::Rules;

    const STREAMS: usize = 2;
    const TIMEOUT: Duration = Duration::from_secs(3);

    fn config(rank: usize, rendezvous: &str) -> Config {
        Config {
            rank,
            world_size: 2,
            rendezvous: rendezvous.into(),
            listen: None,
            token: b"secret".into(),
            transport: TransportChoice::Tcp,
            algorithm: Rules::default(),
            reproducible: false,
            wire_dtype: None,
            streams: STREAMS,
            timeout: TIMEOUT,
        }
    }

    /// Lets rank 1 join rank 0 as it should, and then open connections for these streams alone;
    /// returns what rank 0 made of it and how rank 1's last connection was answered.
    fn connect_streams(streams: &[usize]) -> (Result<Formed>, Result<TcpStream>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        drop(listener);
        let rank_0 = thread::spawn({
            let config = config(0, &address);
            move || form(&config, &mut || false)
        });
        let config = config(1, &address);
        let mut forming = Forming {
            config: &config,
            deadline: Instant::now() + TIMEOUT,
            interrupt: &mut || false,
            turned_away: Vec::new(),
        };
        let (_door, roster) = forming.join().unwrap();
        let mut connections: Vec<_> = streams
            .iter()
            .map(|&stream| forming.call(&roster, 0, &Purpose::Data { stream }))
            .collect();
        (rank_0.join().unwrap(), connections.pop().unwrap())
    }

    #[test]
    fn a_missing_stream_is_named_within_the_deadline() {
        let started = Instant::now();
        let (formed, connected) = connect_streams(&[1]);
        assert!(connected.is_ok());
        let error = formed.err().expect("stream 0 is missing");
        assert!(
            matches!(error.kind, ErrorKind::Rendezvous { .. }),
            "{error}"
        );
        assert_eq!(error.blamed.as_ref().map(|blamed| blamed.rank), Some(1));
        assert!(
            error.to_string().contains("stream 0 of 2 is missing"),
            "{error}"
        );
        assert!(started.elapsed() < TIMEOUT + HANDSHAKE_LIMIT);
    }

    #[test]
    fn a_stream_that_exists_already_is_turned_away_on_both_sides() {
        let (formed, connected) = connect_streams(&[0, 0]);
        let answered = connected.unwrap_err();
        let problem = "stream 0 of rank 1 has been connected already";
        assert!(
            matches!(answered.kind, ErrorKind::Rendezvous { .. }),
            "{answered}"
        );
        assert!(answered.to_string().contains(problem), "{answered}");
        let error = formed.err().expect("stream 1 is missing");
        assert!(error.to_string().contains(problem), "{error}");
    }

    #[test]
    fn a_stream_beyond_the_agreed_number_is_turned_away() {
        for stream in [STREAMS, usize::MAX] {
            let (_, connected) = connect_streams(&[stream]);
            let error = connected.unwrap_err();
            assert!(matches!(error.kind, ErrorKind::Protocol { .. }), "{error}");
        }
    }
}
