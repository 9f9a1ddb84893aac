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
use gradring_net::link::{Block, Heap};
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
    /// Number by which TensorFlow's ops find this communicator, or its successor after the group
    /// has formed again. Nothing else uses it.
    pub id: u64,
    /// Number of agreements on members in an elastic job; 0 in other jobs.
    pub generation: u32,
    /// Index of this process.
    pub rank: usize,
    /// Members of the group, by rank.
    pub roster: Roster,
    /// Number of TCP connections to each peer in each direction.
    pub streams: usize,
    /// `true` if checksums protect all bytes of collectives.
    pub checksum: bool,
    /// Names of the kinds of links in use.
    pub transport_name: String,
    /// Ranks of this host that share no memory with this rank although both offer to, with the
    /// reason.
    pub memory_not_shared: BTreeMap<usize, String>,
    /// TCP congestion controls of payload connections, each with the reasons for its use.
    pub tcp_congestion: BTreeMap<String, BTreeSet<String>>,
    /// Runs the collectives of all ranks.
    pub engine: Engine,
    /// Run the transfers between this rank and one other.
    channels: Channels,
    monitor: Arc<Monitor>,
    /// Answers inquiries about this rank; open as long as the communicator.
    listener: Mutex<Option<GroupListener>>,
    journal: Arc<Journal>,
    abort: Arc<AbortSwitch>,
    /// Start of the running trace, if there is one.
    traced_since_ns: Mutex<Option<u64>>,
    /// Memory for arrays of the program, until the group is left.
    heap: Mutex<Option<Arc<Heap>>>,
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);
static OPEN: PerProcess<HashMap<u64, Weak<Communicator>>> = PerProcess::new();

impl Communicator {
    /// Joins the group within `timeout`.
    ///
    /// # Errors
    /// `Config` for settings that cannot work; `Rendezvous`, `Authentication` or `Protocol` when
    /// the group does not form; `Aborted` when `interrupt` asked to give up.
    pub fn connect(config: &Config, interrupt: Interrupt<'_>) -> Result<Arc<Self>> {
        let kinds = negotiation::offered(&config.settings.transport)?;
        Self::connect_over(&kinds, config, interrupt)
    }

    /// Returns the open communicator of this process with this number.
    #[must_use]
    pub fn by_id(id: u64) -> Option<Arc<Self>> {
        OPEN.lock().get(&id)?.upgrade()
    }

    /// Returns the listening socket of this process with its announced address; `None` if it does
    /// not listen.
    pub(crate) fn listening(&self) -> Option<Result<(TcpListener, String)>> {
        let listener = lock(&self.listener);
        let socket = listener.as_ref()?.port.socket();
        let address = self.roster.members()[self.rank].address.clone();
        Some(socket.map(|socket| (socket, address)))
    }

    /// Opens a port for another group of this process, formed by some ranks of this group. The
    /// address is that of this group's listener. The port is one of `ports` if these are several: a
    /// single one is this group's own. Returns the socket, and the address at which the others
    /// reach it.
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

    /// Runs a collective of all ranks, or of this rank and one other, to its end.
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

    /// Starts a collective like `run`, but returns at once.
    ///
    /// # Errors
    /// As for `Engine::start`; `Config` for a partner that is not another rank.
    pub fn start(&self, request: Request) -> Result<Work> {
        match request.collective.partner() {
            None => self.engine.start(request),
            Some(_) => self.channels.of(&request)?.start(request),
        }
    }

    /// Allocates a block of zeros in the heap of this rank; `None` if not all ranks have heaps.
    ///
    /// # Errors
    /// `Exhausted` when there is no memory for it; `Aborted` if the communicator is closed.
    pub fn allocate(&self, bytes: usize) -> Result<Option<Block>> {
        if self.engine.is_closed() {
            return Err(Abort::Closed.into());
        }
        let heap = lock(&self.heap).clone();
        let Some(heap) = heap.filter(|_| self.engine.policy().has_heaps) else {
            return Ok(None);
        };
        let block = heap.allocate(bytes);
        let exhausted = || {
            let error = Error::no_memory(bytes, "an array of Communicator.empty");
            error.blaming(self.rank, self.roster.host(self.rank))
        };
        block.ok_or_else(exhausted).map(Some)
    }

    /// Counters of everything done so far, by all ranks and by pairs of ranks.
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

    /// Returns `true` once the group has failed: none of its collectives will succeed any more.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.abort.cause().is_some()
    }

    /// Returns the cause of the group's failure if it blames one of these ranks. A rank that left
    /// in good order does not count, because it may still be in other groups.
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

    /// Fails every pending and later work of every rank because this rank has no memory for so many
    /// bytes. Returns the first cause.
    #[must_use]
    pub fn fail_without_memory(&self, bytes: usize, what: &str) -> Error {
        self.engine.fail(Error::no_memory(bytes, what))
    }

    /// Status of every rank, from its last gossip.
    #[must_use]
    pub fn gossip(&self) -> Vec<Gossip> {
        self.journal.board.gossip()
    }

    /// Sends a note of the program to every rank: at once with `now`, otherwise with the next
    /// gossip, within about a second.
    pub fn note(&self, note: Vec<u8>, now: bool) {
        self.journal.board.note(note);
        if now {
            self.monitor.gossip();
        }
    }

    /// Shows a warning in the logs of this rank and of rank 0; never waits.
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

    /// Keeps the last `limit` collectives from now on, until `take_trace`.
    pub fn start_trace(&self, limit: usize) {
        self.journal.recorder.keep(limit);
        *lock(&self.traced_since_ns) = Some(clock::now_ns());
    }

    /// Ends a trace and returns its record as JSON; `None` if no trace is running.
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
        // The monitor closes first: its goodbye explains more than the end of a link.
        self.monitor.close();
        self.engine.close();
        self.channels.close();
        self.abort.forget_wakers();
        drop(lock::take(&self.listener));
        if let Some(heap) = lock::take(&self.heap) {
            heap.close();
        }
        // A program may keep a closed communicator. It keeps the counters, but not megabytes of
        // records.
        self.journal.recorder.keep(1);
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.close();
    }
}
