//! A collective as a rank requests it: operation, buffer and name.

use std::fmt::{self, Write as _};

use crate::buffer::Buffer;
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, MAPPED, Result, Text, Unusable};

/// The collectives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Collective {
    /// Every rank ends with the reduction of all contributions.
    AllReduce {
        /// Operation that combines contributions.
        op: ReduceOp,
    },
    /// Every rank ends with its own chunk of the reduction; the rest of its buffer is undefined.
    ReduceScatter {
        /// Operation that combines contributions.
        op: ReduceOp,
        /// Elements owned by each rank, in rank order; they add up to the buffer's count.
        counts: Vec<usize>,
    },
    /// Every rank's chunk, already in place in its buffer, ends on every rank.
    AllGather {
        /// Elements contributed by each rank, in rank order; they add up to the buffer's count.
        counts: Vec<usize>,
    },
    /// Every rank ends with the root's contents.
    Broadcast {
        /// The rank whose contents all ranks get.
        root: usize,
    },
    /// The root ends with the reduction of all contributions, with the same bits as by an
    /// all-reduce. The buffers of the others are undefined.
    Reduce {
        /// Operation that combines contributions.
        op: ReduceOp,
        /// The rank that gets the result.
        root: usize,
    },
    /// The root ends with the chunks of all ranks. Its buffer has a chunk for each rank, with its
    /// own in place. The buffer of any other rank is its chunk.
    Gather {
        /// The rank that gets the chunks.
        root: usize,
        /// Elements of each rank.
        chunk: usize,
    },
    /// Every rank ends with its chunk of the root's buffer. The root's own chunk stays in place.
    /// The buffer of any other rank is its chunk.
    Scatter {
        /// The rank that has the chunks.
        root: usize,
        /// Elements of each rank.
        chunk: usize,
    },
    /// Every rank sends a chunk to every other. Chunk c of the buffer's first half goes to rank c,
    /// and chunk c of the second half comes from rank c. A rank's chunk for itself is not copied,
    /// so the caller puts it into both halves where it is needed.
    AllToAll,
    /// Like `AllToAll`, with chunks of any size. The first part of the buffer has a chunk for each
    /// rank, the rest has one from each. Both ranks know the size of a chunk before.
    AllToAllV {
        /// Elements for each rank, in rank order.
        sent: Vec<usize>,
        /// Elements from each rank, in rank order; all of them add up to the buffer's count.
        received: Vec<usize>,
    },
    /// No rank leaves before every rank has entered.
    Barrier,
    /// Sends the buffer to the other one of two ranks, which calls `Receive`.
    Send {
        /// Rank of the receiver in the group that the program sees.
        to: usize,
    },
    /// Receives from the other one of two ranks, which calls `Send`.
    Receive {
        /// Rank of the sender in the group that the program sees.
        from: usize,
    },
}

impl Collective {
    /// The name used in every interface.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::AllReduce { .. } => "all_reduce",
            Self::ReduceScatter { .. } => "reduce_scatter",
            Self::AllGather { .. } => "all_gather",
            Self::Broadcast { .. } => "broadcast",
            Self::Reduce { .. } => "reduce",
            Self::Gather { .. } => "gather",
            Self::Scatter { .. } => "scatter",
            Self::AllToAll | Self::AllToAllV { .. } => "all_to_all",
            Self::Barrier => "barrier",
            Self::Send { .. } => "send",
            Self::Receive { .. } => "recv",
        }
    }

    /// The other rank of an exchange between two ranks.
    #[must_use]
    pub const fn partner(&self) -> Option<usize> {
        match self {
            Self::Send { to: partner } | Self::Receive { from: partner } => Some(*partner),
            _ => None,
        }
    }

    /// The reduce operation, if there is one.
    #[must_use]
    pub const fn op(&self) -> Option<ReduceOp> {
        match self {
            Self::AllReduce { op } | Self::ReduceScatter { op, .. } | Self::Reduce { op, .. } => {
                Some(*op)
            }
            Self::Barrier => Some(ReduceOp::Max),
            Self::AllGather { .. }
            | Self::Broadcast { .. }
            | Self::Gather { .. }
            | Self::Scatter { .. }
            | Self::AllToAll
            | Self::AllToAllV { .. }
            | Self::Send { .. }
            | Self::Receive { .. } => None,
        }
    }

    /// Returns whether the buffer of `rank` may change.
    #[must_use]
    pub const fn writes(&self, rank: usize) -> bool {
        match self {
            Self::Send { .. } => false,
            Self::Gather { root, .. } => rank == *root,
            Self::Scatter { root, .. } => rank != *root,
            _ => true,
        }
    }

    /// The rank with a part of its own, if there is one.
    #[must_use]
    pub const fn root(&self) -> Option<usize> {
        match self {
            Self::Broadcast { root }
            | Self::Reduce { root, .. }
            | Self::Gather { root, .. }
            | Self::Scatter { root, .. } => Some(*root),
            _ => None,
        }
    }
}

