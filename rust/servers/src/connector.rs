//! Connector: threads that connect workers and server 0 to servers.

use std::cell::Cell;
use std::collections::VecDeque;
use std::net::TcpStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::link::{Linker, PeerLink};
use gradring_net::config::Config;
use gradring_net::host::host_name;
use gradring_net::link::poll::WakeUp;
use gradring_net::link::tcp;
use gradring_net::link::tcp::connection::Connection;
use gradring_net::link::tcp::deadline_stream::GoOn;
use gradring_net::session::connect::{Connector, Failure, Retry};
use gradring_net::session::credentials::Credentials;
use gradring_proto::error::{Abort, Error, ErrorKind, NotFormed, NotServed, Result, Text};
use gradring_proto::lock::lock;
use gradring_proto::wire::handshake::{ClientKind, Hello, Purpose, random};

/// Shortest and longest pause between two attempts to connect.
const PAUSES: (Duration, Duration) = (Duration::from_millis(25), Duration::from_secs(1));
/// Time limit of a handshake, from an open connection to the finished link.
const CONVERSATION_LIMIT: Duration = Duration::from_secs(5);
/// Limit of all attempts: in effect none, because closing the connector ends them.
const FOREVER: Duration = Duration::from_secs(365 * 86_400);
/// Time for which a worker retries while an earlier process of its index still exists on its own
/// host.
const ENDING_LIMIT: Duration = Duration::from_secs(1);
/// The same time if that process has ended or is on another host. Longer, because the server
/// notices the loss of a silent process late.
const TAKEN_LIMIT: Duration = Duration::from_secs(15);

/// Connects to servers, each attempt in a thread of its own.
pub(crate) struct ServerConnector {
    shared: Arc<ConnectorState>,
}

struct ConnectorState {
    credentials: Arc<Credentials>,
    model: usize,
    client: ClientKind,
    addresses: Vec<String>,
    linker: Linker,
    outcomes: Mutex<Outcomes>,
    wake_up: Arc<WakeUp>,
    closing: AtomicBool,
}

#[derive(Default)]
struct Outcomes {
    links: VecDeque<(usize, Result<PeerLink>)>,
    /// Reason of the last failed attempt, by server.
    whys: Vec<Option<Text>>,
}

impl ServerConnector {
    /// Makes a connector that introduces itself as `client` of the model with this number;
    /// `wake_up` is woken by outcomes and by links.
    pub(crate) fn new(
        credentials: Arc<Credentials>,
        (model, client): (usize, ClientKind),
        addresses: Vec<String>,
        config: &Config,
        wake_up: Arc<WakeUp>,
    ) -> Result<Self> {
        let linker = Linker::new(client.name(), config, Arc::clone(&wake_up))?;
        let whys = vec![None; addresses.len()];
        let outcomes = Outcomes {
            whys,
            ..Outcomes::default()
        };
        Ok(Self {
            shared: Arc::new(ConnectorState {
                credentials,
                model,
                client,
                addresses,
                linker,
                outcomes: Mutex::new(outcomes),
                wake_up,
                closing: AtomicBool::new(false),
            }),
        })
    }

    /// Starts a thread that connects to `server` until it has a link, or an error that a further
    /// attempt would not change.
    pub(crate) fn connect(&self, server: usize) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        std::thread::Builder::new()
            .name("gradring-connect".into())
            .spawn(move || shared.connect(server))
            .map_err(|error| Error::no_thread(&error))?;
        Ok(())
    }

    /// Takes the links and errors since the last call, each with its server.
    pub(crate) fn outcomes(&self) -> VecDeque<(usize, Result<PeerLink>)> {
        std::mem::take(&mut lock(&self.shared.outcomes).links)
    }

    /// Reason why `server` cannot be reached, as far as is known.
    pub(crate) fn why(&self, server: usize) -> Text {
        let outcomes = lock(&self.shared.outcomes);
        let why = outcomes.whys[server].clone();
        why.unwrap_or_else(|| "no attempt to connect has ended yet".into())
    }

    /// Records the reason why a connection ended.
    pub(crate) fn note(&self, server: usize, why: &Error) {
        lock(&self.shared.outcomes).whys[server] = Some(Text::of(&why.kind));
    }
}

