//! How a connection begins: who calls, for what purpose, and the proof that both know the token.
//!
//! caller -> callee  `Hello` with a nonce
//! callee -> caller  `Welcome` with another nonce and HMAC(token, "callee", everything so far)
//! caller -> callee  `Proof`: HMAC(token, "caller", everything so far)
//! callee -> caller  `Accepted`
//!
//! Either side may answer `Refused` instead, with the error that the other should report. The
//! proofs cover both nonces and the whole `Hello`, so they can be neither replayed nor reflected
//! nor moved to another rank, size, purpose or version. HMAC-SHA256 is RFC 2104 with FIPS 180-4.

use std::io::{self, Read, Write};

use hmac::{Hmac, KeyInit as _, Mac as _};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use crate::error::{Error, ErrorKind, Result};

/// Grows with every change of anything that travels.
pub(crate) const PROTOCOL_VERSION: u32 = 4;

/// Bound on one message: a roster of 10,000 ranks fits.
const MESSAGE_BYTES_MAX: usize = 1 << 20;

/// What a connection is for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Purpose {
    /// To join the group; sent to rank 0 only.
    Join(Member),
    /// To carry payload from the caller to the callee, as one of the streams of their pipe.
    Data { stream: usize },
    /// To carry signs of life, questions and aborts, both ways.
    Control,
    /// To ask how the rank is, from outside of the group, as often as one likes.
    Inquiry,
}

impl Purpose {
    /// Equal for two connections of the same purpose.
    pub(crate) const fn number(&self) -> usize {
        match self {
            Self::Join(_) => 0,
            Self::Control => 1,
            Self::Inquiry => 2,
            Self::Data { stream } => 3_usize.saturating_add(*stream),
        }
    }
}

/// How others reach a rank and recognise its host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Member {
    /// `ip:port` where it listens.
    pub address: String,
    /// Name for messages.
    pub host: String,
    /// Equal for two ranks exactly if they run on the same booted system and network.
    pub host_id: String,
    /// Settings that must be equal on all ranks, as text.
    pub plan: String,
    /// Whether it would use shared memory.
    pub shares_memory: bool,
}

/// The first message of a caller.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub version: u32,
    pub rank: usize,
    pub world_size: usize,
    pub generation: u64,
    pub purpose: Purpose,
    pub nonce: [u8; 32],
}

#[derive(Debug, Serialize, Deserialize)]
enum Message {
    Hello(Hello),
    Welcome { nonce: [u8; 32], proof: [u8; 32] },
    Proof([u8; 32]),
    Accepted,
    Refused(Error),
}

impl Hello {
    pub(crate) fn new(rank: usize, world_size: usize, purpose: Purpose) -> Result<Self> {
        Ok(Self {
            version: PROTOCOL_VERSION,
            rank,
            world_size,
            generation: 0,
            purpose,
            nonce: nonce()?,
        })
    }
}

/// The caller's side.
pub(crate) fn call(stream: &mut (impl Read + Write), hello: Hello, token: &[u8]) -> Result<()> {
    let transcript = encode(&hello)?;
    write_message(stream, &Message::Hello(hello))?;
    let (nonce, proof) = match read_message(stream)? {
        Message::Welcome { nonce, proof } => (nonce, proof),
        Message::Refused(error) => return Err(error),
        _ => return Err(unexpected("a welcome")),
    };
    let transcript = [&transcript[..], &nonce].concat();
    if !is_proof(token, b"callee", &transcript, &proof) {
        let error = Error::authentication("the rank that answered does not know this job's token");
        // The callee is told as well; that it may be gone changes nothing here.
        let _ = write_message(stream, &Message::Refused(wrong_token()));
        return Err(error);
    }
    write_message(
        stream,
        &Message::Proof(prove(token, b"caller", &transcript)),
    )?;
    match read_message(stream)? {
        Message::Accepted => Ok(()),
        Message::Refused(error) => Err(error),
        _ => Err(unexpected("an acceptance")),
    }
}

