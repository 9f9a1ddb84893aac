//! This process in an elastic job: agrees with the others on the members of the next group, and forms
//! it with them.
//!
//! [`Participant::next_group`] is the way from one group to the next. [`Member`] decides who is in it;
//! a thread does what it says. The process listens at one address for as long as it is in the job,
//! also while it has no group, so an address that refuses proves a death. Each group takes that
//! listener's place, and gives it back when it has ended.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::ops::RangeInclusive;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::thread;
use std::time::{Duration, Instant};

use crate::communicator::Communicator;
use crate::forming::access::GroupAccess;
use crate::forming::listener::GroupListener;
use crate::forming::membership::{self, Answers};
use crate::observe::own_state::OwnState;
use gradring_net::caller::{Caller, INTERRUPT_INTERVAL, Interrupt};
use gradring_net::config::Config;
use gradring_net::host::host_name;
use gradring_net::link::forks::Process;
use gradring_net::session::connect::resolve;
use gradring_net::session::credentials::Credentials;
use gradring_net::session::listener::bind;
use gradring_proto::collective::Request;
use gradring_proto::consensus::member::Member;
use gradring_proto::consensus::message::{Envelope, Outcome, Reply, Step};
use gradring_proto::consensus::quorum::{Id, Peer, Roster};
use gradring_proto::consensus::timing::Timing;
use gradring_proto::error::{Abort, Error, ErrorKind, NotFormed, Result, SURVIVABLE};
use gradring_proto::lock::{self, lock};
use gradring_proto::settings::wrong;
use gradring_proto::wire::handshake;

mod member_client;

use member_client::MemberClient;

/// A request's thread needs little stack, even to check certificates.
const REQUEST_STACK_BYTES: usize = 512 << 10;

/// Why others form a new group is told in the group that they leave, which may take longer than the
/// call: so long a group may go on to hear of it.
const CAUSE_PATIENCE: Duration = Duration::from_millis(500);

/// What happens on the way to the next group.
pub enum Event<'a> {
    /// The last group is left, and the others hear of it.
    Left,
    /// It has agreed on a group with others, and connects.
    Agreed {
        /// The others have gone on without it, so that its state is of another history.
        joins_again: bool,
    },
    /// That group has not formed; another one is tried.
    NotFormed(&'a Error),
}

/// Who waits for the next group.
pub trait Owner: Caller {
    /// Something has happened; `false` gives up.
    fn hears(&mut self, event: Event<'_>) -> bool;
}

/// Because of whom a group could not be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Blamed {
    Nobody,
    Rank(usize),
    /// Of those that were not in the last group that counted.
    Newcomers,
}

impl Blamed {
    /// Of a group that has not formed.
    fn of(error: &Error) -> Self {
        match &error.kind {
            kind if SURVIVABLE.contains(&kind.exception()) => Self::Nobody,
            // Who has ended its connection can be reached.
            ErrorKind::Rendezvous(
                NotFormed::Busy
                | NotFormed::OtherGeneration { .. }
                | NotFormed::OtherGroup { .. }
                | NotFormed::NoGroupYet { .. }
                | NotFormed::HandshakeBroke { .. }
                | NotFormed::CoordinatorEnded
                | NotFormed::MemberEnded
                | NotFormed::EndedEarly
                | NotFormed::LinkBroke { .. },
            ) => Self::Nobody,
            ErrorKind::Rendezvous(_) => {
                let blamed = error.blamed.as_ref();
                blamed.map_or(Self::Newcomers, |blamed| Self::Rank(blamed.rank))
            }
            // Such as other settings: the members of the group before had the same.
            _ => Self::Newcomers,
        }
    }
}

/// This process in an elastic job, until it leaves.
pub struct Participant {
    shared: Arc<Shared>,
    /// The process that has the thread; a fork of it has none.
    process: Process,
}

struct Shared {
    /// Of all of its groups, but for its place in them.
    config: Config,
    client: MemberClient,
    timing: Timing,
    /// How many members a group may have.
    workers: RangeInclusive<usize>,
    /// Open until its participant is dropped: threads that still ask others do not keep it.
    socket: Mutex<Option<Arc<TcpListener>>>,
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
    outcome: Option<Result<Option<Roster>>>,
    /// As whom it was in its last group, or has tried to connect one.
    agreed_as: Option<Id>,
    /// The group that counts.
    group: Weak<Communicator>,
    /// Where the members of the last group that counted listen.
    known: Vec<String>,
    /// Since when others want to form a new group, while that one has not failed here.
    reconfigures_since: Option<Instant>,
    /// Something has happened since the thread has looked.
    is_news: bool,
    has_left: bool,
    /// It has the state of the training: it is to found the job, or was in a group that counted, and
    /// the others have not gone on without it.
    has_state: bool,
}

