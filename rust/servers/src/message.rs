//! Messages as bytes: a header, a head, and the values of gradients and weights as they lie in
//! memory.
//!
//! The head is the message without its values (`wire::codec`), after the lengths of its arrays. The
//! header has 28 bytes, little-endian:
//!
//! * u32: checksum of a magic word and of the other fields.
//! * u32: length of the head.
//! * u64: length of the values in bytes.
//! * u32: checksum of the head.
//! * u32: checksum of the values.
//! * u32: 1 if the checksum of the values counts.
//!
//! Checksums are CRC-32C. All lengths are bounded before memory is allocated, and memory for values
//! grows as they arrive.

use std::collections::BTreeMap;
use std::iter::zip;
use std::mem;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use gradring_proto::dtype::{bf16, f16};
use gradring_proto::error::{Breach, Error, Result};
use gradring_proto::parameters::changes::PulledPart;
use gradring_proto::parameters::floats::Float;
use gradring_proto::parameters::floats::{Floats, kept};
use gradring_proto::parameters::identity::Version;
use gradring_proto::parameters::message::{Ask, Order, Reply, Report, WorkerRequest};
use gradring_proto::parameters::queue::Counts;
use gradring_proto::parameters::shard::{Gradient, Payload, Shard, Weights};
use gradring_proto::parameters::snapshot::Snapshot;
use gradring_proto::wire::codec;
use gradring_proto::wire::frame::checksum;

use super::values::Values as _;

/// Length of a header.
pub(crate) const HEADER_BYTES: usize = 28;
/// Limit of a head, in bytes.
const HEAD_BYTES_MAX: usize = 1 << 20;
/// Limit of the values of one message, in bytes: far more than the memory of a host.
const VALUES_BYTES_MAX: u64 = 1 << 44;
/// Number of values for which memory is allocated before they arrive; afterwards the memory
/// doubles.
const VALUES_AHEAD: usize = 64 << 10;

const MAGIC: &[u8] = b"GRP3";

/// Messages between workers and servers. A number in a message is the index of a shard's copy; with
/// the server it names the keeper that sends or receives.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Message {
    /// A worker's request to a server.
    Request(usize, WorkerRequest),
    /// A server's reply to a worker.
    Reply(usize, Reply),
    /// An order of server 0's sequencer to another server.
    Order(usize, Order),
    /// A server's report to server 0's sequencer.
    Report(usize, Report),
    /// A server could do nothing with the last long request, so the worker may repeat it.
    Retry(usize),
    /// A keep-alive: the sender has had nothing else to send.
    Alive,
    /// Sent to a worker whose leave is recorded, and to a server when all workers have left.
    Goodbye,
    /// A server's snapshot, for its disk.
    Snapshot(Arc<Snapshot>),
    /// Statistics from server 0 for a worker's user.
    Counted(Counted),
}

/// Statistics of all workers' gradients since servers were last restored.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Counted {
    /// Version of the weights.
    pub version: Version,
    /// Updates since then; initial weights are not an update.
    pub updates: u64,
    /// Gradients that wait to be applied.
    pub queue: usize,
    /// Number of the other gradients, by their fate.
    pub counts: Counts,
    /// Number of applied gradients, by staleness.
    pub staleness: BTreeMap<u64, u64>,
}

impl Counted {
    /// Adds the gradients of another model. The version stays that of the first.
    pub(crate) fn add(&mut self, other: &Self) {
        self.updates += other.updates;
        self.queue += other.queue;
        self.counts.add(other.counts);
        for (staleness, count) in &other.staleness {
            *self.staleness.entry(*staleness).or_default() += count;
        }
    }
}

/// A message to send.
pub struct Outgoing {
    /// Header and head.
    front: Vec<u8>,
    message: Message,
}

