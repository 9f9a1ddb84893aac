//! The part of one process in an elastic job: it agrees with the others on the members of the next
//! group, and forms that group.
//!
//! [`Participant::next_group`] leads from one group to the next. [`Member`] decides on the
//! membership, and a thread carries out its steps. The process listens at one address for as long
//! as it is in the job, even between groups, so a refused connection proves that the process is
//! dead. Each group takes over the listening socket, and gives it back when the group ends.

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

/// Grace period before a group is aborted for a regroup: the abort that explains the regroup can
/// arrive after the request to regroup.
const CAUSE_PATIENCE: Duration = Duration::from_millis(500);

/// Progress on the way to the next group.
pub enum Event<'a> {
    /// The process has left its last group, and the others are being notified.
    Left,
    /// The process has agreed on a group with others and is about to connect.
    Agreed {
        /// The others continued without this process, so its state belongs to another history.
        joins_again: bool,
    },
    /// That group did not form; the process tries another one.
    NotFormed(&'a Error),
}

/// Observer of the events until the next group: the caller that waits for it.
pub trait Observer: Caller {
    /// Handles an event; returns `false` to give up.
    fn on_event(&mut self, event: Event<'_>) -> bool;
}

/// Members to blame for a group that did not form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Blamed {
    Nobody,
    Rank(usize),
    /// All members that were not in the last established group.
    Newcomers,
}

impl Blamed {
    /// Returns the members to blame for a group that did not form with this error.
    fn of(error: &Error) -> Self {
        match &error.kind {
            kind if SURVIVABLE.contains(&kind.exception()) => Self::Nobody,
            // These errors prove that the peer answers, so nobody is excluded.
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
            // For example different settings: members of the last established group had equal ones.
            _ => Self::Newcomers,
        }
    }
}

/// This process in an elastic job, until it leaves.
pub struct Participant {
    shared: Arc<ParticipantState>,
    /// The process that owns the thread; a fork does not have it.
    process: Process,
}

struct ParticipantState {
    /// Configuration of all groups of this process, except for its place in them.
    config: Config,
    client: MemberClient,
    timing: Timing,
    /// Smallest and largest number of members of a group.
    workers: RangeInclusive<usize>,
    /// Taken when the participant is dropped, because request threads keep this state alive longer.
    socket: Mutex<Option<Arc<TcpListener>>>,
    /// Address at which other processes reach this one.
    address: String,
    progress: Mutex<Progress>,
    changed: Condvar,
    /// Listener between groups; after `leave` it serves others that leave at the same time.
    between: Mutex<Option<GroupListener>>,
}

struct Progress {
    id: Id,
    /// `None` until this process founds or joins the job.
    member: Option<Member>,
    /// Result of the member's negotiation, until [`Participant::agree`] takes it.
    outcome: Option<Result<Option<Roster>>>,
    /// Id under which this process last agreed on a roster, even if that group did not form.
    agreed_as: Option<Id>,
    /// The established group.
    group: Weak<Communicator>,
    /// Addresses of the members of the last established group.
    known: Vec<String>,
    /// Time at which this process first saw others regroup while its own group had not failed.
    reconfigures_since: Option<Instant>,
    /// Set by every change; cleared before the thread takes its next step.
    is_news: bool,
    has_left: bool,
    /// This process has the state of the training. It is to found the job, or was in an established
    /// group and the others have not continued without it.
    has_state: bool,
}

