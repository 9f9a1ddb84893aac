//! Kernels of the ops.
//!
//! All kernels are synchronous: completing an asynchronous kernel of the C API from another thread
//! crashes, because TensorFlow frees its callback as soon as the compute function returns. A Start
//! never blocks; a Wait blocks one thread of TensorFlow's pool, within the engine's own deadlines.
//! A pool of any size is free of deadlocks, because the collective of a Wait was started before it.

use std::ffi::c_int;
use std::ops::Range;
use std::slice;
use std::sync::Arc;

use gradring_core::communicator::Communicator;
use gradring_proto::buffer::Buffer;
use gradring_proto::collective::{Collective, Name, Request, push_shape};
use gradring_proto::dtype::{DType, ReduceOp};
use gradring_proto::error::{Abort, Error};
use gradring_proto::schedule;

use crate::api::{Api, DataType, RegisterError};
use crate::check::Check;
use crate::context::{Construction, Context};
use crate::counters;
use crate::equal_gradients::EqualGradients;
use crate::inflight::{self, Origin};
use crate::kernel::{self, Kernel};
use crate::ops::{
    ALL_GATHER_START, ALL_GATHER_V_START, ALL_TO_ALL_V_START, GATE, PULL, PUSH, PUSH_OPEN,
    PUSH_PIECE, REDUCE_SCATTER_V_START, START, WAIT, attr,
};
use crate::served::{Pull, Push, PushOpen, PushPiece};
use crate::status::{Code, Failure};
use crate::tensor::{Tensor, dtype};

/// Registers the kernels, for the CPU.
pub(crate) fn register(api: &'static Api) -> Result<(), RegisterError> {
    kernel::register::<Start>(api, START)?;
    kernel::register::<AllGatherStart>(api, ALL_GATHER_START)?;
    kernel::register::<AllGatherVStart>(api, ALL_GATHER_V_START)?;
    kernel::register::<ReduceScatterVStart>(api, REDUCE_SCATTER_V_START)?;
    kernel::register::<AllToAllVStart>(api, ALL_TO_ALL_V_START)?;
    kernel::register::<Wait>(api, WAIT)?;
    kernel::register::<Gate>(api, GATE)?;
    kernel::register::<PushOpen>(api, PUSH_OPEN)?;
    kernel::register::<PushPiece>(api, PUSH_PIECE)?;
    kernel::register::<Push>(api, PUSH)?;
    kernel::register::<Pull>(api, PULL)
}

/// Attributes of every Start.
struct Bucket {
    dtype: DType,
    name: Name,
    communicator: CommunicatorId,
    check: Option<Check>,
    equal_gradients: Option<EqualGradients>,
    origin: Origin,
}

impl Bucket {
    fn of(node: &Construction) -> Result<Self, Failure> {
        Ok(Self {
            dtype: dtype(node.data_type(attr::T)?)?,
            name: Name {
                shown: node.string(attr::LABEL)?,
                compared: node.string(attr::IDENTITY)?,
            },
            communicator: CommunicatorId::of(node)?,
            check: Check::of(node)?,
            equal_gradients: match node.int(attr::OF_OWN_SAMPLES)? {
                0 => None,
                _ => Some(EqualGradients::of(node.int(attr::COMMUNICATOR)?)),
            },
            origin: Origin::of(node)?,
        })
    }

    /// Checks for values that are not finite, if the node asks for it.
    fn check_values(&self, communicator: &Communicator, tensors: &[Tensor]) {
        if let Some(check) = &self.check {
            check.examine(communicator, self.dtype, tensors);
        }
    }

    /// Starts a collective over `tensors`; its handle becomes output `handle_output`.
    fn launch(
        &self,
        context: &Context,
        communicator: &Arc<Communicator>,
        collective: Collective,
        tensors: Vec<Tensor>,
        handle_output: c_int,
    ) -> Result<(), Failure> {
        let mut shapes = String::new();
        for tensor in &tensors {
            push_shape(&mut shapes, tensor.dims());
        }
        let tensors: Arc<[Tensor]> = tensors.into();
        let slices = tensors.iter().filter_map(|tensor| tensor.slice(self.dtype));
        // SAFETY: each tensor is an output that this op took over or allocated, so no two overlap.
        // Only Wait returns results, after the engine has dropped the buffer. The buffer holds its
        // own references, so the memory outlives a step that fails in between.
        let buffer = unsafe { Buffer::new(self.dtype, slices, Box::new(Arc::clone(&tensors))) };
        let request = Request {
            collective,
            buffer,
            name: self.name.clone(),
            shapes,
        };
        self.start(context, communicator, request, tensors, handle_output)
    }

