//! The header with which a rank begins every collective: it describes the rank's call.
//!
//! Layout, little-endian, 64 bytes:
//!
//! ```text
//! magic u32, kind u8, dtype u8, op u8, mapped u8, generation u32, sender u16, receiver u16,
//! sequence u64, count u64, name hash u64, schedule hash u64, root u64, step u64
//! ```
//!
//! Two ranks take part in the same collective exactly when their headers are equal, apart
//! from sender and receiver. A header with another sender or receiver than its pipe has reached the
//! wrong rank. If each pair of ranks has its own count, a header has the count of its direction.
//!
//! No third rank knows the calls of two ranks that exchange something alone, and one of them may
//! leave as soon as it has sent. So the description of the call follows such a header as text, for
//! the error if the two calls differ.

use crate::collective::{Call, Collective};
use crate::dtype::DType;
use crate::error::MAPPED;
use crate::schedule::Algorithm;

/// Length of an encoded header in bytes.
pub const HEADER_BYTES: usize = 64;
/// Length of that text in bytes, padded with zeros; it fits a name and a shape.
const TEXT_BYTES: usize = 192;
/// Marks a truncated text.
const CUT: &str = " ...";

const MAGIC: u32 = u32::from_le_bytes(*b"GRC1");

/// Largest `kind` of a collective.
const KIND_MAX: u8 = 11;

/// An encoded header.
pub type Header = [u8; HEADER_BYTES];

/// The properties of a call that must be equal on all ranks: its header without its position in the
/// order.
#[derive(Debug, Clone, Copy)]
pub struct Signature(Header);

impl Signature {
    /// The signature of `call`, performed by `algorithm`.
    #[must_use]
    pub fn of(call: &Call, algorithm: Algorithm) -> Self {
        let kind = match &call.collective {
            Collective::AllReduce { .. } => 1,
            Collective::ReduceScatter { .. } => 2,
            Collective::AllGather { .. } => 3,
            Collective::Broadcast { .. } => 4,
            Collective::Barrier => 5,
            Collective::AllToAll => 6,
            Collective::Reduce { .. } => 7,
            Collective::Gather { .. } => 8,
            Collective::Scatter { .. } => 9,
            // Both are one exchange; sender and receiver in the header show which rank sends.
            Collective::Send { .. } | Collective::Receive { .. } => 10,
            Collective::AllToAllV { .. } => 11,
        };
        let root = call.collective.root().unwrap_or(0) as u64;
        let op = call.collective.op().map_or(0, |op| op as u8);
        let mut schedule = Fnv1a::new();
        schedule.write(algorithm.name().as_bytes());
        schedule.write(call.shapes.as_bytes());
        if let Collective::AllGather { counts } | Collective::ReduceScatter { counts, .. } =
            &call.collective
        {
            counts
                .iter()
                .for_each(|count| schedule.write(&count.to_le_bytes()));
        }
        let mut name = Fnv1a::new();
        name.write(call.name.compared.as_bytes());

        let mut bytes = [0; HEADER_BYTES];
        bytes[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&[kind, call.dtype as u8, op, call.is_mapped.into()]);
        let words = [
            0, // generation
            0, // sequence
            call.agreed_count() as u64,
            name.0,
            schedule.0,
            root,
            0, // step
        ];
        for (field, word) in bytes[8..].chunks_exact_mut(8).zip(words) {
            field.copy_from_slice(&word.to_le_bytes());
        }
        Self(bytes)
    }

    /// The header of the `sequence`-th collective of this generation, in the program's step `step`.
    #[must_use]
    pub fn header(&self, generation: u32, sequence: u64, step: u64) -> Header {
        let mut bytes = self.0;
        bytes[8..12].copy_from_slice(&generation.to_le_bytes());
        bytes[16..24].copy_from_slice(&sequence.to_le_bytes());
        bytes[56..64].copy_from_slice(&step.to_le_bytes());
        bytes
    }
}

/// The header with its sender and receiver.
///
/// # Panics
/// When a rank is not below 65,536; groups are much smaller.
#[must_use]
#[inline]
pub fn with_endpoints(mut header: Header, from: usize, to: usize) -> Header {
    for (at, rank) in [(12, from), (14, to)] {
        let rank = u16::try_from(rank).expect("a group has at most 2048 ranks");
        header[at..at + 2].copy_from_slice(&rank.to_le_bytes());
    }
    header
}

/// The header from one rank to another in `call`; `rank` is one of the two.
///
/// # Panics
/// See [`with_endpoints`].
#[must_use]
#[inline]
pub fn between(header: Header, call: &Call, rank: usize, from: usize, to: usize) -> Header {
    let mut header = with_endpoints(header, from, to);
    if let Some(count) = call.count_between(rank, from, to) {
        header[24..32].copy_from_slice(&(count as u64).to_le_bytes());
    }
    header
}

