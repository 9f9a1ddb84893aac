//! The handshake of a connection: identities, purpose, and the proof that both sides know the
//! token.
//!
//! 1. `Hello`, initiator to responder: ranks of both, group, purpose and a nonce.
//! 2. `Welcome`, responder to initiator: its rank, its nonce, and HMAC(token, "callee",
//!    transcript).
//! 3. `Proof`, initiator to responder: HMAC(token, "caller", transcript).
//! 4. `Accepted`, responder to initiator.
//!
//! Either side may send `Refused` instead, with the error that the other side reports. An error
//! from a peer that has not proved to know the token is not quoted. The proofs cover both nonces,
//! the whole `Hello` and the responder's rank. So a proof cannot be replayed or reflected, nor
//! moved to another initiator, responder, group, generation, size, purpose or version. HMAC-SHA256
//! is RFC 2104 with FIPS 180-4.

use std::fmt;
use std::io::{self, Read, Write};

use hmac::{Hmac, KeyInit as _, Mac as _};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use crate::error::{Breach, Error, ErrorKind, NotFormed, NotTrusted, Result, Text, Unusable};
use crate::wire::codec;

/// Bound on the name of a rack in bytes, so that a roster of all ranks fits into one message.
pub const RACK_BYTES_MAX: usize = 24;

/// Version of everything that travels; grows with every change. The start of a greeting and
/// [`Message::OtherVersion`] never change, because two versions recognise each other by them.
pub const PROTOCOL_VERSION: u32 = 24;

/// Bound on the models of one job at parameter servers: each has connections of its own.
pub const MODELS_MAX: usize = 64;

/// Bound on a message of a member, in bytes.
const MESSAGE_BYTES_MAX: usize = 2 << 20;
/// Size of the largest group: with 1,024 bytes for each rank, its roster fits into one message.
pub const WORLD_SIZE_MAX: usize = MESSAGE_BYTES_MAX / 1024;
/// Bound on a message of a stranger, in bytes. The longest is a member's settings, or an error.
const STRANGERS_MESSAGE_BYTES_MAX: usize = 64 << 10;

/// Purpose of a connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Purpose {
    /// Joins the group; sent to rank 0 only.
    Join(RosterMember),
    /// Carries payload from the initiator to the responder, as one stream of their pipe.
    Data {
        /// Index of the stream.
        stream: usize,
    },
    /// Carries heartbeats, questions and aborts in both directions.
    Control,
    /// Carries payload between two ranks of a formed group that connect lazily, as one stream of
    /// their pipe.
    OnDemand {
        /// Kind of payload.
        traffic: Traffic,
        /// Index of the stream.
        stream: usize,
    },
    /// Asks for the rank's status from outside of the group, any number of times.
    Inquiry,
    /// Carries messages about the members of the next group to the process, whatever its rank.
    Membership {
        /// The job, as in [`RosterMember::job`].
        job: String,
    },
    /// A worker's or sequencer's connection to a parameter server: `stream` of `streams`. Ranks in
    /// the `Hello` are ignored.
    Parameters {
        /// The job, as in [`RosterMember::job`].
        job: String,
        /// Index of the server that the initiator wants to reach.
        server: usize,
        /// Number of the model, below [`MODELS_MAX`]. A job has a model for each optimizer.
        model: usize,
        /// Role and identity of the initiator.
        client: ClientKind,
        /// Kinds of link that the initiator offers, by name.
        transports: Vec<String>,
        /// Index of the stream.
        stream: usize,
        /// Number of streams of the link.
        streams: usize,
        /// A random number, the same for all streams of one link.
        attempt: u64,
    },
}

/// Payload of connections that are made on demand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Traffic {
    /// Collectives of all ranks.
    Collectives,
    /// Messages from the initiator to the responder alone.
    ToResponder,
    /// Messages from the responder to the initiator alone.
    ToInitiator,
}

/// Role and identity of a parameter server's client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClientKind {
    /// A worker.
    Worker {
        /// Its index among the workers.
        index: usize,
        /// A random number for its process, the process id, and the host.
        process: (u64, u32, String),
        /// Fingerprint of its variables, optimizer and placement; must be equal for all workers.
        model: [u8; 32],
    },
    /// The first server.
    Sequencer {
        /// A random number for its process.
        process: u64,
        /// The update rules, as text.
        rules: String,
    },
}

