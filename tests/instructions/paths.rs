//! Hot paths of the core, called under valgrind: it counts what is inside of `measured`, and the line
//! that is printed before names the path.
//!
//! The core is the one of the extension module, without what only tests use: it is built already.

use std::collections::VecDeque;
use std::hint::black_box;
use std::io::{IoSlice, IoSliceMut, Read as _};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use gradring_core::drive::{
    Context, Drive, Launched, Limits, Memory, Operand, Prepared, Stall, Step, Supervisor,
    Suspicion, WaitRecord,
};
use gradring_net::abort::AbortSwitch;
use gradring_net::link::mesh::Mesh;
use gradring_net::link::poll::{PollFd, WakeUp};
use gradring_net::link::{Broken, Direction, Link, framing};
use gradring_proto::buffer::Buffer;
use gradring_proto::collective::{Call, Collective};
use gradring_proto::dtype::{DType, ReduceOp};
use gradring_proto::error::Error;
use gradring_proto::kernel;
use gradring_proto::lock::lock;
use gradring_proto::schedule::algorithm_rules::Rules;
use gradring_proto::schedule::choice::Policy;
use gradring_proto::schedule::topology::Topology;
use gradring_proto::schedule::{self, Algorithm};
use gradring_proto::wire::signature::{self, Signature};

const ROUNDS: usize = 5;
const SUM: Collective = Collective::AllReduce { op: ReduceOp::Sum };
/// Of the larger buffers.
const BYTES: usize = 64 << 10;
const FLOATS: usize = BYTES / size_of::<f32>();
/// Elements for a plan of several blocks.
const BLOCKS_FLOATS: usize = 4 << 20;

fn main() {
    headers();
    plans();
    kernels();
    frames();
    all_reduce("drive 2 ranks, 4 B", 1);
    all_reduce("drive 2 ranks, 64 KiB", FLOATS);
}

/// What callgrind counts, by its name.
#[unsafe(no_mangle)]
#[inline(never)]
fn measured(path: &mut dyn FnMut()) {
    path();
    // The call is none that ends this function.
    black_box(());
}

/// Counts the path several times, each time with what `prepare` makes.
fn count<T>(name: &str, mut prepare: impl FnMut() -> T, mut path: impl FnMut(&mut T)) {
    for _ in 0..ROUNDS {
        let mut prepared = prepare();
        println!("{name}");
        measured(&mut || path(&mut prepared));
    }
}

fn call(count: usize) -> Call {
    Call {
        collective: SUM,
        dtype: DType::F32,
        count,
        name: "gradients".into(),
        shapes: format!("[{count}]"),
        is_mapped: false,
    }
}

fn headers() {
    let call = call(FLOATS);
    count(
        "encode a call's header",
        || (),
        |()| {
            let header = Signature::of(black_box(&call), Algorithm::Ring).header(0, 7, 1);
            black_box(signature::with_endpoints(header, 0, 1));
        },
    );
}

fn plans() {
    let topology = Topology::one_host(8);
    count(
        "schedule, ring of 8",
        || (),
        |()| {
            let block = BLOCKS_FLOATS / 16;
            let topology = black_box(&topology);
            black_box(schedule::build(
                Algorithm::Ring,
                &SUM,
                0,
                topology,
                BLOCKS_FLOATS,
                block,
            ));
        },
    );
    let group = Group::new(8);
    let launched = group.launched(0, BLOCKS_FLOATS, Algorithm::Ring);
    // The same memory, too large to be written, for all that is only planned.
    let buffer = || Buffer::zeroed(DType::F32, BLOCKS_FLOATS);
    count(
        "plan, ring of 8",
        || (Memory::default(), Some(buffer())),
        |(memory, buffer)| {
            let buffer = buffer.take().expect("one for each path");
            let mut operand = memory.operand(buffer, &launched).expect("memory");
            black_box(group.drive(0, &launched, &mut operand));
        },
    );
}

fn kernels() {
    let floats = || (vec![1_u64; BYTES / 8], vec![1_u64; BYTES / 8]);
    count("add float32, 64 KiB", floats, |(target, source)| {
        let (target, source) = (target.as_mut_ptr().cast(), source.as_ptr().cast());
        // SAFETY: both hold so many floats.
        unsafe { kernel::reduce(DType::F32, ReduceOp::Sum, target, source, FLOATS) }
    });
    for (name, dtype) in [
        ("widen and round float16, 32 KiB", DType::F16),
        ("widen and round bfloat16, 32 KiB", DType::Bf16),
    ] {
        count(name, floats, |(narrow, wide)| {
            let (narrow, wide) = (narrow.as_mut_ptr().cast(), wide.as_mut_ptr().cast());
            // SAFETY: the first holds more than so many halves, the second so many floats.
            unsafe {
                kernel::widen(dtype, DType::F32, wide, narrow, FLOATS);
                kernel::finish(dtype, ReduceOp::Mean, 2, narrow, wide, FLOATS);
            }
        });
    }
}