/// Sender and receiver of a header.
#[must_use]
#[inline]
pub fn endpoints(header: &Header) -> (usize, usize) {
    let rank = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]).into();
    (rank(12), rank(14))
}

/// Ordinal of a header's collective.
///
/// # Panics
/// Never.
#[must_use]
#[inline]
pub fn sequence(header: &Header) -> u64 {
    u64::from_le_bytes(header[16..24].try_into().expect("eight bytes"))
}

/// Returns whether these bytes are a header, and not some other data.
#[must_use]
#[inline]
pub fn is_header(bytes: &Header) -> bool {
    bytes[0..4] == MAGIC.to_le_bytes() && (1..=KIND_MAX).contains(&bytes[4])
}

/// Text that follows the header of a call between two ranks; it has the same length on both.
#[must_use]
pub fn text_of(call: &Call) -> Option<Vec<u8>> {
    call.collective.partner()?;
    let mut text = call.to_string().into_bytes();
    if text.len() > TEXT_BYTES {
        text.truncate(TEXT_BYTES - CUT.len());
        text.extend_from_slice(CUT.as_bytes());
    }
    text.resize(TEXT_BYTES, 0);
    Some(text)
}

/// Description of the peer's call, from its text. If the text is cut or empty, the header adds or
/// replaces details.
#[must_use]
pub fn description(text: &[u8], theirs: &Header, own: &Header) -> String {
    let text = String::from_utf8_lossy(text);
    match text.trim_end_matches('\0') {
        "" => describe_difference(theirs, own),
        text if text.ends_with(CUT) => format!("{text}, {}", describe_difference(theirs, own)),
        text => text.into(),
    }
}

/// Description of a header's call, for a rank that has made another call.
fn describe_difference(theirs: &Header, own: &Header) -> String {
    let word = |header: &Header, at: usize| {
        let bytes = header[at..at + 8].try_into().expect("eight bytes");
        u64::from_le_bytes(bytes)
    };
    let dtype = DType::ALL
        .into_iter()
        .find(|dtype| *dtype as u8 == theirs[5])
        .map_or("an unknown type", DType::name);
    let mut text = format!("{} elements of {dtype}", word(theirs, 24));
    let differ = |at| word(theirs, at) != word(own, at);
    if theirs[7] != 0 {
        text.push_str(MAPPED);
    }
    if differ(32) {
        text.push_str(" under another name");
    } else if differ(40) && !differ(24) {
        text.push_str(" in another shape");
    }
    text
}

/// The FNV-1a hash of G. Fowler, L. Noll and K.-P. Vo; the same on every machine and version.
struct Fnv1a(u64);

impl Fnv1a {
    const fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::ReduceOp;

    fn changed(change: impl FnOnce(&mut Call)) -> Header {
        let mut call = Call {
            collective: Collective::AllReduce { op: ReduceOp::Sum },
            dtype: DType::F32,
            count: 6,
            name: "w".into(),
            shapes: "[6]".into(),
            is_mapped: false,
        };
        change(&mut call);
        Signature::of(&call, Algorithm::Ring).header(0, 1, 0)
    }

    #[test]
    fn every_difference_between_two_calls_shows_in_the_header() {
        let reduce = |op, root| Collective::Reduce { op, root };
        let in_parts = |sent: [usize; 2], received: [usize; 2]| Collective::AllToAllV {
            sent: sent.into(),
            received: received.into(),
        };
        let base = changed(|_| ());
        assert!(is_header(&base));
        assert_eq!(base, changed(|_| ()));
        let others = [
            changed(|call| call.collective = Collective::AllReduce { op: ReduceOp::Max }),
            changed(|call| call.collective = Collective::Broadcast { root: 0 }),
            changed(|call| call.collective = Collective::Broadcast { root: 1 }),
            changed(|call| call.collective = Collective::AllToAll),
            changed(|call| call.collective = in_parts([0, 4], [1, 1])),
            changed(|call| call.collective = reduce(ReduceOp::Sum, 0)),
            changed(|call| call.collective = reduce(ReduceOp::Max, 0)),
            changed(|call| call.collective = reduce(ReduceOp::Sum, 1)),
            changed(|call| call.collective = Collective::Gather { root: 0, chunk: 6 }),
            changed(|call| call.collective = Collective::Gather { root: 1, chunk: 6 }),
            changed(|call| call.collective = Collective::Gather { root: 0, chunk: 7 }),
            changed(|call| call.collective = Collective::Scatter { root: 0, chunk: 6 }),
            changed(|call| call.collective = Collective::Scatter { root: 1, chunk: 6 }),
            changed(|call| call.collective = Collective::Scatter { root: 0, chunk: 7 }),
            changed(|call| call.count = 7),
            changed(|call| call.dtype = DType::I32),
            changed(|call| call.name = "v".into()),
            changed(|call| call.shapes = "[2,3]".into()),
            changed(|call| call.is_mapped = true),
        ];
        let call = Signature(base);
        assert_eq!(base, call.header(0, 1, 0));
        assert_ne!(base, call.header(0, 2, 0));
        assert_ne!(base, call.header(1, 1, 0));
        assert_ne!(base, call.header(0, 1, 1));
        let sent = with_endpoints(base, 2, 513);
        assert_eq!(endpoints(&sent), (2, 513));
        assert!(is_header(&sent));
        assert_ne!(sent, with_endpoints(base, 513, 2));
        assert_eq!(base, changed(|call| call.name.shown = "v".into()));
        for (index, other) in others.iter().enumerate() {
            assert!(is_header(other));
            let (mut foreign, mut kindless) = (*other, *other);
            (foreign[0], kindless[4]) = (!foreign[0], KIND_MAX + 1);
            assert!(!is_header(&foreign));
            assert!(!is_header(&kindless));
            assert_ne!(&base, other);
            assert!(others[..index].iter().all(|earlier| earlier != other));
        }
    }

