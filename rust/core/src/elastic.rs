//! This process in an elastic job: agrees with the others on the members of the next group.
//!
//! [`Member`] decides; a thread does what it says. The process listens at one address for as long as
//! it is in the job, also while it has no group, so an address that refuses proves a death. Each
//! group takes that listener's place, and gives it back when it has ended.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::ops::RangeInclusive;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::thread;
use std::time::{Duration, Instant};

use crate::agreement::member::Member;
use crate::agreement::message::{Envelope, Outcome, Reply, Step};
use crate::agreement::quorum::{Id, Peer, Roster};
use crate::agreement::timing::Timing;
use crate::caller::{INTERRUPT_INTERVAL, Interrupt};
use crate::communicator::Communicator;
use crate::config::Config;
use crate::error::{Abort, Error, ErrorKind, NotFormed, Result, Unusable};
use crate::forming::access::GroupAccess;
use crate::forming::listener::GroupListener;
use crate::forming::members::{self, Answers};
use crate::host::host_name;
use crate::link::forks::Process;
use crate::lock::{self, lock};
use crate::observe::own_state::OwnState;
use crate::session::connect::resolve;
use crate::session::credentials::Credentials;
use crate::session::listener::bind;
use crate::wire::handshake;

mod member_client;

use member_client::MemberClient;

/// A request's thread needs little stack, even to check certificates.
const REQUEST_STACK_BYTES: usize = 512 << 10;

/// Why others form a new group is told in the group that they leave, which may take longer than the
/// call: so long a group may go on to hear of it.
const CAUSE_PATIENCE: Duration = Duration::from_millis(500);

/// A group that was agreed on, and this process's place in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Agreed {
    /// Its generation.
    pub generation: u32,
    /// This process's index.
    pub rank: usize,
    /// Where each member listens, by rank.
    pub addresses: Vec<String>,
}

/// This process in an elastic job, until it leaves.
pub struct Participant {
    shared: Arc<Shared>,
    /// The process that has the thread; a fork of it has none.
    process: Process,
}

struct Shared {
    config: Config,
    client: MemberClient,
    timing: Timing,
    /// Open for as long as this is.
    socket: Arc<TcpListener>,
    /// Where others reach it.
    address: String,
    progress: Mutex<Progress>,
    changed: Condvar,
    /// Open while there is no group, and for others that leave when this has left.
    between: Mutex<Option<GroupListener>>,
}

struct Progress {
    id: Id,
    /// Nothing before it has founded or would join.
    member: Option<Member>,
    /// What the member has come to, until the owner asks.
    outcome: Option<Result<Option<Agreed>>>,
    /// The group that is connected.
    group: Weak<Communicator>,
    /// Since when others want to form a new group, while that one has not failed here.
    called_since: Option<Instant>,
    /// Another member had heard sooner that the group will not form.
    was_given_up: bool,
    /// Something has happened since the thread has looked.
    is_news: bool,
    has_left: bool,
    /// It would join, and has not been in a group.
    is_outside: bool,
}

impl Participant {
    /// A process that listens where it does for its group, or if it has none where `config` says; others
    /// are found at `addresses`. It waits so long for enough workers.
    ///
    /// # Errors
    /// `Config` or `Rendezvous` if it cannot listen; `Exhausted` if the system has no room for a thread.
    pub fn new(
        config: &Config,
        group: Option<&Communicator>,
        addresses: &[String],
        patience: Duration,
    ) -> Result<Self> {
        let credentials = Credentials::of(config)?;
        let listening = group.and_then(Communicator::listening);
        let (socket, address) = match listening {
            Some(found) => found?,
            None => listen(config, addresses)?,
        };
        let shared = Arc::new(Shared {
            config: config.clone(),
            client: MemberClient { credentials },
            timing: Timing {
                workers: patience,
                ..Timing::default()
            },
            socket: Arc::new(socket),
            address,
            progress: Mutex::new(Progress {
                id: Id(handshake::random()?),
                member: None,
                outcome: None,
                group: Weak::new(),
                called_since: None,
                was_given_up: false,
                is_news: false,
                has_left: false,
                is_outside: !addresses.is_empty(),
            }),
            changed: Condvar::new(),
            between: Mutex::default(),
        });
        let answers: Arc<dyn Answers> = Arc::clone(&shared) as _;
        members::register(&answers);
        if group.is_none_or(|group| group.world_size() == 1) {
            shared.listen_between()?;
        }
        thread::Builder::new()
            .name("gradring-members".into())
            .spawn({
                let shared = Arc::clone(&shared);
                move || shared.run()
            })
            .map_err(|error| Error::no_thread(&error))?;
        let process = Process::this();
        Ok(Self { shared, process })
    }

