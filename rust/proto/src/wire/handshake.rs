//! The handshake of a connection: who connects, for what purpose, and the proof that both know the token.
//!
//! initiator -> responder  `Hello`: who connects to whom, in which group, with a nonce
//! responder -> initiator  `Welcome`: who answers, another nonce, and HMAC(token, "callee", everything so far)
//! initiator -> responder  `Proof`: HMAC(token, "caller", everything so far)
//! responder -> initiator  `Accepted`
//!
//! Either side may answer `Refused` instead, with the error that the other should report; who has not
//! proved to know the token is not quoted. The proofs cover both nonces, the whole `Hello` and who
//! answers, so they can be neither replayed nor reflected nor moved to another initiator, responder,
//! group, generation, size, purpose or version. HMAC-SHA256 is RFC 2104 with FIPS 180-4.

use std::fmt;
use std::io::{self, Read, Write};

use hmac::{Hmac, KeyInit as _, Mac as _};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use crate::error::{Breach, Error, ErrorKind, NotFormed, NotTrusted, Result, Text, Unusable};
use crate::wire::codec;

/// Most bytes of the name of a rack: so that a roster of all ranks fits into a message.
pub const RACK_BYTES_MAX: usize = 24;

/// Grows with every change of anything that travels. What tells two versions apart never changes: the
/// start of a greeting, and [`Message::OtherVersion`].
pub const PROTOCOL_VERSION: u32 = 21;

/// Bound on what a member may send.
const MESSAGE_BYTES_MAX: usize = 2 << 20;
/// Ranks of the largest group: with 1,024 bytes for each, its roster fits into a message.
pub const WORLD_SIZE_MAX: usize = MESSAGE_BYTES_MAX / 1024;
/// Bound on what anybody may send; the longest is the settings of a member, or an error.
const STRANGERS_MESSAGE_BYTES_MAX: usize = 64 << 10;

/// What a connection is for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Purpose {
    /// To join the group; sent to rank 0 only.
    Join(Member),
    /// To carry payload from the initiator to the responder, as one of the streams of their pipe.
    Data {
        /// Its index.
        stream: usize,
    },
    /// To carry signs of life, questions and aborts, both ways.
    Control,
    /// To carry payload between two ranks of a formed group that connect lazily, as one of the
    /// streams of their pipe.
    OnDemand {
        /// What for.
        traffic: Traffic,
        /// Its index.
        stream: usize,
    },
    /// To ask how the rank is, from outside of the group, as often as one likes.
    Inquiry,
    /// To say something about the members of the next group to the process itself, whatever its rank.
    Membership {
        /// The job, as in [`Member::job`].
        job: String,
    },
    /// To push and pull, or to tell a parameter server what to do, as one of the streams of a link;
    /// to a parameter server, whatever the ranks.
    Parameters {
        /// The job, as in [`Member::job`].
        job: String,
        /// Which server is meant.
        server: usize,
        /// Who connects.
        client: ClientKind,
        /// What the initiator offers to make a link of, by name.
        transports: Vec<String>,
        /// Its index.
        stream: usize,
        /// How many the link has.
        streams: usize,
        /// A random number, the same for all streams of one link.
        attempt: u64,
    },
}

/// What travels through connections that are made on demand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Traffic {
    /// Collectives of all ranks.
    Collectives,
    /// What the initiator sends to the responder alone.
    ToResponder,
    /// What the responder sends to the initiator alone.
    ToInitiator,
}

/// Who connects to a parameter server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClientKind {
    /// A worker.
    Worker {
        /// Its index among the workers.
        index: usize,
        /// A random number for its process, its id there, and the host.
        process: (u64, u32, String),
        /// Equal for workers that train the same.
        model: [u8; 32],
    },
    /// The first server, with its rules as text.
    Sequencer {
        /// A random number for its process.
        process: u64,
        /// The update rules, as text.
        rules: String,
    },
}

impl ClientKind {
    /// What messages call it.
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Self::Worker { index, .. } => format!("worker {index}"),
            Self::Sequencer { .. } => "parameter server 0".into(),
        }
    }
}

impl Purpose {
    /// Whether it is to a process, whatever its rank.
    pub const fn is_of_no_rank(&self) -> bool {
        matches!(
            self,
            Self::Inquiry | Self::Membership { .. } | Self::Parameters { .. }
        )
    }
}

/// What tells a group from all others, whatever their ranks, addresses and token: a random number
/// that rank 0 draws when all have joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupId([u8; 16]);

impl GroupId {
    /// That of an initiator who is in no group yet.
    pub const NONE: Self = Self([0; 16]);

    /// A new one.
    pub fn draw() -> Result<Self> {
        random().map(Self)
    }
}

impl fmt::Display for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// How others reach a rank and recognise its host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// `host:port` by which others reach it; empty for rank 0 where they met it.
    pub address: String,
    /// Whether it listens on its host's loopback interface, which no other host can reach.
    pub loopback_only: bool,
    /// Name for messages.
    pub host: String,
    /// Equal for two ranks exactly if they run on the same booted system and network.
    pub host_id: String,
    /// Equal for two hosts exactly if they share what connects them with others; empty if unknown.
    pub rack: String,
    /// The job that started it, such as `slurm 4711.0`; empty if nothing says so.
    pub job: String,
    /// Settings that must be equal on all ranks, as text.
    pub settings: String,
    /// Versions of what computes beside gradring, such as `Python 3.11.7, numpy 2.4.6`. They may
    /// differ, and rank 0 says so.
    pub versions: String,
    /// What it offers to make links of, by name.
    pub transports: Vec<String>,
}

