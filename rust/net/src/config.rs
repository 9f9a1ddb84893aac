//! The table of all settings, and the configuration with which a rank joins its group.
//!
//! A row of [`GROUP`] becomes a field of [`Settings`]. Everything else follows from the rows too:
//! the variables, the arguments of `init()` and `Communicator()`, the stub, the table of
//! docs/command-line.md, and the text that ranks compare during rendezvous.

use std::io::Write as _;
use std::net::{IpAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use gradring_proto::dtype::DType;
use gradring_proto::error::{Result, Subgroup, Unusable};
use gradring_proto::schedule::algorithm_rules::Rules;
use gradring_proto::schedule::choice::MESH_RANKS_MAX;

/// Largest number of TCP connections to each peer in each direction.
pub const STREAMS_MAX: usize = 16;
/// Lower bound on the time limit of one conversation while a group forms. The limit is `timeout /
/// CONVERSATION_PART` if that is longer.
const CONVERSATION_LIMIT: Duration = Duration::from_secs(5);
const CONVERSATION_PART: u32 = 20;

/// One row of the table.
#[derive(Debug, Clone, Copy)]
pub struct Setting {
    /// Name of the setting, and of its argument of `init()` if it has one.
    pub name: &'static str,
    /// Environment variable that sets it.
    pub variable: &'static str,
    /// Kind of value, in the words of docs/command-line.md. Python chooses the parser by this text.
    pub kind: &'static str,
    /// Allowed values, or the smallest and the largest number; empty for any.
    pub choices: &'static [&'static str],
    /// Default value as text; empty for none.
    pub default: &'static str,
    /// `true` if `init()` has an argument for it.
    pub argument: bool,
    /// `true` if all ranks must have the same value.
    pub agreed: bool,
    /// Code that reads the variable.
    pub reader: Reader,
    /// Effect of the setting, in a few words.
    pub meaning: &'static str,
}

/// Code that reads an environment variable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reader {
    /// The detection of clusters.
    Clusters,
    /// `gradring.config.values.Settings`, for [`Settings`].
    Group,
    /// `gradring.config.values.Settings`, for Python's own use.
    Program,
    /// The code that uses the setting, independent of any group.
    User,
}

use Reader::{Clusters, Program, User};

pub mod timing;

use gradring_proto::settings::{Value, table, wrong};
use gradring_proto::wire::handshake::RACK_BYTES_MAX;
use timing::Timing;

/// Values of `agreed`: all ranks must have the same value, or each may have its own.
const ALL: bool = true;
const EACH: bool = false;

const fn row(
    name: &'static str,
    variable: &'static str,
    kind: &'static str,
    meaning: &'static str,
    reader: Reader,
) -> Setting {
    Setting {
        name,
        variable,
        kind,
        choices: &[],
        default: "",
        argument: false,
        agreed: EACH,
        reader,
        meaning,
    }
}

impl Setting {
    const fn argument(mut self, agreed: bool) -> Self {
        self.argument = true;
        self.agreed = agreed;
        self
    }

    const fn or(mut self, default: &'static str) -> Self {
        self.default = default;
        self
    }

    const fn one_of(mut self, choices: &'static [&'static str]) -> Self {
        self.choices = choices;
        self
    }
}

/// Settings for a rank's place in its group, and for access to the group. The handshake detects a
/// different token or job id.
#[rustfmt::skip]
pub const PLACE: &[Setting] = &[
    row("rank", "GRADRING_RANK", "number", "this process's index", Clusters).argument(EACH),
    row("world_size", "GRADRING_WORLD_SIZE", "number", "processes", Clusters).argument(ALL),
    row("rendezvous", "GRADRING_RENDEZVOUS", "host:port", "where rank 0 listens", Clusters).argument(EACH),
    row("job_id", "GRADRING_JOB_ID", "text", "tells jobs apart", Clusters).argument(ALL),
    row("interface", "GRADRING_INTERFACE", "name or IP", "network to listen at", Program).argument(EACH),
    row("port", "GRADRING_PORT", "port or range", "where in it to listen", Program).argument(EACH),
    row("join", "GRADRING_JOIN", "`auto` or addresses", "of a running elastic job", Program).argument(EACH),
    row("token", "GRADRING_TOKEN", "secret", "the job's shared secret", Program).argument(ALL),
    row("token", "GRADRING_TOKEN_FILE", "file", "the same, in a file", Program).argument(EACH),
    row("require_auth", "GRADRING_REQUIRE_AUTH", "0 or 1", "no token is an error", Program).argument(EACH).or("0"),
    row("tls", "GRADRING_TLS_CA", "PEM file", "authorities that are accepted", Program).argument(EACH),
    row("tls", "GRADRING_TLS_CERT", "PEM file", "this rank's certificate", Program).argument(EACH),
    row("tls", "GRADRING_TLS_KEY", "PEM file", "its private key", Program).argument(EACH),
];

