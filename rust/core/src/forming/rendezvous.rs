//! Rendezvous: N processes form a group within a deadline.
//!
//! Rank 0 listens at the rendezvous address. Every other rank opens its own listener, announces its
//! address to rank 0, and receives the roster when all have joined. Then every rank opens data
//! connections to half of its peers (see `peers`), one for each stream, and accepts from the other
//! half. It opens one control connection to its ring successor. The connections to rank 0 last
//! until all ranks are connected (see `bootstrap`).

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use crate::forming::access::GroupAccess;
use crate::forming::bootstrap::{Answer, Bootstrap, Coordinator, Joined};
use crate::forming::listener::GroupListener;
use crate::forming::peers::{accepts_from, by_rank, connects_to, each_stream};
use crate::forming::roster::{Roster, this_member};
use crate::observe::own_state::OwnState;
use gradring_net::caller::{INTERRUPT_INTERVAL, Interrupt};
use gradring_net::config::Config;
use gradring_net::host::host_name;
use gradring_net::link::kind::Kind;
use gradring_net::link::tcp::connection::Connection;
use gradring_net::link::tcp::deadline_stream::DeadlineStream;
use gradring_net::link::tcp::tls;
pub use gradring_net::session::connect::{Cancellation, Resolve, look_up, resolve};
use gradring_net::session::credentials::Credentials;
use gradring_proto::error::{
    Abort, Breach, Error, ErrorKind, NotFormed, Result, Text, Unusable, listed_ranks, message_of,
};
use gradring_proto::wire::handshake::{
    self, GroupId, Hello, Purpose, RosterMember, WORLD_SIZE_MAX,
};

mod connect;
mod missing;

/// Time after the timeout in which the others can still report to rank 0 which rank is late.
const READY_GRACE: Duration = Duration::from_secs(1);

/// A formed group, as seen by one of several ranks.
pub(crate) struct Formed {
    pub roster: Roster,
    pub group: GroupId,
    pub credentials: Arc<Credentials>,
    /// Payload connections by rank, one per stream.
    pub data: BTreeMap<usize, Vec<Connection>>,
    /// Connections to the neighbours on the ring, with their ranks.
    pub control: Vec<(usize, Connection)>,
    /// Stays open for inquiries.
    pub listener: GroupListener,
    pub own_state: Arc<OwnState>,
}

/// Forms a group of several ranks. A panic makes the group fail, never the process.
pub(crate) fn form(config: &Config, kinds: &[Kind], interrupt: Interrupt<'_>) -> Result<Formed> {
    if config.world_size > WORLD_SIZE_MAX {
        let (world_size, most) = (config.world_size, WORLD_SIZE_MAX);
        return Err(Unusable::WorldTooLarge { world_size, most }.into());
    }
    let credentials = Credentials::of(config)?;
    let own_state = OwnState::new(config.rank, config.world_size, config.generation);
    let mut forming = Forming::new(config, kinds, credentials, Arc::new(own_state), interrupt);
    let started = forming.started;
    catch_unwind(AssertUnwindSafe(|| forming.run()))
        .unwrap_or_else(|panic| {
            let what = message_of(&*panic);
            Err(Error::panicked("forming the group", what).blaming(config.rank, host_name()))
        })
        .map_err(|error| match error.kind {
            // The rank that noticed the shortage is the one with it.
            ErrorKind::Exhausted { .. } if error.blamed.is_none() => {
                error.blaming(config.rank, host_name())
            }
            _ => error,
        })
        .map_err(|error| forming.bootstrap.fail(error).after(started.elapsed()))
}

struct Forming<'a> {
    config: &'a Config,
    /// Kinds of links that this rank offers.
    kinds: &'a [Kind],
    credentials: Arc<Credentials>,
    deadline: Instant,
    resolve: Resolve,
    interrupt: Interrupt<'a>,
    bootstrap: Bootstrap,
    /// Identity of the group, once all have joined.
    group: GroupId,
    /// First reason to give up.
    given_up: Option<Error>,
    started: Instant,
    /// Time after `started` at which people are next warned of the wait.
    warn_after: Duration,
    own_state: Arc<OwnState>,
}

