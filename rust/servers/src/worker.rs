//! A worker's process: the program pushes and pulls, and a thread exchanges messages with the
//! servers.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::iter::zip;
use std::mem;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::channel::{self, BEAT, MessageChannel, is_silent};
use super::connector::ServerConnector;
use super::message::{Counted, Message};
use super::model::{Given, Model, PulledModel};
use gradring_core::forming::rendezvous::check_loopback;
use gradring_net::caller::{INTERRUPT_INTERVAL, Interrupt};
use gradring_net::config::Config;
use gradring_net::host::host_name;
use gradring_net::link::forks::{PerProcess, Process};
use gradring_net::link::poll::WakeUp;
use gradring_net::session::credentials::Credentials;
use gradring_proto::error::{Abort, Breach, Error, NotServed, Result, message_of};
use gradring_proto::lock::{self, lock, wait_while};
use gradring_proto::parameters::floats::{FloatSlice, Floats, forget_kept};
use gradring_proto::parameters::identity::{PushId, Term, Version};
use gradring_proto::parameters::keepers::Keepers;
use gradring_proto::parameters::message::{Ask, Reply, WorkerRequest};
use gradring_proto::parameters::optimizer::Hyper;
use gradring_proto::parameters::rules::Timing;
use gradring_proto::parameters::shard::Payload;
use gradring_proto::parameters::worker::{Event, Worker as Protocol};
use gradring_proto::wire::handshake::{ClientKind, random};

/// First values of each variable that are compared to detect that a program has set it. A
/// comparison of all values would read all weights twice in each step.
const SHOWN_VALUES: usize = 256;

static NEXT_ID: AtomicU64 = AtomicU64::new(1);
static OPEN: PerProcess<HashMap<u64, Weak<Worker>>> = PerProcess::new();

/// A push that the program has begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PushHandle(pub u64);

/// The call that the program has to make next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    Begin,
    Pull,
    PushInitial,
    Push,
}

/// Statistics of a worker.
#[derive(Debug, Clone, Default)]
pub struct Stats {
    /// Version of the last pulled weights.
    pub version: Version,
    /// Last known term of the servers.
    pub term: Term,
    /// Number of pushes.
    pub pushes: u64,
    /// Pushes that are in no update and will be in none, as far as is known.
    pub dropped: u64,
    /// Completed pulls.
    pub pulls: u64,
    /// Pushes kept in memory, because servers may need them again.
    pub unsettled: usize,
    /// Bytes sent to all servers.
    pub bytes_sent: u64,
    /// Bytes received from all servers.
    pub bytes_received: u64,
    /// Connections made to replace lost ones.
    pub reconnects: u64,
    /// Kinds of the links to servers, by name; empty without a link.
    pub transport: String,
    /// Total time in `pull`.
    pub waited: Duration,
    /// Last statistics from server 0 about the gradients of all workers.
    pub counted: Counted,
}

/// A worker with its connections to all servers.
pub struct Worker {
    /// Number of this worker among all of the process; ops of a graph find it by this number.
    pub id: u64,
    me: u32,
    /// Number of the model that it trains.
    number: usize,
    addresses: Vec<String>,
    credentials: Arc<Credentials>,
    config: Config,
    shared: Arc<WorkerState>,
    thread: Mutex<Option<JoinHandle<()>>>,
    process: Process,
    /// Memory that TensorFlow's ops keep from pull to pull.
    pub for_ops: Mutex<Option<Box<dyn Any + Send>>>,
}

struct WorkerState {
    state: Mutex<State>,
    /// Signalled after each change that the program may wait for.
    changed: Condvar,
    wake_up: Arc<WakeUp>,
}

struct State {
    protocol: Option<Protocol>,
    model: Option<Arc<Model>>,
    turn: Turn,
    /// Time and reason of a server's disconnection, by server.
    away: Vec<Option<(Instant, String)>>,
    failure: Option<Error>,
    closing: bool,
    leaving: bool,
    has_left: bool,
    /// The push of which pieces arrive from the program; its identity if it counts.
    open: Option<(PushHandle, Option<PushId>)>,
    /// First values of each variable in the last pull.
    shown: Vec<Floats>,
    stats: Stats,
}