impl ClientKind {
    /// Name of the client in errors and logs.
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Self::Worker { index, .. } => format!("worker {index}"),
            Self::Sequencer { .. } => "parameter server 0".into(),
        }
    }
}

impl Purpose {
    /// Returns whether the connection addresses a process, whatever its rank.
    pub const fn addresses_process(&self) -> bool {
        matches!(
            self,
            Self::Inquiry | Self::Membership { .. } | Self::Parameters { .. }
        )
    }
}

/// Identity of a group: a random number that rank 0 draws once all ranks have joined. No other
/// group has it, even with the same ranks, addresses and token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupId([u8; 16]);

impl GroupId {
    /// Used by an initiator that is in no group yet.
    pub const NONE: Self = Self([0; 16]);

    /// Draws the identity of a new group.
    pub fn draw() -> Result<Self> {
        random().map(Self)
    }
}

impl fmt::Display for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Address, host and settings of a rank that joins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RosterMember {
    /// `host:port` at which others reach it; empty for rank 0 at the rendezvous address.
    pub address: String,
    /// True if it listens on its host's loopback interface, which no other host can reach.
    pub loopback_only: bool,
    /// Name of the host in errors and logs.
    pub host: String,
    /// Equal for two ranks exactly if they run on the same booted system and network.
    pub host_id: String,
    /// Name of the rack. Hosts with the same name share one uplink; empty if unknown.
    pub rack: String,
    /// The job that started it, such as `slurm 4711.0`; empty if unknown.
    pub job: String,
    /// Settings that must be equal on all ranks, as text.
    pub settings: String,
    /// Versions of other software that computes, such as `Python 3.11.7, numpy 2.4.6`. They may
    /// differ between ranks; rank 0 reports a difference.
    pub versions: String,
    /// Kinds of link that it offers, by name.
    pub transports: Vec<String>,
}

/// The first message of an initiator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Version of the protocol.
    pub version: u32,
    /// Rank of the initiator.
    pub rank: usize,
    /// The rank that the initiator wants to reach; ignored where [`Purpose::addresses_process`].
    pub responder: usize,
    /// Number of processes, as the initiator knows it.
    pub world_size: usize,
    /// The group, or [`GroupId::NONE`] before it has formed.
    pub group: GroupId,
    /// Generation of the group in an elastic job; 0 otherwise.
    pub generation: u32,
    /// Purpose of the connection.
    pub purpose: Purpose,
    /// Random bytes for the proofs.
    pub nonce: [u8; 32],
}

/// A message of the handshake.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub enum Message {
    /// First message of the initiator.
    Hello(Hello),
    /// Answer of the responder.
    Welcome {
        /// Rank of the responder.
        rank: usize,
        /// Random bytes for the initiator's proof.
        nonce: [u8; 32],
        /// Proves that the responder knows the token.
        proof: [u8; 32],
    },
    /// Proves that the initiator knows the token.
    Proof([u8; 32]),
    /// Ends a successful handshake.
    Accepted,
    /// Ends a handshake without a connection, with the reason.
    Refused(Error),
    /// Version of the responder. It must keep its position among the variants, which is its number
    /// on the wire.
    OtherVersion(u32),
}

/// Sends the reason why this side refuses the connection; either side may call it.
pub fn refuse(stream: &mut impl Write, error: &Error) {
    // The peer may be gone already, which changes nothing here.
    let _ = write_message(stream, &Message::Refused(error.clone()));
}

impl Hello {
    /// A greeting from `rank` to `responder` before the group has formed.
    pub fn new(
        (rank, responder): (usize, usize),
        world_size: usize,
        purpose: Purpose,
    ) -> Result<Self> {
        Ok(Self {
            version: PROTOCOL_VERSION,
            rank,
            responder,
            world_size,
            group: GroupId::NONE,
            generation: 0,
            purpose,
            nonce: random()?,
        })
    }

    /// Rank of the initiator; `None` where [`Purpose::addresses_process`].
    fn initiator(&self) -> Option<usize> {
        (!self.purpose.addresses_process()).then_some(self.rank)
    }