impl<'a> Forming<'a> {
    fn new(
        config: &'a Config,
        kinds: &'a [Kind],
        credentials: Arc<Credentials>,
        own_state: Arc<OwnState>,
        interrupt: Interrupt<'a>,
    ) -> Self {
        let started = Instant::now();
        Self {
            config,
            kinds,
            credentials,
            deadline: started + config.settings.timeout,
            resolve,
            interrupt,
            bootstrap: Bootstrap::Outside,
            group: GroupId::NONE,
            given_up: None,
            started,
            warn_after: config.settings.stall_warning.max(INTERRUPT_INTERVAL),
            own_state,
        }
    }

    fn run(&mut self) -> Result<Formed> {
        check_loopback(&self.config.rendezvous)
            .map_err(|error| error.blaming(self.config.rank, host_name()))?;
        let (listener, roster) = if self.config.rank == 0 {
            self.gather()?
        } else {
            self.join()?
        };
        self.check_settings(&roster)?;
        let (rank, world_size) = (self.config.rank, self.config.world_size);
        let (successor, predecessor) = (
            (rank + 1) % world_size,
            (rank + world_size - 1) % world_size,
        );
        let streams = self.config.settings.streams;
        let mut data = BTreeMap::new();
        let topology = roster.topology();
        for (peer, stream) in each_stream(connects_to(rank, &topology), streams) {
            let connection = self.connect_to(&roster, peer, &Purpose::Data { stream })?;
            data.insert((peer, stream), connection);
        }
        let control_to_successor = self.connect_to(&roster, successor, &Purpose::Control)?;
        let expected: BTreeSet<_> = each_stream(accepts_from(rank, &topology), streams).collect();
        let mut missing = expected.clone();
        let mut control_from_predecessor = None;
        while !missing.is_empty() || control_from_predecessor.is_none() {
            let Some((hello, connection)) = self.next_member(&listener)? else {
                let (late, stream) = match missing.first() {
                    Some(&(peer, stream)) => (peer, Some(stream)),
                    None => (predecessor, None),
                };
                let member = &roster.members()[late];
                let fact = NotFormed::NotConnected {
                    address: member.address.as_str().into(),
                    rank,
                    stream,
                    streams,
                    turned_away: Text::of(&listener.access.turned_away),
                };
                return Err(Error::from(fact).blaming(late, &member.host));
            };
            match hello.purpose {
                Purpose::Data { stream } if expected.contains(&(hello.rank, stream)) => {
                    missing.remove(&(hello.rank, stream));
                    data.insert((hello.rank, stream), connection);
                }
                Purpose::Control => control_from_predecessor = Some((predecessor, connection)),
                // The listener does not know racks, so it admits connections that this rank does
                // not use.
                _ => {}
            }
        }
        self.await_others()?;
        let control_to_successor = Some((successor, control_to_successor));
        let control = [control_to_successor, control_from_predecessor];
        Ok(Formed {
            roster,
            group: self.group,
            credentials: Arc::clone(&self.credentials),
            data: by_rank(data),
            control: control.into_iter().flatten().collect(),
            listener,
            own_state: Arc::clone(&self.own_state),
        })
    }

    /// Compares the members' settings and transports. All ranks see the same roster, and come to
    /// the same conclusion.
    fn check_settings(&self, roster: &Roster) -> Result<()> {
        let settings = &roster.members()[0].settings;
        let mut others = (1..).zip(&roster.members()[1..]);
        if let Some((rank, member)) = others.find(|(_, member)| member.settings != *settings) {
            let (theirs, ours) = what_differs(&member.settings, settings);
            let fact = Unusable::SettingsDiffer {
                theirs: theirs.into(),
                ours: ours.into(),
            };
            return Err(Error::from(fact).blaming(rank, &member.host));
        }
        let members = || (0..).zip(roster.members());
        for (one, chosen) in members() {
            let shares = |member: &RosterMember| {
                let mut offered = member.transports.iter();
                offered.any(|name| chosen.transports.contains(name))
            };
            if let Some((rank, member)) = members().find(|(_, member)| !shares(member)) {
                let fact = Unusable::TransportsDiffer {
                    offered: member.transports.join("+").into(),
                    rank: one,
                    needed: chosen.transports.join("+").into(),
                };
                return Err(Error::from(fact).blaming(rank, &member.host));
            }
        }
        Ok(())
    }