impl Worker {
    /// Makes a worker of the model with this number; it is not connected yet. A process has a
    /// worker for each model that it trains, and gives the first one the number 0.
    ///
    /// # Errors
    /// `Config` for unusable settings; `Rendezvous` for addresses that no network interface has.
    pub fn new(
        me: usize,
        number: usize,
        addresses: Vec<String>,
        config: &Config,
    ) -> Result<Arc<Self>> {
        addresses.iter().try_for_each(|at| check_loopback(at))?;
        let wake_up = WakeUp::new().map_err(|error| Error::no_wake_up(&error))?;
        let state = State {
            protocol: None,
            model: None,
            turn: Turn::Begin,
            away: vec![None; addresses.len()],
            failure: None,
            closing: false,
            leaving: false,
            has_left: false,
            open: None,
            shown: Vec::new(),
            stats: Stats::default(),
        };
        let worker = Arc::new(Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            me: me as u32,
            number,
            credentials: Credentials::of(config)?,
            config: config.clone(),
            addresses,
            shared: Arc::new(WorkerState {
                state: Mutex::new(state),
                changed: Condvar::new(),
                wake_up: Arc::new(wake_up),
            }),
            thread: Mutex::default(),
            process: Process::this(),
            for_ops: Mutex::default(),
        });
        OPEN.lock().insert(worker.id, Arc::downgrade(&worker));
        Ok(worker)
    }

    /// Returns the worker of this process with this number.
    ///
    /// # Errors
    /// When it is gone.
    pub fn by_id(id: u64) -> Result<Arc<Self>> {
        let found = OPEN.lock().get(&id).and_then(Weak::upgrade);
        found.ok_or_else(closed)
    }

    /// Number of servers.
    #[must_use]
    pub fn servers(&self) -> usize {
        self.addresses.len()
    }

    /// Model passed to `begin`.
    ///
    /// # Errors
    /// When `begin` was not called, or the worker is closed.
    pub fn begun(&self) -> Result<Arc<Model>> {
        let model = self.state()?.model.clone();
        model.ok_or_else(|| out_of_turn("pull() or push()"))
    }

    /// Index of this worker.
    #[must_use]
    pub const fn index(&self) -> u32 {
        self.me
    }

    /// Starts the thread that connects to all servers.
    ///
    /// # Errors
    /// When it was called before, or the system cannot start a thread.
    pub fn begin(&self, model: Model) -> Result<()> {
        let mut state = self.state()?;
        if state.turn != Turn::Begin {
            return Err(out_of_turn("begin()"));
        }
        let now = Instant::now();
        let model = Arc::new(model);
        let timing = Timing {
            again: BEAT,
            silence: self.config.timing.silence,
            start: self.config.settings.timeout,
            snapshot_every: 1,
        };
        let drawn = || random().map(u64::from_le_bytes);
        state.protocol = Some(Protocol::new(
            self.me,
            self.addresses.len(),
            timing,
            drawn()?,
            now,
        ));
        let client = ClientKind::Worker {
            index: self.me as usize,
            process: (drawn()?, std::process::id(), host_name()),
            model: model.fingerprint(),
        };
        let wake_up = Arc::clone(&self.shared.wake_up);
        let credentials = Arc::clone(&self.credentials);
        let (addresses, config) = (self.addresses.clone(), &self.config);
        let client = (self.number, client);
        let connector = ServerConnector::new(credentials, client, addresses, config, wake_up)?;
        let shared = Arc::clone(&self.shared);
        let carrier = Carrier {
            sent: BTreeMap::new(),
            is_held: vec![false; self.addresses.len()],
            keepers: Keepers {
                servers: self.addresses.len(),
                replicas: 0,
            },
            channels: self.addresses.iter().map(|_| None).collect(),
            counted: (0, 0),
            left_at: now.checked_sub(BEAT).unwrap_or(now),
            checks_values: self.config.settings.checksum,
            silence: self.config.timing.silence,
            model: Arc::clone(&model),
            connector,
            shared,
        };
        let thread = std::thread::Builder::new()
            .name("gradring-worker".into())
            .spawn(move || carrier.run())
            .map_err(|error| Error::no_thread(&error))?;
        *lock(&self.thread) = Some(thread);
        state.away.fill(Some((now, String::new())));
        state.model = Some(model);
        state.turn = Turn::Pull;
        Ok(())
    }

    /// Waits until the update rule lets this worker continue, and receives the weights into `into`,
    /// which has the bytes of each variable.
    /// Returns their version, or `None` if the servers want the initial weights.
    ///
    /// # Errors
    /// When servers are unreachable, refuse this worker or delay it for too long; when it is called
    /// out of turn, interrupted, or the worker is closed.
    pub fn pull(
        &self,
        into: &mut [&mut [u8]],
        interrupt: Interrupt<'_>,
    ) -> Result<Option<Version>> {
        let Some(pulled) = self.pull_model(interrupt)? else {
            return Ok(None);
        };
        // These know nothing of the rows that this pull has changed.
        *lock(&self.for_ops) = None;
        for (variable, into) in into.iter_mut().enumerate() {
            pulled.put(variable, into);
        }
        Ok(pulled.version())
    }

    /// Waits as `pull` does, and returns the weights, or `None` if the servers want the initial
    /// weights.
    ///
    /// # Errors
    /// Those of `pull`.
    pub fn pull_model(&self, interrupt: Interrupt<'_>) -> Result<Option<PulledModel>> {
        let begun = Instant::now();
        let mut state = self.state()?;
        if state.turn == Turn::Begin {
            return Err(out_of_turn("pull()"));
        }
        let event = loop {
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            let is_due = matches!(state.turn, Turn::Push | Turn::PushInitial);
            let Some(protocol) = &mut state.protocol else {
                return Err(closed());
            };
            if let Some(event) = protocol.event() {
                break event;
            }
            if is_due && (protocol.computes() || protocol.is_open()) {
                return Err(out_of_turn("pull()"));
            }
            self.check_waiting(&state, "pull", begun)?;
            state = self.wait(state, interrupt)?;
        };
        state.stats.waited += begun.elapsed();
        let (turn, result) = match event {
            Event::WantsInitial => (Turn::PushInitial, None),
            Event::Weights(pulled) => {
                let changed = state.protocol.as_mut().map_or(vec![], Protocol::changed);
                let model = state.model.clone().ok_or_else(closed)?;
                let Some(pulled) = PulledModel::new(model, pulled, changed) else {
                    let wanted = "the weights of this model".into();
                    return Err(Breach::Unexpected { wanted }.into());
                };
                let variables = 0..pulled.variables().len();
                state.shown = variables.map(|it| pulled.first(it, SHOWN_VALUES)).collect();
                (Turn::Push, Some(pulled))
            }
        };
        state.turn = turn;
        state.stats.pulls += 1;
        let version = result.as_ref().and_then(PulledModel::version);
        state.stats.version = version.unwrap_or(state.stats.version);
        Ok(result)
    }

    /// Checks that the program has not set a variable since the last pull. `found` has the present
    /// values of each variable, or as many of the first as are compared.
    ///
    /// # Errors
    /// `WasSet` with the name of the first variable that the program has set.
    pub fn check_unset(&self, found: &[FloatSlice<'_>]) -> Result<()> {
        let state = self.state()?;
        for (index, (found, shown)) in zip(found, &state.shown).enumerate() {
            if !found.agrees(shown) {
                let model = state.model.as_ref();
                let variable = model.map_or("", |model| &model.variables()[index].name);
                let (worker, variable) = (self.me as usize, variable.into());
                return Err(NotServed::WasSet { worker, variable }.into());
            }
        }
        Ok(())
    }

    /// Takes the initial weights, one array for each variable. Returns `false` if they surely do
    /// not count.
    ///
    /// # Errors
    /// Those of `push`.
    pub fn push_initial(&self, weights: &[FloatSlice<'_>]) -> Result<bool> {
        let hyper = Hyper {
            learning_rate: 0.0,
            weight_decay: 0.0,
        };
        let push = self.open_in(Turn::PushInitial, "push_initial()", 1)?;
        self.put(push, 0, |model| model.initial(weights))?;
        self.close_push(push, hyper)
    }

    /// Takes gradients computed with the last pulled weights; the thread sends them. Returns
    /// `false` if they surely do not count.
    ///
    /// # Errors
    /// When servers have failed since the last call, or it is called out of turn.
    pub fn push(&self, gradients: &[Option<Given<'_>>], hyper: Hyper) -> Result<bool> {
        let push = self.open_push(1)?;
        self.put_gradients(push, 0, gradients)?;
        self.close_push(push, hyper)
    }

    /// Begins a push in so many pieces, of gradients computed with the last pulled weights. A push
    /// that was begun before and is not closed is abandoned.
    ///
    /// # Errors
    /// Those of `push`.
    pub fn open_push(&self, pieces: usize) -> Result<PushHandle> {
        self.open_in(Turn::Push, "push()", pieces)
    }

    /// Takes a piece of a push: the gradients of some variables. The thread sends them at once.
    ///
    /// # Errors
    /// Those of `push`.
    pub fn put_gradients(
        &self,
        push: PushHandle,
        piece: usize,
        gradients: &[Option<Given<'_>>],
    ) -> Result<()> {
        self.put(push, piece, |model| model.gradients(gradients))
    }

    /// Ends a push whose pieces are all there. Returns `false` if it surely does not count.
    ///
    /// # Errors
    /// Those of `push`; `NotServed` if another push was begun since.
    pub fn close_push(&self, push: PushHandle, hyper: Hyper) -> Result<bool> {
        let mut state = self.state()?;
        let Some((_, id)) = state.open.take_if(|(handle, _)| *handle == push) else {
            return Err(out_of_turn("push()"));
        };
        let protocol = state.protocol.as_mut().ok_or_else(closed)?;
        let counts = id.is_some_and(|id| protocol.close(id, hyper));
        // Without this call, the push would wait for the next regular repetition.
        protocol.say_again(Instant::now());
        // Initial weights are not a gradient.
        if state.turn == Turn::Push {
            state.stats.pushes += 1;
            state.stats.dropped += u64::from(!counts);
        }
        state.turn = Turn::Pull;
        drop(state);
        self.shared.wake_up.wake();
        Ok(counts)
    }

    fn open_in(&self, turn: Turn, call: &str, pieces: usize) -> Result<PushHandle> {
        let mut state = self.state()?;
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        if state.turn != turn {
            return Err(out_of_turn(call));
        }
        let handle = PushHandle(NEXT_ID.fetch_add(1, Ordering::Relaxed));
        let protocol = state.protocol.as_mut().ok_or_else(closed)?;
        // If newer weights have arrived already, these gradients are out of date.
        let id = (!protocol.has_event())
            .then(|| protocol.open(pieces))
            .flatten();
        state.open = Some((handle, id));
        Ok(handle)
    }

    fn put(
        &self,
        push: PushHandle,
        piece: usize,
        payloads: impl FnOnce(&Model) -> Vec<Arc<Payload>>,
    ) -> Result<()> {
        let state = self.state()?;
        let model = state.model.clone().ok_or_else(closed)?;
        let Some(id) = open_id(&state, push) else {
            return Ok(());
        };
        // Unlocks the state, so that the thread can work during the copy.
        drop(state);
        let payloads = payloads(&model);
        let mut state = self.state()?;
        let protocol = state.protocol.as_mut().ok_or_else(closed)?;
        protocol.put(id, piece, payloads);
        protocol.say_again(Instant::now());
        drop(state);
        self.shared.wake_up.wake();
        Ok(())
    }

    /// Returns the statistics so far.
    ///
    /// # Errors
    /// In a fork.
    pub fn stats(&self) -> Result<Stats> {
        let state = self.alive()?;
        let protocol = state.protocol.as_ref();
        Ok(Stats {
            term: protocol.map_or(0, Protocol::term),
            unsettled: protocol.map_or(0, Protocol::unsettled),
            dropped: state.stats.dropped + protocol.map_or(0, Protocol::dropped),
            ..state.stats.clone()
        })
    }

    /// Waits until the update rule has settled the last push, takes leave of the servers, and
    /// closes.
    ///
    /// # Errors
    /// Those of `pull`.
    pub fn leave(&self, interrupt: Interrupt<'_>) -> Result<()> {
        let begun = Instant::now();
        let mut state = self.alive()?;
        if state.closing {
            return Ok(());
        }
        if state.turn != Turn::Begin {
            state.leaving = true;
            // A step may have failed after a part of its push.
            state.open = None;
            if let Some(protocol) = &mut state.protocol {
                protocol.abandon();
            }
            self.shared.wake_up.wake();
            while !state.has_left {
                if let Some(failure) = state.failure.clone() {
                    drop(state);
                    self.close();
                    return Err(failure);
                }
                self.check_waiting(&state, "leave", begun)?;
                state = self.wait(state, interrupt)?;
            }
        }
        drop(state);
        self.close();
        Ok(())
    }

    /// Closes at once, without a message to the servers.
    pub fn close(&self) {
        if !self.process.is_this() {
            return;
        }
        lock(&self.shared.state).closing = true;
        self.shared.changed.notify_all();
        self.shared.wake_up.wake();
        if let Some(thread) = lock::take(&self.thread) {
            // A panic of the thread is recorded as `failure`.
            drop(thread.join());
        }
        *lock(&self.for_ops) = None;
        forget_kept();
    }

    /// Waits for a change for a short time, and then checks for an interrupt.
    fn wait<'a>(
        &'a self,
        state: std::sync::MutexGuard<'a, State>,
        interrupt: Interrupt<'_>,
    ) -> Result<std::sync::MutexGuard<'a, State>> {
        let mut first = true;
        let state = wait_while(&self.shared.changed, state, INTERRUPT_INTERVAL, |_| {
            std::mem::take(&mut first)
        });
        drop(state);
        if interrupt.interrupts() {
            return Err(Abort::Interrupted.into());
        }
        self.state()
    }

    /// Fails if a server is unreachable, or this call waits, for longer than the settings allow.
    fn check_waiting(&self, state: &State, doing: &str, begun: Instant) -> Result<()> {
        let settings = &self.config.settings;
        let now = Instant::now();
        for (server, away) in state.away.iter().enumerate() {
            if let Some((since, why)) = away
                && let waited = now.saturating_duration_since(*since)
                && waited >= settings.timeout
            {
                return Err(NotServed::Unreachable {
                    server,
                    address: self.addresses[server].as_str().into(),
                    doing: format!("{doing} of worker {}", self.me).into(),
                    waited,
                    why: why.as_str().into(),
                }
                .into());
            }
        }
        if begun.elapsed() >= settings.stall_timeout {
            return Err(NotServed::Held {
                doing: doing.into(),
                worker: self.me as usize,
                waited: begun.elapsed(),
            }
            .into());
        }
        Ok(())
    }

    fn alive(&self) -> Result<std::sync::MutexGuard<'_, State>> {
        if !self.process.is_this() {
            let what = "client".into();
            return Err(NotServed::OfParent { what }.into());
        }
        Ok(lock(&self.shared.state))
    }

    fn state(&self) -> Result<std::sync::MutexGuard<'_, State>> {
        let state = self.alive()?;
        if state.closing {
            return Err(closed());
        }
        Ok(state)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if self.process.is_this() {
            OPEN.lock().remove(&self.id);
            self.close();
        } else {
            // A fork has neither the thread nor its lock, so it must not drop the shared state.
            std::mem::forget(self.shared.clone());
        }
    }
}

