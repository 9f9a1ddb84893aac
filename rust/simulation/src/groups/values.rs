//! Values that ranks contribute to collectives, and the expected results: exact in every element
//! type.

use half::{bf16, f16};

use gradring_proto::buffer::{Buffer, Slice};
use gradring_proto::collective::{Call, Collective};
use gradring_proto::dtype::{DType, ReduceOp};
use gradring_proto::schedule;

use crate::world::random::Random;

/// Difference between a rank's values for one peer and for the next.
const PART: usize = 1000;

/// Content of an element that is not defined yet.
const UNDEFINED: i64 = 3;

/// Element `index` of the contribution of `rank` to collective `sequence`. Sums and products of
/// eight such values are exact, in 8 bits of mantissa too if `narrow`, and so are means of 2, 4 or
/// 8.
fn value(op: Option<ReduceOp>, narrow: bool, rank: usize, index: usize, sequence: u64) -> i64 {
    let mixed = (index * 16 + index / 7 + rank * 5 + rank) as i64 + sequence as i64;
    match op {
        Some(ReduceOp::Product) => 1 + mixed % 2,
        _ if narrow => mixed % 32,
        _ => mixed % (1 << 17),
    }
}

/// One collective: the data from which contributions and results follow.
pub(super) struct Values<'a> {
    pub(super) call: &'a Call,
    pub(super) world_size: usize,
    pub(super) sequence: u64,
    /// True if elements travel in 16 bits.
    pub(super) narrow: bool,
}

