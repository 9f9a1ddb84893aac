//! Heaps of all ranks of a host, behind the slots in their segment: memory for arrays of programs.
//!
//! Each rank has one heap. It alone writes there, and all others map it for reading. So a
//! collective over arrays in heaps moves no bytes through rings: each rank reads its peers' arrays
//! where they are.
//!
//! A heap is sparse. Its pages are allocated with the blocks that a program asks for, and go back
//! to the system with them. A rank maps the heaps when its program asks for the first block.

use std::fs::read_to_string;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, OnceLock};

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::{Errno, retry_on_intr};
use rustix::mm::{
    Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap, mprotect, munlock, munmap,
};
use rustix::process::{Pid, Resource, getpid, getrlimit};
use rustix::system::sysinfo;

use free_list::FreeList;
use gradring_proto::lock::lock;

mod free_list;

/// Size of a huge page. Heaps begin and end with one, and so do large blocks.
pub(super) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Bound on the heaps of all ranks together. A process maps them all for each of its groups, and
/// its addresses end at 128 TiB.
const HEAPS_BYTES_MAX: u64 = 1 << 40;

/// Bytes that `fallocate` gets at a time. A signal ends it, and it begins again.
const FALLOCATE_BYTES: usize = 16 << 20;

/// Size of each rank's heap in a new segment, which begins with `segment_bytes` of other things. It
/// is the memory of the host or container, or 0 where a limit of the process forbids such files or
/// mappings.
pub(super) fn bytes_of_each(world_size: usize, segment_bytes: usize) -> usize {
    let info = sysinfo();
    let memory = info.totalram as u64 * u64::from(info.mem_unit);
    let own = read_to_string("/proc/self/cgroup").unwrap_or_default();
    let memory = memory.min(memory_limit(Path::new("/sys/fs/cgroup"), &own));
    let most = memory.min(HEAPS_BYTES_MAX / world_size as u64);
    let bytes = most / HUGE_PAGE_BYTES as u64 * HUGE_PAGE_BYTES as u64;
    let file = segment_bytes as u64 + world_size as u64 * bytes;
    // A file above its limit would end the process by SIGXFSZ.
    let fits = getrlimit(Resource::Fsize)
        .current
        .is_none_or(|limit| file <= limit);
    match fits && addresses_are_unlimited() {
        true => bytes as usize,
        false => 0,
    }
}

/// Least limit on the memory of these control groups, as `/proc/self/cgroup` lists them, and of
/// those around them. A limit that cannot be read is none.
fn memory_limit(root: &Path, own: &str) -> u64 {
    let mut limits = vec![root.join("memory.max")];
    for line in own.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (parts.next(), parts.next()) else {
            continue;
        };
        let (root, name) = match controllers {
            "" => (root.to_path_buf(), "memory.max"),
            _ if controllers.split(',').any(|each| each == "memory") => {
                (root.join("memory"), "memory.limit_in_bytes")
            }
            _ => continue,
        };
        let groups = Path::new(group.trim_start_matches('/')).ancestors();
        limits.extend(groups.map(|group| root.join(group).join(name)));
    }
    let limit = |path: PathBuf| read_to_string(path).ok()?.trim().parse().ok();
    limits
        .into_iter()
        .filter_map(limit)
        .min()
        .unwrap_or(u64::MAX)
}

/// A process whose addresses are limited needs them for other things.
fn addresses_are_unlimited() -> bool {
    getrlimit(Resource::As).current.is_none()
}

/// Position of a group's heaps in the segment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    /// Place of the first heap in the segment.
    pub(super) start: usize,
    pub(super) bytes_of_each: usize,
    pub(super) world_size: usize,
}

impl Layout {
    /// Place of a rank's heap in the segment.
    const fn start_of(&self, rank: usize) -> usize {
        self.start + rank * self.bytes_of_each
    }
}