    /// Starts a request, whose results are `tensors`; its handle becomes output `handle_output`.
    fn start(
        &self,
        context: &Context,
        communicator: &Arc<Communicator>,
        request: Request,
        tensors: Arc<[Tensor]>,
        handle_output: c_int,
    ) -> Result<(), Failure> {
        let execution = (self.origin, context.execution());
        let search = self.equal_gradients.as_ref();
        let sample = search.and_then(|it| it.sample(communicator, &request, &tensors));
        let api = context.api();
        let handle = inflight::start(api, communicator, execution, request, tensors, sample)?;
        counters::STARTS.add(1);
        context.set_output(handle_output, &handle)
    }
}

/// Starts a collective over a bucket, whose tensors keep their shapes.
struct Start {
    /// The collective; the counts of a reduce-scatter are empty, because they depend on the tensor.
    collective: Collective,
    bucket: Bucket,
}

impl Kernel for Start {
    fn create(node: &Construction) -> Result<Self, Failure> {
        Ok(Self {
            collective: collective(node)?,
            bucket: Bucket::of(node)?,
        })
    }

    fn compute(&self, context: &Context) -> Result<(), Failure> {
        let communicator = self.bucket.communicator.open()?;
        // Input 0 is the token.
        let count = context.num_inputs() - 1;
        let tensors = (0..count)
            .map(|index| context.take_over(index + 1, index))
            .collect::<Result<Vec<_>, _>>()?;
        self.bucket.check_values(&communicator, &tensors);
        let mut collective = self.collective.clone();
        if let Collective::ReduceScatter { counts, .. } = &mut collective {
            *counts = counts_of_rows(&tensors, communicator.world_size());
        }
        self.bucket
            .launch(context, &communicator, collective, tensors, count)
    }
}

/// Starts a reduce-scatter of a bucket, with a number of elements for each rank.
struct ReduceScatterVStart {
    op: ReduceOp,
    bucket: Bucket,
}

impl Kernel for ReduceScatterVStart {
    fn create(node: &Construction) -> Result<Self, Failure> {
        Ok(Self {
            op: reduce_op(node)?,
            bucket: Bucket::of(node)?,
        })
    }

    fn compute(&self, context: &Context) -> Result<(), Failure> {
        let communicator = self.bucket.communicator.open()?;
        let counts = context.input(1)?.read_i64()?;
        // Input 0 is the token, and input 1 the counts.
        let count = context.num_inputs() - 2;
        let tensors = (0..count)
            .map(|index| context.take_over(index + 2, index))
            .collect::<Result<Vec<_>, _>>()?;
        self.bucket.check_values(&communicator, &tensors);
        let total = tensors.iter().map(Tensor::size_bytes).sum::<usize>();
        let total = total / self.bucket.dtype.size_bytes();
        let counts = divided(&counts, total, communicator.world_size()).map_err(|problem| {
            let text = format!("reduce_scatter '{}': {problem}", self.bucket.name);
            Failure::new(Code::InvalidArgument, text)
        })?;
        let collective = Collective::ReduceScatter {
            op: self.op,
            counts,
        };
        self.bucket
            .launch(context, &communicator, collective, tensors, count)
    }
}

/// Returns the counts as numbers of elements, or the problem with them.
fn divided(counts: &[i64], total: usize, world_size: usize) -> Result<Vec<usize>, String> {
    let found: Option<Vec<_>> = counts.iter().map(|it| usize::try_from(*it).ok()).collect();
    let found = found.filter(|found| {
        let sum = found.iter().copied().fold(0, usize::saturating_add);
        sum == total && found.len() == world_size
    });
    found.ok_or_else(|| {
        format!(
            "counts {counts:?} do not divide {total} elements among {world_size} ranks; pass \
             every rank's number"
        )
    })
}

/// Returns the number of elements for each rank if rows are divided among the ranks.
fn counts_of_rows(tensors: &[Tensor], world_size: usize) -> Vec<usize> {
    let dims = tensors.iter().flat_map(Tensor::dims);
    let mut dims = dims.map(|dim| usize::try_from(dim).unwrap_or(0));
    let (rows, row) = (dims.next().unwrap_or(1), dims.product::<usize>());
    let chunk = |rank| schedule::chunk(rows, world_size, rank).len();
    (0..world_size).map(|rank| chunk(rank) * row).collect()
}