    /// The same greeting from a member of `group` in `generation`.
    pub const fn within(mut self, group: GroupId, generation: u32) -> Self {
        self.group = group;
        self.generation = generation;
        self
    }

    /// A constant greeting for tests, without a secret.
    #[cfg(any(test, feature = "testing"))]
    pub const fn sample(purpose: Purpose) -> Self {
        Self {
            version: PROTOCOL_VERSION,
            rank: 1,
            responder: 0,
            world_size: 2,
            group: GroupId([3; 16]),
            generation: 0,
            purpose,
            nonce: [7; 32],
        }
    }
}

/// Performs the initiator's side of the handshake.
pub fn initiate(stream: &mut (impl Read + Write), hello: Hello, token: &[u8]) -> Result<()> {
    let transcript = codec::encode(&hello, MESSAGE_BYTES_MAX)?;
    let meant = (!hello.purpose.addresses_process()).then_some(hello.responder);
    let (initiator, version) = (hello.initiator(), hello.version);
    write_message(stream, &Message::Hello(hello))?;
    let (rank, nonce, proof) = match receive(stream)? {
        Message::Welcome { rank, nonce, proof } => (rank, nonce, proof),
        Message::OtherVersion(theirs) => return Err(other_version(version, theirs)),
        Message::Refused(error) if token.is_empty() => return Err(error.fit_to_travel()),
        Message::Refused(error) => return Err(without_peer_text(&error)),
        _ => return Err(unexpected("a welcome")),
    };
    let transcript = continued(&transcript, rank, &nonce);
    if !is_proof(token, b"callee", &transcript, &proof) {
        let error = tokens_differ(initiator, rank, token);
        refuse(stream, &error);
        return Err(error);
    }
    write_message(
        stream,
        &Message::Proof(prove(token, b"caller", &transcript)),
    )?;
    match receive(stream)? {
        // A responder of another rank should have refused.
        Message::Accepted => meant.map_or(Ok(()), |meant| {
            check_responder(initiator.unwrap_or_default(), meant, rank)
        }),
        Message::Refused(error) => Err(error.fit_to_travel()),
        _ => Err(unexpected("an acceptance")),
    }
}

/// Performs the responder's side as `rank`; `check` accepts or refuses an authenticated `Hello`.
pub fn respond(
    stream: &mut (impl Read + Write),
    rank: usize,
    token: &[u8],
    check: impl FnOnce(&Hello) -> Result<()>,
) -> Result<Hello> {
    let greeting = read_body(stream, STRANGERS_MESSAGE_BYTES_MAX)?;
    if let Some(theirs) = version_of(&greeting).filter(|&theirs| theirs != PROTOCOL_VERSION) {
        write_message(stream, &Message::OtherVersion(PROTOCOL_VERSION))?;
        return Err(other_version(theirs, PROTOCOL_VERSION));
    }
    let Message::Hello(hello) = codec::decode(&greeting)? else {
        return Err(unexpected("a greeting"));
    };
    let nonce = random()?;
    let transcript = continued(&codec::encode(&hello, MESSAGE_BYTES_MAX)?, rank, &nonce);
    let proof = prove(token, b"callee", &transcript);
    write_message(stream, &Message::Welcome { rank, nonce, proof })?;
    let checked = match receive(stream)? {
        Message::Proof(proof) if is_proof(token, b"caller", &transcript, &proof) => check(&hello),
        // A stranger's reason must not reach the user.
        Message::Refused(_) => return Err(tokens_differ(hello.initiator(), rank, token)),
        _ => Err(tokens_differ(hello.initiator(), rank, token)),
    };
    match checked {
        Ok(()) => {
            write_message(stream, &Message::Accepted)?;
            Ok(hello)
        }
        Err(error) => {
            write_message(stream, &Message::Refused(error.clone()))?;
            Err(error)
        }
    }
}

/// Version in a greeting. The rest of the bytes may be of an unknown format.
fn version_of(greeting: &[u8]) -> Option<u32> {
    let ((message, version), _) = postcard::take_from_bytes::<(u32, u32)>(greeting).ok()?;
    (message == 0).then_some(version)
}

/// Returns an error unless the rank that answers is the one that was meant.
pub fn check_responder(initiator: usize, meant: usize, reached: usize) -> Result<()> {
    if meant == reached {
        return Ok(());
    }
    Err(NotFormed::OtherRank {
        initiator,
        meant,
        reached,
    }
    .into())
}

