//! Every setting, in one table, and how a rank joins its group.
//!
//! A row of [`GROUP`] becomes a field of [`Settings`]. Everything else follows from the rows too: the
//! variables, the arguments of `init()` and `Communicator()`, the stub, the table of
//! docs/command-line.md, and the text that ranks compare when they meet.

use std::io::Write as _;
use std::net::{IpAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use gradring_proto::dtype::DType;
use gradring_proto::error::{Part, Result, Unusable};
use gradring_proto::schedule::algorithm_rules::Rules;
use gradring_proto::schedule::choice::MESH_RANKS_MAX;

/// Most TCP connections to each peer in each direction.
pub const STREAMS_MAX: usize = 16;
/// How long one conversation may take while a group forms, at least, and the part of the time for
/// forming that it may take if that is more.
const CONVERSATION_LIMIT: Duration = Duration::from_secs(5);
const CONVERSATION_PART: u32 = 20;

/// One row of the table.
#[derive(Debug, Clone, Copy)]
pub struct Setting {
    /// What the code calls it; the argument of `init()` if there is one.
    pub name: &'static str,
    /// The variable that says it.
    pub variable: &'static str,
    /// What its value is, in words of docs/command-line.md; says how Python reads it.
    pub kind: &'static str,
    /// The values that can be chosen, or the least and the greatest number; empty for any.
    pub choices: &'static [&'static str],
    /// What counts when neither argument nor variable says anything; empty for nothing.
    pub default: &'static str,
    /// Whether it is an argument of `init()`, too.
    pub argument: bool,
    /// Whether all ranks need the same value.
    pub agreed: bool,
    /// Who reads the variable.
    pub reader: Reader,
    /// What it does, in a few words.
    pub meaning: &'static str,
}

/// Who reads a variable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reader {
    /// The detection of clusters.
    Clusters,
    /// `gradring.config.values.Settings`, for [`Settings`].
    Group,
    /// `gradring.config.values.Settings`, for Python's own use.
    Program,
    /// The code that uses it, whatever group it is for.
    User,
}

use Reader::{Clusters, Program, User};

pub mod timing;

use gradring_proto::settings::{Value, table, wrong};
use gradring_proto::wire::handshake::RACK_BYTES_MAX;
use timing::Timing;

/// Whether all ranks need the same value, or each may have its own.
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
}

/// Where a rank is, and who may join. A token and a job that differ are found by the handshake.
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

/// What a process does, in whatever group it is.
#[rustfmt::skip]
pub const PROCESS: &[Setting] = &[
    row("tcp_congestion", "GRADRING_TCP_CONGESTION", "name", "congestion control of TCP, or `system`", User),
    row("kernel", "GRADRING_KERNEL", "name", "arithmetic: `avx512`, `avx2` or `scalar`", User),
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

/// Makes the rows of [`GROUP`], and of each a field of [`Settings`] with its type.
macro_rules! settings {
    ($($name:ident: $type:ty = $default:literal, $variable:literal, $kind:literal $choices:expr,
        $agreed:ident, $meaning:literal;)*) => {
        /// How a rank talks to the others. Each is an argument of `init()` and `Communicator()`.
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
            /// How a rank talks to the others: a field for each row of [`GROUP`].
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

/// What the hosts of one rack call it, or nothing.
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

/// Where a rank finds what it needs for TLS: PEM files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificates of the authorities whose certificates are accepted.
    pub ca: PathBuf,
    /// This rank's certificate, followed by those that lead to an authority.
    pub certificate: PathBuf,
    /// The private key of this rank's certificate.
    pub key: PathBuf,
}

/// How a rank joins its group. Holds a secret, so it is never printed.
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
    /// First and last of the ports of which this rank takes a free one, where nothing says its
    /// address: for firewalls.
    pub ports: Option<(u16, u16)>,
    /// Address at which this rank listens, whatever `rendezvous` and `listen` say; they still say
    /// the port. For hosts with several networks.
    pub interface: Option<IpAddr>,
    /// `host:port` by which others reach this rank, where that is not the address it listens at:
    /// behind a forwarded port.
    pub announce: Option<String>,
    /// Where each rank listens, by rank, if that is known beforehand; for messages only.
    pub addresses: Vec<String>,
    /// What tells the job from others that may use the same addresses; must be the same on all
    /// ranks. Empty if nothing does.
    pub job: String,
    /// Versions of what computes beside gradring, which the ranks tell each other; empty for none.
    pub versions: String,
    /// Shared secret of the job; empty for none.
    pub token: Vec<u8>,
    /// Certificates, if everything that travels over TCP is to be inside TLS.
    pub tls: Option<TlsFiles>,
    /// The socket at which this process listens already, whatever the others say of its address.
    pub socket: Option<Arc<TcpListener>>,
    /// How often the processes of an elastic job have agreed on their group; 0 in any other job.
    pub generation: u32,
    /// The number of the communicator that this one follows in its process, if it follows one.
    pub id: Option<u64>,
    /// What the group is of the world, if it is not all of it; for messages only.
    pub part: Option<Arc<Part>>,
    /// How to talk to the others.
    pub settings: Settings,
    /// After how long others count as lost; for tests.
    #[doc(hidden)]
    pub timing: Timing,
    /// Shows people a warning; called on threads that must not wait.
    pub on_warning: fn(String),
}

impl Config {
    /// The place of a process, and defaults for everything else: no token, no TLS, any free port,
    /// [`Settings::default`], and warnings that go to the standard error. No variable changes them.
    ///
    /// Without a `token`, every process that reaches the port of a rank may join: give all ranks the
    /// same one wherever others share the machine or the network. A world of one needs no
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
            // A full disk must not end what warns.
            on_warning: |warning| drop(writeln!(std::io::stderr(), "gradring: {warning}")),
        }
    }

    /// Whether a group can form by it.
    ///
    /// # Errors
    /// `Config` for what cannot be used.
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

    /// How long one conversation of two ranks may take while the group forms. It takes
    /// milliseconds; who is silent for longer is stopped or cut off, or one of very many on a
    /// machine.
    pub fn conversation_limit(&self) -> Duration {
        CONVERSATION_LIMIT.max(self.settings.timeout / CONVERSATION_PART)
    }
}
