//! Facts of failures, each with the sentence that users read. Code matches the fact; nothing parses
//! a sentence.

use std::fmt;
use std::ops::Deref;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::{Error as Failure, shortened};

/// A text from outside, such as an error of the operating system. It may come from an untrusted
/// peer, so it is shortened and freed of characters that would garble a terminal or a log, also
/// when it is decoded.
#[derive(Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(from = "String")]
pub struct Text(String);

impl From<String> for Text {
    fn from(text: String) -> Self {
        Self(shortened(&text))
    }
}

impl From<&str> for Text {
    fn from(text: &str) -> Self {
        Self(shortened(text))
    }
}

impl Text {
    /// The text that `shown` displays.
    pub fn of(shown: impl fmt::Display) -> Self {
        shown.to_string().into()
    }
}

impl Deref for Text {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Makes an enum of facts, each with its sentence.
macro_rules! facts {
    ($(#[$doc:meta] $name:ident { $($facts:tt)* })*) => { $(
        #[$doc]
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Error)]
        #[expect(missing_docs, reason = "the sentences say it")]
        pub enum $name { $($facts)* }
    )* };
}

const ALL_OR_NONE: &str = "give certificates (tls=, or GRADRING_TLS_CA, GRADRING_TLS_CERT and \
                           GRADRING_TLS_KEY) on every rank or on none";