impl Values<'_> {
    fn value(&self, rank: usize, index: usize) -> i64 {
        let op = self.call.collective.op();
        let narrow = self.narrow || matches!(self.call.dtype, DType::F16 | DType::Bf16);
        value(op, narrow, rank, index, self.sequence)
    }

    /// Buffer with the contribution of `rank`, in random slices.
    pub(super) fn buffer(&self, rank: usize, random: &mut Random) -> Buffer {
        let (dtype, count) = (self.call.dtype, self.call.count);
        if self.call.collective == Collective::Barrier {
            return Buffer::zeroed(dtype, count);
        }
        let elements = (0..count).map(|index| match &self.call.collective {
            Collective::AllGather { counts } if owner(counts, index) != rank => UNDEFINED,
            Collective::Broadcast { root } | Collective::Scatter { root, .. } if *root != rank => {
                UNDEFINED
            }
            Collective::Receive { .. } => UNDEFINED,
            Collective::AllToAllV { sent, .. } => self.sent_in_parts(rank, sent, index),
            Collective::Gather { root, chunk } if *root == rank && index / chunk != rank => {
                UNDEFINED
            }
            _ => self.value(rank, index),
        });
        let bytes: Vec<u8> = elements.flat_map(|value| encoded(dtype, value)).collect();
        let parts = if random.once_in(2) {
            1
        } else {
            1 + random.below(4)
        };
        let mut memory = Vec::new();
        let mut left = &bytes[..];
        for part in 0..parts {
            let most = left.len() / dtype.size_bytes();
            let length = if part + 1 == parts {
                most
            } else {
                random.below(most + 1)
            };
            let (first, rest) = left.split_at(length * dtype.size_bytes());
            // Words, so that every element is aligned.
            let mut words = vec![0_u64; first.len().div_ceil(8)];
            for (word, bytes) in words.iter_mut().zip(first.chunks(8)) {
                let mut whole = [0; 8];
                whole[..bytes.len()].copy_from_slice(bytes);
                *word = u64::from_ne_bytes(whole);
            }
            memory.push((words, length));
            left = rest;
        }
        let slices = memory.iter_mut().map(|(words, count)| Slice {
            start: words.as_mut_ptr().cast(),
            count: *count,
        });
        let slices: Vec<Slice> = slices.collect();
        // SAFETY: the slices cover the words, which the keepalive owns and nobody else can reach.
        unsafe { Buffer::new(dtype, slices, Box::new(memory)) }
    }

    /// Returns the difference between the result of `rank` and the expected one, or `None`.
    pub(super) fn check(&self, rank: usize, buffer: &Buffer) -> Option<String> {
        let size = self.call.dtype.size_bytes();
        let bytes: Vec<u8> = buffer
            .elements(0..buffer.count())
            .flatten()
            .copied()
            .collect();
        bytes
            .chunks_exact(size)
            .enumerate()
            .find_map(|(index, bytes)| {
                let expected = self.expected(rank, index)?;
                let expected = encoded(self.call.dtype, expected).collect::<Vec<u8>>();
                (bytes != expected).then(|| {
                    format!(
                        "element {index} of {} is {bytes:?}, not {expected:?}",
                        self.call
                    )
                })
            })
    }

    /// Expected element of `rank` after the collective, where it is defined.
    fn expected(&self, rank: usize, index: usize) -> Option<i64> {
        match &self.call.collective {
            Collective::AllReduce { op } => Some(self.reduced(*op, index)),
            Collective::ReduceScatter { op, counts } => {
                (owner(counts, index) == rank).then(|| self.reduced(*op, index))
            }
            Collective::AllGather { counts } => Some(self.value(owner(counts, index), index)),
            Collective::Broadcast { root } => Some(self.value(*root, index)),
            Collective::Reduce { op, root } => (*root == rank).then(|| self.reduced(*op, index)),
            Collective::Gather { root, chunk } => Some(match index / chunk {
                source if *root == rank && source != rank => self.value(source, index % chunk),
                _ => self.value(rank, index),
            }),
            Collective::Scatter { root, chunk } => Some(match *root == rank {
                true => self.value(rank, index),
                false => self.value(*root, rank * chunk + index),
            }),
            Collective::AllToAll => Some(match index.checked_sub(self.call.count / 2) {
                None => self.value(rank, index),
                Some(received) => {
                    let chunk = self.call.count / 2 / self.world_size;
                    let source = received / chunk;
                    let sent = match source == rank {
                        true => index,
                        false => rank * chunk + received % chunk,
                    };
                    self.value(source, sent)
                }
            }),
            Collective::AllToAllV { sent, received } => {
                let came = index.checked_sub(sent.iter().sum());
                let came = came.map(|index| place(received, index));
                Some(match came.filter(|(source, _)| *source != rank) {
                    None => self.sent_in_parts(rank, sent, index),
                    Some((source, offset)) => self.value(source, rank * PART + offset),
                })
            }
            Collective::Send { .. } => Some(self.value(rank, index)),
            Collective::Receive { from } => Some(self.value(*from, index)),
            Collective::Barrier => None,
        }
    }

    /// Contribution of `rank` to an all-to-all of parts. The value depends on the element's index
    /// in its part, because the receiver knows only the parts that it receives.
    fn sent_in_parts(&self, rank: usize, sent: &[usize], index: usize) -> i64 {
        match index < sent.iter().sum() {
            true => {
                let (to, offset) = place(sent, index);
                self.value(rank, to * PART + offset)
            }
            false => self.value(rank, index),
        }
    }

    fn reduced(&self, op: ReduceOp, index: usize) -> i64 {
        let values = (0..self.world_size).map(|rank| match self.call.dtype {
            DType::U8 => self.value(rank, index) & 0xff,
            _ => self.value(rank, index),
        });
        match op {
            ReduceOp::Sum => values.sum(),
            ReduceOp::Mean => values.sum::<i64>() / self.world_size as i64,
            ReduceOp::Min => values.min().unwrap_or(0),
            ReduceOp::Max => values.max().unwrap_or(0),
            ReduceOp::Product => values.product(),
        }
    }
}

/// The rank that owns an element.
fn owner(counts: &[usize], index: usize) -> usize {
    let mut end = 0;
    let holds = |count: &usize| {
        end += count;
        index < end
    };
    counts.iter().position(holds).expect("counts cover all")
}

/// The part that contains an element, and the element's index in that part.
fn place(counts: &[usize], index: usize) -> (usize, usize) {
    let part = owner(counts, index);
    (part, index - counts[..part].iter().sum::<usize>())
}

/// Number of elements that `from` sends to `to` in an all-to-all of parts: none, some, or most.
fn part(from: usize, to: usize, count: usize) -> usize {
    match (from * 3 + to * 5 + count) % 7 {
        0..2 => 0,
        2 => count,
        some => count / (2 * some),
    }
}