impl Outgoing {
    /// Encodes a message. Its values are not copied.
    pub fn new(message: Message, checks_values: bool) -> Result<Self> {
        let arrays = message.arrays();
        let lengths: Vec<_> = arrays.iter().map(|it| it.len() as u64).collect();
        let head = codec::encode(&(lengths, &message), HEAD_BYTES_MAX)?;
        let values_bytes = arrays.iter().map(|it| it.len() as u64).sum();
        let header = Header {
            head_bytes: head.len(),
            values_bytes,
            head_checksum: checksum([&head[..]]),
            values_checksum: (checks_values && values_bytes > 0).then(|| checksum(arrays)),
        };
        let front = [&header.encode()[..], &head].concat();
        Ok(Self { front, message })
    }

    /// All bytes, in order, as slices.
    pub fn slices(&self) -> Vec<&[u8]> {
        let mut slices = vec![&self.front[..]];
        let arrays = self.message.arrays().into_iter();
        slices.extend(arrays.filter(|it| !it.is_empty()));
        slices
    }
}

/// Destination of a received array.
enum ArrayPlace<'a> {
    Floats(&'a mut Floats),
    Rows(&'a mut Vec<u32>),
}

impl Message {
    /// Values that follow the head.
    fn arrays(&self) -> Vec<&[u8]> {
        match self {
            Self::Request(_, request) => match &request.ask {
                Ask::Stage { payload, .. } => arrays_of(payload),
                _ => vec![],
            },
            Self::Reply(_, Reply::Weights { parts, .. }) => pulled_arrays(parts),
            _ => {
                let shard = self.snapshot().and_then(|it| it.shard.as_ref());
                let arrays = shard.into_iter().flat_map(Shard::arrays);
                arrays.map(|it| it.bytes()).collect()
            }
        }
    }

    /// Destinations of the values, in the order of `arrays`. Nobody else may hold the message yet.
    fn places(&mut self) -> Vec<ArrayPlace<'_>> {
        match self {
            Self::Request(_, request) => match &mut request.ask {
                Ask::Stage { payload, .. } => Arc::get_mut(payload).map_or(vec![], places_of),
                _ => vec![],
            },
            Self::Reply(_, Reply::Weights { parts, .. }) => pulled_places(parts),
            Self::Snapshot(state)
            | Self::Order(_, Order::InstallSnapshot(_, state))
            | Self::Report(_, Report::FetchedState { state, .. }) => {
                let shard = Arc::get_mut(state).and_then(|it| it.shard.as_mut());
                let arrays = shard.into_iter().flat_map(Shard::arrays_mut);
                arrays.filter_map(ArrayPlace::of).collect()
            }
            _ => vec![],
        }
    }

    fn snapshot(&self) -> Option<&Snapshot> {
        match self {
            Self::Snapshot(state)
            | Self::Order(_, Order::InstallSnapshot(_, state))
            | Self::Report(_, Report::FetchedState { state, .. }) => Some(state),
            _ => None,
        }
    }
}

impl<'a> ArrayPlace<'a> {
    fn of(weights: &'a mut Weights) -> Option<Self> {
        Arc::get_mut(weights).map(Self::Floats)
    }
}

fn arrays_of(payload: &Payload) -> Vec<&[u8]> {
    let gradients = match payload {
        Payload::Initial { parts, .. } => return parts.iter().map(|it| it.1.bytes()).collect(),
        Payload::Gradients(gradients) => gradients.iter().flatten(),
    };
    let arrays = gradients.flat_map(|gradient| match gradient {
        Gradient::Dense(values) => [None, Some(values.bytes())],
        Gradient::Rows { rows, values } => [Some(rows.bytes()), Some(values.bytes())],
    });
    arrays.flatten().collect()
}

fn places_of(payload: &mut Payload) -> Vec<ArrayPlace<'_>> {
    let gradients = match payload {
        Payload::Initial { parts, .. } => {
            return parts
                .iter_mut()
                .filter_map(|it| ArrayPlace::of(&mut it.1))
                .collect();
        }
        Payload::Gradients(gradients) => gradients.iter_mut().flatten(),
    };
    let places = gradients.flat_map(|gradient| match gradient {
        Gradient::Dense(values) => [None, Some(ArrayPlace::Floats(values))],
        Gradient::Rows { rows, values } => [
            Some(ArrayPlace::Rows(rows)),
            Some(ArrayPlace::Floats(values)),
        ],
    });
    places.flatten().collect()
}