    /// Who this is, and where others reach it.
    #[must_use]
    pub fn peer(&self) -> Peer {
        self.shared.peer(lock(&self.shared.progress).id)
    }

    /// It is in the first group, of these, by rank, which counts as this generation.
    pub fn found(&self, peers: Vec<Peer>, generation: u64, workers: RangeInclusive<usize>) {
        let mut roster = Roster::founding(peers);
        roster.ballot.round = generation;
        self.shared
            .become_member(|me, timing, _| Member::founding(me, roster, timing, workers));
    }

    /// It wants to be in the group of the job of which a member listens at one of these addresses.
    pub fn join(&self, addresses: Vec<String>, workers: RangeInclusive<usize>) {
        self.shared
            .become_member(|me, timing, now| Member::joining(me, addresses, timing, workers, now));
    }

    /// Waits for the next group; there is none if another member says that the training is over.
    ///
    /// # Errors
    /// `Membership` if there is none with this process; `Aborted` when it has left meanwhile, or when
    /// `interrupt` asked to give up.
    pub fn agree(&self, interrupt: Interrupt<'_>) -> Result<Option<Agreed>> {
        loop {
            let waits = |progress: &mut Progress| progress.outcome.is_none() && !progress.has_left;
            let progress = lock(&self.shared.progress);
            let mut progress =
                lock::wait_while(&self.shared.changed, progress, INTERRUPT_INTERVAL, waits);
            if let Some(outcome) = progress.outcome.take() {
                return outcome;
            }
            if progress.has_left {
                return Err(Abort::Closed.into());
            }
            drop(progress);
            if interrupt.interrupts() {
                return Err(Abort::InterruptedForming.into());
            }
        }
    }

    /// Makes `config` that of a group that was agreed on.
    pub fn prepare(&self, agreed: &Agreed, config: &mut Config) {
        let shared = &self.shared;
        config.rank = agreed.rank;
        config.world_size = agreed.addresses.len();
        config.rendezvous.clone_from(&agreed.addresses[0]);
        config.generation = agreed.generation;
        config.listen = Some(shared.address.clone());
        config.announce = Some(shared.address.clone());
        config.addresses.clone_from(&agreed.addresses);
        config.socket = Some(Arc::clone(&shared.socket));
        config.settings.timeout = shared.timing.connect;
    }

    /// The group is connected, and each of its members has the state of the training.
    pub fn connected(&self, group: &Arc<Communicator>) {
        let mut progress = lock(&self.shared.progress);
        progress.group = Arc::downgrade(group);
        progress.is_outside = false;
        if let Some(member) = &mut progress.member {
            member.connected();
        }
        self.shared.tell(progress);
    }

    /// The group could not form. Who has ended its connection can be reached, and need not be kept apart.
    pub fn not_formed(&self, error: &Error) {
        lock(&self.shared.progress).was_given_up = matches!(
            error.kind,
            ErrorKind::Rendezvous(
                NotFormed::Busy
                    | NotFormed::OtherGeneration { .. }
                    | NotFormed::OtherGroup { .. }
                    | NotFormed::NoGroupYet { .. }
                    | NotFormed::HandshakeBroke { .. }
                    | NotFormed::CoordinatorEnded
                    | NotFormed::MemberEnded
                    | NotFormed::EndedEarly
                    | NotFormed::LinkBroke { .. }
            )
        );
    }