facts! {
    /// Reasons why a setting cannot be used.
    Unusable {
        #[error("rank {rank} does not exist in a world of {world_size}; ranks run from 0 to world_size - 1")]
        NoSuchRank { rank: usize, world_size: usize },
        #[error("world_size={world_size} is too large: a group has at most {most} ranks")]
        WorldTooLarge { world_size: usize, most: usize },
        #[error(
            "reproducible=True with transport=\"shm\" works with at most {most} ranks, not {world_size}; use \
             transport=\"auto\""
        )]
        TooManyForReproducible { world_size: usize, most: usize },
        #[error("there is no setting {name}")]
        NoSuchSetting { name: Text },
        #[error("{name}={value} is not {wanted}")]
        Value { name: Text, value: Text, wanted: Text },
        #[error("algorithm={value:?}: {problem}; give auto, {known}, or text such as one_shot:64KiB,direct")]
        Algorithm { value: Text, problem: BadRules, known: Text },
        #[error("{call}: root={root} is not a rank of a world of {world_size}")]
        Root { call: Text, root: usize, world_size: usize },
        #[error("{call}: counts {counts} do not divide {elements} elements among {world_size} ranks")]
        Counts { call: Text, counts: Text, elements: usize, world_size: usize },
        #[error(
            "{call}: a buffer of {elements} elements has no equal chunks for {world_size} ranks; pad it"
        )]
        Chunks { call: Text, elements: usize, world_size: usize },
        #[error(
            "{call}: needs connections that are not there: of {world_size} ranks each shares memory with \
             its neighbours only; use transport=\"auto\" or \"tcp\", by which others can be connected"
        )]
        NotConnected { call: Text, world_size: usize },
        #[error("{call}: rank {peer} is not another rank of a world of {world_size}")]
        NotAnother { call: Text, peer: usize, world_size: usize },
        #[error(
            "{algorithm} does not perform {collective} there: hierarchical needs several hosts, and \
             several ranks on one of them, and all_to_all needs direct; choose another algorithm"
        )]
        NotThere { algorithm: Text, collective: Text },
        #[error(
            "{collective} of {bytes} bytes by {world_size} ranks moves about {pieces} pieces, too many \
             to simulate; choose fewer ranks or a smaller size; {symmetric} without stragglers, of {even} \
             bytes or a multiple, may have more, as its ranks do the same"
        )]
        TooLargeToSimulate {
            collective: Text,
            bytes: usize,
            world_size: usize,
            pieces: usize,
            symmetric: Text,
            even: usize,
        },
        #[error(
            "{collective} of {bytes} bytes by {world_size} ranks takes more than half a year there; \
             check the units of times and rates"
        )]
        TooLongToSimulate { collective: Text, bytes: usize, world_size: usize },
        #[error("was started with {theirs}, rank 0 with {ours}")]
        SettingsDiffer { theirs: Text, ours: Text },
        #[error(
            "was started with transport=\"{offered}\", rank {rank} with transport=\"{needed}\", which \
             have nothing in common"
        )]
        TransportsDiffer { offered: Text, rank: usize, needed: Text },
        #[error("rank {rank} cannot have a link with it: {reason}")]
        NoLink { rank: usize, reason: Text },
        #[error("transport=\"shm\", but rank {rank} cannot share memory with it: {reason}")]
        NoSharedMemory { rank: usize, reason: Text },
        #[error("cannot listen on {address}: {error}; choose an address of this host")]
        NotAnAddressOfThisHost { address: Text, error: Text },
        #[error("{setting}: {path} cannot be read as PEM: {error}")]
        NotPem { setting: Text, path: Text, error: Text },
        #[error("{setting}: {path} cannot be used: {error}")]
        Certificate { setting: Text, path: Text, error: Text },
        #[error("{host:?} is no name that a certificate can be for")]
        NotAName { host: Text },
        #[error("it takes TLS only; the rank that connects to it does not speak it; {ALL_OR_NONE}")]
        InitiatorWithoutTls,
        #[error("it takes TLS only, and this rank does not speak it; {ALL_OR_NONE}")]
        OnlyTls,
        #[error("it does not speak TLS; the rank that connects to it does; {ALL_OR_NONE}")]
        ResponderWithoutTls,
        #[error("it answers without TLS; {ALL_OR_NONE}")]
        AnswersWithoutTls,
    }

    /// Mistakes in a choice of algorithms.
    BadRules {
        #[error("{name:?} is no algorithm")]
        NoAlgorithm { name: Text },
        #[error("{part:?} has no size")]
        NoSize { part: Text },
        #[error("sizes must grow from part to part")]
        SizesShrink,
    }

    /// Reasons why a group has not formed, or why a connection was refused meanwhile.
    NotFormed {
        #[error("{}", who_is_missing(missing, *more, *world_size, rendezvous, *within, turned_away))]
        MissingRanks {
            missing: Vec<Missing>,
            more: usize,
            world_size: usize,
            rendezvous: Text,
            within: Duration,
            turned_away: Text,
        },
        #[error(
            "joined from {address} but did not connect to rank {rank} in time ({} is \
             missing){turned_away}",
            which_stream(*stream, *streams)
        )]
        NotConnected { address: Text, rank: usize, stream: Option<usize>, streams: usize, turned_away: Text },
        #[error("its group has formed already and has not ended")]
        Busy,
        #[error("rank {initiator} was started with world size {theirs}, rank {responder} with {ours}")]
        OtherWorldSize { initiator: usize, theirs: usize, responder: usize, ours: usize },
        #[error(
            "rank {initiator} connected to rank {meant} and reached rank {reached}: the name, address or \
             forwarded port of the one leads to the other"
        )]
        OtherRank { initiator: usize, meant: usize, reached: usize },
        #[error("a process connected to rank {responder} as rank {initiator} of {world_size}")]
        NoSuchRank { initiator: usize, responder: usize, world_size: usize },
        #[error("stream {stream} of rank {rank} has been connected already")]
        StreamTaken { rank: usize, stream: usize },
        #[error("another process has joined as rank {rank} already")]
        RankTaken { rank: usize },
        #[error(
            "rank {initiator} belongs to another group than rank {responder}, of another job or an earlier \
             start"
        )]
        OtherGroup { initiator: usize, responder: usize },
        #[error(
            "rank {initiator} forms the group of generation {theirs}, and rank {responder} that of \
             generation {ours}: one of them has not heard of the newer one"
        )]
        OtherGeneration { initiator: usize, theirs: u32, responder: usize, ours: u32 },
        #[error("rank {rank} has not heard of a group yet")]
        NoGroupYet { rank: usize },
        #[error(
            "rank {initiator} was started by {}, rank {responder} by {}; two jobs may be using one address",
            job(theirs), job(ours)
        )]
        OtherJob { initiator: usize, theirs: Text, responder: usize, ours: Text },
        #[error("it refused this rank, and did not prove that it belongs to the job")]
        Refused,
        #[error("rank {initiator} cannot reach it at {address}: {error}")]
        Unreachable { initiator: usize, address: Text, error: Text, obstacle: Obstacle },
        #[error("no process can be reached at {address}: {error}")]
        NobodyThere { address: Text, error: Text, obstacle: Obstacle },
        #[error("cannot listen on {address}: {error}")]
        PortInUse { address: Text, error: Text },
        #[error("cannot listen on {address}: {error}")]
        PortForbidden { address: Text, error: Text },
        #[error("cannot listen on {address}: {error}")]
        CannotListen { address: Text, error: Text },
        #[error("a socket fails: {error}")]
        Socket { error: Text },
        #[error("{address} cannot be reached ({error}): the loopback interface of this host or container is down")]
        NoLoopback { address: Text, error: Text },
        #[error("the connection broke during the handshake: {error}")]
        HandshakeBroke { error: Text },
        #[error("there was no answer in time during the handshake")]
        HandshakeSilent,
        #[error("its process ended while the group was forming")]
        CoordinatorEnded,
        #[error("joined, but its process ended while the group was forming")]
        MemberEnded,
        #[error("joined, but did not finish connecting in time")]
        NotFinished,
        #[error("does not answer while the group is forming; it is stopped, or the network to it is cut")]
        CoordinatorSilent,
        #[error("it accepted this rank but sent no roster in time")]
        NoRoster,
        #[error("it ended before the group was complete")]
        EndedEarly,
        #[error("did not answer rank {rank} in time when both agreed about their link")]
        LinkSilent { rank: usize },
        #[error("its connection to rank {rank} broke when both agreed about their link: {error}")]
        LinkBroke { rank: usize, error: Text },
    }

    /// Reasons why the processes of an elastic job found no members for its next generation.
    NotAgreed {
        #[error(
            "{}, and so cannot be more than half of generation {generation}; nothing has proved that {} \
             ended, and they may have gone on without this process ({} s)",
            alone(*here), listed(missing), within.as_secs()
        )]
        Minority { here: usize, missing: Vec<Text>, generation: u64, within: Duration },
        #[error("{here} workers are left and {least} are needed; no others joined within {} s", within.as_secs())]
        TooFewWorkers { here: usize, least: usize, within: Duration },
        #[error("no member of the job answered at {} within {} s", listed(asked), within.as_secs())]
        NobodyToJoin { asked: Vec<Text>, within: Duration },
        #[error("the job does not let this process join: {}", listed(refusals))]
        TurnedAway { refusals: Vec<Text> },
    }

    /// Reasons why parameter servers do not serve a worker.
    NotServed {
        #[error("parameter server {server} at {address}: {}", error.kind)]
        Greeting { server: usize, address: Text, error: Box<Failure> },
        #[error(
            "{doing}: parameter server {server} at {address} could not be reached for {:.1} s: {why}",
            waited.as_secs_f64()
        )]
        Unreachable { server: usize, address: Text, doing: Text, waited: Duration, why: Text },
        #[error(
            "{doing}: all parameter servers answer, and for {:.1} s they did not let worker {worker} go on: \
             the rule makes it wait for other workers, or server 0 waits for another server",
            waited.as_secs_f64()
        )]
        Held { doing: Text, worker: usize, waited: Duration },
        #[error("worker {worker} is process {process} on {host}, which lives")]
        WorkerTaken { worker: usize, process: u32, host: Text },
        #[error("worker {worker} was started, and there are {workers}: their indices are 0 to {}", workers - 1)]
        NoSuchWorker { worker: usize, workers: usize },
        #[error(
            "worker {worker} trains variables of other names, shapes or dtypes than worker {other}, or with \
             another optimizer or placement"
        )]
        ModelsDiffer { worker: usize, other: usize },
        #[error("it was started with {theirs}, and server 0 with {ours}")]
        RulesDiffer { theirs: Text, ours: Text },
        #[error("it offers {theirs} to make a link of, and this process {ours}: {reason}")]
        NoLink { theirs: Text, ours: Text, reason: Text },
        #[error("{client} was started with streams={theirs}, and it with streams={ours}")]
        StreamsDiffer { client: Text, theirs: usize, ours: usize },
        #[error("the address leads to parameter server {reached}")]
        OtherServer { reached: usize },
        #[error("the address is a rank's, not a parameter server's")]
        NotAServer,
        #[error("the address is a parameter server's, not a rank's")]
        OnlyParameters,
        #[error("{directory} has the snapshots of another living process")]
        DirectoryTaken { directory: Text },
        #[error(
            "{directory} has the snapshots of a job with {}, and this job has {ours}",
            servers(*theirs)
        )]
        OtherNumber { directory: Text, theirs: usize, ours: usize },
        #[error(
            "{directory} has the snapshots of a job whose variables, optimizer or placement differ from those \
             of worker {worker}"
        )]
        OtherModel { directory: Text, worker: usize },
        #[error("{directory} has the snapshots of server {theirs} of {servers}, and this is server {server}")]
        OtherDirectory { directory: Text, theirs: usize, servers: usize, server: usize },
        #[error("cannot {what} {path}: {error}")]
        Disk { what: Text, path: Text, error: Text },
        #[error("no worker came to parameter server {server} within {} s{turned_away}", within.as_secs())]
        NobodyCame { server: usize, within: Duration, turned_away: Text },
        #[error("all workers of parameter server {server} were lost and none had left: {workers:?}")]
        AllLost { server: usize, workers: Vec<usize> },
        #[error("{call} was called out of turn: each pull() is followed by one push(), and begin() comes first")]
        OutOfTurn { call: Text },
        #[error(
            "worker {worker}: {variable} was set since the last step, and the servers do not have its new value"
        )]
        WasSet { worker: usize, variable: Text },
        #[error("the parameter {what} is closed")]
        Closed { what: Text },
        #[error("the parameter {what} belongs to the process from which this one was forked")]
        OfParent { what: Text },
    }

    /// Reasons why a peer is not trusted to belong to the job.
    NotTrusted {
        #[error(
            "{} and rank {responder} have different tokens, and either may be the one to correct{}",
            initiator_name(*initiator), unless_changed(*tokenless)
        )]
        TokensDiffer { initiator: Option<usize>, responder: usize, tokenless: bool },
        #[error("it presents no certificate")]
        NoCertificate,
        #[error("its certificate does not lead to an authority in tls.ca (GRADRING_TLS_CA)")]
        UnknownAuthority,
        #[error("its certificate is refused: {reason}")]
        Certificate { reason: Text },
        #[error(
            "it does not accept this rank's certificate (alert {alert}); this rank's tls.cert \
             (GRADRING_TLS_CERT) must be valid now by the other's clock, and lead to an authority in \
             the other's tls.ca (GRADRING_TLS_CA)"
        )]
        OwnCertificate { alert: Text },
    }

    /// Signs of the loss of a rank.
    Lost {
        #[error("no sign of life for {} s; it is stopped, or the network to it is cut", silence.as_secs())]
        Silent { silence: Duration },
        #[error("has closed its communicator while others still use it")]
        Left,
        #[error("its control connection was closed: its process has ended")]
        ControlClosed,
        #[error("its control connection was reset: its process has ended")]
        ControlReset,
        #[error("its control connection broke: {error}")]
        ControlBroke { error: Text },
        #[error("the connection to it {broken}")]
        LinkEnded { broken: Broken },
    }

    /// Reasons why a pipe carries nothing more.
    Breakage {
        #[error("was closed by the other side")]
        Closed,
        #[error("ended with the other side's process")]
        ProcessEnded,
        #[error("does not exist")]
        Absent,
        #[error("broke: {error}")]
        Failed { error: Text },
        #[error("broke: {error}")]
        Undecipherable { error: Text },
        #[error("is corrupt: at byte {own} the other side {} up to byte {other}", counted(*published))]
        Counter { own: u64, published: bool, other: u64 },
        #[error("corrupted segment {sequence}: {problem}")]
        Segment { sequence: u32, problem: BadSegment },
    }

    /// Defects of a segment.
    BadSegment {
        #[error("{bytes} bytes have the checksum {found:08x}, and were sent with {sent:08x}")]
        Checksum { bytes: usize, found: u32, sent: u32 },
        #[error("the announcement is not what its checksum says")]
        Announcement,
        #[error("segment {came} came instead")]
        OtherCame { came: u32 },
        #[error("it is longer than a sender makes them")]
        TooLong,
        #[error("it is lost: later ones came on all streams")]
        NeverCame,
    }

    /// Contents that no correct peer sends at the start of a collective.
    Garbled {
        #[error("sent bytes that are not a collective's header")]
        NotAHeader,
        #[error("its connection to rank {rank} carries what rank {from} sent to rank {to}")]
        OtherWay { rank: usize, from: usize, to: usize },
        #[error("published an array that does not lie in its heap")]
        OutsideHeap,
    }

    /// A problem that a rank noticed and cannot explain alone.
    Suspicion {
        #[error("the connection to rank {peer} {broken}")]
        LinkBroken { peer: usize, broken: Broken },
        #[error("rank {peer}: {how}")]
        Garbled { peer: usize, how: Garbled },
        #[error("in {call} (collective #{sequence}) the connection from rank {peer} {broken}")]
        Corrupted { peer: usize, broken: Broken, call: Text, sequence: u64 },
        #[error("rank {peer} called something else as collective #{sequence}: {theirs}")]
        HeadersDiffer { peer: usize, sequence: u64, theirs: Text, own: Text },
        #[error(
            "collective #{sequence}, waiting for {}, did not move for {:.1} s",
            ranks(awaited), idle.as_secs_f64()
        )]
        Stalled { awaited: Vec<usize>, sequence: u64, idle: Duration },
    }

    /// States of a rank that has not acted in time.
    Late {
        #[error("is alive but has not entered this collective")]
        NotEntered,
        #[error("is in {call} and has not entered this collective")]
        Beside { call: Text },
        #[error("does not answer")]
        Silent,
        #[error("is alive but sends nothing")]
        SendsNothing,
        #[error("has entered this collective but sends nothing")]
        EnteredSendsNothing,
        #[error(
            "waits in a circle: {} wait for each other; let one of them call send_async or recv_async",
            ranks(circle)
        )]
        InACircle { circle: Vec<usize> },
        #[error("has not ended within the {} s of this wait", limit.as_secs_f64())]
        ThisWait { limit: Duration },
    }

    /// Reasons why a communicator works no more.
    Abort {
        #[error("aborted the communicator: {reason}")]
        ByProgram { reason: Text },
        #[error("was interrupted (Ctrl-C or a signal handler)")]
        Interrupted,
        #[error("was interrupted while the group was forming")]
        InterruptedForming,
        #[error("the communicator is closed")]
        Closed,
        #[error("the communicator was closed while a collective was under way")]
        ClosedUnderWay,
        #[error(
            "this tf.function was traced with a communicator that is closed, and has to be traced again \
             under another one"
        )]
        ClosedSinceTraced,
        #[error("this process was forked in the middle of the call, which goes on in its parent only")]
        ForkedInside,
        #[error(
            "this process was forked from the one that launched the collective, which alone can wait for \
             it"
        )]
        OfParent,
    }

    /// Messages that no correct peer sends, and defects of this program.
    Breach {
        #[error("one process speaks protocol version {initiator}, the rank that it connected to version {responder}")]
        OtherVersion { initiator: u32, responder: u32 },
        #[error("a message of {bytes} bytes was announced; at most {most} are accepted")]
        TooLong { bytes: usize, most: usize },
        #[error("a message is too long to send")]
        TooLongToSend,
        #[error("a message could not be decoded: {error}")]
        NotDecoded { error: Text },
        #[error("a message could not be encoded: {error}")]
        NotEncoded { error: Text },
        #[error("no random numbers from the system: {error}")]
        NoRandomNumbers { error: Text },
        #[error("something else than {wanted} arrived")]
        Unexpected { wanted: Text },
        #[error("rank {responder} expects no such connection from rank {initiator}")]
        NotExpected { initiator: usize, responder: usize },
        #[error("rank 0 sent a roster of another size")]
        RosterSize,
        #[error("TLS fails: {error}")]
        Tls { error: Text },
        #[error("{part} failed: {panic}; please report this")]
        Panicked { part: Text, panic: Text },
        #[error("an unlimited wait ended without a result")]
        NoResult,
        #[error("the group could not find the cause of this: {suspicion}")]
        NoCause { suspicion: Suspicion },
        #[error("its header of a collective arrived changed")]
        HeaderChanged,
        #[error("has told that it sends {rows} rows in {call}, which no rank can")]
        Rows { rows: i64, call: Text },
        #[error("{how}")]
        Garbled { how: Garbled },
    }

    /// Places where bytes changed.
    Damage {
        #[error("the connection from rank {from} on {from_host} to rank {to} on {to_host} {broken}")]
        OnLink { from: usize, from_host: Text, to: usize, to_host: Text, broken: Broken },
        #[error("{seconds} s arrived as the time of a calibration, which no rank measures")]
        WildTime { seconds: f64 },
    }

    /// Calls of two collectives that nothing orders.
    Disorder {
        #[error("a signal handler or finalizer that ran while {other} waits called {call}")]
        InHandler { call: Text, other: Text },
        #[error(
            "one thread called {call} while another one was inside {other}, and nothing orders the two: \
             other ranks may have them the other way round"
        )]
        TwoThreads { call: Text, other: Text },
    }

    /// Exhausted resources of the system, with the limit to raise.
    Shortage {
        #[error(
            "has no memory for {bytes} bytes of {what}: reduce smaller buckets, or give its process more \
             (ulimit -v, or the limit of its container)"
        )]
        NoMemory { bytes: usize, what: Text },
        #[error(
            "cannot start a thread ({error}): raise the number of its user's processes (ulimit -u), or \
             the limit of its container on processes or memory"
        )]
        NoThread { error: Text },
        #[error("the system refuses eventfd2, by which threads wake each other ({error})")]
        NoWakeUp { error: Text },
        #[error("{what}: {error}: raise the number of files that its process may have open (ulimit -n)")]
        NoFile { what: Text, error: Text },
        #[error("{what}: {error}: raise the number of files that its host may have open (sysctl fs.file-max)")]
        NoFileOfHost { what: Text, error: Text },
        #[error("{what}: {error}: give its process more memory (ulimit -v, or the limit of its container)")]
        NoBuffers { what: Text, error: Text },
    }
}