    /// Waits for all members and sends the roster, on rank 0.
    fn gather(&mut self) -> Result<(GroupListener, Roster)> {
        let Config {
            world_size,
            rendezvous,
            ..
        } = self.config;
        let listener = self.open_listener(rendezvous)?;
        self.bootstrap = Bootstrap::Coordinator(BTreeMap::new());
        while self.joined().len() < world_size - 1 {
            let Some((hello, stream)) = self.next_member(&listener)? else {
                return Err(self.missing(&listener)?);
            };
            // Only joins arrive here: no rank connects to a neighbour before it has the roster.
            if let (Purpose::Join(member), Bootstrap::Coordinator(joined)) =
                (hello.purpose, &mut self.bootstrap)
            {
                self.own_state.has_joined(hello.rank);
                let conversation_limit = self.config.conversation_limit();
                joined.insert(hello.rank, Joined::new(member, stream, conversation_limit));
            }
        }
        // The others know the address at which they reached rank 0.
        let announced = self.config.announce.clone().unwrap_or_default();
        let mut members = vec![this_member(
            announced,
            Some(listener.port.address),
            self.config,
            self.kinds,
        )];
        members.extend(self.joined().values().map(|joined| joined.member.clone()));
        self.group = GroupId::draw()?;
        self.own_state.has_agreed(self.group);
        self.bootstrap.announce(self.group, members.clone());
        Ok((listener, self.roster(members)))
    }

    /// Opens a listener, announces it to rank 0, and waits for the roster, on all other ranks.
    fn join(&mut self) -> Result<(GroupListener, Roster)> {
        let rendezvous = &self.config.rendezvous;
        // The address of another host fails at once; a port in use may become free in time.
        let mut listener = match self.config.listen.as_ref().map(|at| self.open_listener(at)) {
            Some(Err(error)) if matches!(error.kind, ErrorKind::Config(_)) => return Err(error),
            opened => opened.and_then(Result::ok),
        };
        let mut stream = self.meet(0, rendezvous, rendezvous, |this, tcp| {
            let own_ip = tcp.local_addr().map_err(|error| socket_fails(&error))?.ip();
            let listener = match &mut listener {
                Some(listener) => listener,
                none => none.insert(match &this.config.listen {
                    Some(listen) => this.open_listener(listen)?,
                    None => this.open_listener_at(own_ip)?,
                }),
            };
            let bound = listener.port.address;
            let address = this.announced(bound, own_ip);
            Ok(Purpose::Join(this_member(
                address,
                Some(bound),
                this.config,
                this.kinds,
            )))
        })?;
        let listener = listener.expect("no rank joins without a listener");
        // Rank 0 gives up at about the same time, and knows better which ranks are missing.
        let conversation_limit = self.config.conversation_limit();
        let limit = self.deadline + conversation_limit;
        let mut go_on = || self.check().is_ok();
        let mut line = DeadlineStream::cancellable(&mut stream, limit, &mut go_on);
        let answer = handshake::read_message(&mut line);
        let (group, members) = match answer {
            Ok(Answer::Formed { group, members }) => (group, members),
            Ok(Answer::Failed(error)) => return Err(error),
            Ok(Answer::Complete) | Err(_) => {
                self.check()?;
                let fact = match Instant::now() >= limit {
                    true => NotFormed::NoRoster,
                    false => NotFormed::EndedEarly,
                };
                return Err(Error::from(fact).blaming(0, rendezvous));
            }
        };
        if members.len() != self.config.world_size {
            return Err(Breach::RosterSize.into());
        }
        self.group = group;
        self.own_state.has_agreed(group);
        self.bootstrap = Bootstrap::Member(Coordinator::new(
            stream,
            members[0].host.clone(),
            conversation_limit,
        ));
        Ok((listener, self.roster(members)))
    }