fn closed() -> Error {
    let what = "client".into();
    NotServed::Closed { what }.into()
}

fn out_of_turn(call: &str) -> Error {
    let call = call.into();
    NotServed::OutOfTurn { call }.into()
}

fn open_id(state: &State, push: PushHandle) -> Option<PushId> {
    let (handle, id) = state.open?;
    id.filter(|_| handle == push)
}

/// A long request, which is sent once over each connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Long {
    Stage(Term, PushId, u32),
    Pull(Term, u64),
}

impl Long {
    const fn of(request: &WorkerRequest) -> Option<Self> {
        match &request.ask {
            Ask::Stage { id, piece, .. } => Some(Self::Stage(request.term, *id, piece.index)),
            Ask::Pull { round, .. } => Some(Self::Pull(request.term, *round)),
            _ => None,
        }
    }

    /// Returns whether both are pieces of one push.
    fn is_beside(self, other: Self) -> bool {
        match (self, other) {
            (Self::Stage(term, id, _), Self::Stage(other_term, other, _)) => {
                (term, id) == (other_term, other)
            }
            _ => false,
        }
    }
}

/// State of the thread that exchanges messages with the servers.
struct Carrier {
    shared: Arc<WorkerState>,
    model: Arc<Model>,
    connector: ServerConnector,
    /// Channel to each server; `None` without a connection.
    channels: Vec<Option<MessageChannel>>,
    /// Last long request sent over a keeper's current connection, by keeper; of a push, all pieces.
    sent: BTreeMap<usize, BTreeSet<Long>>,
    /// True for each server whose channel has no room for further pieces of a push.
    is_held: Vec<bool>,
    /// Keepers of shards, as far as is known; the servers announce the number of replicas.
    keepers: Keepers,
    /// Bytes sent and received on closed channels.
    counted: (u64, u64),
    /// When the last request to leave was sent.
    left_at: Instant,
    checks_values: bool,
    /// Silence of a server after which its connection is given up.
    silence: Duration,
}