/// The transcript up to the responder's nonce, which both proofs sign.
fn continued(hello: &[u8], rank: usize, nonce: &[u8; 32]) -> Vec<u8> {
    [hello, &(rank as u64).to_le_bytes(), nonce].concat()
}

/// Writes one length-prefixed message.
pub fn write_message(stream: &mut impl Write, message: &impl Serialize) -> Result<()> {
    let bytes = codec::with_length(message, MESSAGE_BYTES_MAX)?;
    stream.write_all(&bytes).map_err(|error| broken(&error))
}

/// Reads one length-prefixed message of a member; its length is bounded before anything is
/// allocated.
pub fn read_message<T: DeserializeOwned>(stream: &mut impl Read) -> Result<T> {
    codec::decode(&read_body(stream, MESSAGE_BYTES_MAX)?)
}

/// Reads the next message of a peer that may be a stranger.
pub fn receive(stream: &mut impl Read) -> Result<Message> {
    codec::decode(&read_body(stream, STRANGERS_MESSAGE_BYTES_MAX)?)
}

fn read_body(stream: &mut impl Read, bytes_max: usize) -> Result<Vec<u8>> {
    let mut length = [0; 4];
    stream
        .read_exact(&mut length)
        .map_err(|error| broken(&error))?;
    let length = codec::length(length, bytes_max)?;
    // Allocates as bytes arrive, so a claimed length alone takes no memory.
    let mut body = Vec::new();
    let mut claimed = stream.take(length as u64);
    claimed
        .read_to_end(&mut body)
        .map_err(|error| broken(&error))?;
    match body.len() == length {
        true => Ok(body),
        false => Err(broken(&io::ErrorKind::UnexpectedEof.into())),
    }
}

fn mac(token: &[u8], role: &[u8], transcript: &[u8]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(token).expect("HMAC takes keys of any length");
    mac.update(b"gradring handshake ");
    mac.update(role);
    mac.update(transcript);
    mac
}

fn prove(token: &[u8], role: &[u8], transcript: &[u8]) -> [u8; 32] {
    mac(token, role, transcript).finalize().into_bytes().into()
}

/// Compares in constant time.
fn is_proof(token: &[u8], role: &[u8], transcript: &[u8], proof: &[u8; 32]) -> bool {
    mac(token, role, transcript).verify_slice(proof).is_ok()
}

/// Random bytes from the operating system.
pub fn random<const BYTES: usize>() -> Result<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    getrandom::fill(&mut bytes).map_err(|error| Breach::NoRandomNumbers {
        error: Text::of(error),
    })?;
    Ok(bytes)
}

/// Error for two processes of different protocol versions.
pub fn other_version(initiator: u32, responder: u32) -> Error {
    Breach::OtherVersion {
        initiator,
        responder,
    }
    .into()
}

/// Error for a refusal that came before any proof. The peer may be a stranger, so none of its text
/// reaches the user.
fn without_peer_text(refusal: &Error) -> Error {
    match &refusal.kind {
        ErrorKind::Config(_) => Unusable::OnlyTls.into(),
        _ => NotFormed::Refused.into(),
    }
}

/// Error for a proof that does not match `token`, this side's token.
fn tokens_differ(initiator: Option<usize>, responder: usize, token: &[u8]) -> Error {
    NotTrusted::TokensDiffer {
        initiator,
        responder,
        tokenless: token.is_empty(),
    }
    .into()
}

fn unexpected(wanted: &str) -> Error {
    let wanted = wanted.into();
    Breach::Unexpected { wanted }.into()
}

/// Error for a connection that failed in the handshake: the gradring error inside `error`, if there
/// is one.
pub fn broken(error: &std::io::Error) -> Error {
    let inner = error.get_ref();
    if let Some(error) = inner.and_then(|inner| inner.downcast_ref::<Error>()) {
        return error.clone();
    }
    match error.kind() {
        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => {
            NotFormed::HandshakeSilent.into()
        }
        _ => NotFormed::HandshakeBroke {
            error: Text::of(error),
        }
        .into(),
    }
}

#[cfg(test)]
mod tests;