    #[test]
    fn ranks_may_differ_in_their_parts_but_not_each_two_in_what_goes_between_them() {
        let call = |sent: [usize; 2], received: [usize; 2]| Call {
            collective: Collective::AllToAllV {
                sent: sent.into(),
                received: received.into(),
            },
            count: 9,
            ..Call::float_sum(0)
        };
        let (first, second) = (call([1, 5], [1, 2]), call([2, 0], [5, 2]));
        let header = |call: &Call| Signature::of(call, Algorithm::Direct).header(0, 1, 0);
        let (own, other) = (header(&first), header(&second));
        assert_eq!(own, other);
        for (from, to) in [(0, 1), (1, 0)] {
            let sent = between(own, &first, 0, from, to);
            assert_eq!(sent, between(own, &second, 1, from, to));
            assert_eq!(endpoints(&sent), (from, to));
            let another = call([1, 4], [1, 3]);
            assert_ne!(sent, between(own, &another, 0, from, to));
        }
        let sum = Call::float_sum(8);
        let sent = between(own, &sum, 0, 0, 1);
        assert_eq!(sent, with_endpoints(own, 0, 1));
    }

    #[test]
    fn both_ranks_of_a_send_have_the_same_header() {
        let sent = changed(|call| call.collective = Collective::Send { to: 3 });
        assert!(is_header(&sent));
        let received = changed(|call| call.collective = Collective::Receive { from: 5 });
        assert_eq!(sent, received);
    }

    #[test]
    fn behind_a_header_of_two_ranks_stands_what_was_called() {
        let described = |name: &str| {
            let call = Call {
                collective: Collective::Send { to: 3 },
                name: name.into(),
                ..Call::float_sum(24)
            };
            let text = text_of(&call).unwrap();
            assert_eq!(text.len(), TEXT_BYTES);
            description(
                &text,
                &changed(|call| call.name = "v".into()),
                &changed(|_| ()),
            )
        };
        assert_eq!(described("w"), "send(dest=3) 'w' float32");
        let long = described(&"\u{e9}".repeat(200));
        let rest = ", 6 elements of float32 under another name";
        assert!(long.starts_with("send(dest=3) '\u{e9}"));
        assert!(long.ends_with(&format!("{CUT}{rest}")));
        // The text is cut only as far as necessary.
        let around = "send(dest=3) '' float32".len();
        assert!(described(&"x".repeat(TEXT_BYTES - around)).ends_with("x' float32"));
        let cut = described(&"x".repeat(TEXT_BYTES + 1 - around));
        assert_eq!(cut.len(), TEXT_BYTES + rest.len());
        assert_eq!(text_of(&Call::float_sum(24)), None);
    }

    #[test]
    fn a_header_tells_in_what_it_differs() {
        let own = changed(|_| ());
        let described = |change: fn(&mut Call)| description(&[], &changed(change), &own);
        assert_eq!(described(|call| call.count = 7), "7 elements of float32");
        assert_eq!(
            described(|call| call.dtype = DType::I64),
            "6 elements of int64"
        );
        assert_eq!(
            described(|call| call.name = "v".into()),
            "6 elements of float32 under another name"
        );
        assert_eq!(
            described(|call| call.shapes = "[2,3]".into()),
            "6 elements of float32 in another shape"
        );
        assert_eq!(
            described(|call| call.is_mapped = true),
            "6 elements of float32 in memory of Communicator.empty"
        );
    }
}