impl Participant {
    /// Takes part in the job of which a member listens at one of `addresses`; without addresses, it
    /// is to found a job. The process listens where it does for `group`, or else where `config`
    /// says. `worker_timeout` bounds the wait for enough workers.
    ///
    /// # Errors
    /// `Config` or `Rendezvous` if it cannot listen; `Exhausted` if the system has no thread left.
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
        let shared = Arc::new(ParticipantState {
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

    /// Id and address of this process.
    #[must_use]
    pub fn peer(&self) -> Peer {
        self.shared.peer(lock(&self.shared.progress).id)
    }

    /// Founds the job: `peers`, by rank, are its first group, and `generation` is the group's
    /// number.
    pub fn found(&self, peers: Vec<Peer>, generation: u64) {
        let mut roster = Roster::founding(peers);
        roster.ballot.round = generation;
        let mut progress = lock(&self.shared.progress);
        progress.agreed_as = Some(progress.id);
        (self.shared).become_member(progress, |me, timing, workers| {
            Member::founding(me, roster, timing, workers)
        });
    }

    /// Leaves the last group, if this process has been in one, and forms the next one. Returns the
    /// group and the address of its first rank, or `None` if all members have finished the
    /// training. Groups that do not form are retried until `observer` gives up. `newcomers_failed`
    /// means that the last group failed because of members that were not in the last established
    /// group; the next group excludes these.
    ///
    /// # Errors
    /// `Membership` if no group has this process in it; `Aborted` if it left meanwhile, or
    /// `observer` gave up. A group that did not form gives its own error if `observer` gave up
    /// because of it.
    pub fn next_group(
        &self,
        last: &Communicator,
        newcomers_failed: bool,
        observer: &mut dyn Observer,
    ) -> Result<Option<(Arc<Communicator>, String)>> {
        if lock(&self.shared.progress).agreed_as.is_some() {
            last.close();
            let blamed = if newcomers_failed {
                Blamed::Newcomers
            } else {
                Blamed::Nobody
            };
            self.reform(blamed, observer)?;
        }
        loop {
            let Some(config) = self.agree(observer)? else {
                // Some member knew of the end before the group failed; others may not know of it
                // yet.
                self.finish();
                return Ok(None);
            };
            let mut or_reconfigured = || observer.interrupts() || self.must_reconfigure();
            let error = match Communicator::connect(&config, &mut or_reconfigured) {
                Ok(group) => return Ok(Some((group, config.rendezvous))),
                Err(error) => error,
            };
            if !observer.on_event(Event::NotFormed(&error)) {
                return Err(error);
            }
            self.reform(Blamed::of(&error), observer)?;
        }
    }

    /// Gives up the last group, and has the member negotiate the next one without those in
    /// `blamed`.
    fn reform(&self, blamed: Blamed, observer: &mut dyn Observer) -> Result<()> {
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
        unless_cancelled(observer.on_event(Event::Left))
    }

    /// Waits for an agreement on a group. Returns this process's configuration in that group, or
    /// `None` at the end of the training.
    fn agree(&self, observer: &mut dyn Observer) -> Result<Option<Config>> {
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
                unless_cancelled(observer.on_event(Event::Agreed { joins_again }))?;
                return Ok(Some(self.shared.config_in(&roster, id)));
            }
            if progress.has_left {
                return Err(Abort::Closed.into());
            }
            drop(progress);
            unless_cancelled(!observer.interrupts())?;
        }
    }

    /// Returns `true` if this process brings the state of the training into its group.
    #[must_use]
    pub fn has_state(&self) -> bool {
        lock(&self.shared.progress).has_state
    }

    /// Waits until each member of the group has the state of the training. Only then is the group
    /// established.
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

    /// Returns `true` if others form a new group, so that this process has to leave its own.
    fn must_reconfigure(&self) -> bool {
        let progress = lock(&self.shared.progress);
        progress
            .member
            .as_ref()
            .is_some_and(Member::must_reconfigure)
    }

    /// Returns the process that made the others form a new group, and the reason.
    #[must_use]
    pub fn reconfigured_by(&self) -> Option<String> {
        let progress = lock(&self.shared.progress);
        progress.member.as_ref().and_then(Member::reconfigured_by)
    }

    /// Addresses of the processes that wait to join.
    #[must_use]
    pub fn joiners(&self) -> Vec<String> {
        let progress = lock(&self.shared.progress);
        let members = progress.member.iter();
        let now = Instant::now();
        members
            .flat_map(|member| member.joiners(now).map(|joiner| joiner.address.clone()))
            .collect()
    }

    /// Leaves the job for good; later calls do nothing. If it `tells` the others, they need not
    /// wait for it. In a fork it does nothing, because the parent stays in the job.
    pub fn leave(&self, tells: bool) {
        self.end(|member| {
            let farewells = member.leave();
            if tells { farewells } else { Vec::new() }
        });
    }