impl Drop for ServerConnector {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
    }
}

impl ConnectorState {
    fn connect(&self, server: usize) {
        let (credentials, address) = (&*self.credentials, self.addresses[server].as_str());
        let again = |failure: &Failure, elapsed| {
            let error = failure.error(address);
            lock(&self.outcomes).whys[server] = Some(Text::of(&error.kind));
            !is_final(&error, elapsed)
        };
        let retry = Retry {
            conversation: Some(CONVERSATION_LIMIT),
            pauses: PAUSES,
            ..Retry::until(Instant::now() + FOREVER, &again)
        };
        let mut check = || match self.closing.load(Ordering::Acquire) {
            true => Err(Abort::Closed.into()),
            false => Ok(()),
        };
        let attempt = Cell::new(0);
        let linked = Connector::new(address, credentials, retry).connect_to(
            &mut check,
            |_, tcp| {
                attempt.set(u64::from_le_bytes(random()?));
                self.hello(server, attempt.get(), 0, tcp)
            },
            |first, _, go_on| {
                let mut connections = vec![first];
                for stream in 1..self.linker.streams {
                    connections.push(self.connect_stream(server, attempt.get(), stream, go_on)?);
                }
                let deadline = Instant::now() + CONVERSATION_LIMIT;
                self.linker.initiate(connections, server, deadline, go_on)
            },
        );
        let outcome = linked.map_err(|failure| {
            let error = Box::new(failure.error(address));
            let address = address.into();
            NotServed::Greeting {
                server,
                address,
                error,
            }
            .into()
        });
        lock(&self.outcomes).links.push_back((server, outcome));
        self.wake_up.wake();
    }

    /// Opens the connection for a further stream of the link.
    fn connect_stream(
        &self,
        server: usize,
        attempt: u64,
        stream: usize,
        go_on: GoOn<'_>,
    ) -> Result<Connection> {
        let address = self.addresses[server].as_str();
        // No retry: a failed stream fails the whole attempt.
        let retry = Retry::until(Instant::now() + CONVERSATION_LIMIT, &|_, _| false);
        let mut check = || match go_on() {
            true => Ok(()),
            false => Err(Abort::Closed.into()),
        };
        let connected = Connector::new(address, &self.credentials, retry).connect(
            &mut check,
            |_, tcp| self.hello(server, attempt, stream, tcp),
            |_| Ok(()),
        );
        let connected = connected.map_err(|failure| failure.error(address))?;
        Ok(connected.0)
    }

    fn hello(&self, server: usize, attempt: u64, stream: usize, tcp: &TcpStream) -> Result<Hello> {
        let address = &self.addresses[server];
        tcp::configure(tcp)
            .map_err(|error| Failure::Unreachable(error, Vec::new()).error(address))?;
        let purpose = Purpose::Parameters {
            job: self.credentials.job.clone(),
            server,
            model: self.model,
            client: self.client.clone(),
            transports: self.linker.transports(),
            stream,
            streams: self.linker.streams,
            attempt,
        };
        Hello::new((0, server), 0, purpose)
    }
}

fn process_exists(process: u32) -> bool {
    Path::new("/proc").join(process.to_string()).exists()
}

/// Returns whether a further attempt would fail with the same error.
fn is_final(error: &Error, elapsed: Duration) -> bool {
    match &error.kind {
        ErrorKind::Parameters(NotServed::WorkerTaken { process, host, .. }) => {
            let lives_here = **host == *host_name() && process_exists(*process);
            elapsed
                >= if lives_here {
                    ENDING_LIMIT
                } else {
                    TAKEN_LIMIT
                }
        }
        // Other rendezvous errors are not final: another program, or a rank that moves later, may
        // listen there meanwhile.
        ErrorKind::Rendezvous(NotFormed::OtherJob { .. })
        | ErrorKind::Authentication(_)
        | ErrorKind::Config(_)
        | ErrorKind::Parameters(_)
        | ErrorKind::Protocol(_) => true,
        _ => false,
    }
}