impl Participant {
    /// A process that listens where it does for its group, or if it has none where `config` says. It
    /// wants to be in the job of which a member listens at one of these addresses; without addresses,
    /// it is to found one. It waits so long for enough workers.
    ///
    /// # Errors
    /// `Config` or `Rendezvous` if it cannot listen; `Exhausted` if the system has no room for a thread.
    pub fn new(
        config: &Config,
        group: Option<&Communicator>,
        addresses: &[String],
        workers: RangeInclusive<usize>,
        worker_timeout: Duration,
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
                workers: worker_timeout,
                ..Timing::default()
            },
            workers,
            socket: Mutex::new(Some(Arc::new(socket))),
            address,
            progress: Mutex::new(Progress {
                id: Id(handshake::random()?),
                member: None,
                outcome: None,
                agreed_as: None,
                group: Weak::new(),
                known: Vec::new(),
                reconfigures_since: None,
                is_news: false,
                has_left: false,
                has_state: addresses.is_empty(),
            }),
            changed: Condvar::new(),
            between: Mutex::default(),
        });
        let answers: Arc<dyn Answers> = Arc::clone(&shared) as _;
        membership::register(&answers);
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
        if !addresses.is_empty() {
            let addresses = addresses.to_vec();
            shared.become_member(lock(&shared.progress), |me, timing, workers| {
                Member::joining(me, addresses, timing, workers, Instant::now())
            });
        }
        let process = Process::this();
        Ok(Self { shared, process })
    }

    /// Who this is, and where others reach it.
    #[must_use]
    pub fn peer(&self) -> Peer {
        self.shared.peer(lock(&self.shared.progress).id)
    }

    /// It is in the first group, of these, by rank, which counts as this generation.
    pub fn found(&self, peers: Vec<Peer>, generation: u64) {
        let mut roster = Roster::founding(peers);
        roster.ballot.round = generation;
        let mut progress = lock(&self.shared.progress);
        progress.agreed_as = Some(progress.id);
        (self.shared).become_member(progress, |me, timing, workers| {
            Member::founding(me, roster, timing, workers)
        });
    }

    /// Leaves the last group, unless it is yet to be in one, and forms the next one with others; none
    /// if all have come to the end of the training. What does not form is tried again, until `owner`
    /// gives up. Those that were not in the last group that counted are left out if the last one has
    /// come to nothing because of them: `newcomers_failed`. Returns where its first rank listens, too.
    ///
    /// # Errors
    /// `Membership` if there is none with this process; `Aborted` when it has left meanwhile, or when
    /// `owner` gave up; why a group has not formed, if that made it give up.
    pub fn next_group(
        &self,
        last: &Communicator,
        newcomers_failed: bool,
        owner: &mut dyn Owner,
    ) -> Result<Option<(Arc<Communicator>, String)>> {
        if lock(&self.shared.progress).agreed_as.is_some() {
            last.close();
            let blamed = if newcomers_failed {
                Blamed::Newcomers
            } else {
                Blamed::Nobody
            };
            self.reform(blamed, owner)?;
        }
        loop {
            let Some(config) = self.agree(owner)? else {
                // One knew it before the group failed, and others may not know yet.
                self.finish();
                return Ok(None);
            };
            let mut or_reconfigured = || owner.interrupts() || self.must_reconfigure();
            let error = match Communicator::connect(&config, &mut or_reconfigured) {
                Ok(group) => return Ok(Some((group, config.rendezvous))),
                Err(error) => error,
            };
            if !owner.hears(Event::NotFormed(&error)) {
                return Err(error);
            }
            self.reform(Blamed::of(&error), owner)?;
        }
    }

    /// Makes way for another group.
    fn reform(&self, blamed: Blamed, owner: &mut dyn Owner) -> Result<()> {
        self.shared.listen_between()?;
        let mut progress = lock(&self.shared.progress);
        progress.group = Weak::new();
        progress.reconfigures_since = None;
        progress.outcome = None;
        let Progress { member, known, .. } = &mut *progress;
        if let Some(member) = member {
            let roster = member.view().map(|place| &place.roster.members);
            let peers = roster.into_iter().flatten().enumerate();
            let peers = peers.filter(|(rank, peer)| match blamed {
                Blamed::Nobody => false,
                Blamed::Rank(one) => *rank == one,
                Blamed::Newcomers => !known.contains(&peer.address),
            });
            let ids: Vec<_> = peers.map(|(_, peer)| peer.id).collect();
            member.reform(&ids, Instant::now());
        }
        self.shared.tell(progress);
        goes_on(owner.hears(Event::Left))
    }

    /// Waits for an agreement on a group, and returns this process's place in it.
    fn agree(&self, owner: &mut dyn Owner) -> Result<Option<Config>> {
        loop {
            let waits = |progress: &mut Progress| progress.outcome.is_none() && !progress.has_left;
            let progress = lock(&self.shared.progress);
            let mut progress =
                lock::wait_while(&self.shared.changed, progress, INTERRUPT_INTERVAL, waits);
            if let Some(outcome) = progress.outcome.take() {
                let Some(roster) = outcome? else {
                    return Ok(None);
                };
                let id = progress.id;
                let before = progress.agreed_as.replace(id);
                drop(progress);
                let joins_again = before.is_some_and(|before| before != id);
                goes_on(owner.hears(Event::Agreed { joins_again }))?;
                return Ok(Some(self.shared.config_in(&roster, id)));
            }
            if progress.has_left {
                return Err(Abort::Closed.into());
            }
            drop(progress);
            goes_on(!owner.interrupts())?;
        }
    }

    /// Whether it brings the state of the training into its group.
    #[must_use]
    pub fn has_state(&self) -> bool {
        lock(&self.shared.progress).has_state
    }

    /// Waits until each member of the group has the state of the training. From then on it counts.
    ///
    /// # Errors
    /// As for `Engine::run`.
    pub fn establish(&self, group: &Arc<Communicator>, interrupt: Interrupt<'_>) -> Result<()> {
        group.engine.run(Request::barrier(), interrupt)?;
        let mut progress = lock(&self.shared.progress);
        progress.group = Arc::downgrade(group);
        progress.has_state = true;
        if let Some(member) = &mut progress.member {
            member.connected();
            let roster = member.view().map(|place| &place.roster.members);
            let members = roster.into_iter().flatten();
            progress.known = members.map(|it| it.address.clone()).collect();
        }
        self.shared.tell(progress);
        Ok(())
    }

    /// Whether others want to form a new group: this one is to be left.
    fn must_reconfigure(&self) -> bool {
        let progress = lock(&self.shared.progress);
        progress
            .member
            .as_ref()
            .is_some_and(Member::must_reconfigure)
    }

    /// Because of whom others form a new group, and why.
    #[must_use]
    pub fn reconfigured_by(&self) -> Option<String> {
        let progress = lock(&self.shared.progress);
        progress.member.as_ref().and_then(Member::reconfigured_by)
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
            drop(lock::take(&self.shared.between));
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
        drop(lock::take(&self.shared.between));
        drop(lock::take(&self.shared.socket));
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

    fn become_member(
        &self,
        mut progress: MutexGuard<'_, Progress>,
        member: impl FnOnce(Peer, Timing, RangeInclusive<usize>) -> Member,
    ) {
        let me = self.peer(progress.id);
        progress.member = Some(member(me, self.timing.clone(), self.workers.clone()));
        self.tell(progress);
    }

    /// The configuration of the process of this id in a group that was agreed on.
    fn config_in(&self, roster: &Roster, id: Id) -> Config {
        let members = roster.members.iter();
        let addresses: Vec<_> = members.map(|it| it.address.clone()).collect();
        let mut config = Config {
            rank: roster.position(id).expect("nobody connects without itself"),
            world_size: addresses.len(),
            rendezvous: addresses[0].clone(),
            generation: u32::try_from(roster.generation()).unwrap_or(u32::MAX),
            listen: Some(self.address.clone()),
            announce: Some(self.address.clone()),
            addresses,
            socket: lock(&self.socket).clone(),
            ..self.config.clone()
        };
        config.settings.timeout = self.timing.connect;
        config
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
        let is_outside = !lock(&self.progress).has_state;
        // One that a group has taken over is closed already.
        drop(lock::take(&self.between));
        let own_state = Arc::new(OwnState::between_groups(is_outside));
        let access = GroupAccess::new(&self.config, &self.client.credentials, &own_state);
        let socket = lock(&self.socket).clone().ok_or(Abort::Closed)?;
        let listener = GroupListener::reopen(&socket, access)?;
        // Another thread may have opened one meanwhile, which this one has closed.
        let earlier = lock(&self.between).replace(listener);
        drop(earlier);
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
                    progress.outcome = Some(Ok(Some(roster)));
                    self.changed.notify_all();
                }
                Step::Finished => {
                    progress.outcome = Some(Ok(None));
                    self.changed.notify_all();
                }
                Step::Excluded => match handshake::random().map(Id) {
                    Ok(id) => {
                        progress.id = id;
                        progress.has_state = false;
                        let member = progress.member.take();
                        progress.member = member.map(|member| member.rejoining(id, now));
                    }
                    Err(error) => progress.outcome = Some(Err(error)),
                },
                Step::Failed(error) => {
                    let place = progress.member.as_ref().and_then(Member::view);
                    let rank = place.and_then(|place| place.roster.position(progress.id));
                    progress.outcome = Some(Err(match rank {
                        Some(rank) => error.blaming(rank, host_name()),
                        None => error,
                    }));
                    self.changed.notify_all();
                }
                Step::Wait(until) => {
                    let group = self.group_to_leave(&progress);
                    let patient_until = group
                        .as_ref()
                        .map(|_| *progress.reconfigures_since.get_or_insert(now) + CAUSE_PATIENCE);
                    if let Some(group) = group.filter(|_| patient_until <= Some(now)) {
                        let call = progress.member.as_ref().and_then(Member::reconfigured_by);
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
    fn group_to_leave(&self, progress: &Progress) -> Option<Arc<Communicator>> {
        let must_reconfigure = progress
            .member
            .as_ref()
            .is_some_and(Member::must_reconfigure);
        let group = progress.group.upgrade().filter(|_| must_reconfigure)?;
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

fn goes_on(does: bool) -> Result<()> {
    does.then_some(())
        .ok_or_else(|| Abort::InterruptedForming.into())
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
        let wanted = "an address at which processes that join can reach this one";
        wrong("listen", "", wanted)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two processes that have founded a job; each is alone in a group of its own.
    fn founders() -> [Participant; 2] {
        let both = [(); 2].map(|()| {
            let mut config = Config::new(0, 1, "");
            config.listen = Some("127.0.0.1:0".into());
            Participant::new(&config, None, &[], 1..=2, Duration::from_secs(60)).unwrap()
        });
        for participant in &both {
            participant.found(both.iter().map(Participant::peer).collect(), 1);
        }
        both
    }

    /// Gives up where a group has not formed, and keeps what has happened.
    #[derive(Default)]
    struct Notes(Vec<&'static str>);

    impl Caller for Notes {
        fn interrupts(&mut self) -> bool {
            false
        }
    }

    impl Owner for Notes {
        fn hears(&mut self, event: Event<'_>) -> bool {
            self.0.push(match event {
                Event::Left => "left",
                Event::Agreed { joins_again: false } => "agreed",
                Event::Agreed { joins_again: true } => "joins again",
                Event::NotFormed(_) => return false,
            });
            true
        }
    }

    #[test]
    fn its_port_is_free_when_it_has_gone_also_while_a_request_waits_for_an_answer() {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut config = Config::new(0, 1, "");
        config.listen = Some("127.0.0.1:0".into());
        let asked = [silent.local_addr().unwrap().to_string()];
        let limit = Duration::from_secs(60);
        let joins = Participant::new(&config, None, &asked, 1..=2, limit).unwrap();
        let address = joins.peer().address;
        let (_request, _) = silent.accept().unwrap();
        drop(joins);
        TcpListener::bind(address).unwrap();
    }

    #[test]
    fn those_that_leave_their_group_form_the_next_one_and_it_counts_when_all_have_the_state() {
        let alone = Communicator::connect(&Config::new(0, 1, ""), &mut || false).unwrap();
        let form = |participant: &Participant| {
            let mut notes = Notes::default();
            let formed = participant.next_group(&alone, false, &mut notes).unwrap();
            let (group, rendezvous) = formed.unwrap();
            participant.establish(&group, &mut || false).unwrap();
            assert_eq!(notes.0, ["left", "agreed"]);
            assert!(participant.has_state());
            (group, rendezvous)
        };
        let both = founders();
        let found = thread::scope(|scope| {
            let ways = both.each_ref().map(|one| scope.spawn(|| form(one)));
            ways.map(|way| way.join().unwrap())
        });
        let first = both[0].peer().address;
        for (rank, (group, rendezvous)) in found.iter().enumerate() {
            assert!(group.generation > 1);
            assert_eq!((group.rank, group.world_size()), (rank, 2));
            assert_eq!(*rendezvous, first);
        }
    }

    #[test]
    fn who_has_been_reached_is_not_to_blame_nor_is_a_loss_of_others() {
        let of = |error: Error| Blamed::of(&error.blaming(1, "host"));
        assert_eq!(of(NotFormed::MemberEnded.into()), Blamed::Nobody);
        assert_eq!(of(Abort::InterruptedForming.into()), Blamed::Nobody);
        let silent = || Error::from(NotFormed::LinkSilent { rank: 0 });
        assert_eq!(of(silent()), Blamed::Rank(1));
        assert_eq!(Blamed::of(&silent()), Blamed::Newcomers);
        let settings = gradring_proto::error::Unusable::NoSuchSetting { name: "x".into() };
        assert_eq!(of(settings.into()), Blamed::Newcomers);
    }

    #[test]
    fn two_that_leave_at_the_same_time_do_not_wait_for_each_other() {
        let both = founders();
        for participant in &both {
            // As when the group that had taken its place is closed: connections wait unanswered.
            drop(lock::take(&participant.shared.between));
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