impl NotServed {
    /// Name of the exception class for this fact.
    pub(super) const fn exception(&self) -> &'static str {
        match self {
            Self::Greeting { error, .. } => error.kind.exception(),
            Self::Unreachable { .. } | Self::AllLost { .. } => "PeerLostError",
            Self::Held { .. } => "CollectiveTimeoutError",
            Self::ModelsDiffer { .. } | Self::RulesDiffer { .. } => "MismatchError",
            Self::NobodyCame { .. } | Self::NotAServer | Self::OnlyParameters => "RendezvousError",
            Self::OutOfTurn { .. } => "GradringError",
            Self::Closed { .. } | Self::OfParent { .. } => "AbortedError",
            Self::WorkerTaken { .. }
            | Self::NoSuchWorker { .. }
            | Self::WasSet { .. }
            | Self::NoLink { .. }
            | Self::StreamsDiffer { .. }
            | Self::OtherServer { .. }
            | Self::DirectoryTaken { .. }
            | Self::OtherDirectory { .. }
            | Self::OtherNumber { .. }
            | Self::OtherModel { .. }
            | Self::Disk { .. } => "ConfigError",
        }
    }
}

/// End of the text of a call whose buffer all ranks read where it is, in the heap of its rank.
pub const MAPPED: &str = " in memory of Communicator.empty";

