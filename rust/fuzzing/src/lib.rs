//! Every decoder of bytes from outside, as a function that panics if the decoder breaks a promise.
//! `tests/decoders.rs` and the targets in `fuzz/` call these functions.

use std::io::{self, Read, Write};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

pub use gradring_core::forming::bootstrap::{Answer, Status};
use gradring_proto::collective::{Call, Collective};
use gradring_proto::dtype::{DType, ReduceOp};
use gradring_proto::error::{
    BadSegment, Breakage, Broken, Damage, Error, ErrorKind, Lost, Missing, NotFormed, Result, Text,
};
use gradring_proto::schedule::Algorithm;
use gradring_proto::wire::control::{self, Entered, Report, Waits};
use gradring_proto::wire::frame::{FRAME_BYTES_MAX, Frame};
use gradring_proto::wire::gossip::{ClockOffset, Gossip, Late, Tick};
use gradring_proto::wire::handshake::{
    self, ClientKind, GroupId, Hello, Purpose, RosterMember, Traffic,
};
use gradring_proto::wire::pairing as wire_pairing;
use gradring_proto::wire::signature::{self, HEADER_BYTES, Header, Signature};
use gradring_proto::wire::state::{self, Phase, State};

mod consensus;
mod parameters;

pub use consensus::consensus;
pub use parameters::parameters;

const TOKEN: &[u8] = b"what no input contains";

/// A decoder.
pub struct Decoder {
    /// Name of the decoder and of its fuzz target.
    pub name: &'static str,
    /// Decodes bytes; panics if the decoder breaks a promise.
    pub run: fn(&[u8]),
    /// Messages of a correct peer.
    pub samples: fn() -> Vec<Vec<u8>>,
}

impl Decoder {
    const fn new(name: &'static str, run: fn(&[u8]), samples: fn() -> Vec<Vec<u8>>) -> Self {
        Self { name, run, samples }
    }
}

/// All decoders.
pub const DECODERS: [Decoder; 10] = [
    Decoder::new("signature", signature_header, signature_samples),
    Decoder::new("frame", frame, frame_samples),
    Decoder::new("control", control_messages, control_samples),
    Decoder::new(
        "handshake_initiator",
        handshake_initiator,
        handshake_samples,
    ),
    Decoder::new(
        "handshake_responder",
        handshake_responder,
        handshake_samples,
    ),
    Decoder::new("roster", roster, roster_samples),
    Decoder::new("state", state, state_samples),
    Decoder::new("pairing", pairing, pairing_samples),
    Decoder::new("consensus", consensus, consensus::samples),
    Decoder::new("parameters", parameters, parameters::samples),
];

/// Bytes that pass as a header begin with our magic number.
pub fn signature_header(bytes: &[u8]) {
    let Some(header) = bytes.first_chunk::<HEADER_BYTES>() else {
        return;
    };
    let own = own_header();
    if signature::is_header(header) {
        assert_eq!(header[..4], own[..4], "another magic number");
    } else {
        assert_ne!(header, &own);
    }
}

/// Bytes that pass as a frame are a frame of bounded length that a sender could have written.
pub fn frame(bytes: &[u8]) {
    let Some(header) = bytes.first_chunk() else {
        return;
    };
    if let Some(frame) = Frame::decode(header) {
        assert!((1..=FRAME_BYTES_MAX).contains(&frame.length));
        assert_eq!(&frame.encode(), header);
    }
}

/// Messages are taken out of a stream whole, and survive encoding and decoding.
pub fn control_messages(bytes: &[u8]) {
    let (mut inbox, mut left) = (bytes.to_vec(), bytes.len());
    while let Ok(Some(message)) = control::decode(&mut inbox) {
        assert!(inbox.len() < left, "a message without bytes");
        left = inbox.len();
        if let Ok(again) = control::encode(&message) {
            let read = control::decode(&mut again.clone()).expect("what was written can be read");
            // Compared as bytes, since NaN is not equal to itself.
            let written = control::encode(&read.expect("all of it is there"));
            assert_eq!(written, Ok(again));
        }
    }
}

/// A process without the token does not pass as a responder.
pub fn handshake_initiator(bytes: &[u8]) {
    let hello =
        Hello::new((1, 0), 2, Purpose::Data { stream: 0 }).expect("the system has random numbers");
    let initiated = handshake::initiate(&mut Script::new(bytes), hello, TOKEN);
    assert!(initiated.is_err(), "a stranger answered for a rank");
    decode_alone(bytes, |mut bytes| handshake::receive(&mut bytes));
}

/// A process without the token does not pass as an initiator.
pub fn handshake_responder(bytes: &[u8]) {
    let check = |_: &Hello| panic!("a stranger was let in");
    let answered = handshake::respond(&mut Script::new(bytes), 0, TOKEN, check);
    assert!(answered.is_err());
    decode_alone(bytes, |mut bytes| handshake::receive(&mut bytes));
}

