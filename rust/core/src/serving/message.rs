//! Messages as bytes: what is said, and behind it the values of gradients and weights as they lie in
//! memory.
//!
//! Layout of the header, little-endian, 28 bytes: checksum u32 of a magic word and the other fields,
//! length of what is said u32, length of the values in bytes u64, checksum of what is said u32,
//! checksum of the values u32, 1 if that counts u32. Checksums are CRC-32C. All lengths are bounded
//! before memory is taken, and memory for values is taken as they arrive.

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::{Breach, Error, Result, Text};
use crate::parameters::floats::{self, Floats};
use crate::parameters::identity::{Incarnation, Point, PushId, Term, Version};
use crate::parameters::log::History;
use crate::parameters::message::{Ask, Order, Reply, Report, Request, Start};
use crate::parameters::optimizer::Optimizer;
use crate::parameters::queue::Counts;
use crate::parameters::shard::{Gradient, Payload, Shard, Spec, Weights};
use crate::parameters::snapshot::Snapshot;
use crate::wire::frame::checksum;

use super::values::Values;

/// Length of a header.
pub(crate) const HEADER_BYTES: usize = 28;
/// Bound on what is said, without values.
const SAID_BYTES_MAX: usize = 1 << 20;
/// Bound on the values of one message: far more than the memory of a host.
const VALUES_BYTES_MAX: u64 = 1 << 44;
/// Values for which memory is taken before they are there; what arrives doubles it.
const ROOM: usize = (256 << 10) / size_of::<f32>();

const MAGIC: &[u8] = b"GRP1";

/// What travels between workers and servers. Where there is a number, it is that of the copy among
/// those of its shard, which says for which keeper of a server a message is, or from which.
#[derive(Debug, Clone)]
pub enum Message {
    /// From a worker.
    Request(usize, Request),
    /// From a server to a worker.
    Reply(usize, Reply),
    /// From server 0 to another.
    Order(usize, Order),
    /// From a server to server 0.
    Report(usize, Report),
    /// A server could do nothing with the last long request, so it may be said again.
    Unheard(usize),
    /// The sender lives.
    Alive,
    /// The worker has left, as it wanted; or, to a server, all workers have.
    Over,
    /// A server's snapshot; on its way to a disk.
    Snapshot(Snapshot),
    /// From server 0 to a worker, for people to see.
    Counted(Counted),
}

/// What has become of all workers' gradients since servers were restored.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Counted {
    /// Of the weights.
    pub version: Version,
    /// Updates that were made since; initial weights are none.
    pub updates: u64,
    /// Gradients that wait to be applied.
    pub queue: usize,
    /// What became of the others.
    pub counts: Counts,
    /// By staleness, how many gradients were applied.
    pub staleness: BTreeMap<u64, u64>,
}

/// A message without values: how many of them follow.
#[derive(Serialize, Deserialize)]
enum Said {
    Request(usize, Request),
    Reply(usize, Reply),
    Order(usize, Order),
    Report(usize, Report),
    Unheard(usize),
    Alive,
    Over,
    Stage {
        copy: usize,
        term: Term,
        worker: u32,
        id: PushId,
        base: Version,
        shape: Shape,
    },
    Weights {
        round: u64,
        point: Point,
        lengths: Vec<u64>,
    },
    Snapshot(SaidSnapshot),
    Counted(Counted),
    Fill(usize, Start, SaidSnapshot),
    Given(usize, u64, SaidSnapshot),
}

/// A snapshot without its arrays: how long they are.
#[derive(Serialize, Deserialize)]
struct SaidSnapshot {
    point: Point,
    history: History,
    applied: BTreeMap<u32, (Incarnation, u64)>,
    shard: Option<(Optimizer, Vec<Spec>, Vec<u64>)>,
}

#[derive(Serialize, Deserialize)]
enum Shape {
    Initial {
        optimizer: Optimizer,
        specs: Vec<(Spec, u64)>,
    },
    Gradients(Vec<GradientShape>),
}

#[derive(Serialize, Deserialize)]
enum GradientShape {
    None,
    Dense(u64),
    Rows { rows: u64, values: u64 },
}

/// What holds the values of a message.
enum Source {
    Nothing,
    Payload(Arc<Payload>),
    /// Of a pull, or of a snapshot.
    Weights(Vec<Weights>),
}