    /// The group has failed, or is left so that others can join, or could not connect with these ranks.
    ///
    /// # Errors
    /// `Rendezvous` or `Exhausted` if it cannot go on listening.
    pub fn reform(&self, unreached: &[usize]) -> Result<()> {
        self.shared.listen_between()?;
        let mut progress = lock(&self.shared.progress);
        progress.group = Weak::new();
        progress.called_since = None;
        progress.outcome = None;
        let was_given_up = std::mem::take(&mut progress.was_given_up);
        let unreached = if was_given_up { &[] } else { unreached };
        if let Some(member) = &mut progress.member {
            let roster = member.standpoint().map(|place| &place.roster.members);
            let peers = roster.into_iter().flatten().enumerate();
            let peers = peers.filter(|(rank, _)| unreached.contains(rank));
            let ids: Vec<_> = peers.map(|(_, peer)| peer.id).collect();
            member.reform(&ids, Instant::now());
        }
        self.shared.tell(progress);
        Ok(())
    }

    /// Whether others want to form a new group: this one is to be left.
    #[must_use]
    pub fn is_called(&self) -> bool {
        let progress = lock(&self.shared.progress);
        progress.member.as_ref().is_some_and(Member::is_called)
    }

    /// Who has called, and why.
    #[must_use]
    pub fn call(&self) -> Option<String> {
        let progress = lock(&self.shared.progress);
        progress.member.as_ref().and_then(Member::call)
    }

    /// Where the processes listen that wait to join.
    #[must_use]
    pub fn joiners(&self) -> Vec<String> {
        let progress = lock(&self.shared.progress);
        let members = progress.member.iter();
        let now = Instant::now();
        members
            .flat_map(|member| member.joiners(now).map(|joiner| joiner.address.clone()))
            .collect()
    }

    /// Leaves the job for good, unless it has; if it `tells` the others, they need not wait for it. In
    /// a fork, nothing is to be done: the parent stays.
    pub fn leave(&self, tells: bool) {
        self.end(|member| {
            let farewells = member.leave();
            if tells { farewells } else { Vec::new() }
        });
    }

    /// All members of its group have come to the end of the training, and the group has failed since:
    /// tells them, as some may not know and would form another group.
    pub fn finish(&self) {
        self.end(Member::finish);
    }

    fn end(&self, farewell: impl FnOnce(&mut Member) -> Vec<(String, Envelope)>) {
        if !self.process.is_this() {
            return;
        }
        let mut progress = lock(&self.shared.progress);
        if progress.has_left {
            return;
        }
        let farewells = progress.member.as_mut().map(farewell).unwrap_or_default();
        progress.has_left = true;
        self.shared.tell(progress);
        if farewells.is_empty() {
            lock(&self.shared.between).take();
            return;
        }
        // Others may leave now, too: each would wait for an answer that nobody gives. If it cannot be
        // given, they wait for their limit.
        drop(self.shared.listen_between());
        let sent = farewells.into_iter().map(|(address, envelope)| {
            let shared = Arc::clone(&self.shared);
            thread::Builder::new()
                .stack_size(REQUEST_STACK_BYTES)
                .spawn(move || shared.ask(&address, &envelope))
        });
        let sent: Vec<_> = sent.collect();
        for farewell in sent.into_iter().flatten() {
            // One that does not hear it finds nobody at the address.
            drop(farewell.join());
        }
    }
}

impl Drop for Participant {
    fn drop(&mut self) {
        if !self.process.is_this() {
            return;
        }
        lock(&self.shared.progress).has_left = true;
        self.shared.changed.notify_all();
        lock(&self.shared.between).take();
    }
}

impl Answers for Shared {
    fn job(&self) -> &str {
        &self.client.credentials.job
    }

    fn answer(&self, envelope: &Envelope) -> Reply {
        let mut progress = lock(&self.progress);
        let is_meant = envelope.to.is_none_or(|to| to == progress.id);
        let Some(member) = &mut progress.member else {
            return match envelope.to {
                // Others have founded already.
                Some(_) if is_meant => Reply::Busy,
                Some(_) => Reply::OtherProcess,
                None => Reply::Noted(Vec::new()),
            };
        };
        let reply = member.answer(envelope, Instant::now());
        self.tell(progress);
        reply
    }
}