/// Settings of a process, independent of its group.
#[rustfmt::skip]
pub const PROCESS: &[Setting] = &[
    row("tcp_congestion", "GRADRING_TCP_CONGESTION", "name", "congestion control of TCP, or `system`", User),
    row("kernel", "GRADRING_KERNEL", "one of", "instruction set of the arithmetic", Program)
        .one_of(&["avx512", "avx2", "scalar"]),
    row("log", "GRADRING_LOG", "level", "of the logger `gradring`, such as `ERROR`", Program),
    row("log_dir", "GRADRING_LOG_DIR", "directory", "for rank 0's `steps.jsonl`, of a `Monitor`", Program),
    row("flight_dir", "GRADRING_FLIGHT_DIR", "directory", "for the last collectives of each rank", Program),
    row("trace", "GRADRING_TRACE", "file", "for a timeline of all ranks", Program),
    row("prometheus_port", "GRADRING_PROMETHEUS_PORT", "port", "serve metrics, at this plus the local rank", Program),
    row("prometheus_address", "GRADRING_PROMETHEUS_ADDRESS", "name or IP", "where to serve them", Program)
        .or("127.0.0.1"),
    row("as_horovod", "GRADRING_AS_HOROVOD", "0 or 1", "`import horovod` finds gradring", Program).or("0"),
    row("as_mwms", "GRADRING_AS_MWMS", "0 or 1", "`MultiWorkerMirroredStrategy` is gradring's", Program).or("0"),
    row("with_strategy", "GRADRING_WITH_STRATEGY", "0 or 1", "models of Keras are trained by all ranks", Program)
        .or("0"),
    row("servers", "GRADRING_SERVERS", "0 or 1", "set by `gradring run --ps`: who would wait for a chief gets an error", Program)
        .or("0"),
    row("verify", "GRADRING_VERIFY", "directory", "set by `gradring verify`: where each optimizer step is recorded", Program),
    row("claims", "GRADRING_CLAIMS", "text", "set by a rank: its processes and places, for the processes that it starts", Program),
    row("restart", "GRADRING_RESTART", "number", "set by `gradring run`: the attempt, from 0", User),
    row("failure_file", "GRADRING_FAILURE_FILE", "file", "set by `gradring run`: where a rank leaves what ended it", User),
    row("input_service", "GRADRING_INPUT_SERVICE", "address", "set by `gradring run`: tf.data service, of `--input-workers`", User),
];

/// Generates the rows of [`GROUP`], and for each row a field of [`Settings`] with its type.
macro_rules! settings {
    ($($name:ident: $type:ty = $default:literal, $variable:literal, $kind:literal $choices:expr,
        $agreed:ident, $meaning:literal;)*) => {
        /// Settings for the communication between ranks. Each is an argument of `init()` and
        /// `Communicator()`.
        pub const GROUP: &[Setting] = &[$(Setting {
            name: stringify!($name),
            variable: $variable,
            kind: $kind,
            choices: &$choices,
            default: $default,
            argument: true,
            agreed: $agreed,
            reader: Reader::Group,
            meaning: $meaning,
        }),*];

        table! {
            /// Settings for the communication between ranks: a field for each row of [`GROUP`].
            pub struct Settings {
                $($name: $type = $default, $agreed, $meaning;)*
            }
        }
    };
}

settings! {
    transport: String = "auto", "GRADRING_TRANSPORT", "one of" ["auto", "tcp", "shm"], EACH,
        "what links are made of";
    streams: usize = "1", "GRADRING_STREAMS", "from" ["1", "16"], ALL, "TCP connections to each peer";
    checksum: bool = "0", "GRADRING_CHECKSUM", "0 or 1" [], ALL, "check all bytes";
    algorithm: Rules = "auto", "GRADRING_ALGORITHM", "names" [], ALL,
        "such as `ring` or `one_shot:64KiB,ring`";
    reproducible: bool = "0", "GRADRING_REPRODUCIBLE", "0 or 1" [], ALL,
        "fold sums in the order of ranks";
    wire_dtype: Option<DType> = "", "GRADRING_WIRE_DTYPE", "one of" ["bfloat16", "float16"], ALL,
        "float32 travels in half the bytes";
    rack: Rack = "", "GRADRING_RACK", "text" [], EACH,
        "equal for hosts that share a line to others";
    timeout: Duration = "300", "GRADRING_TIMEOUT_S", "seconds" [], EACH, "bound on forming the group";
    stall_timeout: Duration = "1800", "GRADRING_STALL_TIMEOUT_S", "seconds" [], EACH,
        "stall that ends a collective";
    stall_warning: Duration = "30", "GRADRING_STALL_WARNING_S", "seconds" [], EACH,
        "stall that is logged";
}

/// Name of a rack, equal on all of its hosts; empty for none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rack(pub String);

impl Value for Rack {
    fn read(name: &str, text: &str) -> Result<Self> {
        match text.len() {
            ..=RACK_BYTES_MAX => Ok(Self(text.into())),
            _ => Err(wrong(name, text, "a name of at most 24 bytes")),
        }
    }

    fn shown(&self) -> String {
        self.0.clone()
    }
}