/// The end of a pipe that carries nothing more.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Broken {
    /// Reason for the end.
    pub how: Breakage,
    /// The stream that broke first, if there are several.
    pub stream: Option<usize>,
}

impl Broken {
    /// The other side has closed the pipe in good order.
    #[must_use]
    pub fn closed() -> Self {
        Breakage::Closed.into()
    }

    /// The operating system reports an error on the pipe.
    pub fn failed(error: impl fmt::Display) -> Self {
        let error = Text::of(error);
        Breakage::Failed { error }.into()
    }

    /// Returns whether bytes arrived changed, as opposed to a pipe that only ended.
    #[must_use]
    pub const fn corrupted(&self) -> bool {
        use Breakage::{Counter, Segment, Undecipherable};
        matches!(
            self.how,
            Counter { .. } | Segment { .. } | Undecipherable { .. }
        )
    }
}

impl From<Breakage> for Broken {
    fn from(how: Breakage) -> Self {
        Self { how, stream: None }
    }
}

/// Continues a sentence that begins with "the connection".
impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.how.fmt(f)?;
        self.stream
            .map_or(Ok(()), |stream| write!(f, " (stream {stream})"))
    }
}

/// Reason why a process has no connection to an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Obstacle {
    /// The name has no address, or none yet.
    NoAddress,
    /// The host answers that no process listens.
    NobodyListens,
    /// Nothing answers, or there is no route.
    NoWay,
}

