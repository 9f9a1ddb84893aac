//! A collective as a rank asks for it: over a buffer, under a name.

use std::fmt::{self, Write as _};

use crate::buffer::Buffer;
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result, Text, Unusable};

/// The collectives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Collective {
    /// Every rank ends with the reduction of all contributions.
    AllReduce {
        /// How contributions are combined.
        op: ReduceOp,
    },
    /// Every rank ends with its own chunk of the reduction; the rest of its buffer is undefined.
    ReduceScatter {
        /// How contributions are combined.
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
        /// The rank whose contents win.
        root: usize,
    },
    /// The root ends with the reduction of all contributions, the same bits as by an all-reduce; the
    /// buffers of the others are undefined.
    Reduce {
        /// How contributions are combined.
        op: ReduceOp,
        /// The rank that gets the result.
        root: usize,
    },
    /// The root, whose buffer has a chunk for each rank with its own in place, ends with all of them;
    /// the buffers of the others are their chunks.
    Gather {
        /// The rank that gets the chunks.
        root: usize,
        /// Elements of each rank.
        chunk: usize,
    },
    /// Every rank ends with its chunk of the root's buffer. The buffers of the others are their
    /// chunks; the root's own stays in place.
    Scatter {
        /// The rank that has the chunks.
        root: usize,
        /// Elements of each rank.
        chunk: usize,
    },
    /// Of the buffer's two halves, the first keeps what a rank sends: in chunk c, what goes to
    /// rank c. Chunk c of the second ends with what rank c has sent to this one. A rank's chunk for
    /// itself is not touched, so that both halves begin alike where it is wanted.
    AllToAll,
    /// As `AllToAll` with chunks of any size: the buffer's first part has a chunk for each rank, the
    /// rest one from each. What one rank has for another, both know before.
    AllToAllV {
        /// Elements for each rank, in rank order.
        sent: Vec<usize>,
        /// Elements from each rank, in rank order; all of them add up to the buffer's count.
        received: Vec<usize>,
    },
    /// No rank leaves before every rank has entered.
    Barrier,
    /// Of two ranks, the first one's contents end on the other, which calls `Receive`.
    Send {
        /// That other rank, as it is called in their group.
        to: usize,
    },
    /// What the second of two ranks calls when the first one calls `Send`.
    Receive {
        /// The first one, as it is called in their group.
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

    /// The other rank of what two do alone.
    #[must_use]
    pub const fn partner(&self) -> Option<usize> {
        match self {
            Self::Send { to: partner } | Self::Receive { from: partner } => Some(*partner),
            _ => None,
        }
    }

    /// The reduce operation, where there is one.
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

    /// Whether the buffer of `rank` may change.
    #[must_use]
    pub const fn writes(&self, rank: usize) -> bool {
        match self {
            Self::Send { .. } => false,
            Self::Gather { root, .. } => rank == *root,
            Self::Scatter { root, .. } => rank != *root,
            _ => true,
        }
    }

    /// The rank that has a part of its own, where there is one.
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

/// What a caller calls a collective.
#[derive(Debug, Clone, Default, Eq)]
pub struct Name {
    /// For people; may differ between ranks, and may be empty.
    pub shown: String,
    /// Compared across ranks.
    pub compared: String,
}

impl PartialEq for Name {
    /// Two empty strings are not compared: they have no memory, and glibc's `memcmp` for AVX-512
    /// takes 100 ns to find that out.
    fn eq(&self, other: &Self) -> bool {
        let same = |a: &str, b: &str| a.len() == b.len() && (a.is_empty() || a == b);
        same(&self.shown, &other.shown) && same(&self.compared, &other.compared)
    }
}

/// On one line, and without what a terminal would obey: it may come from anybody.
impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shown.chars().try_for_each(|c| match c.is_control() {
            true => write!(f, "{}", c.escape_default()),
            false => f.write_char(c),
        })
    }
}

impl<S: Into<String>> From<S> for Name {
    /// A name that is compared as it is shown.
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
    /// Which collective.
    pub collective: Collective,
    /// What it reads and writes.
    pub buffer: Buffer,
    /// The caller's name for it.
    pub name: Name,
    /// Shapes of the tensors in the bucket, such as `[98]` or `[3,4] [7]`, for messages and
    /// compared across ranks; of one row where ranks may differ in their number.
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

    /// Splits the request into what it is and what it works on.
    pub fn into_parts(self) -> (Call, Buffer) {
        let call = Call {
            collective: self.collective,
            dtype: self.buffer.dtype(),
            count: self.buffer.count(),
            name: self.name,
            shapes: self.shapes,
        };
        (call, self.buffer)
    }
}

/// Appends the shape of one more tensor of a bucket to a request's `shapes`. Every call does this,
/// so it takes the shortest way from a number to its digits.
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

/// A request without its memory: what all ranks have to agree about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// Which collective.
    pub collective: Collective,
    /// Element type.
    pub dtype: DType,
    /// Number of elements in the buffer of this rank.
    pub count: usize,
    /// The caller's name for it.
    pub name: Name,
    /// Shapes of the tensors in the bucket.
    pub shapes: String,
}

impl Call {
    /// A sum of as many float32 as fit into `bytes`.
    #[must_use]
    pub fn float_sum(bytes: usize) -> Self {
        Self {
            collective: Collective::AllReduce { op: ReduceOp::Sum },
            dtype: DType::F32,
            count: bytes / DType::F32.size_bytes(),
            name: Name::default(),
            shapes: String::new(),
        }
    }

    /// Size of the buffer.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.count * self.dtype.size_bytes()
    }

    /// The number of elements that all ranks have to agree about.
    pub(crate) const fn agreed_count(&self) -> usize {
        match self.collective {
            Collective::Gather { chunk, .. } | Collective::Scatter { chunk, .. } => chunk,
            // Of each two, by `count_between`.
            Collective::AllToAllV { .. } => 0,
            _ => self.count,
        }
    }

    /// The number of elements about which rank `from` and rank `to` have to agree beside that, where
    /// `rank`, whose call this is, is one of them.
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

    /// Whether the call makes sense for `rank` in a group of `world_size` ranks, each of which has or
    /// gets a link with any other if it `reaches_all`.
    ///
    /// # Errors
    /// `Config` for a root that does not exist, counts that do not divide the buffer, or chunks that
    /// go from any rank to any where not all can be reached, or that are not of the length said.
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

/// All counts together, if that is a number.
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
        write!(f, " {}{}", self.dtype.name(), self.shapes)
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