/// Starts an all-gather along the first dimension.
struct AllGatherStart(Bucket);

impl Kernel for AllGatherStart {
    fn create(node: &Construction) -> Result<Self, Failure> {
        Bucket::of(node).map(Self)
    }

    fn compute(&self, context: &Context) -> Result<(), Failure> {
        let Self(bucket) = self;
        let communicator = bucket.communicator.open()?;
        let rows = context.input(1)?.read_i64()?;
        let own = context.input(2)?;
        bucket.check_values(&communicator, slice::from_ref(&own));
        let (rank, world_size) = (communicator.rank, communicator.world_size());
        let layout =
            GatherLayout::new(&rows, &own.dims(), rank, world_size).map_err(|problem| {
                let text = format!("all_gather '{}': {problem}", bucket.name);
                Failure::new(Code::InvalidArgument, text)
            })?;
        let element_bytes = bucket.dtype.size_bytes();
        let bytes = layout.counts.iter().sum::<usize>() * element_bytes;
        let gathered = context.allocate(0, own.data_type(), &layout.dims, bytes)?;
        // SAFETY: the output was allocated by this call.
        unsafe { gathered.copy_from(&own, layout.offset * element_bytes) };
        counters::count_copy(own.size_bytes());
        let counts = layout.counts;
        let collective = Collective::AllGather { counts };
        bucket.launch(context, &communicator, collective, vec![gathered], 1)
    }
}

/// Starts an all-gather of a bucket, of which each rank has a number of consecutive elements.
///
/// The results are in the memory of other tensors, which are used up.
struct AllGatherVStart(Bucket);

impl Kernel for AllGatherVStart {
    fn create(node: &Construction) -> Result<Self, Failure> {
        Bucket::of(node).map(Self)
    }

    fn compute(&self, context: &Context) -> Result<(), Failure> {
        let Self(bucket) = self;
        let communicator = bucket.communicator.open()?;
        let counts = context.input(1)?.read_i64()?;
        // Input 0 is the token, and input 1 the counts. As many parts follow the memory.
        let count = (context.num_inputs() - 2) / 2;
        let parts = (0..count).map(|index| context.input(index + 2 + count));
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        bucket.check_values(&communicator, &parts);
        let tensors = (0..count).map(|index| Ok(context.take_memory(index + 2, index)?.0));
        let tensors = tensors.collect::<Result<Vec<_>, Failure>>()?;
        let invalid = |problem: String| {
            let text = format!("all_gather '{}': {problem}", bucket.name);
            Failure::new(Code::InvalidArgument, text)
        };
        let sizes: Vec<usize> = tensors.iter().map(Tensor::size_bytes).collect();
        let element_bytes = bucket.dtype.size_bytes();
        let total = sizes.iter().sum::<usize>() / element_bytes;
        let counts = divided(&counts, total, communicator.world_size()).map_err(invalid)?;
        let start = counts[..communicator.rank].iter().sum::<usize>() * element_bytes;
        let own = start..start + counts[communicator.rank] * element_bytes;
        let given: Vec<usize> = parts.iter().map(Tensor::size_bytes).collect();
        let offsets = part_offsets(&own, &sizes, &given).map_err(invalid)?;
        for ((tensor, part), offset) in tensors.iter().zip(&parts).zip(offsets) {
            // SAFETY: nothing else uses the memory of this output.
            unsafe { tensor.copy_from(part, offset) };
            counters::count_copy(part.size_bytes());
        }
        let collective = Collective::AllGather { counts };
        bucket.launch(context, &communicator, collective, tensors, count)
    }
}

/// Returns the offset of this rank's part in each tensor of a bucket, in bytes.
///
/// # Arguments
/// `own` is this rank's range in the bucket, `sizes` are those of the tensors, and `given` those of
/// the parts.
fn part_offsets(
    own: &Range<usize>,
    sizes: &[usize],
    given: &[usize],
) -> Result<Vec<usize>, String> {
    let mut end = 0;
    let offsets = sizes.iter().zip(given).map(|(size, given)| {
        let start = end;
        end += size;
        let (first, last) = (own.start.clamp(start, end), own.end.clamp(start, end));
        (last - first == *given).then_some(first - start)
    });
    offsets.collect::<Option<_>>().ok_or_else(|| {
        format!("parts of {given:?} bytes are not the bytes {own:?} of tensors of {sizes:?} bytes")
    })
}

