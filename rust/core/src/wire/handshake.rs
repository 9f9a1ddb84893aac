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

use std::io::{Read, Write};

use hmac::{Hmac, KeyInit as _, Mac as _};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use crate::error::{Error, ErrorKind, Result};

/// Grows with every change of anything that travels.
pub(crate) const PROTOCOL_VERSION: u32 = 5;

/// Bound on what a member may send: a roster of 10,000 ranks fits.
const MESSAGE_BYTES_MAX: usize = 1 << 20;
/// Bound on what anybody may send; the longest is the plan of a member, or an error.
const STRANGERS_MESSAGE_BYTES_MAX: usize = 64 << 10;

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
    /// `host:port` by which others reach it; empty for rank 0 where they met it.
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

#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Message {
    Hello(Hello),
    Welcome { nonce: [u8; 32], proof: [u8; 32] },
    Proof([u8; 32]),
    Accepted,
    Refused(Error),
}

/// Tells the other side, from whichever, why there will be no conversation.
pub(crate) fn refuse(stream: &mut impl Write, error: &Error) {
    // It may have gone, which changes nothing here.
    let _ = write_message(stream, &Message::Refused(error.clone()));
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

    /// One without a secret in it, the same every time.
    pub(crate) const fn sample(purpose: Purpose) -> Self {
        Self {
            version: PROTOCOL_VERSION,
            rank: 1,
            world_size: 2,
            generation: 0,
            purpose,
            nonce: [7; 32],
        }
    }
}

/// The caller's side.
pub(crate) fn call(stream: &mut (impl Read + Write), hello: Hello, token: &[u8]) -> Result<()> {
    let transcript = encode(&hello)?;
    write_message(stream, &Message::Hello(hello))?;
    let (nonce, proof) = match hear(stream)? {
        Message::Welcome { nonce, proof } => (nonce, proof),
        Message::Refused(error) => return Err(error.fit_to_travel()),
        _ => return Err(unexpected("a welcome")),
    };
    let transcript = [&transcript[..], &nonce].concat();
    if !is_proof(token, b"callee", &transcript, &proof) {
        let error = Error::authentication("the rank that answered does not know this job's token");
        refuse(stream, &wrong_token());
        return Err(error);
    }
    write_message(
        stream,
        &Message::Proof(prove(token, b"caller", &transcript)),
    )?;
    match hear(stream)? {
        Message::Accepted => Ok(()),
        Message::Refused(error) => Err(error.fit_to_travel()),
        _ => Err(unexpected("an acceptance")),
    }
}