impl Shared {
    fn peer(&self, id: Id) -> Peer {
        Peer {
            id,
            address: self.address.clone(),
        }
    }

    fn become_member(&self, member: impl FnOnce(Peer, Timing, Instant) -> Member) {
        let mut progress = lock(&self.progress);
        let me = self.peer(progress.id);
        progress.member = Some(member(me, self.timing.clone(), Instant::now()));
        self.tell(progress);
    }

    fn tell(&self, mut progress: MutexGuard<'_, Progress>) {
        progress.is_news = true;
        drop(progress);
        self.changed.notify_all();
    }

    fn ask(&self, address: &str, envelope: &Envelope) -> Outcome {
        self.client.call(address, envelope, self.timing.request)
    }

    /// Goes on listening, although there is no group.
    fn listen_between(&self) -> Result<()> {
        let is_outside = lock(&self.progress).is_outside;
        let mut between = lock(&self.between);
        // One that a group has taken over is closed already.
        between.take();
        let own_state = Arc::new(OwnState::between_groups(is_outside));
        let access = GroupAccess::new(&self.config, &self.client.credentials, &own_state);
        *between = Some(GroupListener::reopen(&self.socket, access)?);
        Ok(())
    }

    /// Does what the member says, until it has left.
    fn run(self: Arc<Self>) {
        let mut progress = lock(&self.progress);
        while !progress.has_left {
            progress.is_news = false;
            let now = Instant::now();
            let step = match &mut progress.member {
                Some(member) => member.step(now),
                None => Step::Wait(None),
            };
            match step {
                Step::Send(address, envelope) => {
                    drop(progress);
                    self.send(address, envelope);
                    progress = lock(&self.progress);
                }
                Step::Connect(roster) => {
                    progress.outcome = Some(Ok(Some(agreed(&roster, progress.id))));
                    self.changed.notify_all();
                }
                Step::Finished => {
                    progress.outcome = Some(Ok(None));
                    self.changed.notify_all();
                }
                Step::Excluded => match handshake::random().map(Id) {
                    Ok(id) => {
                        progress.id = id;
                        let member = progress.member.take();
                        progress.member = member.map(|member| member.rejoining(id, now));
                    }
                    Err(error) => progress.outcome = Some(Err(error)),
                },
                Step::Failed(error) => {
                    let place = progress.member.as_ref().and_then(Member::standpoint);
                    let rank = place.and_then(|place| place.roster.position(progress.id));
                    progress.outcome = Some(Err(match rank {
                        Some(rank) => error.blaming(rank, host_name()),
                        None => error,
                    }));
                    self.changed.notify_all();
                }
                Step::Wait(until) => {
                    let group = self.called_group(&progress);
                    let patient_until = group
                        .as_ref()
                        .map(|_| *progress.called_since.get_or_insert(now) + CAUSE_PATIENCE);
                    if let Some(group) = group.filter(|_| patient_until <= Some(now)) {
                        let call = progress.member.as_ref().and_then(Member::call);
                        drop(progress);
                        let call = call.unwrap_or_default();
                        group.abort(&format!("other ranks form a new group: {call}"));
                        progress = lock(&self.progress);
                        continue;
                    }
                    let wanted = until.into_iter().chain(patient_until).min();
                    let limit = wanted.map_or(Duration::from_secs(3600), |until| {
                        until.saturating_duration_since(Instant::now())
                    });
                    let waits = |progress: &mut Progress| !progress.is_news && !progress.has_left;
                    progress = lock::wait_while(&self.changed, progress, limit, waits);
                }
            }
        }
    }

    /// The group, if others have left it.
    fn called_group(&self, progress: &Progress) -> Option<Arc<Communicator>> {
        let is_called = progress.member.as_ref().is_some_and(Member::is_called);
        let group = progress.group.upgrade().filter(|_| is_called)?;
        (!group.has_failed()).then_some(group)
    }