/// The heap of this rank, and those of its peers for reading.
pub struct Heap {
    /// The segment, until nothing is to be allocated any more.
    file: Mutex<Option<OwnedFd>>,
    layout: Layout,
    rank: usize,
    /// Set with the first block.
    mapped: OnceLock<Mapped>,
    free: Mutex<FreeList>,
    /// The process that allocates. A fork has the same memory, but only copies of the blocks.
    creator: Pid,
}

/// The mappings of a process.
struct Mapped {
    /// The heap of its rank, for writing.
    own: Mapping,
    /// The heaps of all ranks, for reading.
    all: Mapping,
}

impl Heap {
    /// Prepares the heap of a rank; `None` if the process cannot map it.
    pub(super) fn new(file: BorrowedFd<'_>, layout: Layout, rank: usize) -> Option<Arc<Self>> {
        if layout.bytes_of_each == 0 || !addresses_are_unlimited() {
            return None;
        }
        Some(Arc::new(Self {
            file: Mutex::new(Some(file.try_clone_to_owned().ok()?)),
            layout,
            rank,
            mapped: OnceLock::new(),
            free: Mutex::new(FreeList::new(layout.bytes_of_each)),
            creator: getpid(),
        }))
    }

    /// Addresses of the heap in this process; none before the first block.
    #[must_use]
    pub fn addresses(&self) -> Range<usize> {
        self.mapped.get().map_or(0..0, |mapped| {
            let start = mapped.own.base.addr().get();
            start..start + mapped.own.bytes
        })
    }

    /// Allocates a block of zeros; `None` when the heap or the memory of the system is full, and
    /// after `close`.
    #[must_use]
    pub fn allocate(self: &Arc<Self>, bytes: usize) -> Option<Block> {
        if getpid() != self.creator {
            return None;
        }
        let start = self.map().ok()?;
        let range = lock(&self.free).take(bytes)?;
        let block = Block {
            heap: Arc::clone(self),
            // SAFETY: the allocator gives out ranges of the heap.
            start: unsafe { start.add(range.start) },
            range,
        };
        block.populate().ok()?;
        Some(block)
    }

    /// Closes the segment. Nothing is allocated any more; blocks and mappings stay.
    pub fn close(&self) {
        drop(lock(&self.file).take());
    }

    /// Maps the heaps, unless they are mapped, and returns the first address of this rank's heap.
    fn map(&self) -> io::Result<NonNull<u8>> {
        let file = lock(&self.file);
        let file = file.as_ref().ok_or(Errno::BADF)?.as_fd();
        if let Some(mapped) = self.mapped.get() {
            return Ok(mapped.own.base);
        }
        let Layout {
            start,
            bytes_of_each,
            world_size,
        } = self.layout;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let own = Mapping::new(file, self.layout.start_of(self.rank), bytes_of_each, access)?;
        let all = Mapping::new(file, start, world_size * bytes_of_each, ProtFlags::READ)?;
        Ok(self.mapped.get_or_init(|| Mapped { own, all }).own.base)
    }

    /// Returns whether `bytes` from this offset on lie in a heap.
    pub(super) fn holds(&self, offset: usize, bytes: usize) -> bool {
        let end = offset.checked_add(bytes);
        end.is_some_and(|end| end <= self.layout.bytes_of_each)
    }

    /// Returns a part of a rank's heap.
    ///
    /// # Panics
    /// When it does not lie in the heap, and before this rank has allocated anything.
    pub(super) fn read(&self, rank: usize, part: Range<usize>) -> &[u8] {
        assert!(self.holds(part.start, part.len()));
        let all = &self.mapped.get().expect("this rank has an array there").all;
        let start = rank * self.layout.bytes_of_each + part.start;
        assert!(start + part.len() <= all.bytes);
        // SAFETY: inside of the mapping. The ranks agree in turns on who writes when; see
        // `Arena::read` for a process that breaks this promise.
        unsafe {
            let start = all.base.add(start).as_ptr();
            std::slice::from_raw_parts(start, part.len())
        }
    }
}

