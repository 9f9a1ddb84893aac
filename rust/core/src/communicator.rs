//! A connected group of ranks.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::TcpListener;
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, Weak};

use crate::engine::{Engine, Supervisor as _};
use crate::failure::Monitor;
use crate::forming::listener::GroupListener;
use crate::forming::roster::Roster;
use crate::observe::journal::Journal;
use crate::observe::stats::Stats;
use crate::observe::{clock, flight_recorder, record, signals};
use crate::work::Work;
use gradring_net::abort::AbortSwitch;
use gradring_net::caller::Interrupt;
use gradring_net::config::Config;
use gradring_net::link::forks::PerProcess;
use gradring_net::link::negotiation;
use gradring_net::session::listener::bind_beside;
use gradring_proto::collective::Request;
use gradring_proto::error::{self, Abort, Error, Lost, NotFormed, Result, Text, shortened};
use gradring_proto::lock::{self, lock};
use gradring_proto::wire::gossip::Gossip;

mod channels;
mod connecting;
mod rows;
mod slices;

use channels::Channels;

/// A connected group of ranks with an order.
pub struct Communicator {
    /// Number by which TensorFlow's ops find this communicator, or its successor when the group has
    /// formed again; used for nothing else in a process.
    pub id: u64,
    /// How often an elastic job has agreed on its members; 0 in a job that never does.
    pub generation: u32,
    /// This process's index.
    pub rank: usize,
    /// Who is in the group.
    pub roster: Roster,
    /// TCP connections to each peer in each direction.
    pub streams: usize,
    /// Whether all bytes of collectives are protected by checksums.
    pub checksum: bool,
    /// What the links are made of.
    pub transport_name: String,
    /// The ranks of this host with which it shares no memory although both would, and why not.
    pub memory_not_shared: BTreeMap<usize, String>,
    /// The TCP congestion controls of connections that carry payload, and why they do.
    pub tcp_congestion: BTreeMap<String, BTreeSet<String>>,
    /// Runs the collectives of all ranks.
    pub engine: Engine,
    /// Run what this rank and one other do alone.
    channels: Channels,
    monitor: Arc<Monitor>,
    /// Open while this is, for those who ask how the rank is.
    listener: Mutex<Option<GroupListener>>,
    journal: Arc<Journal>,
    abort: Arc<AbortSwitch>,
    /// When the trace under way began, if there is one.
    traced_since_ns: Mutex<Option<u64>>,
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);
static OPEN: PerProcess<HashMap<u64, Weak<Communicator>>> = PerProcess::new();

impl Communicator {
    /// Joins the group, at most for its `timeout`.
    ///
    /// # Errors
    /// `Config` for settings that cannot work; `Rendezvous`, `Authentication` or `Protocol` when
    /// the group does not form; `Aborted` when `interrupt` asked to give up.
    pub fn connect(config: &Config, interrupt: Interrupt<'_>) -> Result<Arc<Self>> {
        let kinds = negotiation::offered(&config.settings.transport)?;
        Self::connect_over(&kinds, config, interrupt)
    }

    /// The open communicator of this number in this process.
    #[must_use]
    pub fn by_id(id: u64) -> Option<Arc<Self>> {
        OPEN.lock().get(&id)?.upgrade()
    }

    /// The socket at which this process listens, and the address that others know of it, if it listens.
    pub(crate) fn listening(&self) -> Option<Result<(TcpListener, String)>> {
        let listener = lock(&self.listener);
        let socket = listener.as_ref()?.port.socket();
        let address = self.roster.members()[self.rank].address.clone();
        Some(socket.map(|socket| (socket, address)))
    }

    /// Opens a port for another group of this process, with some ranks of this one: at the address at
    /// which it listens for this one, and one of `ports` where those are several: a single one is
    /// this group's own. Returns the socket, and the address by which the others reach it.
    ///
    /// # Errors
    /// `Rendezvous` if no port is free; `Aborted` if the communicator is closed.
    pub fn listen_beside(&self, ports: Option<(u16, u16)>) -> Result<(Arc<TcpListener>, String)> {
        let (socket, address) = self
            .listening()
            .ok_or_else(|| Error::from(Abort::Closed))??;
        let cannot = |error| {
            Error::from(NotFormed::Socket {
                error: Text::of(error),
            })
        };
        let ip = socket.local_addr().map_err(cannot)?.ip();
        let several = ports.filter(|(first, last)| first < last);
        let (socket, bound) = bind_beside(ip, several.unwrap_or((0, 0)), self.rank)?;
        let host = address.rsplit_once(':').map_or(&*address, |(host, _)| host);
        Ok((Arc::new(socket), format!("{host}:{}", bound.port())))
    }