/// Positions of the ranks' rows in the gathered tensor.
#[derive(Debug, PartialEq)]
struct GatherLayout {
    /// Shape of the gathered tensor.
    dims: Vec<i64>,
    /// Number of elements of each rank.
    counts: Vec<usize>,
    /// Index of this rank's first element.
    offset: usize,
}

impl GatherLayout {
    fn new(rows: &[i64], dims: &[i64], rank: usize, world_size: usize) -> Result<Self, String> {
        let Some((own_rows, rest)) = dims.split_first() else {
            return Err("a scalar has no dimension to gather along; reshape it to [1]".into());
        };
        if rows.len() != world_size || rows.get(rank) != Some(own_rows) {
            return Err(format!(
                "counts {rows:?} do not fit rank {rank} of {world_size} with {own_rows} rows; \
                 pass every rank's number of rows"
            ));
        }
        let too_large =
            || format!("counts {rows:?} of rows of shape {rest:?} are negative or too large");
        let row = rest
            .iter()
            .try_fold(1_usize, |row, dim| {
                row.checked_mul(usize::try_from(*dim).ok()?)
            })
            .ok_or_else(too_large)?;
        let counts = rows
            .iter()
            .map(|rows| usize::try_from(*rows).ok()?.checked_mul(row))
            .collect::<Option<Vec<_>>>()
            .ok_or_else(too_large)?;
        let total_rows = rows
            .iter()
            .try_fold(0_i64, |total, rows| total.checked_add(*rows))
            .ok_or_else(too_large)?;
        let dims = std::iter::once(total_rows)
            .chain(rest.iter().copied())
            .collect();
        let offset = counts.iter().take(rank).sum();
        Ok(Self {
            dims,
            counts,
            offset,
        })
    }
}

/// Starts an all-to-all of parts of any number of rows.
struct AllToAllVStart(Bucket);

impl Kernel for AllToAllVStart {
    fn create(node: &Construction) -> Result<Self, Failure> {
        Bucket::of(node).map(Self)
    }

    fn compute(&self, context: &Context) -> Result<(), Failure> {
        let Self(bucket) = self;
        let communicator = bucket.communicator.open()?;
        let (sent, received) = (context.input(1)?.read_i64()?, context.input(2)?.read_i64()?);
        let source = context.input(3)?;
        bucket.check_values(&communicator, slice::from_ref(&source));
        let (rank, world_size) = (communicator.rank, communicator.world_size());
        let call = format!("all_to_all '{}'", bucket.name);
        let row = sent_row(&sent, &received, &source.dims(), rank, world_size)
            .map_err(|problem| Failure::new(Code::InvalidArgument, format!("{call}: {problem}")))?;
        let size = bucket.dtype.size_bytes();
        let rows = received.iter().copied();
        let received = communicator.elements_of_rows(&received, (row, size), &call)?;
        // The sent rows are those of an existing tensor, so these numbers cannot overflow.
        let sent: Vec<usize> = sent.iter().map(|rows| *rows as usize * row).collect();
        let mut dims = source.dims();
        dims[0] = rows.sum();
        let bytes = received.iter().sum::<usize>() * size;
        let target = context
            .allocate(0, source.data_type(), &dims, bytes)
            .map_err(|_| communicator.fail_without_memory(bytes, &call))?;
        let start = |counts: &[usize]| counts[..rank].iter().sum::<usize>() * size;
        let own = start(&sent)..start(&sent) + sent[rank] * size;
        counters::count_copy(own.len());
        // SAFETY: the output was allocated by this call.
        unsafe { target.copy_part_from(&source, own, start(&received)) };

        let mut shapes = String::new();
        push_shape(&mut shapes, dims.drain(1..));
        let slices = [&source, &target].map(|tensor| tensor.slice(bucket.dtype));
        let slices = slices.into_iter().flatten();
        let target: Arc<[Tensor]> = Arc::new([target]);
        let keepalive = Box::new((source, Arc::clone(&target)));
        // SAFETY: the source is only read, and TensorFlow changes no memory to which others refer.
        // The target is as in `launch`. The buffer holds references to both.
        let buffer = unsafe { Buffer::new(bucket.dtype, slices, keepalive) };
        let request = Request {
            collective: Collective::AllToAllV { sent, received },
            buffer,
            name: bucket.name.clone(),
            shapes,
        };
        bucket.start(context, &communicator, request, target, 1)
    }
}