/// The first message of an initiator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The version of the protocol.
    pub version: u32,
    /// Of the initiator.
    pub rank: usize,
    /// The rank that the initiator means to reach; of no matter for an inquiry.
    pub responder: usize,
    /// Number of processes, as the initiator knows it.
    pub world_size: usize,
    /// The group, unless it is yet to form.
    pub group: GroupId,
    /// Of an elastic job.
    pub generation: u32,
    /// What the connection is for.
    pub purpose: Purpose,
    /// Random, for the proofs.
    pub nonce: [u8; 32],
}

/// A message of the handshake.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub enum Message {
    /// The initiator's first.
    Hello(Hello),
    /// The responder's answer.
    Welcome {
        /// Of the responder.
        rank: usize,
        /// Random, for the initiator's proof.
        nonce: [u8; 32],
        /// That the responder knows the token.
        proof: [u8; 32],
    },
    /// That the initiator knows the token.
    Proof([u8; 32]),
    /// The end of a handshake that led to a connection.
    Accepted,
    /// Why there is no connection.
    Refused(Error),
    /// The responder's version. What stands above it may change, if this stays where it is.
    OtherVersion(u32),
}

/// Tells the other side, from whichever, why there will be no conversation.
pub fn refuse(stream: &mut impl Write, error: &Error) {
    // It may have gone, which changes nothing here.
    let _ = write_message(stream, &Message::Refused(error.clone()));
}

impl Hello {
    /// What `rank` says to `responder`, before it is in a group.
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

    /// The rank of the initiator, unless it is no rank of the group.
    fn initiator(&self) -> Option<usize> {
        (!self.purpose.is_of_no_rank()).then_some(self.rank)
    }

    /// The same from a member of `group`, if it knows that, of this generation.
    pub const fn within(mut self, group: GroupId, generation: u32) -> Self {
        self.group = group;
        self.generation = generation;
        self
    }

    /// One without a secret in it, the same every time.
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

/// The initiator's side.
pub fn initiate(stream: &mut (impl Read + Write), hello: Hello, token: &[u8]) -> Result<()> {
    let transcript = codec::encode(&hello, MESSAGE_BYTES_MAX)?;
    let meant = (!hello.purpose.is_of_no_rank()).then_some(hello.responder);
    let (initiator, version) = (hello.initiator(), hello.version);
    write_message(stream, &Message::Hello(hello))?;
    let (rank, nonce, proof) = match hear(stream)? {
        Message::Welcome { rank, nonce, proof } => (rank, nonce, proof),
        Message::OtherVersion(theirs) => return Err(other_version(version, theirs)),
        Message::Refused(error) if token.is_empty() => return Err(error.fit_to_travel()),
        Message::Refused(error) => return Err(in_our_words(&error)),
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
    match hear(stream)? {
        // It should have refused.
        Message::Accepted => meant.map_or(Ok(()), |meant| {
            check_responder(initiator.unwrap_or_default(), meant, rank)
        }),
        Message::Refused(error) => Err(error.fit_to_travel()),
        _ => Err(unexpected("an acceptance")),
    }
}

/// The side of the responder, which is `rank`; `check` looks at an authenticated `Hello`.
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
    let checked = match hear(stream)? {
        Message::Proof(proof) if is_proof(token, b"caller", &transcript, &proof) => check(&hello),
        // What a stranger gives as the reason is not worth repeating.
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

/// The version that a greeting names, whatever follows in that version.
fn version_of(greeting: &[u8]) -> Option<u32> {
    let ((message, version), _) = postcard::take_from_bytes::<(u32, u32)>(greeting).ok()?;
    (message == 0).then_some(version)
}

/// Whether the rank that answers is the one that was meant.
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

/// What was said, with what the responder adds to it.
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

/// The other side's next message, while it may be a stranger.
pub fn hear(stream: &mut impl Read) -> Result<Message> {
    codec::decode(&read_body(stream, STRANGERS_MESSAGE_BYTES_MAX)?)
}

fn read_body(stream: &mut impl Read, bytes_max: usize) -> Result<Vec<u8>> {
    let mut length = [0; 4];
    stream
        .read_exact(&mut length)
        .map_err(|error| broken(&error))?;
    let length = codec::length(length, bytes_max)?;
    // Memory is taken for what has come, whatever length is claimed.
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

/// Of the system.
pub fn random<const BYTES: usize>() -> Result<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    getrandom::fill(&mut bytes).map_err(|error| Breach::NoRandomNumbers {
        error: Text::of(error),
    })?;
    Ok(bytes)
}

/// The two processes speak different versions.
pub fn other_version(initiator: u32, responder: u32) -> Error {
    Breach::OtherVersion {
        initiator,
        responder,
    }
    .into()
}

/// What a refusal means that came before any proof. It may be a stranger's, who does not choose
/// what the user reads.
fn in_our_words(refusal: &Error) -> Error {
    match &refusal.kind {
        ErrorKind::Config(_) => Unusable::OnlyTls.into(),
        _ => NotFormed::Refused.into(),
    }
}

/// The other side's proof does not fit `token`, this side's.
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

/// What is to be said about a connection that fails meanwhile: the error inside, if it is ours.
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