/// A message on its way out.
pub(crate) struct Outgoing {
    head: Vec<u8>,
    source: Source,
}

impl Outgoing {
    /// Encodes a message; the values stay where they are.
    pub(crate) fn new(message: Message, checks_values: bool) -> Result<Self> {
        let (said, source) = taken_apart(message);
        let said = postcard::to_stdvec(&said).map_err(|error| {
            let error = Text::of(error);
            Error::from(Breach::NotEncoded { error })
        })?;
        if said.len() > SAID_BYTES_MAX {
            return Err(Breach::TooLongToSend.into());
        }
        let values: usize = source.slices().iter().map(|it| it.len()).sum();
        let checks_values = checks_values && values > 0;
        let of_values = if checks_values {
            checksum(source.slices())
        } else {
            0
        };
        let mut head = vec![0; 4];
        head.extend((said.len() as u32).to_le_bytes());
        head.extend((values as u64).to_le_bytes());
        head.extend(checksum([&said[..]]).to_le_bytes());
        head.extend(of_values.to_le_bytes());
        head.extend(u32::from(checks_values).to_le_bytes());
        let own = checksum([MAGIC, &head[4..]]);
        head[..4].copy_from_slice(&own.to_le_bytes());
        head.extend(said);
        Ok(Self { head, source })
    }

    /// All its bytes, in order.
    pub(crate) fn slices(&self) -> Vec<&[u8]> {
        let mut slices = vec![&self.head[..]];
        slices.extend(self.source.slices());
        slices
    }
}

impl Source {
    fn slices(&self) -> Vec<&[u8]> {
        let slices: Vec<&[u8]> = match self {
            Self::Nothing => vec![],
            Self::Weights(parts) => parts.iter().map(|it| it.bytes()).collect(),
            Self::Payload(payload) => match &**payload {
                Payload::Initial { parts, .. } => {
                    parts.iter().map(|(_, weights)| weights.bytes()).collect()
                }
                Payload::Gradients(gradients) => {
                    let mut slices = Vec::new();
                    for gradient in gradients.iter().flatten() {
                        match gradient {
                            Gradient::Dense(values) => slices.push(values.bytes()),
                            Gradient::Rows { rows, values } => {
                                slices.push(rows.as_slice().bytes());
                                slices.push(values.as_slice().bytes());
                            }
                        }
                    }
                    slices
                }
            },
        };
        slices.into_iter().filter(|it| !it.is_empty()).collect()
    }
}

fn taken_apart(message: Message) -> (Said, Source) {
    let said = match message {
        Message::Request(
            copy,
            Request {
                term,
                worker,
                ask: Ask::Stage { id, base, payload },
            },
        ) => {
            let said = Said::Stage {
                copy,
                term,
                worker,
                id,
                base,
                shape: shape_of(&payload),
            };
            return (said, Source::Payload(payload));
        }
        Message::Reply(
            _,
            Reply::Weights {
                round,
                point,
                parts,
            },
        ) => {
            let said = Said::Weights {
                round,
                point,
                lengths: parts.iter().map(|it| it.len() as u64).collect(),
            };
            return (said, Source::Weights(parts));
        }
        Message::Snapshot(snapshot) => {
            let (said, arrays) = without_arrays(&snapshot);
            return (Said::Snapshot(said), arrays);
        }
        Message::Order(copy, Order::Fill(start, state)) => {
            let (said, arrays) = without_arrays(&state);
            return (Said::Fill(copy, start, said), arrays);
        }
        Message::Report(copy, Report::Given { question, state }) => {
            let (said, arrays) = without_arrays(&state);
            return (Said::Given(copy, question, said), arrays);
        }
        Message::Request(copy, request) => Said::Request(copy, request),
        Message::Reply(copy, reply) => Said::Reply(copy, reply),
        Message::Order(copy, order) => Said::Order(copy, order),
        Message::Report(copy, report) => Said::Report(copy, report),
        Message::Unheard(copy) => Said::Unheard(copy),
        Message::Alive => Said::Alive,
        Message::Over => Said::Over,
        Message::Counted(counted) => Said::Counted(counted),
    };
    (said, Source::Nothing)
}