/// A decoded roster can be encoded again, and so can the status reports of its receivers.
pub fn roster(bytes: &[u8]) {
    decode_alone(bytes, |mut bytes| {
        handshake::read_message::<Status>(&mut bytes)
    });
    decode_alone(bytes, |mut bytes| {
        handshake::read_message::<Answer>(&mut bytes)
    });
}

/// A decoded state of a rank can be encoded again.
pub fn state(bytes: &[u8]) {
    decode_alone(bytes, |mut bytes| {
        handshake::read_message::<State>(&mut bytes)
    });
}

/// Decoded messages about shared memory are short, and can be encoded again.
pub fn pairing(mut bytes: &[u8]) {
    let mut left = bytes.len();
    while let Ok(message) = wire_pairing::read(&mut bytes) {
        assert!(bytes.len() < left, "a message without bytes");
        left = bytes.len();
        let again = wire_pairing::encode(&message);
        assert_eq!(wire_pairing::read(&mut &again[..]).ok(), Some(message));
    }
}

/// Decodes one message, with and without a length in front of it.
fn decode_alone<T>(bytes: &[u8], decode: impl Fn(&[u8]) -> Result<T>)
where
    T: Serialize + DeserializeOwned,
{
    let written = |message: &T| {
        let mut bytes = Vec::new();
        handshake::write_message(&mut bytes, message).expect("what was read can be written");
        bytes
    };
    let framed = [&(bytes.len() as u32).to_le_bytes()[..], bytes].concat();
    for bytes in [bytes, &framed] {
        if let Ok(message) = decode(bytes) {
            // Compared as bytes, since NaN is not equal to itself.
            let again = written(&message);
            let read = decode(&again).expect("what was written can be read");
            assert_eq!(written(&read), again);
        }
    }
}

/// The other side of a conversation, which sends the same bytes whatever it receives.
struct Script<'a> {
    says: &'a [u8],
    received_bytes: usize,
}

impl<'a> Script<'a> {
    const fn new(says: &'a [u8]) -> Self {
        Self {
            says,
            received_bytes: 0,
        }
    }
}

impl Read for Script<'_> {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        self.says.read(target)
    }
}

impl Write for Script<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.received_bytes += bytes.len();
        assert!(
            self.received_bytes < 64 << 10,
            "a stranger is told a long story"
        );
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn own_header() -> Header {
    let call = Call {
        collective: Collective::AllReduce { op: ReduceOp::Sum },
        dtype: DType::F32,
        count: 98,
        name: "dense/kernel".into(),
        shapes: "[98]".into(),
        is_mapped: false,
    };
    Signature::of(&call, Algorithm::Ring).header(0, 1, 2)
}

fn signature_samples() -> Vec<Vec<u8>> {
    vec![own_header().to_vec()]
}

fn frame_samples() -> Vec<Vec<u8>> {
    let frames = [(0, 1), (u32::MAX, FRAME_BYTES_MAX)].map(|(sequence, length)| Frame {
        sequence,
        length,
        checksum: 0xe306_9283,
    });
    frames.map(|frame| frame.encode().to_vec()).into()
}

fn control_samples() -> Vec<Vec<u8>> {
    use control::Message::{
        Abort, Goodbye, Gossip as Beat, Heartbeat, LinkBroken, Query, Report as Answer,
    };
    let report = |entered| {
        Answer(Report {
            rank: 3,
            sequence: 7,
            entered,
            waits: Some(Waits {
                awaited: vec![2, 0],
                idle: Duration::from_millis(1500),
                beside: Some("send(dest=2) 'x' float32[98]".into()),
                in_advance: true,
            }),
        })
    };
    let entered = Entered {
        header: own_header().to_vec(),
        call: "all_reduce(sum) 'dense/kernel' float32[98]".into(),
        step: 2,
        left: Some((1, "ValueError".into())),
    };
    let tick = Tick {
        sent_ns: 1 << 60,
        lag_ns: Some(-7),
        to_first: Some(ClockOffset {
            ns: -7,
            within_ns: 7,
        }),
    };
    let late = Late {
        rank: 1,
        total_ns: 7,
        recent_ns: 7,
    };
    let gossip = Gossip {
        rank: 3,
        number: 7,
        collectives: 7,
        moves_in: Some(7),
        late: vec![late; 2],
        note: vec![7; 7],
    };
    let cut = LinkBroken { rank: 2, peer: 1 };
    let messages = [
        vec![
            Heartbeat(tick),
            Beat(gossip),
            Query { sequence: 7 },
            report(None),
        ],
        vec![report(Some(entered)), cut, Goodbye],
        errors().into_iter().map(Abort).collect(),
    ];
    let stream = |messages: &Vec<_>| {
        let encoded = messages.iter().flat_map(control::encode);
        encoded.flatten().collect()
    };
    messages.iter().map(stream).collect()
}