/// The callee's side; `judge` looks at an authenticated `Hello`.
pub(crate) fn answer(
    stream: &mut (impl Read + Write),
    token: &[u8],
    judge: impl FnOnce(&Hello) -> Result<()>,
) -> Result<Hello> {
    let Message::Hello(hello) = read_message(stream)? else {
        return Err(unexpected("a greeting"));
    };
    if hello.version != PROTOCOL_VERSION {
        let error = Error::protocol(format!(
            "rank {} speaks protocol version {}, the rank it called version {PROTOCOL_VERSION}",
            hello.rank, hello.version
        ));
        write_message(stream, &Message::Refused(error.clone()))?;
        return Err(error);
    }
    let nonce = nonce()?;
    let transcript = [&encode(&hello)?[..], &nonce].concat();
    let proof = prove(token, b"callee", &transcript);
    write_message(stream, &Message::Welcome { nonce, proof })?;
    let verdict = match read_message(stream)? {
        Message::Proof(proof) if is_proof(token, b"caller", &transcript, &proof) => judge(&hello),
        Message::Refused(error) => return Err(error),
        _ => Err(wrong_token()),
    };
    match verdict {
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

/// Writes one length-prefixed message.
pub(crate) fn write_message(stream: &mut impl Write, message: &impl Serialize) -> Result<()> {
    let body = encode(message)?;
    let length = u32::try_from(body.len())
        .ok()
        .filter(|&length| length as usize <= MESSAGE_BYTES_MAX)
        .ok_or_else(|| Error::protocol("a message is too long to send"))?;
    let bytes = [&length.to_le_bytes()[..], &body].concat();
    stream.write_all(&bytes).map_err(|error| broken(&error))
}

/// Reads one length-prefixed message; its length is bounded before anything is allocated.
pub(crate) fn read_message<T: DeserializeOwned>(stream: &mut impl Read) -> Result<T> {
    let mut length = [0; 4];
    stream
        .read_exact(&mut length)
        .map_err(|error| broken(&error))?;
    let length = u32::from_le_bytes(length) as usize;
    if length > MESSAGE_BYTES_MAX {
        return Err(Error::protocol(format!(
            "a message of {length} bytes was announced; at most {MESSAGE_BYTES_MAX} are accepted"
        )));
    }
    let mut body = vec![0; length];
    stream
        .read_exact(&mut body)
        .map_err(|error| broken(&error))?;
    postcard::from_bytes(&body)
        .map_err(|error| Error::protocol(format!("a message could not be decoded: {error}")))
}

fn encode(message: &impl Serialize) -> Result<Vec<u8>> {
    postcard::to_stdvec(message)
        .map_err(|error| Error::protocol(format!("a message could not be encoded: {error}")))
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

fn nonce() -> Result<[u8; 32]> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce)
        .map_err(|error| Error::protocol(format!("no random numbers from the system: {error}")))?;
    Ok(nonce)
}

fn wrong_token() -> Error {
    Error::authentication("this rank does not know the job's token")
}

fn unexpected(wanted: &str) -> Error {
    Error::protocol(format!("something else than {wanted} arrived"))
}

const BROKEN: &str = "the connection broke during the handshake";

fn broken(error: &io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            Error::rendezvous("there was no answer in time during the handshake")
        }
        _ => Error::rendezvous(format!("{BROKEN}: {error}")),
    }
}

/// Whether the other side went away instead of answering.
pub(crate) fn is_broken(error: &Error) -> bool {
    matches!(&error.kind, ErrorKind::Rendezvous { problem } if problem.starts_with(BROKEN))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// Lets a caller and a callee with these tokens meet.
    fn meet(caller: &'static [u8], callee: &'static [u8]) -> (Result<()>, Result<Hello>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let calling = std::thread::spawn(move || {
            let mut stream = TcpStream::connect(address).unwrap();
            call(
                &mut stream,
                Hello::new(1, 2, Purpose::Data { stream: 0 }).unwrap(),
                caller,
            )
        });
        let (mut stream, _) = listener.accept().unwrap();
        let answered = answer(&mut stream, callee, |hello| {
            if hello.world_size == 2 {
                Ok(())
            } else {
                Err(Error::rendezvous("another size"))
            }
        });
        (calling.join().unwrap(), answered)
    }

    #[test]
    fn equal_tokens_meet() {
        let (called, answered) = meet(b"secret", b"secret");
        assert_eq!(called, Ok(()));
        assert_eq!(answered.unwrap().rank, 1);
    }

    #[test]
    fn a_wrong_or_missing_token_is_refused_on_both_sides() {
        for (caller, callee) in [
            (&b"secret"[..], &b"other"[..]),
            (b"", b"secret"),
            (b"secret", b""),
        ] {
            let (called, answered) = meet(caller, callee);
            for error in [called.unwrap_err(), answered.unwrap_err()] {
                assert!(
                    matches!(error.kind, ErrorKind::Authentication { .. }),
                    "{error}"
                );
            }
        }
    }

    #[test]
    fn another_version_is_named_on_both_sides() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let calling = std::thread::spawn(move || {
            let mut hello = Hello::new(1, 2, Purpose::Control).unwrap();
            hello.version += 1;
            call(&mut TcpStream::connect(address).unwrap(), hello, b"")
        });
        let answered = answer(&mut listener.accept().unwrap().0, b"", |_| Ok(()));
        for error in [calling.join().unwrap().unwrap_err(), answered.unwrap_err()] {
            assert!(matches!(error.kind, ErrorKind::Protocol { .. }), "{error}");
            let versions = format!("version {}, the rank it called", PROTOCOL_VERSION + 1);
            assert!(error.to_string().contains(&versions), "{error}");
        }
    }

    #[test]
    fn a_giant_length_is_refused_before_it_is_allocated() {
        let error = read_message::<Hello>(&mut &u32::MAX.to_le_bytes()[..]).unwrap_err();
        assert!(matches!(error.kind, ErrorKind::Protocol { .. }), "{error}");
    }

    #[test]
    fn random_bytes_are_an_error_and_not_a_panic() {
        for seed in 0..200_u32 {
            let body: Vec<u8> = (0..seed)
                .map(|index| (index.wrapping_mul(2_654_435_761) ^ seed) as u8)
                .collect();
            let framed = [&(body.len() as u32).to_le_bytes()[..], &body].concat();
            let _ = read_message::<Message>(&mut &framed[..]);
        }
    }
}