fn without_arrays(snapshot: &Snapshot) -> (SaidSnapshot, Source) {
    let arrays = snapshot.shard.iter().flat_map(Shard::arrays);
    let arrays: Vec<_> = arrays.cloned().collect();
    let shard = snapshot.shard.as_ref().map(|shard| {
        let lengths = arrays.iter().map(|it| it.len() as u64).collect();
        (*shard.optimizer(), shard.specs().collect(), lengths)
    });
    let said = SaidSnapshot {
        point: snapshot.point,
        history: snapshot.history,
        applied: snapshot.applied.clone(),
        shard,
    };
    (said, Source::Weights(arrays))
}

fn shape_of(payload: &Payload) -> Shape {
    match payload {
        Payload::Initial { optimizer, parts } => Shape::Initial {
            optimizer: *optimizer,
            specs: parts
                .iter()
                .map(|(spec, values)| (*spec, values.len() as u64))
                .collect(),
        },
        Payload::Gradients(gradients) => {
            let shape = |gradient: &Option<Gradient>| match gradient {
                None => GradientShape::None,
                Some(Gradient::Dense(values)) => GradientShape::Dense(values.len() as u64),
                Some(Gradient::Rows { rows, values }) => GradientShape::Rows {
                    rows: rows.len() as u64,
                    values: values.len() as u64,
                },
            };
            Shape::Gradients(gradients.iter().map(shape).collect())
        }
    }
}

/// Values that arrive.
enum Array {
    Floats(Vec<f32>),
    Rows(Vec<u32>),
}

/// A message that arrives, as far as it has.
pub(crate) struct Incoming(Stage);

impl Incoming {
    /// Nothing yet.
    pub(crate) const NEW: Self = Self(Stage::NEW);
}

enum Stage {
    Header {
        bytes: [u8; HEADER_BYTES],
        filled: usize,
    },
    Said {
        header: Header,
        bytes: Vec<u8>,
        filled: usize,
    },
    Values {
        header: Header,
        said: Box<Said>,
        /// With how many numbers each will have.
        arrays: Vec<(Array, usize)>,
        /// Which one is being filled, and how many of its bytes are there.
        at: (usize, usize),
    },
}

#[derive(Clone, Copy)]
struct Header {
    said_bytes: usize,
    values_bytes: u64,
    said_checksum: u32,
    values_checksum: Option<u32>,
}

impl Header {
    fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self> {
        let word = |at: usize| {
            let mut word = [0; 4];
            word.copy_from_slice(&bytes[at..at + 4]);
            u32::from_le_bytes(word)
        };
        if word(0) != checksum([MAGIC, &bytes[4..]]) {
            return Err(unexpected("the header of a message"));
        }
        let said_bytes = word(4) as usize;
        let values_bytes = u64::from(word(8)) | u64::from(word(12)) << 32;
        if said_bytes == 0 {
            return Err(unexpected("a message"));
        }
        if said_bytes > SAID_BYTES_MAX || values_bytes > VALUES_BYTES_MAX {
            let (bytes, most) = (said_bytes, SAID_BYTES_MAX);
            return Err(Breach::TooLong { bytes, most }.into());
        }
        Ok(Self {
            said_bytes,
            values_bytes,
            said_checksum: word(16),
            values_checksum: (word(24) == 1).then_some(word(20)),
        })
    }
}

impl Stage {
    const NEW: Self = Self::Header {
        bytes: [0; HEADER_BYTES],
        filled: 0,
    };
}