/// Returns the number of elements of a row, or the problem with the splits. This rank's own part
/// stays here, so its size must be equal in both lists.
fn sent_row(
    sent: &[i64],
    received: &[i64],
    dims: &[i64],
    rank: usize,
    world_size: usize,
) -> Result<usize, String> {
    let Some((rows, rest)) = dims.split_first() else {
        return Err("a scalar has no rows; reshape it to [1]".into());
    };
    if [sent.len(), received.len()] != [world_size; 2] {
        return Err(format!(
            "splits {sent:?} and {received:?} are not one for each of {world_size} ranks"
        ));
    }
    let total = sent.iter().try_fold(0_i64, |total, rows| {
        total.checked_add(*rows).filter(|_| *rows >= 0)
    });
    if total != Some(*rows) {
        return Err(format!("splits {sent:?} do not add up to {rows} rows"));
    }
    if sent[rank] != received[rank] {
        return Err(format!(
            "rank {rank} cannot keep {} rows and get {} of them",
            sent[rank], received[rank]
        ));
    }
    Ok(rest.iter().map(|dim| *dim as usize).product())
}

/// Waits for the collective of a Start, and returns its tensors.
struct Wait;

impl Kernel for Wait {
    fn create(_node: &Construction) -> Result<Self, Failure> {
        Ok(Self)
    }

    fn compute(&self, context: &Context) -> Result<(), Failure> {
        let handle_input = context.num_inputs() - 1;
        let handles = context.input(handle_input)?.read_i64()?;
        let handle = handles.first().copied().unwrap_or_default();
        let started = inflight::take(handle)?;
        let expected = (0..handle_input)
            .map(|index| context.input(index))
            .collect::<Result<Vec<_>, _>>()?;
        if !expected
            .iter()
            .map(kind)
            .eq(started.tensors().iter().map(kind))
        {
            return Err(Failure::new(
                Code::Aborted,
                "the tensors handed to GradringWait are not those of its Start: something has \
                 changed the graph between the two; report this with the transformation used",
            ));
        }
        let ended = started.wait(handle);
        counters::WAITS.add(1);
        ended?;
        // The engine has dropped the memory, so it is passed on without a copy. The entry's tensors
        // are used, because only they are certain to be those of the collective.
        (0..handle_input)
            .zip(started.tensors())
            .try_for_each(|(index, tensor)| context.set_output(index, tensor))
    }
}

/// Passes a tensor on, without a copy.
struct Gate;

impl Kernel for Gate {
    fn create(_node: &Construction) -> Result<Self, Failure> {
        Ok(Self)
    }

    fn compute(&self, context: &Context) -> Result<(), Failure> {
        // The handle is an input, so its Start has run.
        context.set_output(0, &context.input(0)?)
    }
}

/// Returns the element type and the shape.
fn kind(tensor: &Tensor) -> (DataType, Vec<i64>) {
    (tensor.data_type(), tensor.dims())
}

/// Number of a communicator, as stored in the graph.
struct CommunicatorId(u64);

impl CommunicatorId {
    fn of(node: &Construction) -> Result<Self, Failure> {
        let id = node.int(attr::COMMUNICATOR)?;
        u64::try_from(id)
            .map(Self)
            .map_err(|_| Failure::new(Code::InvalidArgument, format!("{id} is no communicator")))
    }

    fn open(&self) -> Result<Arc<Communicator>, Failure> {
        Communicator::by_id(self.0)
            .ok_or_else(|| Failure::from(Error::from(Abort::ClosedSinceTraced)))
    }
}

impl Origin {
    fn of(node: &Construction) -> Result<Self, Failure> {
        Ok(match node.string(attr::ORIGIN)?.as_str() {
            "function" => Self::Function,
            "dataset" => Self::Dataset,
            _ => Self::Eager,
        })
    }
}