    /// Says something to another process in a thread of its own, and tells the member what came of it.
    fn send(self: &Arc<Self>, address: String, envelope: Envelope) {
        let shared = Arc::clone(self);
        let (to, at) = (envelope.to, address.clone());
        let heard = move |shared: &Self, outcome: &Outcome| {
            let mut progress = lock(&shared.progress);
            if let Some(member) = &mut progress.member {
                member.heard(&at, to, outcome, Instant::now());
            }
            shared.tell(progress);
        };
        let later = heard.clone();
        let sent = thread::Builder::new()
            .stack_size(REQUEST_STACK_BYTES)
            .spawn(move || {
                let outcome = shared.ask(&address, &envelope);
                later(&shared, &outcome);
            });
        if sent.is_err() {
            heard(self, &Outcome::Silent);
        }
    }
}

fn agreed(roster: &Roster, id: Id) -> Agreed {
    Agreed {
        generation: u32::try_from(roster.generation()).unwrap_or(u32::MAX),
        rank: roster.position(id).expect("nobody connects without itself"),
        addresses: roster.members.iter().map(|it| it.address.clone()).collect(),
    }
}

/// Opens a port for a process that has no group yet.
fn listen(config: &Config, addresses: &[String]) -> Result<(TcpListener, String)> {
    let wished = config.listen.clone();
    let (words, resolved) = match &wished {
        Some(listen) => (listen.clone(), resolve(listen)),
        None => {
            let ip = config.interface.map_or_else(|| own_ip(addresses), Ok)?;
            let (first, last) = config.ports.unwrap_or((0, 0));
            let ports = (first..=last).map(|port| SocketAddr::new(ip, port));
            (SocketAddr::new(ip, first).to_string(), Ok(ports.collect()))
        }
    };
    let (socket, mut address) = bind(&words, resolved, config.rank)?;
    if address.ip().is_unspecified() && config.listen.is_none() {
        address.set_ip(own_ip(addresses)?);
    }
    let name = wished.and_then(|wished| Some(wished.rsplit_once(':')?.0.to_owned()));
    let own = match name {
        Some(name) => format!("{name}:{}", address.port()),
        None => address.to_string(),
    };
    Ok((socket, config.announce.clone().unwrap_or(own)))
}

/// The address of this host from which it reaches one of these; of IPv4, if there is one.
fn own_ip(addresses: &[String]) -> Result<IpAddr> {
    let toward = |address: &String| {
        let towards = |remote: SocketAddr| {
            let any: IpAddr = match remote {
                SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
                SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
            };
            let socket = UdpSocket::bind((any, 0)).ok()?;
            // Nothing is sent.
            socket.connect(remote).ok()?;
            Some(socket.local_addr().ok()?.ip())
        };
        let mut resolved = resolve(address).ok()?;
        resolved.sort_by_key(SocketAddr::is_ipv6);
        resolved.into_iter().find_map(towards)
    };
    let found = addresses.iter().find_map(toward);
    found.ok_or_else(|| {
        Unusable::Value {
            name: "listen".into(),
            value: "".into(),
            wanted: "an address at which processes that join can reach this one".into(),
        }
        .into()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_that_leave_at_the_same_time_do_not_wait_for_each_other() {
        let both = [(); 2].map(|()| {
            let mut config = Config::new(0, 1, "127.0.0.1:0");
            config.listen = Some("127.0.0.1:0".into());
            Participant::new(&config, None, &[], Duration::from_secs(60)).unwrap()
        });
        for participant in &both {
            participant.found(both.iter().map(Participant::peer).collect(), 1, 1..=2);
            // As when the group that had taken its place is closed: connections wait unanswered.
            lock(&participant.shared.between).take();
        }
        let began = Instant::now();
        thread::scope(|scope| {
            for participant in &both {
                scope.spawn(|| participant.leave(true));
            }
        });
        assert!(began.elapsed() < Timing::default().request);
    }
}
