//! What a rank asks for: a collective over a buffer, under a name.

use std::fmt::Write as _;

use crate::buffer::Buffer;
use crate::dtype::ReduceOp;

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
    /// No rank leaves before every rank has entered.
    Barrier,
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
            Self::Barrier => "barrier",
        }
    }

    /// The reduce operation, where there is one.
    #[must_use]
    pub const fn op(&self) -> Option<ReduceOp> {
        match self {
            Self::AllReduce { op } | Self::ReduceScatter { op } => Some(*op),
            _ => None,
        }
    }
}

/// One collective to run.
pub struct Request {
    /// Which collective.
    pub collective: Collective,
    /// What it reads and writes.
    pub buffer: Buffer,
    /// The caller's name for it, compared across ranks; may be empty.
    pub name: String,
    /// Shapes of the tensors in the bucket, such as `[98]` or `[3,4] [7]`, for messages and
    /// compared across ranks.
    pub shapes: String,
}

impl Request {
    /// One line that identifies the collective to a person, such as
    /// `all_reduce(sum) 'dense_2/kernel' float32[98]`.
    #[must_use]
    pub fn describe(&self) -> String {
        let mut text = String::from(self.collective.name());
        match &self.collective {
            Collective::AllReduce { op } | Collective::ReduceScatter { op } => {
                let _ = write!(text, "({})", op.name());
            }
            Collective::Broadcast { root } => {
                let _ = write!(text, "(root={root})");
            }
            Collective::AllGather { .. } => {}
            Collective::Barrier => return text,
        }
        if !self.name.is_empty() {
            let _ = write!(text, " '{}'", self.name);
        }
        let _ = write!(text, " {}{}", self.buffer.dtype().name(), self.shapes);
        text
    }
}