    /// Runs a collective of all ranks, or what this rank and one other do alone, to its end.
    ///
    /// # Errors
    /// As for `Engine::run`; `Config` for a partner that is not another rank.
    #[inline]
    pub fn run(&self, request: Request, interrupt: Interrupt<'_>) -> Result<()> {
        match request.collective.partner() {
            None => self.engine.run(request, interrupt),
            Some(_) => self.channels.of(&request)?.run(request, interrupt),
        }
    }

    /// As `run`, but returns at once.
    ///
    /// # Errors
    /// As for `Engine::start`; `Config` for a partner that is not another rank.
    pub fn start(&self, request: Request) -> Result<Work> {
        match request.collective.partner() {
            None => self.engine.start(request),
            Some(_) => self.channels.of(&request)?.start(request),
        }
    }

    /// What was done so far, by all ranks and by two alone.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let mut stats = self.engine.stats();
        self.channels.add_stats(&mut stats);
        stats
    }

    /// Number of processes.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.roster.members().len()
    }

    /// Whether the group has failed, so that none of its collectives will succeed any more.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.abort.cause().is_some()
    }

    /// Why the group has failed, if one of these ranks is to blame for it, and did not leave in good
    /// order: it may still be in other groups.
    #[must_use]
    pub fn failure_by(&self, ranks: &[usize]) -> Option<Error> {
        self.abort.cause().filter(|cause| {
            let blamed = cause.blamed.as_ref();
            let left = matches!(cause.kind, error::ErrorKind::PeerLost(Lost::Left));
            !left && blamed.is_some_and(|blamed| ranks.contains(&blamed.rank))
        })
    }

    /// Fails every pending and later work of every rank with this reason.
    pub fn abort(&self, reason: &str) {
        let cause = Error::aborted(reason);
        let host = self.roster.host(self.rank);
        self.monitor.abort(cause.blaming(self.rank, host));
    }

    /// Fails every pending and later work of every rank, because this one has no memory for so
    /// many bytes; returns the first cause.
    #[must_use]
    pub fn fail_without_memory(&self, bytes: usize, what: &str) -> Error {
        self.engine.fail(Error::no_memory(bytes, what))
    }

    /// How every rank is doing, by its last gossip.
    #[must_use]
    pub fn gossip(&self) -> Vec<Gossip> {
        self.journal.board.gossip()
    }

    /// Tells every rank what the program says about itself: at once with `now`, or else with the
    /// next gossip, within about a second.
    pub fn note(&self, note: Vec<u8>, now: bool) {
        self.journal.board.note(note);
        if now {
            self.monitor.gossip();
        }
    }

    /// Shows people a warning in the logs of this rank and of rank 0; never waits.
    pub fn log_line(&self, text: &str) {
        let host = self.roster.host(self.rank);
        let text = format!("rank {} on {host}: {text}", self.rank);
        self.monitor.log_line(shortened(&text));
    }

    /// Writes the flight record to `directory` when the group fails, and on SIGUSR2.
    pub fn write_records_to(&self, directory: &Path) {
        self.journal.write_to(directory);
        signals::listen();
    }

    /// Remembers the last `limit` collectives from now on, until `take_trace`.
    pub fn start_trace(&self, limit: usize) {
        self.journal.recorder.keep(limit);
        *lock(&self.traced_since_ns) = Some(clock::now_ns());
    }

    /// Ends a trace and returns the record of it, as JSON; `None` if none was under way.
    #[must_use]
    pub fn take_trace(&self) -> Option<Vec<u8>> {
        let since_ns = lock(&self.traced_since_ns).take()?;
        let json = record::to_json(
            &self.journal,
            self.abort.cause().as_ref(),
            "trace",
            since_ns,
        );
        self.journal.recorder.keep(flight_recorder::CAPACITY);
        Some(json)
    }

    /// Leaves the group in good order. A collective under way fails as aborted.
    pub fn close(&self) {
        let this = std::ptr::from_ref(self);
        OPEN.lock()
            .retain(|_, communicator| !std::ptr::eq(communicator.as_ptr(), this));
        // What the monitor has to tell goes first: the end of a link alone says less.
        self.monitor.close();
        self.engine.close();
        self.channels.close();
        self.abort.forget_wakers();
        drop(lock::take(&self.listener));
        // A program that keeps a closed communicator keeps its counters, but no megabyte of records.
        self.journal.recorder.keep(1);
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.close();
    }
}