fn pulled_arrays(parts: &[PulledPart]) -> Vec<&[u8]> {
    let arrays = parts.iter().flat_map(|part| match part {
        PulledPart::All(weights) | PulledPart::Keep(weights) => [None, Some(weights.bytes())],
        PulledPart::Rows { rows, values } => [Some(rows.bytes()), Some(values.bytes())],
    });
    arrays.flatten().collect()
}

fn pulled_places(parts: &mut [PulledPart]) -> Vec<ArrayPlace<'_>> {
    let places = parts.iter_mut().flat_map(|part| match part {
        PulledPart::All(weights) | PulledPart::Keep(weights) => [None, ArrayPlace::of(weights)],
        PulledPart::Rows { rows, values } => [
            Some(ArrayPlace::Rows(rows)),
            Some(ArrayPlace::Floats(values)),
        ],
    });
    places.flatten().collect()
}

/// An array that is being received.
enum Array {
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
    Rows(Vec<u32>),
}

/// Evaluates an expression with the numbers of any array.
macro_rules! each {
    ($array:expr, $values:ident => $result:expr) => {
        match $array {
            Array::F32($values) => $result,
            Array::F64($values) => $result,
            Array::Bf16($values) => $result,
            Array::F16($values) => $result,
            Array::Rows($values) => $result,
        }
    };
}

/// A partly received message.
pub struct Incoming(Stage);

impl Incoming {
    /// State before the first byte.
    pub const NEW: Self = Self(Stage::NEW);
}

enum Stage {
    Header {
        bytes: [u8; HEADER_BYTES],
        filled: usize,
    },
    Head {
        header: Header,
        bytes: Vec<u8>,
        filled: usize,
    },
    Values {
        header: Header,
        message: Box<Message>,
        /// Each array with its full length in bytes.
        arrays: Vec<(Array, usize)>,
        /// Index of the array being received, and number of its bytes so far.
        at: (usize, usize),
    },
}

#[derive(Clone, Copy)]
struct Header {
    head_bytes: usize,
    values_bytes: u64,
    head_checksum: u32,
    values_checksum: Option<u32>,
}

