//! Bytes that ranks exchange.

use gradring_proto::collective::{Call, Collective};
use gradring_proto::dtype::DType;

/// A collective over float32, with the bytes of each rank's buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Traffic {
    /// A sum.
    AllReduce {
        /// Bytes of each rank's buffer.
        bytes: usize,
    },
    /// Every rank receives a part of each rank's buffer.
    AllToAll {
        /// Bytes of each rank's buffer, including the part for the rank itself.
        bytes: usize,
        /// Relative chunk sizes in the order of their receivers, repeated for further ranks; at
        /// least one is not 0. All ranks have the same `splits`.
        splits: Vec<u32>,
    },
}

impl Traffic {
    /// Name of the collective in sentences.
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::AllReduce { .. } => "an all-reduce",
            Self::AllToAll { .. } => "an all-to-all",
        }
    }

    /// Bytes of each rank's buffer.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        match self {
            Self::AllReduce { bytes } | Self::AllToAll { bytes, .. } => *bytes,
        }
    }

    /// The same bytes in parts that are as equal as possible.
    pub(super) fn even(&self) -> Self {
        match self {
            Self::AllReduce { bytes } => Self::AllReduce { bytes: *bytes },
            Self::AllToAll { bytes, .. } => Self::AllToAll {
                bytes: *bytes,
                splits: vec![1],
            },
        }
    }

    /// Call of `rank` in a group of `world_size` ranks.
    #[must_use]
    pub fn call(&self, rank: usize, world_size: usize) -> Call {
        if let Self::AllReduce { bytes } = self {
            return Call::float_sum(*bytes);
        }
        let sent = self.parts(world_size);
        let own = sent[rank];
        let count = sent.iter().sum::<usize>() + own * world_size;
        let collective = if sent.iter().all(|part| *part == own) {
            Collective::AllToAll
        } else {
            let received = vec![own; world_size];
            Collective::AllToAllV { sent, received }
        };
        Call {
            collective,
            count,
            ..Call::float_sum(0)
        }
    }

    /// Elements that each rank has for each of `world_size` ranks.
    pub(super) fn parts(&self, world_size: usize) -> Vec<usize> {
        let Self::AllToAll { bytes, splits } = self else {
            return Vec::new();
        };
        let elements = (bytes / DType::F32.size_bytes()) as u128;
        let shares = || splits.iter().cycle().take(world_size);
        let all: u128 = shares().map(|share| u128::from(*share)).sum();
        let ends = shares().scan(0, |end, share| {
            *end += u128::from(*share);
            Some((elements * *end / all.max(1)) as usize)
        });
        let mut start = 0;
        ends.map(|end| end - std::mem::replace(&mut start, end))
            .collect()
    }
}