impl Carrier {
    fn run(mut self) {
        let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.carry()));
        let failure = match ran {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error,
            Err(panic) => Error::panicked("a worker's thread", message_of(&*panic)),
        };
        lock(&self.shared.state).failure.get_or_insert(failure);
        self.shared.changed.notify_all();
    }

    fn carry(&mut self) -> Result<()> {
        for server in 0..self.channels.len() {
            self.connector.connect(server)?;
        }
        loop {
            self.shared.wake_up.reset();
            let now = Instant::now();
            self.connect(now)?;
            let (replies, goodbye) = self.receive(now)?;
            let Some((requests, wake)) = self.turn(replies, goodbye, now) else {
                return Ok(());
            };
            for (keeper, request) in requests {
                self.send(keeper, request, now)?;
            }
            let wake = if self.keep_up(now)? { now } else { wake };
            let wake = wake.clamp(now + Duration::from_millis(1), now + BEAT);
            let limit = wake.saturating_duration_since(Instant::now());
            channel::wait(
                self.channels.iter_mut().flatten(),
                &self.shared.wake_up,
                limit,
            );
        }
    }

    /// Takes new connections.
    fn connect(&mut self, now: Instant) -> Result<()> {
        for (server, outcome) in self.connector.outcomes() {
            let mut channel = MessageChannel::new(outcome?, self.checks_values, now);
            channel.values_max = self.model.bytes_on(server);
            self.channels[server] = Some(channel);
            let keepers = self.keepers;
            self.sent
                .retain(|keeper, _| keepers.server(*keeper) != server);
            let mut state = lock(&self.shared.state);
            state.away[server] = None;
            if let Some(protocol) = &mut state.protocol {
                protocol.say_again(now);
            }
        }
        Ok(())
    }

    /// Returns all received replies, and whether a server has recorded that this worker leaves.
    fn receive(&mut self, now: Instant) -> Result<(Vec<(usize, Reply)>, bool)> {
        let (mut replies, mut goodbye) = (Vec::new(), false);
        for server in 0..self.channels.len() {
            let mut turn = 0;
            while let Some(channel) = &mut self.channels[server] {
                match channel.recv(&mut turn, now) {
                    Ok(Some(Message::Reply(copy, reply))) if copy <= self.keepers.replicas => {
                        replies.push((self.keepers.on(server, copy), reply));
                    }
                    Ok(Some(Message::Retry(copy))) if copy <= self.keepers.replicas => {
                        self.sent.remove(&self.keepers.on(server, copy));
                    }
                    Ok(Some(Message::Goodbye)) => goodbye = true,
                    Ok(Some(Message::Counted(counted))) => {
                        lock(&self.shared.state).stats.counted = counted;
                    }
                    Ok(Some(_)) => {}
                    Ok(None) => break,
                    Err(error) => self.lose(server, &error, now)?,
                }
            }
        }
        Ok((replies, goodbye))
    }

    /// Returns requests to send and the time of the next turn; `None` after `close`.
    fn turn(
        &mut self,
        replies: Vec<(usize, Reply)>,
        goodbye: bool,
        now: Instant,
    ) -> Option<(Vec<(usize, WorkerRequest)>, Instant)> {
        let mut state = lock(&self.shared.state);
        if state.closing {
            return None;
        }
        let (mut sent, mut received) = self.counted;
        let mut transports = BTreeSet::new();
        for channel in self.channels.iter().flatten() {
            sent += channel.bytes_sent;
            received += channel.bytes_received;
            transports.insert(channel.transport);
        }
        (state.stats.bytes_sent, state.stats.bytes_received) = (sent, received);
        state.stats.transport = Vec::from_iter(transports).join("+");
        for (server, away) in state.away.iter_mut().enumerate() {
            if let Some((_, why)) = away {
                *why = self.connector.why(server).to_string();
            }
        }
        let leaving = state.leaving;
        state.has_left |= leaving && goodbye;
        let protocol = state.protocol.as_mut()?;
        for (keeper, reply) in replies {
            protocol.receive(keeper, reply, now);
        }
        self.keepers = protocol.keepers();
        let next = if leaving && (protocol.has_gone_on() || protocol.term() == 0) {
            let is_due = now >= self.left_at + BEAT;
            let goodbye = is_due.then(|| (0, protocol.leave()));
            if goodbye.is_some() {
                self.left_at = now;
            }
            (goodbye.into_iter().collect(), now + BEAT)
        } else {
            (protocol.step(now), protocol.wake())
        };
        drop(state);
        self.shared.changed.notify_all();
        Some(next)
    }

    fn send(&mut self, keeper: usize, request: WorkerRequest, now: Instant) -> Result<()> {
        let (server, copy) = (self.keepers.server(keeper), self.keepers.copy(keeper));
        let Some(channel) = &mut self.channels[server] else {
            return Ok(());
        };
        if let Some(long) = Long::of(&request) {
            let sent = self.sent.entry(keeper).or_default();
            if sent.contains(&long) {
                return Ok(());
            }
            // Confirmations are received only while the outbox is short.
            if matches!(long, Long::Stage(..)) && !channel.has_room() {
                self.is_held[server] = true;
                return Ok(());
            }
            sent.retain(|it| it.is_beside(long));
            sent.insert(long);
        }
        channel.send(Message::Request(copy, request), now)
    }

    /// Sends queued messages, and drops connections that are broken or silent. Returns whether there
    /// is room again for pieces that were held back.
    fn keep_up(&mut self, now: Instant) -> Result<bool> {
        let mut has_room = false;
        for server in 0..self.channels.len() {
            let Some(channel) = &mut self.channels[server] else {
                continue;
            };
            channel.keep_alive(now, BEAT)?;
            let lost = channel.flush().err();
            has_room |= channel.has_room() && mem::take(&mut self.is_held[server]);
            let lost = lost.or_else(|| is_silent(channel, self.silence, now));
            if let Some(error) = lost {
                self.lose(server, &error, now)?;
            }
        }
        if has_room && let Some(protocol) = &mut lock(&self.shared.state).protocol {
            protocol.say_again(now);
        }
        Ok(has_room)
    }

    /// Replaces a connection that has ended by a new one.
    fn lose(&mut self, server: usize, error: &Error, now: Instant) -> Result<()> {
        if let Some(channel) = self.channels[server].take() {
            self.counted.0 += channel.bytes_sent;
            self.counted.1 += channel.bytes_received;
        }
        self.connector.note(server, error);
        let mut state = lock(&self.shared.state);
        state.away[server] = Some((now, String::new()));
        state.stats.reconnects += 1;
        drop(state);
        self.connector.connect(server)
    }
}