/// A piece of this rank's heap; dropping it frees the memory.
pub struct Block {
    heap: Arc<Heap>,
    start: NonNull<u8>,
    range: Range<usize>,
}

// SAFETY: the memory belongs to this value, whichever thread holds it.
unsafe impl Send for Block {}
// SAFETY: a shared reference gives only an address.
unsafe impl Sync for Block {}

impl Block {
    /// First byte; begins a page.
    #[must_use]
    pub const fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Allocates the pages now. Without memory for them, a later access would end the process.
    fn populate(&self) -> io::Result<()> {
        match self.advise(Advice::LinuxPopulateWrite) {
            // Kernels before 5.14 do not know this.
            Err(Errno::INVAL) => self.allocate_in_file(),
            outcome => Ok(outcome?),
        }
    }

    /// Allocates the pages without mapping them.
    fn allocate_in_file(&self) -> io::Result<()> {
        let file = lock(&self.heap.file);
        let file = file.as_ref().ok_or(Errno::BADF)?;
        let start = self.heap.layout.start_of(self.heap.rank);
        for first in self.range.clone().step_by(FALLOCATE_BYTES) {
            let bytes = FALLOCATE_BYTES.min(self.range.end - first) as u64;
            let offset = (start + first) as u64;
            retry_on_intr(|| fallocate(file, FallocateFlags::empty(), offset, bytes))?;
        }
        Ok(())
    }

    /// Gives the pages back to the system.
    fn remove(&self) -> rustix::io::Result<()> {
        match self.advise(Advice::LinuxRemove) {
            // Locked pages stay where they are.
            Err(Errno::INVAL) => {
                // SAFETY: changes nothing that the memory holds.
                unsafe { munlock(self.start.as_ptr().cast(), self.range.len())? };
                self.advise(Advice::LinuxRemove)
            }
            outcome => outcome,
        }
    }

    fn advise(&self, advice: Advice) -> rustix::io::Result<()> {
        let start = self.start.as_ptr().cast();
        // SAFETY: nothing but this block refers to these pages.
        unsafe { madvise(start, self.range.len(), advice) }
    }
}

impl Drop for Block {
    /// Gives the pages back to the system, unless this is a copy of the block in a fork.
    fn drop(&mut self) {
        if getpid() != self.heap.creator {
            return;
        }
        // Pages that stay would keep the values of this block.
        if self.remove().is_ok() {
            lock(&self.heap.free).give_back(self.range.clone());
        }
    }
}

/// Pages of the segment in this process.
struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to this value, whichever thread holds it.
unsafe impl Send for Mapping {}
// SAFETY: a shared reference gives only addresses, and bytes for reading.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(
        file: BorrowedFd<'_>,
        offset: usize,
        bytes: usize,
        access: ProtFlags,
    ) -> io::Result<Self> {
        if !addresses_are_unlimited() {
            return Err(Errno::NOMEM.into());
        }
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        let (any, none) = (std::ptr::null_mut(), ProtFlags::empty());
        // SAFETY: a new mapping at an address of the system's choice.
        let base = unsafe { mmap(any, bytes, none, flags, file, offset as u64)? };
        let mapping = Self {
            base: NonNull::new(base.cast()).expect("the system maps nothing at zero"),
            bytes,
        };
        let access = MprotectFlags::from_bits_retain(access.bits());
        // SAFETY: nothing refers to this mapping yet, and no advice changes what the memory holds.
        unsafe {
            // After `mlockall`, the system would allocate every page of an accessible mapping. A
            // core dump would do so, too.
            munlock(base, bytes)?;
            mprotect(base, bytes, access)?;
            madvise(base, bytes, Advice::LinuxDontDump)?;
            // Systems without huge pages for shared memory refuse this.
            let _ = madvise(base, bytes, Advice::LinuxHugepage);
        }
        Ok(mapping)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's, and no reference outlives it.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