/// Frames with checksums: of a small one, the header is most of it.
fn frames() {
    for (size, bytes) in [("4 B", 4), ("64 KiB", BYTES)] {
        let payload = vec![7; bytes];
        let send = |link: &mut dyn Link| {
            let sent = link.try_send(&[IoSlice::new(&payload)]);
            assert_eq!(sent.expect("the link holds"), Some(bytes));
        };
        let checked = || Pipe::pair().map(|end| framing::over(vec![Box::new(end)], true));
        count(
            &format!("send a checked frame, {size}"),
            checked,
            |[sender, _]| send(&mut **sender),
        );
        count(
            &format!("receive a checked frame, {size}"),
            || {
                let [mut sender, receiver] = checked();
                send(&mut *sender);
                (sender, receiver, vec![0; bytes])
            },
            |(_, receiver, memory)| {
                let received = receiver.try_receive(&mut [IoSliceMut::new(memory)]);
                assert_eq!(received.expect("the link holds"), Some(bytes));
            },
        );
    }
}

/// Both ranks of an all-reduce on one thread, over pipes in memory: nothing waits.
fn all_reduce(name: &str, floats: usize) {
    let group = Group::new(2);
    let launched = [0, 1].map(|rank| group.launched(rank, floats, Algorithm::Ring));
    let mut memories = [Memory::default(), Memory::default()];
    let [low, high] = Pipe::pair().map(|end| Some(Box::new(end) as Box<dyn Link>));
    let mut links = [vec![None, low], vec![high, None]].map(|links| {
        let doorbell = WakeUp::new().expect("a file descriptor");
        Mesh::new(links, Arc::new(doorbell)).expect("a file descriptor")
    });
    count(
        name,
        || [0, 1].map(|_| Some(Buffer::zeroed(DType::F32, floats))),
        |buffers| {
            let [first, second] = &mut memories;
            let mut operands = [(first, 0), (second, 1)].map(|(memory, rank)| {
                let buffer = buffers[rank].take().expect("one for each path");
                memory.operand(buffer, &launched[rank]).expect("memory")
            });
            let [first, second] = &mut operands;
            let mut drives = [(first, 0), (second, 1)]
                .map(|(operand, rank)| (group.drive(rank, &launched[rank], operand), false));
            while drives.iter().any(|(_, done)| !done) {
                for ((drive, done), link) in drives.iter_mut().zip(&mut links) {
                    match drive.step(link, || group.started) {
                        Step::Done => *done = true,
                        Step::Moved | Step::Blocked => {}
                        Step::Failed(cause) => panic!("{cause}"),
                    }
                }
            }
        },
    );
}

/// What the ranks of a group without faults have in common.
struct Group {
    topology: Topology,
    abort: AbortSwitch,
    waits: WaitRecord,
    started: Instant,
}

impl Group {
    fn new(world_size: usize) -> Self {
        Self {
            topology: Topology::one_host(world_size),
            abort: AbortSwitch::default(),
            waits: WaitRecord::default(),
            started: Instant::now(),
        }
    }

    fn launched(&self, rank: usize, floats: usize, algorithm: Algorithm) -> Launched {
        let mut policy = Policy::new(self.topology.clone());
        policy.rules = Rules::always(algorithm);
        let prepared =
            Prepared::new(Arc::new(call(floats)), rank, &policy).expect("a call that makes sense");
        prepared.launch(0, 1, 0)
    }

    fn drive<'a>(
        &'a self,
        rank: usize,
        launched: &'a Launched,
        operand: &'a mut Operand<'_>,
    ) -> Drive<'a> {
        let limits = Limits {
            timeout: Duration::MAX,
            stall_warning: Duration::MAX,
        };
        let context = Context {
            rank,
            topology: &self.topology,
            limits,
            abort: &self.abort,
            supervisor: self,
            waits: &self.waits,
        };
        Drive::new(context, launched, operand, self.started).expect("memory")
    }
}

impl Supervisor for Group {
    fn investigate(&self, suspicion: Suspicion) {
        panic!("{suspicion:?}");
    }

    fn abort(&self, cause: Error) {
        panic!("{cause}");
    }

    fn warn(&self, _: &Stall<'_>) {}
}

/// One end of a link in memory that is never full.
struct Pipe {
    outgoing: Arc<Mutex<VecDeque<u8>>>,
    incoming: Arc<Mutex<VecDeque<u8>>>,
}

impl Pipe {
    fn pair() -> [Self; 2] {
        let [there, back] =
            [0, 1].map(|_| Arc::new(Mutex::new(VecDeque::with_capacity(4 * BYTES))));
        let other = Self {
            outgoing: Arc::clone(&back),
            incoming: Arc::clone(&there),
        };
        let outgoing = there;
        let incoming = back;
        [Self { outgoing, incoming }, other]
    }
}

impl Link for Pipe {
    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> Result<Option<usize>, Broken> {
        let mut bytes = lock(&self.outgoing);
        parts.iter().for_each(|part| bytes.extend(&part[..]));
        Ok(Some(parts.iter().map(|part| part.len()).sum()))
    }

    fn try_receive(&mut self, parts: &mut [IoSliceMut<'_>]) -> Result<Option<usize>, Broken> {
        let mut bytes = lock(&self.incoming);
        let mut received = 0;
        for part in parts {
            let mut spare = &mut part[..];
            // What lies across the end of the ring comes in two parts.
            while let Ok(length @ 1..) = bytes.read(spare) {
                spare = &mut spare[length..];
                received += length;
            }
        }
        Ok((received > 0).then_some(received))
    }

    fn may_sleep(&mut self, _: Direction) -> bool {
        false
    }

    fn awaited<'a>(&'a self, _: Direction, _: &mut Vec<PollFd<'a>>) {}
}