fn collective(node: &Construction) -> Result<Collective, Failure> {
    let invalid = |text| Failure::new(Code::InvalidArgument, text);
    let root = || {
        let root = node.int(attr::ROOT)?;
        usize::try_from(root).map_err(|_| invalid(format!("{root} is no rank; pass a root >= 0")))
    };
    match node.string(attr::COLLECTIVE)?.as_str() {
        "all_reduce" => Ok(Collective::AllReduce {
            op: reduce_op(node)?,
        }),
        "reduce_scatter" => Ok(Collective::ReduceScatter {
            op: reduce_op(node)?,
            counts: Vec::new(),
        }),
        "reduce" => Ok(Collective::Reduce {
            op: reduce_op(node)?,
            root: root()?,
        }),
        "broadcast" => Ok(Collective::Broadcast { root: root()? }),
        "all_to_all" => Ok(Collective::AllToAll),
        other => Err(invalid(format!(
            "'{other}' is no collective of GradringStart"
        ))),
    }
}

fn reduce_op(node: &Construction) -> Result<ReduceOp, Failure> {
    let name = node.string(attr::REDUCE_OP)?;
    ReduceOp::from_name(&name).ok_or_else(|| {
        let known = ReduceOp::ALL.map(ReduceOp::name).join(", ");
        let text = format!("'{name}' is no reduce op; use one of {known}");
        Failure::new(Code::InvalidArgument, text)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_of_a_gathering_puts_the_ranks_one_after_another() {
        let layout = GatherLayout::new(&[2, 0, 3], &[3, 5], 2, 3);
        assert_eq!(
            layout,
            Ok(GatherLayout {
                dims: vec![5, 5],
                counts: vec![10, 0, 15],
                offset: 10,
            })
        );
    }

    #[test]
    fn a_rank_has_consecutive_parts_of_the_tensors_of_a_bucket() {
        let sizes = [16, 0, 8, 32];
        assert_eq!(
            part_offsets(&(0..12), &sizes, &[12, 0, 0, 0]),
            Ok(vec![0; 4])
        );
        let offsets = part_offsets(&(12..40), &sizes, &[4, 0, 8, 16]);
        assert_eq!(offsets, Ok(vec![12, 0, 0, 0]));
        let offsets = part_offsets(&(40..56), &sizes, &[0, 0, 0, 16]);
        assert_eq!(offsets, Ok(vec![16, 0, 8, 16]));
        assert!(part_offsets(&(12..40), &sizes, &[4, 0, 12, 12]).is_err());
    }

    #[test]
    fn parts_that_are_not_those_of_the_tensor_are_refused() {
        let row =
            |sent: &[i64], received: &[i64], dims: &[i64]| sent_row(sent, received, dims, 1, 2);
        assert_eq!(row(&[2, 1], &[7, 1], &[3, 5, 2]), Ok(10));
        assert_eq!(row(&[0, 0], &[7, 0], &[0]), Ok(1));
        assert!(row(&[0, 0], &[0, 0], &[]).is_err());
        assert!(row(&[3], &[7, 1], &[3]).is_err());
        assert!(row(&[2, 1], &[7, 1, 0], &[3]).is_err());
        assert!(row(&[2, 1], &[7, 1], &[4]).is_err());
        assert!(row(&[2, 1], &[7, 2], &[3]).is_err());
        assert!(row(&[4, -1], &[7, -1], &[3]).is_err());
        assert!(row(&[i64::MAX, i64::MAX], &[0, i64::MAX], &[3]).is_err());
    }

    #[test]
    fn counts_that_do_not_divide_the_bucket_are_refused() {
        assert_eq!(divided(&[2, 0, 3], 5, 3), Ok(vec![2, 0, 3]));
        assert!(divided(&[2, 3], 5, 3).is_err());
        assert!(divided(&[2, 0, 2], 5, 3).is_err());
        assert!(divided(&[-1, 3, 3], 5, 3).is_err());
        assert!(divided(&[i64::MAX, i64::MAX, 5], 5, 3).is_err());
    }

    #[test]
    fn the_layout_of_a_gathering_refuses_counts_that_do_not_fit() {
        assert!(GatherLayout::new(&[2, 1], &[1, 5], 0, 2).is_err());
        assert!(GatherLayout::new(&[2], &[2, 5], 0, 2).is_err());
        assert!(GatherLayout::new(&[1, 1], &[], 0, 2).is_err());
        assert!(GatherLayout::new(&[1, -1], &[1], 0, 2).is_err());
        assert!(GatherLayout::new(&[i64::MAX, i64::MAX], &[i64::MAX], 0, 2).is_err());
    }
}