/// Encodes a value as an element. Whole numbers only; integers that do not fit wrap around.
fn encoded(dtype: DType, value: i64) -> impl Iterator<Item = u8> {
    let bytes = match dtype {
        DType::F32 => (value as f32).to_ne_bytes().to_vec(),
        DType::F64 => (value as f64).to_ne_bytes().to_vec(),
        DType::F16 => f16::from_f64(value as f64).to_ne_bytes().to_vec(),
        DType::Bf16 => bf16::from_f64(value as f64).to_ne_bytes().to_vec(),
        DType::I32 => (value as i32).to_ne_bytes().to_vec(),
        DType::I64 => value.to_ne_bytes().to_vec(),
        DType::U8 => vec![value as u8],
    };
    bytes.into_iter()
}

/// The call of `rank`, derived from the call of a rank that is not the root. The root of a gather
/// or scatter has a buffer for all ranks. The peer of a send receives, and in an all-to-all of
/// parts each rank has its own parts.
pub(super) fn call_of(rank: usize, world_size: usize, mut call: Call) -> Call {
    if rank == 1 && matches!(call.collective, Collective::Send { .. }) {
        call.collective = Collective::Receive { from: 0 };
    }
    if let Collective::AllToAllV { sent, received } = &mut call.collective {
        let ranks = || 0..world_size;
        *sent = ranks().map(|to| part(rank, to, call.count)).collect();
        *received = ranks().map(|from| part(from, rank, call.count)).collect();
        call.count = sent.iter().chain(&*received).sum();
    }
    if let Collective::Gather { root, chunk } | Collective::Scatter { root, chunk } =
        call.collective
        && root == rank
    {
        call.count = chunk * world_size;
    }
    call
}

/// Draws a collective that is possible among `world_size` ranks, as called by a rank that is not
/// the root.
pub(super) fn random_call(random: &mut Random, world_size: usize, large: bool) -> Call {
    let count = if large {
        random.between(250_000, 400_000) as usize
    } else {
        let some = random.below(3000);
        random.pick(&[
            0,
            1,
            2,
            world_size - 1,
            world_size,
            7,
            100,
            1000,
            some,
            some,
        ])
    };
    let mut dtype = random.pick(&DType::ALL);
    let op = random.pick(&ReduceOp::ALL);
    // The mean of whole numbers must be exact.
    let whole = matches!(dtype, DType::I32 | DType::I64 | DType::U8);
    let op = if op == ReduceOp::Mean && !whole {
        ReduceOp::Sum
    } else {
        op
    };
    let root = random.below(world_size);
    let collective = match random.below(14) {
        0..4 => Collective::AllReduce { op },
        4 => Collective::ReduceScatter {
            op,
            counts: random_counts(random, count, world_size),
        },
        5 => Collective::AllGather {
            counts: random_counts(random, count, world_size),
        },
        6 | 7 => Collective::Broadcast { root },
        // No further draw, so that a seed keeps its history.
        8 if count % 2 == 1 => Collective::AllToAllV {
            sent: Vec::new(),
            received: Vec::new(),
        },
        8 => Collective::AllToAll,
        9 => Collective::Reduce { op, root },
        10 => Collective::Gather { root, chunk: count },
        11 => Collective::Scatter { root, chunk: count },
        12 if world_size == 2 => Collective::Send { to: 1 },
        _ => Collective::Barrier,
    };
    let count = match collective {
        Collective::AllToAll => count.next_multiple_of(2 * world_size),
        _ => count,
    };
    let barrier = collective == Collective::Barrier;
    if barrier {
        dtype = DType::U8;
    }
    Call {
        count: if barrier { 1 } else { count },
        shapes: if barrier {
            String::new()
        } else {
            format!("[{count}]")
        },
        collective,
        dtype,
        name: "x".into(),
        is_mapped: false,
    }
}

/// Draws even chunks, or chunks of any sizes.
fn random_counts(random: &mut Random, count: usize, world_size: usize) -> Vec<usize> {
    if random.once_in(2) {
        let chunk = |rank| schedule::chunk(count, world_size, rank).len();
        return (0..world_size).map(chunk).collect();
    }
    let mut cuts: Vec<usize> = (1..world_size).map(|_| random.below(count + 1)).collect();
    cuts.extend([0, count]);
    cuts.sort_unstable();
    cuts.windows(2).map(|cut| cut[1] - cut[0]).collect()
}