const fn counted(published: bool) -> &'static str {
    match published {
        true => "published",
        false => "took back",
    }
}

/// `1 parameter server`, or `2 parameter servers`.
fn servers(count: usize) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} parameter server{plural}")
}

/// `rank 3`, or `ranks 0, 1 and 2`; a long list ends with the number of further ranks.
#[must_use]
pub fn ranks(ranks: &[usize]) -> String {
    let shown: Vec<_> = ranks.iter().take(8).map(usize::to_string).collect();
    listed_ranks(&shown, ranks.len() - shown.len())
}

/// Like [`ranks`], for names that may have additions, and `more` ranks that are only counted.
#[must_use]
pub fn listed_ranks(names: &[String], more: usize) -> String {
    match (names, more) {
        ([], 0) => "no rank".into(),
        ([one], 0) => format!("rank {one}"),
        ([first @ .., last], 0) => format!("ranks {} and {last}", first.join(", ")),
        (names, more) => format!("ranks {} and {more} more", names.join(", ")),
    }
}

/// A rank that did not join.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Missing {
    /// Index of the rank.
    pub rank: usize,
    /// The address where it should listen, and the finding there, if that is known.
    pub found: Option<(Text, Text)>,
}

fn who_is_missing(
    missing: &[Missing],
    more: usize,
    world_size: usize,
    rendezvous: &Text,
    within: Duration,
    turned_away: &Text,
) -> String {
    let name = |missing: &Missing| match &missing.found {
        Some((address, found)) => format!("{} at {address} ({found})", missing.rank),
        None => missing.rank.to_string(),
    };
    let names = missing.iter().map(name).collect::<Vec<_>>();
    let ranks = listed_ranks(&names, more);
    let within = within.as_secs_f64();
    format!(
        "{ranks} of {world_size} did not join rank 0 at {rendezvous} within \
         {within:.0} s{turned_away}"
    )
}

fn which_stream(stream: Option<usize>, streams: usize) -> String {
    stream.map_or_else(
        || "control".into(),
        |stream| format!("stream {stream} of {streams}"),
    )
}

fn job(name: &Text) -> String {
    match &**name {
        "" => "no job that it knows of".into(),
        name => format!("job {name}"),
    }
}

const fn unless_changed(tokenless: bool) -> &'static str {
    match tokenless {
        true => "; if neither has one, bytes changed between them",
        false => "",
    }
}

fn initiator_name(initiator: Option<usize>) -> String {
    initiator.map_or_else(|| "a process".into(), |rank| format!("rank {rank}"))
}

/// Number of processes that found each other, as text.
fn alone(here: usize) -> String {
    match here {
        1 => "this process reaches no other member".into(),
        more => format!("{more} members reach each other and no others"),
    }
}

/// The first few of some addresses, as text.
fn listed(addresses: &[Text]) -> String {
    const SHOWN: usize = 8;
    let shown = addresses.iter().take(SHOWN).map(|address| &**address);
    let shown = shown.collect::<Vec<_>>().join(", ");
    match addresses.len() {
        0 => "no address".into(),
        all if all > SHOWN => format!("{shown} and {} more", all - SHOWN),
        _ => shown,
    }
}