/// Paths of the PEM files that a rank needs for TLS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificates of the authorities that may issue a peer's certificate.
    pub ca: PathBuf,
    /// This rank's certificate, followed by the intermediate certificates.
    pub certificate: PathBuf,
    /// The private key of this rank's certificate.
    pub key: PathBuf,
}

/// Configuration with which a rank joins its group. It holds a secret, so it is never printed.
#[derive(Clone)]
pub struct Config {
    /// This process's index.
    pub rank: usize,
    /// Number of processes.
    pub world_size: usize,
    /// `host:port` at which rank 0 listens.
    pub rendezvous: String,
    /// `host:port` at which this rank listens; by default a free port on the interface that
    /// reaches the rendezvous.
    pub listen: Option<String>,
    /// First and last port of the range in which this rank listens if no address is given, for
    /// hosts behind firewalls.
    pub ports: Option<(u16, u16)>,
    /// IP address at which this rank listens, for hosts with several networks. It replaces the host
    /// of `rendezvous` and `listen`; their port remains.
    pub interface: Option<IpAddr>,
    /// `host:port` at which others reach this rank, if it differs from the listening address, as
    /// behind a forwarded port.
    pub announce: Option<String>,
    /// Listening addresses, indexed by rank, if they are known beforehand; for messages only.
    pub addresses: Vec<String>,
    /// Job id, which separates jobs that use the same addresses; equal on all ranks. Empty for
    /// none.
    pub job: String,
    /// Versions of the other libraries that compute, exchanged between ranks; empty for none.
    pub versions: String,
    /// Shared secret of the job; empty for none.
    pub token: Vec<u8>,
    /// Files for TLS, if all connections are to be encrypted.
    pub tls: Option<TlsFiles>,
    /// Socket on which this process listens already; used instead of binding an address.
    pub socket: Option<Arc<TcpListener>>,
    /// Number of groups that the processes of an elastic job have agreed on; 0 in any other job.
    pub generation: u32,
    /// Number of the communicator that this one replaces in its process; the new one takes it over.
    pub id: Option<u64>,
    /// The part of the world that the group consists of; `None` for all of it. For messages only.
    pub part: Option<Arc<Subgroup>>,
    /// Settings for the communication between ranks.
    pub settings: Settings,
    /// Time limits of failure detection; only tests change them.
    #[doc(hidden)]
    pub timing: Timing,
    /// Shows a warning to the user; called on threads that must not block.
    pub on_warning: fn(String),
}

impl Config {
    /// Creates the configuration of one rank, with defaults for everything else: no token, no TLS,
    /// any free port, [`Settings::default`], and warnings on standard error. Environment variables
    /// are not read.
    ///
    /// Without a `token`, every process that reaches the port of a rank may join. Give all ranks
    /// the same token if others share the machine or the network. A world of one needs no
    /// rendezvous.
    #[must_use]
    pub fn new(rank: usize, world_size: usize, rendezvous: impl Into<String>) -> Self {
        Self {
            rank,
            world_size,
            rendezvous: rendezvous.into(),
            listen: None,
            ports: None,
            interface: None,
            announce: None,
            addresses: Vec::new(),
            job: String::new(),
            versions: String::new(),
            token: Vec::new(),
            tls: None,
            socket: None,
            generation: 0,
            id: None,
            part: None,
            settings: Settings::default(),
            timing: Timing::USUAL,
            // A failed write, as to a full disk, must not end the thread that warns.
            on_warning: |warning| drop(writeln!(std::io::stderr(), "gradring: {warning}")),
        }
    }

    /// Checks that a group can form with this configuration.
    ///
    /// # Errors
    /// `Config` for a value that cannot be used.
    pub fn validate(&self) -> Result<()> {
        let (settings, rank, world_size) = (&self.settings, self.rank, self.world_size);
        if rank >= world_size {
            return Err(Unusable::NoSuchRank { rank, world_size }.into());
        }
        if let Some(dtype) = settings.wire_dtype
            && !matches!(dtype, DType::F16 | DType::Bf16)
        {
            return Err(wrong("wire_dtype", dtype.name(), "a 16-bit float"));
        }
        if !(1..=STREAMS_MAX).contains(&settings.streams) {
            let wanted = format!("a number of connections from 1 to {STREAMS_MAX}");
            return Err(wrong("streams", &settings.streams.to_string(), &wanted));
        }
        for (name, limit) in [
            ("timeout", settings.timeout),
            ("stall_timeout", settings.stall_timeout),
        ] {
            if limit.is_zero() {
                return Err(wrong(name, "0", "more than 0 seconds"));
            }
        }
        let most = MESH_RANKS_MAX;
        if settings.reproducible && settings.transport == "shm" && world_size > most {
            return Err(Unusable::TooManyForReproducible { world_size, most }.into());
        }
        Ok(())
    }

    /// Returns the time limit of one conversation between two ranks while the group forms. A
    /// conversation takes milliseconds, unless the peer is stopped, unreachable, or one of very
    /// many processes on its machine.
    pub fn conversation_limit(&self) -> Duration {
        CONVERSATION_LIMIT.max(self.settings.timeout / CONVERSATION_PART)
    }
}