impl Header {
    fn encode(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[4..8].copy_from_slice(&(self.head_bytes as u32).to_le_bytes());
        bytes[8..16].copy_from_slice(&self.values_bytes.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.head_checksum.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.values_checksum.unwrap_or(0).to_le_bytes());
        bytes[24..].copy_from_slice(&u32::from(self.values_checksum.is_some()).to_le_bytes());
        let own = checksum([MAGIC, &bytes[4..]]);
        bytes[..4].copy_from_slice(&own.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self> {
        let word = |at: usize| {
            let mut word = [0; 4];
            word.copy_from_slice(&bytes[at..at + 4]);
            u32::from_le_bytes(word)
        };
        if word(0) != checksum([MAGIC, &bytes[4..]]) {
            return Err(unexpected("the header of a message"));
        }
        let head_bytes = word(4) as usize;
        let values_bytes = u64::from(word(8)) | u64::from(word(12)) << 32;
        if head_bytes == 0 {
            return Err(unexpected("a message"));
        }
        if head_bytes > HEAD_BYTES_MAX || values_bytes > VALUES_BYTES_MAX {
            let (bytes, most) = (head_bytes, HEAD_BYTES_MAX);
            return Err(Breach::TooLong { bytes, most }.into());
        }
        Ok(Self {
            head_bytes,
            values_bytes,
            head_checksum: word(16),
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
    /// Buffer for the next bytes; never empty.
    pub fn spare_capacity(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Stage::Header { bytes, filled } => &mut bytes[*filled..],
            Stage::Head { bytes, filled, .. } => &mut bytes[*filled..],
            Stage::Values { arrays, at, .. } => {
                let (index, filled) = *at;
                let (array, length) = &mut arrays[index];
                array.grow(*length, filled);
                &mut array.bytes_mut()[filled..]
            }
        }
    }

    /// Records that `count` bytes were written into `spare_capacity`. Returns the message once
    /// it is complete.
    ///
    /// # Errors
    /// `Protocol` for a wrong checksum or length, and for values of more than `values_max` bytes.
    pub fn filled(&mut self, count: usize, values_max: u64) -> Result<Option<Message>> {
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
                let bytes = vec![0; header.head_bytes];
                self.0 = Stage::Head {
                    header,
                    bytes,
                    filled: 0,
                };
                Ok(None)
            }
            Stage::Head {
                header,
                bytes,
                filled,
            } => {
                *filled += count;
                if *filled < bytes.len() {
                    return Ok(None);
                }
                let (header, bytes) = (*header, mem::take(bytes));
                self.head(header, &bytes)
            }
            Stage::Values { arrays, at, .. } => {
                at.1 += count;
                if at.1 == arrays[at.0].1 {
                    *at = (at.0 + 1, 0);
                    // Empty arrays have no bytes that could arrive.
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

    /// Handles a complete head: prepares the arrays for its values.
    fn head(&mut self, header: Header, bytes: &[u8]) -> Result<Option<Message>> {
        if checksum([bytes]) != header.head_checksum {
            return Err(unexpected("what its checksum says"));
        }
        let (lengths, message): (Vec<u64>, Message) = codec::decode(bytes)?;
        let mut message = Box::new(message);
        let total = lengths
            .iter()
            .try_fold(0_u64, |total, length| total.checked_add(*length));
        let places = message.places();
        if total != Some(header.values_bytes) || places.len() != lengths.len() {
            return Err(unexpected("as many values as announced"));
        }
        let lengths = lengths.into_iter().map(|it| it as usize);
        let arrays: Vec<_> = zip(places.iter().map(Array::of), lengths).collect();
        drop(places);
        if !arrays
            .iter()
            .all(|(array, length)| length.is_multiple_of(array.value_bytes()))
        {
            return Err(unexpected("whole values"));
        }
        let first = arrays.iter().position(|it| it.1 > 0);
        self.0 = Stage::Values {
            header,
            message,
            at: (first.unwrap_or(arrays.len()), 0),
            arrays,
        };
        match first {
            Some(_) => Ok(None),
            None => self.values(),
        }
    }

    /// Handles complete values: puts them into the message.
    fn values(&mut self) -> Result<Option<Message>> {
        let Stage::Values {
            header,
            mut message,
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
        for (place, (array, _)) in zip(message.places(), arrays) {
            match (place, array) {
                (ArrayPlace::Rows(place), Array::Rows(values)) => *place = values,
                (ArrayPlace::Floats(place), Array::F32(values)) => *place = values.into(),
                (ArrayPlace::Floats(place), Array::F64(it)) => *place = Floats::F64(it.into()),
                (ArrayPlace::Floats(place), Array::Bf16(it)) => *place = Floats::Bf16(it.into()),
                (ArrayPlace::Floats(place), Array::F16(it)) => *place = Floats::F16(it.into()),
                _ => return Err(unexpected("an array for its place")),
            }
        }
        let shard = message.snapshot().and_then(|it| it.shard.as_ref());
        if !shard.is_none_or(Shard::fits_itself) {
            return Err(unexpected("arrays that fit"));
        }
        if let Message::Reply(_, Reply::Weights { parts, .. }) = &*message
            && !parts.iter().all(PulledPart::fits_itself)
        {
            return Err(unexpected("rows in order with their values"));
        }
        Ok(Some(*message))
    }
}

impl Array {
    const fn of(place: &ArrayPlace<'_>) -> Self {
        match place {
            ArrayPlace::Rows(_) => Self::Rows(Vec::new()),
            ArrayPlace::Floats(Floats::F32(_)) => Self::F32(Vec::new()),
            ArrayPlace::Floats(Floats::F64(_)) => Self::F64(Vec::new()),
            ArrayPlace::Floats(Floats::Bf16(_)) => Self::Bf16(Vec::new()),
            ArrayPlace::Floats(Floats::F16(_)) => Self::F16(Vec::new()),
        }
    }

    /// Size of one number.
    const fn value_bytes(&self) -> usize {
        const fn size<T>(_: &Vec<T>) -> usize {
            size_of::<T>()
        }
        each!(self, values => size(values))
    }

    fn bytes(&self) -> &[u8] {
        each!(self, values => values.as_slice().bytes())
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        each!(self, values => values.as_mut_slice().bytes_mut())
    }

    /// Allocates memory for some of `length` bytes after the first `filled`, if none is left.
    fn grow(&mut self, length: usize, filled: usize) {
        fn grown<T: Clone + Default>(values: &mut Vec<T>, length: usize, filled: usize) {
            let there = values.len();
            if filled == size_of_val(&values[..]) {
                let more = there.max(VALUES_AHEAD).min(length / size_of::<T>() - there);
                values.reserve_exact(more);
                values.resize(there + more, T::default());
            }
        }
        fn kept_or_grown<T: Float>(values: &mut Vec<T>, length: usize, filled: usize) {
            let is_new = values.is_empty();
            match is_new.then(|| kept(length / size_of::<T>())).flatten() {
                Some(kept) => *values = kept,
                None => grown(values, length, filled),
            }
        }
        match self {
            Self::F32(values) => kept_or_grown(values, length, filled),
            Self::F64(values) => kept_or_grown(values, length, filled),
            Self::Bf16(values) => kept_or_grown(values, length, filled),
            Self::F16(values) => kept_or_grown(values, length, filled),
            Self::Rows(values) => grown(values, length, filled),
        }
    }
}

fn unexpected(wanted: &str) -> Error {
    let wanted = wanted.into();
    Breach::Unexpected { wanted }.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use gradring_proto::parameters::changes::Kept;
    use gradring_proto::parameters::float::FloatType;
    use gradring_proto::parameters::identity::Point;
    use gradring_proto::parameters::optimizer::{Optimizer, Sgd};
    use gradring_proto::parameters::shard::Spec;

    const SGD: Optimizer = Optimizer::Sgd(Sgd {
        momentum: 0.0,
        is_nesterov: false,
    });

    fn snapshot(rows: usize, weights: usize) -> Message {
        let (width, decays) = (2, true);
        let spec = Spec {
            rows,
            width,
            decays,
        };
        let weights = Arc::new(vec![1.5; weights].into());
        let mut snapshot = Snapshot::empty();
        snapshot.shard = Some(Shard::new(SGD, &[(spec, weights)]));
        Message::Snapshot(Arc::new(snapshot))
    }

    fn weights(lengths: &[usize]) -> Message {
        let whole = |&it: &usize| PulledPart::All(Arc::new(vec![2.5; it].into()));
        pulled(lengths.iter().map(whole).collect())
    }

    fn rows(rows: &[u32], values: usize) -> PulledPart {
        PulledPart::Rows {
            rows: rows.into(),
            values: vec![2.5; values].into(),
        }
    }

    fn pulled(parts: Vec<PulledPart>) -> Message {
        let start = 3;
        let weights = Reply::Weights {
            round: 7,
            point: Point::default(),
            start,
            base: Some(Kept { start, version: 0 }),
            parts,
        };
        Message::Reply(0, weights)
    }

    fn received(mut bytes: &[u8]) -> Result<Option<Message>> {
        let mut incoming = Incoming::NEW;
        while !bytes.is_empty() {
            let spare = incoming.spare_capacity();
            let count = spare.len().min(bytes.len());
            spare[..count].copy_from_slice(&bytes[..count]);
            bytes = &bytes[count..];
            if let Some(message) = incoming.filled(count, u64::MAX)? {
                assert!(bytes.is_empty());
                return Ok(Some(message));
            }
        }
        Ok(None)
    }

    #[test]
    fn arrays_arrive_where_they_belong_whatever_their_lengths() {
        let lengths = [0, 1, 0, VALUES_AHEAD, 3 * VALUES_AHEAD + 1, 0];
        for checks in [false, true] {
            let sent = Outgoing::new(weights(&lengths), checks).unwrap();
            let message = received(&sent.slices().concat()).unwrap();
            let Some(Message::Reply(0, Reply::Weights { parts, .. })) = message else {
                panic!("something else arrived: {message:?}");
            };
            let expected = weights(&lengths);
            let Message::Reply(_, Reply::Weights { parts: sent, .. }) = expected else {
                unreachable!();
            };
            assert_eq!(parts, sent);
        }
    }

    #[test]
    fn arrays_arrive_with_their_element_types_and_as_long_as_these_are() {
        let pass = |parts| {
            let sent = Outgoing::new(pulled(parts), true)
                .unwrap()
                .slices()
                .concat();
            (sent.len(), received(&sent).unwrap())
        };
        let part = |length| move |it| PulledPart::All(Arc::new(Floats::repeated(it, 1.5, length)));
        let types = [FloatType::ALL, FloatType::ALL].concat().into_iter();
        let parts: Vec<_> = types.map(part(3 * VALUES_AHEAD + 1)).collect();
        let (_, message) = pass(parts.clone());
        let Some(Message::Reply(0, Reply::Weights { parts: there, .. })) = message else {
            panic!("something else arrived: {message:?}");
        };
        assert_eq!(there, parts);
        for float_type in FloatType::ALL {
            let long = |length| pass(vec![part(length)(float_type)]).0;
            assert_eq!(long(3) - long(2), float_type.size_bytes());
        }
    }

    #[test]
    fn a_part_of_a_value_is_refused() {
        let message = pulled(vec![PulledPart::All(Arc::new(vec![1.5].into()))]);
        let head = codec::encode(&(vec![3_u64], &message), HEAD_BYTES_MAX).unwrap();
        let header = Header {
            head_bytes: head.len(),
            values_bytes: 3,
            head_checksum: checksum([&head[..]]),
            values_checksum: None,
        };
        let wanted = "whole values".into();
        let error = received(&[&header.encode()[..], &head].concat()).unwrap_err();
        assert_eq!(error, Breach::Unexpected { wanted }.into());
    }

    #[test]
    fn rows_of_a_pull_arrive_with_their_values_and_are_refused_unless_they_fit() {
        let pass = |parts| {
            received(
                &Outgoing::new(pulled(parts), true)
                    .unwrap()
                    .slices()
                    .concat(),
            )
        };
        let keep = PulledPart::Keep(Arc::new(vec![1.5; 4].into()));
        let parts = vec![rows(&[0, 4], 6), keep, rows(&[], 0), rows(&[7], 0)];
        let message = pass(parts.clone()).unwrap();
        let Some(Message::Reply(0, Reply::Weights { parts: there, .. })) = message else {
            panic!("something else arrived: {message:?}");
        };
        assert_eq!(there, parts);
        let wanted = "rows in order with their values".into();
        let refused = Error::from(Breach::Unexpected { wanted });
        for part in [
            rows(&[4, 0], 6),
            rows(&[4, 4], 6),
            rows(&[0, 4], 5),
            rows(&[], 1),
        ] {
            assert_eq!(pass(vec![part]).unwrap_err(), refused);
        }
    }

    #[test]
    fn a_snapshot_whose_arrays_do_not_fit_its_parts_is_refused() {
        let pass = |message| received(&Outgoing::new(message, true).unwrap().slices().concat());
        assert!(pass(snapshot(3, 6)).is_ok_and(|it| it.is_some()));
        for (rows, weights) in [(3, 5), (0, 1), (usize::MAX, 6)] {
            // Without slots, no other array would reveal the wrong length.
            assert!(pass(snapshot(rows, weights)).is_err(), "{rows} {weights}");
        }
    }

    #[test]
    fn a_head_that_announces_other_arrays_than_it_has_is_refused() {
        let message = weights(&[2]);
        for lengths in [vec![], vec![4, 4], vec![u64::MAX], vec![1 << 62]] {
            let head = codec::encode(&(&lengths, &message), HEAD_BYTES_MAX).unwrap();
            let header = Header {
                head_bytes: head.len(),
                values_bytes: 8,
                head_checksum: checksum([&head[..]]),
                values_checksum: None,
            };
            assert!(received(&[&header.encode()[..], &head].concat()).is_err());
        }
    }
}