/// Name of a collective, from its caller.
#[derive(Debug, Clone, Default, Eq)]
pub struct Name {
    /// Text for people; may differ between ranks, and may be empty.
    pub shown: String,
    /// Text that must be equal on all ranks.
    pub compared: String,
}

impl PartialEq for Name {
    /// Skips `memcmp` for two empty strings: they have no memory, and glibc's version for AVX-512
    /// takes 100 ns to find that out.
    fn eq(&self, other: &Self) -> bool {
        let same = |a: &str, b: &str| a.len() == b.len() && (a.is_empty() || a == b);
        same(&self.shown, &other.shown) && same(&self.compared, &other.compared)
    }
}

/// One line, with control characters escaped, because a name may come from an untrusted peer.
impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shown.chars().try_for_each(|c| match c.is_control() {
            true => write!(f, "{}", c.escape_default()),
            false => f.write_char(c),
        })
    }
}

impl<S: Into<String>> From<S> for Name {
    /// A name whose shown text is also compared.
    fn from(name: S) -> Self {
        let shown = name.into();
        Self {
            compared: shown.clone(),
            shown,
        }
    }
}

/// One collective to run.
pub struct Request {
    /// The operation.
    pub collective: Collective,
    /// Memory that it reads and writes.
    pub buffer: Buffer,
    /// The caller's name for it.
    pub name: Name,
    /// Shapes of the tensors in the bucket, such as `[98]` or `[3,4] [7]`. They appear in errors
    /// and must be equal on all ranks. If ranks may differ in their number of rows, it is the shape
    /// of one row.
    pub shapes: String,
}

impl Request {
    /// A barrier.
    #[must_use]
    pub fn barrier() -> Self {
        Self {
            collective: Collective::Barrier,
            buffer: Buffer::zeroed(DType::U8, 1),
            name: Name::default(),
            shapes: String::new(),
        }
    }

    /// Splits the request into its call and its memory.
    pub fn into_parts(self) -> (Call, Buffer) {
        let call = Call {
            collective: self.collective,
            dtype: self.buffer.dtype(),
            count: self.buffer.count(),
            name: self.name,
            shapes: self.shapes,
            is_mapped: false,
        };
        (call, self.buffer)
    }
}

/// Appends the shape of one more tensor of a bucket to a request's `shapes`. Every call does this,
/// so it uses the fastest conversion of numbers.
pub fn push_shape(shapes: &mut String, dims: impl IntoIterator<Item = impl itoa::Integer>) {
    shapes.push_str(if shapes.is_empty() { "[" } else { " [" });
    for (axis, dim) in dims.into_iter().enumerate() {
        if axis > 0 {
            shapes.push(',');
        }
        shapes.push_str(itoa::Buffer::new().format(dim));
    }
    shapes.push(']');
}

/// A request without its memory: everything on which all ranks have to agree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// The operation.
    pub collective: Collective,
    /// Element type.
    pub dtype: DType,
    /// Number of elements in the buffer of this rank.
    pub count: usize,
    /// The caller's name for it.
    pub name: Name,
    /// Shapes of the tensors in the bucket.
    pub shapes: String,
    /// `true` if all ranks read each other's buffers where they are, in the heaps of the group.
    pub is_mapped: bool,
}

impl Call {
    /// A sum of as many float32 values as fit into `bytes`.
    #[must_use]
    pub fn float_sum(bytes: usize) -> Self {
        Self {
            collective: Collective::AllReduce { op: ReduceOp::Sum },
            dtype: DType::F32,
            count: bytes / DType::F32.size_bytes(),
            name: Name::default(),
            shapes: String::new(),
            is_mapped: false,
        }
    }