    fn roster(&self, mut members: Vec<RosterMember>) -> Roster {
        let address = &mut members[0].address;
        if address.is_empty() {
            address.clone_from(&self.config.rendezvous);
        }
        Roster::new(members)
    }

    /// Waits until all ranks are connected with each other.
    fn await_others(&mut self) -> Result<()> {
        let conversation_limit = match self.bootstrap {
            Bootstrap::Coordinator(_) => READY_GRACE,
            _ => self.config.conversation_limit(),
        };
        self.bootstrap.be_ready();
        loop {
            self.check()?;
            if self.bootstrap.is_complete() {
                return Ok(());
            }
            if Instant::now() >= self.deadline + conversation_limit {
                return Err(self.bootstrap.late());
            }
            self.bootstrap.wait(INTERRUPT_INTERVAL);
        }
    }

    fn joined(&self) -> &BTreeMap<usize, Joined> {
        static NONE: BTreeMap<usize, Joined> = BTreeMap::new();
        match &self.bootstrap {
            Bootstrap::Coordinator(joined) => joined,
            _ => &NONE,
        }
    }

    /// Listens at `host:port`, on the chosen interface if there is one.
    fn open_listener(&mut self, address: &str) -> Result<GroupListener> {
        if let Some(socket) = &self.config.socket {
            return GroupListener::reopen(socket, self.access());
        }
        let address = self.on_interface(address);
        let resolved = look_up(&address, self.resolve, self.deadline, self)?;
        GroupListener::open(&address, resolved, self.access())
    }

    /// Listens at the first free port of those allowed, on the chosen interface or else on `ip`.
    fn open_listener_at(&self, ip: IpAddr) -> Result<GroupListener> {
        let ip = self.config.interface.unwrap_or(ip);
        let (first, last) = self.config.ports.unwrap_or((0, 0));
        let addresses = (first..=last).map(|port| SocketAddr::new(ip, port));
        let mut words = SocketAddr::new(ip, first).to_string();
        if last > first {
            words = format!("{words} to {last}");
        }
        GroupListener::open(&words, Ok(addresses.collect()), self.access())
    }

    /// Replaces the host in `host:port` by the chosen interface, if there is one.
    fn on_interface(&self, address: &str) -> String {
        let port = address
            .rsplit_once(':')
            .and_then(|(_, port)| port.parse().ok());
        match (self.config.interface, port) {
            (Some(interface), Some(port)) => SocketAddr::new(interface, port).to_string(),
            _ => address.into(),
        }
    }

    /// Address that others should use for a listener: the one that the user announces, if there is
    /// one. Certificates are for names, so with TLS the name in `listen` will do, too.
    fn announced(&self, listener: SocketAddr, own_ip: IpAddr) -> String {
        let Config {
            listen,
            announce,
            interface,
            tls,
            ..
        } = self.config;
        if let Some(announce) = announce {
            return announce.clone();
        }
        let name = listen.as_ref().and_then(|listen| listen.rsplit_once(':'));
        match name {
            Some((name, _))
                if tls.is_some()
                    && interface.is_none()
                    && tls::host_of(name).parse::<IpAddr>().is_err() =>
            {
                format!("{name}:{}", listener.port())
            }
            _ if listener.ip().is_unspecified() => {
                SocketAddr::new(own_ip, listener.port()).to_string()
            }
            _ => listener.to_string(),
        }
    }

    fn access(&self) -> Arc<GroupAccess> {
        GroupAccess::new(self.config, &self.credentials, &self.own_state)
    }