    /// Leaves the job after all members of the group have finished the training and the group has
    /// failed. Notifies the others: a member that does not know of the end would form another
    /// group.
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
        // Others may leave at the same moment. Without a listener here, their farewells would wait
        // for an answer. If listening fails, they wait until their requests time out.
        drop(self.shared.listen_between());
        let sent = farewells.into_iter().map(|(address, envelope)| {
            let shared = Arc::clone(&self.shared);
            thread::Builder::new()
                .stack_size(REQUEST_STACK_BYTES)
                .spawn(move || shared.ask(&address, &envelope))
        });
        let sent: Vec<_> = sent.collect();
        for farewell in sent.into_iter().flatten() {
            // A process that misses the farewell finds nobody at this address.
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

impl Answers for ParticipantState {
    fn job(&self) -> &str {
        &self.client.credentials.job
    }

    fn answer(&self, envelope: &Envelope) -> Reply {
        let mut progress = lock(&self.progress);
        let is_meant = envelope.to.is_none_or(|to| to == progress.id);
        let Some(member) = &mut progress.member else {
            return match envelope.to {
                // Other founders have begun already; this process has not called `found` yet.
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

impl ParticipantState {
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

    /// Configuration of the process with this id in a group that was agreed on.
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

    /// Listens while there is no group.
    fn listen_between(&self) -> Result<()> {
        let is_outside = !lock(&self.progress).has_state;
        // A listener whose socket a group has taken over is closed already.
        drop(lock::take(&self.between));
        let own_state = Arc::new(OwnState::between_groups(is_outside));
        let access = GroupAccess::new(&self.config, &self.client.credentials, &own_state);
        let socket = lock(&self.socket).clone().ok_or(Abort::Closed)?;
        let listener = GroupListener::reopen(&socket, access)?;
        // `reopen` has closed a listener that another thread stored meanwhile.
        let earlier = lock(&self.between).replace(listener);
        drop(earlier);
        Ok(())
    }

    /// Carries out the member's steps until this process has left.
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

    /// Returns the group if others have left it and it has not failed yet.
    fn group_to_leave(&self, progress: &Progress) -> Option<Arc<Communicator>> {
        let must_reconfigure = progress
            .member
            .as_ref()
            .is_some_and(Member::must_reconfigure);
        let group = progress.group.upgrade().filter(|_| must_reconfigure)?;
        (!group.has_failed()).then_some(group)
    }

    /// Sends a request to another process from a thread of its own, and gives the member the
    /// outcome.
    fn send(self: &Arc<Self>, address: String, envelope: Envelope) {
        let shared = Arc::clone(self);
        let (to, at) = (envelope.to, address.clone());
        let deliver = move |shared: &Self, outcome: &Outcome| {
            let mut progress = lock(&shared.progress);
            if let Some(member) = &mut progress.member {
                member.on_outcome(&at, to, outcome, Instant::now());
            }
            shared.tell(progress);
        };
        let later = deliver.clone();
        let sent = thread::Builder::new()
            .stack_size(REQUEST_STACK_BYTES)
            .spawn(move || {
                let outcome = shared.ask(&address, &envelope);
                later(&shared, &outcome);
            });
        if sent.is_err() {
            deliver(self, &Outcome::Silent);
        }
    }
}

fn unless_cancelled(continues: bool) -> Result<()> {
    continues
        .then_some(())
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

/// Local address of this host on a route to one of `addresses`, preferably of IPv4.
fn own_ip(addresses: &[String]) -> Result<IpAddr> {
    let toward = |address: &String| {
        let towards = |remote: SocketAddr| {
            let any: IpAddr = match remote {
                SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
                SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
            };
            let socket = UdpSocket::bind((any, 0)).ok()?;
            // `connect` on a UDP socket sends no packet; it only checks that a route exists.
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

    /// Records the events, and gives up when a group does not form.
    #[derive(Default)]
    struct Notes(Vec<&'static str>);

    impl Caller for Notes {
        fn interrupts(&mut self) -> bool {
            false
        }
    }

    impl Observer for Notes {
        fn on_event(&mut self, event: Event<'_>) -> bool {
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
            // The same as after a group that had taken the listener over: connections wait
            // unanswered.
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