impl Incoming {
    /// Where the next bytes belong; never empty.
    pub(crate) fn room(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Stage::Header { bytes, filled } => &mut bytes[*filled..],
            Stage::Said { bytes, filled, .. } => &mut bytes[*filled..],
            Stage::Values { arrays, at, .. } => {
                let (index, filled) = *at;
                let (array, length) = &mut arrays[index];
                array.grow(*length, filled);
                &mut array.bytes_mut()[filled..]
            }
        }
    }

    /// So many bytes were put there; the message, once it is complete. Values of more than
    /// `values_max` bytes are refused.
    pub(crate) fn filled(&mut self, count: usize, values_max: u64) -> Result<Option<Message>> {
        match &mut self.0 {
            Stage::Header { bytes, filled } => {
                *filled += count;
                if *filled < HEADER_BYTES {
                    return Ok(None);
                }
                let header = Header::decode(bytes)?;
                if header.values_bytes > values_max {
                    let (bytes, most) = (header.values_bytes as usize, values_max as usize);
                    return Err(Breach::TooLong { bytes, most }.into());
                }
                let bytes = vec![0; header.said_bytes];
                self.0 = Stage::Said {
                    header,
                    bytes,
                    filled: 0,
                };
                Ok(None)
            }
            Stage::Said {
                header,
                bytes,
                filled,
            } => {
                *filled += count;
                if *filled < bytes.len() {
                    return Ok(None);
                }
                let (header, bytes) = (*header, mem::take(bytes));
                self.said(header, &bytes)
            }
            Stage::Values { arrays, at, .. } => {
                at.1 += count;
                if at.1 == arrays[at.0].1 * size_of::<f32>() {
                    *at = (at.0 + 1, 0);
                    // Empty ones have no bytes that could come.
                    while arrays.get(at.0).is_some_and(|it| it.1 == 0) {
                        at.0 += 1;
                    }
                }
                if at.0 < arrays.len() {
                    return Ok(None);
                }
                self.values()
            }
        }
    }

    /// All is there but the values.
    fn said(&mut self, header: Header, bytes: &[u8]) -> Result<Option<Message>> {
        if checksum([bytes]) != header.said_checksum {
            return Err(unexpected("what its checksum says"));
        }
        let said: Said = postcard::from_bytes(bytes).map_err(|error| {
            let error = Text::of(error);
            Error::from(Breach::NotDecoded { error })
        })?;
        let arrays = announced(&said);
        let said = Box::new(said);
        let total = arrays.iter().try_fold(0_u64, |total, (_, length)| {
            total.checked_add(length.checked_mul(size_of::<f32>() as u64)?)
        });
        if total != Some(header.values_bytes) {
            return Err(unexpected("as many values as announced"));
        }
        let arrays: Vec<_> = arrays
            .into_iter()
            .map(|(array, length)| (array, length as usize))
            .collect();
        let first = arrays.iter().position(|it| it.1 > 0);
        self.0 = Stage::Values {
            header,
            said,
            at: (first.unwrap_or(arrays.len()), 0),
            arrays,
        };
        match first {
            Some(_) => Ok(None),
            None => self.values(),
        }
    }

    /// All is there.
    fn values(&mut self) -> Result<Option<Message>> {
        let Stage::Values {
            header,
            said,
            arrays,
            ..
        } = mem::replace(&mut self.0, Stage::NEW)
        else {
            return Ok(None);
        };
        if let Some(expected) = header.values_checksum
            && checksum(arrays.iter().map(|it| it.0.bytes())) != expected
        {
            return Err(unexpected("the values that their checksum says"));
        }
        put_together(*said, arrays.into_iter().map(|it| it.0)).map(Some)
    }
}

impl Array {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Floats(values) => values.as_slice().bytes(),
            Self::Rows(values) => values.as_slice().bytes(),
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Floats(values) => values.as_mut_slice().bytes_mut(),
            Self::Rows(values) => values.as_mut_slice().bytes_mut(),
        }
    }

    /// Makes room behind the first `filled` bytes, if there is none.
    fn grow(&mut self, length: usize, filled: usize) {
        fn grown<T: Clone + Default>(values: &mut Vec<T>, length: usize, filled: usize) {
            let there = values.len();
            if filled == size_of_val(&values[..]) {
                let more = there.max(ROOM).min(length - there);
                values.reserve_exact(more);
                values.resize(there + more, T::default());
            }
        }
        match self {
            Self::Floats(values) if values.is_empty() => match floats::kept(length) {
                Some(kept) => *values = kept,
                None => grown(values, length, filled),
            },
            Self::Floats(values) => grown(values, length, filled),
            Self::Rows(values) => grown(values, length, filled),
        }
    }
}