    /// Returns the next member that connects, or `None` after the deadline.
    fn next_member(&mut self, listener: &GroupListener) -> Result<Option<(Hello, Connection)>> {
        loop {
            match listener.members.recv_timeout(INTERRUPT_INTERVAL) {
                Ok(member) => return Ok(Some(member)),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    self.check()?;
                }
            }
            listener.port.check()?;
            if Instant::now() >= self.deadline {
                return Ok(None);
            }
        }
    }

    /// Warns people of a long wait, after `stall_warning`, twice that, four times and so on.
    fn warn_of_long_wait(&mut self) {
        let waited = self.started.elapsed();
        if waited < self.warn_after {
            return;
        }
        self.warn_after *= 2;
        let Config {
            rank,
            world_size,
            rendezvous,
            ..
        } = self.config;
        let (late, named) = (self.late(), missing::NAMED_MAX);
        let waits = match (&self.bootstrap, late.as_slice()) {
            (Bootstrap::Coordinator(_), []) => "all ranks, which have joined, to connect".into(),
            (Bootstrap::Coordinator(_), late) => {
                let names: Vec<_> = late.iter().take(named).map(usize::to_string).collect();
                let ranks = listed_ranks(&names, late.len() - names.len());
                format!("{ranks} of {world_size} to join")
            }
            _ => format!("the group to form at {rendezvous}; the log of rank 0 says who is late"),
        };
        (self.config.on_warning)(format!(
            "rank {rank} on {} has waited {:.0} s for {waits}",
            host_name(),
            waited.as_secs_f64()
        ));
    }

    fn go_on_or_abort(&mut self) -> Result<()> {
        if !self.interrupt.interrupts() {
            return Ok(());
        }
        Err(interrupted(self.config.rank))
    }
}

impl Cancellation for Forming<'_> {
    fn check(&mut self) -> Result<()> {
        self.warn_of_long_wait();
        if self.given_up.is_none() {
            self.given_up = self
                .go_on_or_abort()
                .and_then(|()| self.bootstrap.poll())
                .err();
        }
        self.given_up.clone().map_or(Ok(()), Err)
    }
}

/// Returns the settings in which two texts differ, from each text.
fn what_differs(theirs: &str, ours: &str) -> (String, String) {
    let (theirs, ours): (Vec<_>, Vec<_>) =
        (theirs.split(", ").collect(), ours.split(", ").collect());
    let without = |these: &[&str], others: &[&str]| {
        let these = these.iter().filter(|setting| !others.contains(setting));
        these.copied().collect::<Vec<_>>().join(", ")
    };
    (without(&theirs, &ours), without(&ours, &theirs))
}

/// Error of a rank that was interrupted while its group forms.
pub(crate) fn interrupted(rank: usize) -> Error {
    Error::from(Abort::InterruptedForming).blaming(rank, host_name())
}

/// Checks that the interface of a loopback address is up. In a new namespace it is down, and no
/// rank can connect.
pub fn check_loopback(address: &str) -> Result<()> {
    let local = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let name = address.strip_prefix("localhost:");
    let named = name.and_then(|port| port.parse().ok()).map(local);
    let Some(at) = named.or(address.parse().ok()) else {
        return Ok(());
    };
    // `connect` on a UDP socket sends no packet; it only checks that a route exists.
    match UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).and_then(|socket| socket.connect(at)) {
        Err(error)
            if at.ip() == Ipv4Addr::LOCALHOST
                && error.kind() == std::io::ErrorKind::NetworkUnreachable =>
        {
            let (address, error) = (address.into(), Text::of(error));
            Err(NotFormed::NoLoopback { address, error }.into())
        }
        _ => Ok(()),
    }
}

fn socket_fails(error: &std::io::Error) -> Error {
    Error::out_of_resources(error, "cannot make a connection").unwrap_or_else(|| {
        let error = Text::of(error);
        NotFormed::Socket { error }.into()
    })
}

#[cfg(test)]
mod tests;