fn handshake_samples() -> Vec<Vec<u8>> {
    use handshake::Message::{Accepted, Proof, Refused, Welcome};
    let hello = |purpose| handshake::Message::Hello(Hello::sample(purpose));
    let proof = [7; 32];
    let on_demand = Purpose::OnDemand {
        traffic: Traffic::ToResponder,
        stream: 0,
    };
    let parameters = Purpose::Parameters {
        job: "slurm 1".into(),
        server: 1,
        model: 2,
        client: ClientKind::Worker {
            index: 3,
            process: (7, 4711, "node-a".into()),
            model: proof,
        },
        transports: vec!["shm".into(), "tcp".into()],
        stream: 1,
        streams: 2,
        attempt: 7,
    };
    let conversations = [
        vec![hello(Purpose::Data { stream: 0 }), Proof(proof)],
        vec![hello(parameters), Proof(proof)],
        vec![hello(on_demand), Proof(proof)],
        vec![hello(Purpose::Join(member())), Proof(proof)],
        vec![
            Welcome {
                rank: 0,
                nonce: proof,
                proof,
            },
            Accepted,
        ],
        errors().into_iter().map(Refused).collect(),
    ];
    conversations
        .iter()
        .map(|messages| script(messages))
        .collect()
}

fn roster_samples() -> Vec<Vec<u8>> {
    let formed = Answer::Formed {
        group: GroupId::NONE,
        members: vec![member(); 3],
    };
    let answers = [formed, Answer::Complete];
    let failures = errors().into_iter().map(Answer::Failed);
    let statuses = errors().into_iter().map(Status::Failed);
    let statuses = statuses.chain([Status::Ready]);
    let answers = answers.into_iter().chain(failures);
    answers
        .map(|answer| script(&[answer]))
        .chain(statuses.map(|status| script(&[status])))
        .collect()
}

fn state_samples() -> Vec<Vec<u8>> {
    let collective = |sequence| state::Collective {
        sequence,
        call: "all_reduce(sum) 'dense/kernel' float32[98]".into(),
        age: Duration::from_millis(1500),
    };
    let phases = [
        Phase::Forming {
            missing: vec![1, 3],
            generation: 0,
        },
        Phase::Formed {
            group: GroupId::NONE,
            members: vec![("127.0.0.1:29500".into(), "node-a".into()); 3],
            entered: Some(collective(8)),
            beside: None,
            awaited: vec![2],
            ended: Some(collective(7)),
            failed: None,
        },
        Phase::Formed {
            group: GroupId::NONE,
            members: Vec::new(),
            entered: None,
            beside: Some(Box::new(collective(2))),
            awaited: Vec::new(),
            ended: None,
            failed: Some("why".into()),
        },
        Phase::Between { is_outside: true },
    ];
    let state = |phase| State {
        rank: 1,
        world_size: 3,
        host: "node-a".into(),
        process_id: 4711,
        version: "0.1.0".into(),
        phase,
    };
    phases.map(|phase| script(&[state(phase)])).into()
}

fn pairing_samples() -> Vec<Vec<u8>> {
    let refusal = wire_pairing::encode(&Err("different hosts or network namespaces".into()));
    let conversation = [&[7; 32][..], &[]].map(|it| wire_pairing::encode(&Ok(it.into())));
    vec![conversation.concat(), refusal]
}

fn script(messages: &[impl Serialize]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for message in messages {
        handshake::write_message(&mut bytes, message).expect("samples can be written");
    }
    bytes
}

fn member() -> RosterMember {
    RosterMember {
        address: "127.0.0.1:29500".into(),
        loopback_only: true,
        host: "node-a".into(),
        host_id: "node-a 7b1c".into(),
        job: "slurm 4711.0".into(),
        settings: "algorithm=auto".into(),
        rack: "r7".into(),
        versions: "Python 3.11.7, numpy 2.4.6".into(),
        transports: vec!["shm".into(), "tcp".into()],
    }
}

fn errors() -> Vec<Error> {
    let (theirs, others) = ("barrier".into(), "broadcast".into());
    let elapsed = Duration::from_millis(1500);
    vec![
        Error::aborted("why").blaming(3, "node-d"),
        Error::new(ErrorKind::Mismatch { theirs, others }).during("barrier", 7),
        Error::from(Lost::LinkEnded {
            broken: Broken::closed(),
        })
        .after(elapsed),
        Error::from(Damage::OnLink {
            from: 1,
            from_host: "node-b".into(),
            to: 0,
            to_host: "node-a".into(),
            broken: Breakage::Segment {
                sequence: 7,
                problem: BadSegment::Announcement,
            }
            .into(),
        })
        .blaming(1, "node-b"),
        NotFormed::MissingRanks {
            missing: vec![Missing {
                rank: 1,
                found: Some(("node-b:1".into(), "no answer in time".into())),
            }],
            more: 1,
            world_size: 3,
            rendezvous: "node-a:1".into(),
            within: elapsed,
            turned_away: Text::default(),
        }
        .into(),
    ]
}