/// The arrays that follow, and how long they will be.
fn announced(said: &Said) -> Vec<(Array, u64)> {
    let floats = || Array::Floats(Vec::new());
    match said {
        Said::Weights { lengths, .. } => lengths.iter().map(|it| (floats(), *it)).collect(),
        Said::Snapshot(said) | Said::Fill(_, _, said) | Said::Given(_, _, said) => {
            let lengths = said.shard.iter().flat_map(|(_, _, lengths)| lengths);
            lengths.map(|it| (floats(), *it)).collect()
        }
        Said::Stage { shape, .. } => match shape {
            Shape::Initial { specs, .. } => specs.iter().map(|it| (floats(), it.1)).collect(),
            Shape::Gradients(shapes) => {
                let mut arrays = Vec::new();
                for shape in shapes {
                    match shape {
                        GradientShape::None => {}
                        GradientShape::Dense(values) => arrays.push((floats(), *values)),
                        GradientShape::Rows { rows, values } => {
                            arrays.push((Array::Rows(Vec::new()), *rows));
                            arrays.push((floats(), *values));
                        }
                    }
                }
                arrays
            }
        },
        _ => vec![],
    }
}

fn put_together(said: Said, mut arrays: impl Iterator<Item = Array>) -> Result<Message> {
    let mut floats = || match arrays.next() {
        Some(Array::Floats(values)) => Ok(Floats::from(values)),
        _ => Err(unexpected("floats")),
    };
    Ok(match said {
        Said::Request(copy, request) => Message::Request(copy, request),
        Said::Reply(copy, reply) => Message::Reply(copy, reply),
        Said::Order(copy, order) => Message::Order(copy, order),
        Said::Report(copy, report) => Message::Report(copy, report),
        Said::Unheard(copy) => Message::Unheard(copy),
        Said::Alive => Message::Alive,
        Said::Over => Message::Over,
        Said::Counted(counted) => Message::Counted(counted),
        Said::Snapshot(said) => Message::Snapshot(with_arrays(said, floats)?),
        Said::Fill(copy, start, said) => {
            let state = Arc::new(with_arrays(said, floats)?);
            Message::Order(copy, Order::Fill(start, state))
        }
        Said::Given(copy, question, said) => {
            let state = Arc::new(with_arrays(said, floats)?);
            Message::Report(copy, Report::Given { question, state })
        }
        Said::Weights {
            round,
            point,
            lengths,
        } => {
            let parts: Result<_> = lengths.iter().map(|_| floats().map(Arc::new)).collect();
            let parts = parts?;
            let weights = Reply::Weights {
                round,
                point,
                parts,
            };
            Message::Reply(0, weights)
        }
        Said::Stage {
            copy,
            term,
            worker,
            id,
            base,
            shape,
        } => {
            let payload = match shape {
                Shape::Initial { optimizer, specs } => {
                    let part = |(spec, _)| Ok((spec, Arc::new(floats()?)));
                    let parts: Result<_> = specs.into_iter().map(part).collect();
                    Payload::Initial {
                        optimizer,
                        parts: parts?,
                    }
                }
                Shape::Gradients(shapes) => {
                    let mut gradients = Vec::with_capacity(shapes.len());
                    for shape in shapes {
                        gradients.push(match shape {
                            GradientShape::None => None,
                            GradientShape::Dense(_) => match arrays.next() {
                                Some(Array::Floats(values)) => Some(Gradient::Dense(values.into())),
                                _ => return Err(unexpected("floats")),
                            },
                            GradientShape::Rows { .. } => match (arrays.next(), arrays.next()) {
                                (Some(Array::Rows(rows)), Some(Array::Floats(values))) => {
                                    Some(Gradient::Rows { rows, values })
                                }
                                _ => return Err(unexpected("rows")),
                            },
                        });
                    }
                    Payload::Gradients(gradients)
                }
            };
            let payload = Arc::new(payload);
            let ask = Ask::Stage { id, base, payload };
            Message::Request(copy, Request { term, worker, ask })
        }
    })
}

fn with_arrays(said: SaidSnapshot, mut floats: impl FnMut() -> Result<Floats>) -> Result<Snapshot> {
    let shard = match said.shard {
        None => None,
        Some((optimizer, specs, lengths)) => {
            let arrays: Result<Vec<_>> = lengths.iter().map(|_| floats().map(Arc::new)).collect();
            let shard = Shard::restored(optimizer, &specs, arrays?);
            Some(shard.ok_or_else(|| unexpected("arrays that fit"))?)
        }
    };
    Ok(Snapshot {
        point: said.point,
        history: said.history,
        applied: said.applied,
        shard,
    })
}

fn unexpected(wanted: &str) -> Error {
    let wanted = wanted.into();
    Breach::Unexpected { wanted }.into()
}