    /// Size of the buffer in bytes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.count * self.dtype.size_bytes()
    }

    /// Number of elements that must be equal on all ranks.
    pub(crate) const fn agreed_count(&self) -> usize {
        match self.collective {
            Collective::Gather { chunk, .. } | Collective::Scatter { chunk, .. } => chunk,
            // Each pair of ranks has its own count, in `count_between`.
            Collective::AllToAllV { .. } => 0,
            _ => self.count,
        }
    }

    /// Number of elements between ranks `from` and `to` that must be equal on these two ranks. This
    /// is the call of `rank`, which is one of them.
    #[inline]
    pub(crate) fn count_between(&self, rank: usize, from: usize, to: usize) -> Option<usize> {
        match &self.collective {
            Collective::AllToAllV { sent, received } => Some(match rank == from {
                true => sent[to],
                false => received[from],
            }),
            _ => None,
        }
    }

    /// Checks the call for `rank` in a group of `world_size` ranks. `reaches_all` is true if each
    /// rank has a link with any other, or can make one.
    ///
    /// # Errors
    /// `Config` for a root that does not exist, counts that do not divide the buffer, or chunks of a
    /// wrong length. Also for exchanges between any two ranks if not all can be reached.
    pub fn validate(&self, rank: usize, world_size: usize, reaches_all: bool) -> Result<()> {
        if let Some(root) = self.collective.root().filter(|root| *root >= world_size) {
            let call = Text::of(self);
            return Err(Unusable::Root {
                call,
                root,
                world_size,
            }
            .into());
        }
        match &self.collective {
            Collective::AllGather { counts } | Collective::ReduceScatter { counts, .. }
                if counts.len() != world_size || total([counts]) != Some(self.count) =>
            {
                Err(self.undivided(format!("{counts:?}"), world_size))
            }
            Collective::AllToAllV { sent, received }
                if [sent, received].map(Vec::len) != [world_size; 2]
                    || total([sent, received]) != Some(self.count) =>
            {
                Err(self.undivided(format!("{sent:?} and {received:?}"), world_size))
            }
            Collective::AllToAll
            | Collective::AllToAllV { .. }
            | Collective::Gather { .. }
            | Collective::Scatter { .. }
                if !reaches_all =>
            {
                Err(Unusable::NotConnected {
                    call: Text::of(self),
                    world_size,
                }
                .into())
            }
            Collective::Gather { root, chunk } | Collective::Scatter { root, chunk }
                if Some(self.count)
                    != chunk.checked_mul(if rank == *root { world_size } else { 1 }) =>
            {
                Err(Unusable::Chunks {
                    call: Text::of(self),
                    elements: self.count,
                    world_size,
                }
                .into())
            }
            Collective::AllToAll if !self.count.is_multiple_of(2 * world_size) => {
                Err(Unusable::Chunks {
                    call: Text::of(self),
                    elements: self.count,
                    world_size,
                }
                .into())
            }
            _ => Ok(()),
        }
    }

    fn undivided(&self, counts: String, world_size: usize) -> Error {
        Unusable::Counts {
            call: Text::of(self),
            counts: counts.into(),
            elements: self.count,
            world_size,
        }
        .into()
    }
}

/// Sum of all counts; `None` if it overflows.
fn total<const N: usize>(counts: [&Vec<usize>; N]) -> Option<usize> {
    let mut counts = counts.into_iter().flatten();
    counts.try_fold(0_usize, |sum, count| sum.checked_add(*count))
}

/// One line that identifies the call to a person, such as
/// `all_reduce(sum) 'dense_2/kernel' float32[98]`.
impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.collective.name())?;
        match &self.collective {
            Collective::AllReduce { op } | Collective::ReduceScatter { op, .. } => {
                write!(f, "({})", op.name())?;
            }
            Collective::Reduce { op, root } => write!(f, "({}, root={root})", op.name())?,
            Collective::Broadcast { root }
            | Collective::Gather { root, .. }
            | Collective::Scatter { root, .. } => write!(f, "(root={root})")?,
            Collective::AllGather { .. } | Collective::AllToAll | Collective::AllToAllV { .. } => {}
            Collective::Send { to } => write!(f, "(dest={to})")?,
            Collective::Receive { from } => write!(f, "(source={from})")?,
            Collective::Barrier => return Ok(()),
        }
        if !self.name.shown.is_empty() {
            write!(f, " '{}'", self.name)?;
        }
        if let Collective::AllToAllV { .. } = self.collective {
            f.write_str(" rows of")?;
        }
        write!(f, " {}{}", self.dtype.name(), self.shapes)?;
        f.write_str(if self.is_mapped { MAPPED } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_stays_on_its_line_and_tells_a_terminal_nothing() {
        let name = Name::from("größe\n\u{1b}[2Jrank 3 on b\r\u{9b}31m");
        let call = Call {
            name,
            ..Call::float_sum(4)
        };
        let shown = r"größe\n\u{1b}[2Jrank 3 on b\r\u{9b}31m";
        assert_eq!(
            call.to_string(),
            format!("all_reduce(sum) '{shown}' float32")
        );
    }

    #[test]
    fn shapes_are_written_as_people_write_them() {
        let mut shapes = String::new();
        for dims in [&[3_i64, 4] as &[i64], &[], &[7]] {
            push_shape(&mut shapes, dims.iter().copied());
        }
        assert_eq!(shapes, "[3,4] [] [7]");
    }

    #[test]
    fn a_call_reads_as_one_line() {
        let request = Request {
            collective: Collective::AllReduce { op: ReduceOp::Sum },
            buffer: Buffer::zeroed(DType::F32, 98),
            name: "dense_2/kernel".into(),
            shapes: "[98]".into(),
        };
        assert_eq!(
            request.into_parts().0.to_string(),
            "all_reduce(sum) 'dense_2/kernel' float32[98]"
        );
    }
}