/// The callee's side; `judge` looks at an authenticated `Hello`.
pub(crate) fn answer(
    stream: &mut (impl Read + Write),
    token: &[u8],
    judge: impl FnOnce(&Hello) -> Result<()>,
) -> Result<Hello> {
    let Message::Hello(hello) = hear(stream)? else {
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
    let verdict = match hear(stream)? {
        Message::Proof(proof) if is_proof(token, b"caller", &transcript, &proof) => judge(&hello),
        // What a stranger gives as the reason is not worth repeating.
        Message::Refused(_) => return Err(not_believed()),
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

/// Reads one length-prefixed message of a member; its length is bounded before anything is
/// allocated.
pub(crate) fn read_message<T: DeserializeOwned>(stream: &mut impl Read) -> Result<T> {
    read_bounded(stream, MESSAGE_BYTES_MAX)
}

/// The other side's next message, while it may be a stranger.
pub(crate) fn hear(stream: &mut impl Read) -> Result<Message> {
    read_bounded(stream, STRANGERS_MESSAGE_BYTES_MAX)
}

fn read_bounded<T: DeserializeOwned>(stream: &mut impl Read, bytes_max: usize) -> Result<T> {
    let mut length = [0; 4];
    stream
        .read_exact(&mut length)
        .map_err(|error| broken(&error))?;
    let length = u32::from_le_bytes(length) as usize;
    if length > bytes_max {
        return Err(Error::protocol(format!(
            "a message of {length} bytes was announced; at most {bytes_max} are accepted"
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

fn not_believed() -> Error {
    Error::authentication("the caller says that this rank does not know its job's token")
}

fn unexpected(wanted: &str) -> Error {
    Error::protocol(format!("something else than {wanted} arrived"))
}

const BROKEN: &str = "the connection broke during the handshake";

/// What is to be said about a connection that fails meanwhile: the error inside, if it is ours.
pub(crate) fn broken(error: &std::io::Error) -> Error {
    let inner = error.get_ref();
    if let Some(error) = inner.and_then(|inner| inner.downcast_ref::<Error>()) {
        return error.clone();
    }
    match error.kind() {
        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => {
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

    /// The other side of a conversation: says what is on it, and keeps what it hears.
    struct Tape {
        says: std::io::Cursor<Vec<u8>>,
        heard: Vec<u8>,
    }

    impl Tape {
        fn new(says: Vec<u8>) -> Self {
            Self {
                says: std::io::Cursor::new(says),
                heard: Vec::new(),
            }
        }

        fn saying(messages: &[Message]) -> Self {
            let mut says = Vec::new();
            for message in messages {
                write_message(&mut says, message).unwrap();
            }
            Self::new(says)
        }

        /// The message of this number among those heard.
        fn heard(&self, number: usize) -> Message {
            let mut heard = &self.heard[..];
            for _ in 0..number {
                hear(&mut heard).unwrap();
            }
            hear(&mut heard).unwrap()
        }
    }

    impl Read for Tape {
        fn read(&mut self, target: &mut [u8]) -> std::io::Result<usize> {
            self.says.read(target)
        }
    }

    impl Write for Tape {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.heard.write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// What each side of a successful handshake said: the caller, and the callee.
    fn overheard() -> [Vec<u8>; 2] {
        struct Wire(TcpStream, Vec<u8>);
        impl Read for Wire {
            fn read(&mut self, target: &mut [u8]) -> std::io::Result<usize> {
                let count = self.0.read(target)?;
                self.1.extend_from_slice(&target[..count]);
                Ok(count)
            }
        }
        impl Write for Wire {
            fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                self.0.write(bytes)
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let calling = std::thread::spawn(move || {
            let mut wire = Wire(TcpStream::connect(address).unwrap(), Vec::new());
            let hello = Hello::new(1, 2, Purpose::Data { stream: 0 }).unwrap();
            call(&mut wire, hello, b"secret").unwrap();
            wire.1
        });
        let mut wire = Wire(listener.accept().unwrap().0, Vec::new());
        answer(&mut wire, b"secret", |_| Ok(())).unwrap();
        [wire.1, calling.join().unwrap()]
    }

    fn assert_refuses_caller(tape: &mut Tape) {
        let error = answer(tape, b"secret", |_| panic!("a stranger was let in")).unwrap_err();
        let refused = matches!(error.kind, ErrorKind::Authentication { .. });
        assert!(refused, "{error}");
        assert!(matches!(tape.heard(1), Message::Refused(_)));
    }

    fn assert_refuses_callee(tape: &mut Tape) {
        let hello = Hello::new(1, 2, Purpose::Data { stream: 0 }).unwrap();
        let error = call(tape, hello, b"secret").unwrap_err();
        let refused = matches!(error.kind, ErrorKind::Authentication { .. });
        assert!(refused, "{error}");
        assert!(matches!(tape.heard(1), Message::Refused(_)));
    }

    #[test]
    fn a_replayed_proof_is_refused_on_both_sides() {
        let [caller, callee] = overheard();
        assert_refuses_caller(&mut Tape::new(caller));
        assert_refuses_callee(&mut Tape::new(callee));
    }

    #[test]
    fn a_reflected_proof_is_refused_on_both_sides() {
        let [caller, _] = overheard();
        let mut callers = &caller[..];
        hear(&mut callers).unwrap();
        let Message::Proof(overheard) = hear(&mut callers).unwrap() else {
            panic!("a caller's second message is its proof");
        };
        // A callee that has only what a caller once said.
        assert_refuses_callee(&mut Tape::saying(&[
            Message::Welcome {
                nonce: [0; 32],
                proof: overheard,
            },
            Message::Accepted,
        ]));

        // A caller that gives the callee's own proof back.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mirror = std::thread::spawn(move || {
            let mut stream = TcpStream::connect(address).unwrap();
            let hello = Message::Hello(Hello::sample(Purpose::Data { stream: 0 }));
            write_message(&mut stream, &hello).unwrap();
            let Message::Welcome { proof, .. } = hear(&mut stream).unwrap() else {
                panic!("a greeting is answered with a welcome");
            };
            write_message(&mut stream, &Message::Proof(proof)).unwrap();
            hear(&mut stream).unwrap()
        });
        let mut stream = listener.accept().unwrap().0;
        let judge = |_: &Hello| panic!("a mirror was let in");
        let error = answer(&mut stream, b"secret", judge).unwrap_err();
        let refused = matches!(error.kind, ErrorKind::Authentication { .. });
        assert!(refused, "{error}");
        assert!(matches!(mirror.join().unwrap(), Message::Refused(_)));
    }

    #[test]
    fn a_missing_proof_is_refused_on_both_sides() {
        let hello = || Message::Hello(Hello::sample(Purpose::Data { stream: 0 }));
        assert_refuses_caller(&mut Tape::saying(&[hello(), Message::Accepted]));
        assert_refuses_caller(&mut Tape::saying(&[hello(), hello()]));
        let mut tape = Tape::saying(&[Message::Accepted]);
        let hello = Hello::new(1, 2, Purpose::Data { stream: 0 }).unwrap();
        assert!(call(&mut tape, hello, b"secret").is_err());
    }

    #[test]
    fn a_proof_for_another_rank_or_purpose_is_refused() {
        let [caller, _] = overheard();
        let mut said = &caller[..];
        let (Message::Hello(hello), proof) = (hear(&mut said).unwrap(), hear(&mut said).unwrap())
        else {
            panic!("a caller begins with a greeting");
        };
        let others = [
            Hello {
                rank: 0,
                ..hello.clone()
            },
            Hello {
                purpose: Purpose::Control,
                ..hello.clone()
            },
            Hello {
                world_size: 3,
                ..hello
            },
        ];
        let Message::Proof(proof) = proof else {
            panic!("then comes its proof");
        };
        for other in others {
            assert_refuses_caller(&mut Tape::saying(&[
                Message::Hello(other),
                Message::Proof(proof),
            ]));
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
}
