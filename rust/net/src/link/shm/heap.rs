//! Heaps of all ranks of a host, behind the slots in their segment: memory for arrays of programs.
//!
//! Each rank has one heap. It alone writes there, and all others map it for reading. So a
//! collective over arrays in heaps moves no bytes through rings: each rank reads its peers' arrays
//! where they are.
//!
//! A heap is sparse. Its pages are allocated with the blocks that a program asks for, and go back
//! to the system with them.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use rustix::io::Errno;
use rustix::mm::{
    Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap, mprotect, munlock, munmap,
};
use rustix::process::{Resource, getrlimit};
use rustix::system::sysinfo;

use crate::link::forks::Process;
use free_list::FreeList;
use gradring_proto::lock::lock;

mod free_list;

/// Size of a huge page. Heaps begin and end with one, and so do large blocks.
pub(super) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Bound on the heaps of all ranks together. A process maps them all, and its addresses end at
/// 128 TiB.
const HEAPS_BYTES_MAX: u64 = 8 << 40;

/// Size of each rank's heap in a new segment, which begins with `segment_bytes` of other things. It
/// is the memory of the host, or 0 where a limit of the process forbids such files or mappings.
pub(super) fn bytes_of_each(world_size: usize, segment_bytes: usize) -> usize {
    let info = sysinfo();
    let memory = info.totalram as u64 * u64::from(info.mem_unit);
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

/// A process whose addresses are limited needs them for other things.
fn addresses_are_unlimited() -> bool {
    getrlimit(Resource::As).current.is_none()
}

/// The heap of this rank.
pub struct Heap {
    mapping: Mapping,
    free: Mutex<FreeList>,
    /// The process that allocates. A fork has the same memory, but only copies of the blocks.
    process: Process,
}

impl Heap {
    /// Maps the heap of a rank, at `offset` of the segment.
    pub(super) fn map(file: BorrowedFd<'_>, offset: usize, bytes: usize) -> io::Result<Arc<Self>> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        Ok(Arc::new(Self {
            mapping: Mapping::new(file, offset, bytes, access)?,
            free: Mutex::new(FreeList::new(bytes)),
            process: Process::this(),
        }))
    }

    /// Addresses of the heap in this process.
    #[must_use]
    pub fn addresses(&self) -> Range<usize> {
        let start = self.mapping.base.addr().get();
        start..start + self.mapping.bytes
    }

    /// Allocates a block of zeros; `None` when the heap or the memory of the system is full.
    #[must_use]
    pub fn allocate(self: &Arc<Self>, bytes: usize) -> Option<Block> {
        let range = lock(&self.free).take(bytes)?;
        let block = Block {
            heap: Arc::clone(self),
            range,
        };
        block.populate().ok()?;
        Some(block)
    }
}

/// A piece of this rank's heap; dropping it frees the memory.
pub struct Block {
    heap: Arc<Heap>,
    range: Range<usize>,
}

impl Block {
    /// First byte; begins a page.
    #[must_use]
    pub fn start(&self) -> NonNull<u8> {
        // SAFETY: the allocator gives out ranges of the heap.
        unsafe { self.heap.mapping.base.add(self.range.start) }
    }

    /// Allocates the pages now. Without memory for them, a later access would end the process.
    fn populate(&self) -> rustix::io::Result<()> {
        match self.advise(Advice::LinuxPopulateWrite) {
            // Kernels before 5.14 do not know this.
            Err(Errno::INVAL) => Ok(()),
            outcome => outcome,
        }
    }

    fn advise(&self, advice: Advice) -> rustix::io::Result<()> {
        let start = self.start().as_ptr().cast();
        // SAFETY: nothing but this block refers to these pages.
        unsafe { madvise(start, self.range.len(), advice) }
    }
}

impl Drop for Block {
    /// Gives the pages back to the system, unless this is a copy of the block in a fork.
    fn drop(&mut self) {
        if !self.heap.process.is_this() {
            return;
        }
        // Pages that stay would keep the values of this block.
        if self.advise(Advice::LinuxRemove).is_ok() {
            lock(&self.heap.free).give_back(self.range.clone());
        }
    }
}

/// The heaps of all ranks, for reading.
pub(super) struct Heaps {
    mapping: Mapping,
    bytes_of_each: usize,
}

impl Heaps {
    /// Maps the heaps, which begin at `offset` of the segment.
    pub(super) fn map(
        file: BorrowedFd<'_>,
        offset: usize,
        bytes_of_each: usize,
        world_size: usize,
    ) -> io::Result<Self> {
        let bytes = world_size * bytes_of_each;
        Ok(Self {
            mapping: Mapping::new(file, offset, bytes, ProtFlags::READ)?,
            bytes_of_each,
        })
    }

    /// Returns whether `bytes` from this offset on lie in a heap.
    pub(super) fn holds(&self, offset: usize, bytes: usize) -> bool {
        let end = offset.checked_add(bytes);
        end.is_some_and(|end| end <= self.bytes_of_each)
    }

    /// Returns a part of a rank's heap.
    ///
    /// # Panics
    /// When it does not lie in the heap.
    pub(super) fn read(&self, rank: usize, part: Range<usize>) -> &[u8] {
        assert!(self.holds(part.start, part.len()));
        let start = rank * self.bytes_of_each + part.start;
        assert!(start + part.len() <= self.mapping.bytes);
        // SAFETY: inside of the mapping. The ranks agree in turns on who writes when; see
        // `Arena::read` for a process that breaks this promise.
        unsafe {
            let start = self.mapping.base.add(start).as_ptr();
            std::slice::from_raw_parts(start, part.len())
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
