//! The memory of a link: two rings and their counters, mapped from a sealed memfd.
//!
//! File: ring 0, ring 1, counters. Each ring is mapped twice, one copy behind the other, so that
//! any range of it is contiguous in memory, also one that passes the end of the ring.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat,
    ftruncate, memfd_create,
};
use rustix::io::pwrite;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use super::pipe::ControlBlock;

/// Bytes of the file for the counters.
const SHARED_BYTES: usize = 4096;
/// The largest page size of any kernel that we know: mappings begin at multiples of it.
const PAGE_BYTES_MAX: usize = 64 << 10;
/// Seals that fix the file's size and the seals. A process that shrank the file would kill the
/// other one with SIGBUS.
const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

const _: () = assert!(size_of::<ControlBlock>() <= SHARED_BYTES);

/// Both rings and their counters, mapped into this process.
pub(super) struct Arena {
    base: NonNull<u8>,
    capacity: usize,
}

// SAFETY: the mapping belongs to this value, whichever thread holds it.
unsafe impl Send for Arena {}

impl Arena {
    /// Creates zeroed memory with rings of `capacity` bytes each. Returns it with the file by which
    /// it is shared.
    pub(super) fn create(capacity: usize) -> io::Result<(Self, OwnedFd)> {
        let file = sealed_file(file_bytes(capacity))?;
        Ok((Self::map(file.as_fd(), capacity)?, file))
    }

    /// Maps the memory in a file that another process created with the same capacity.
    pub(super) fn open(file: OwnedFd, capacity: usize) -> io::Result<Self> {
        check_sealed(&file, file_bytes(capacity))?;
        Self::map(file.as_fd(), capacity)
    }

    fn map(file: BorrowedFd<'_>, capacity: usize) -> io::Result<Self> {
        assert!(capacity.is_power_of_two() && capacity >= PAGE_BYTES_MAX);
        let reserved = mapped_bytes(capacity);
        // SAFETY: a new mapping at an address of the system's choice.
        let base = unsafe {
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
            mmap_anonymous(std::ptr::null_mut(), reserved, ProtFlags::empty(), flags)?
        };
        let base = NonNull::new(base.cast()).expect("the system maps nothing at zero");
        let arena = Self { base, capacity };
        arena.map_part(file, 0, 0, capacity)?;
        arena.map_part(file, capacity, 0, capacity)?;
        arena.map_part(file, 2 * capacity, capacity, capacity)?;
        arena.map_part(file, 3 * capacity, capacity, capacity)?;
        arena.map_part(file, 4 * capacity, 2 * capacity, SHARED_BYTES)?;
        Ok(arena)
    }

    fn map_part(
        &self,
        file: BorrowedFd<'_>,
        at: usize,
        offset: usize,
        length: usize,
    ) -> io::Result<()> {
        assert!(at + length <= mapped_bytes(self.capacity));
        // SAFETY: replaces a part of this arena's own mapping, to which nothing refers yet.
        unsafe {
            let target = self.base.add(at).as_ptr().cast();
            let access = ProtFlags::READ | ProtFlags::WRITE;
            let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::POPULATE;
            mmap(target, length, access, flags, file, offset as u64)?;
        }
        Ok(())
    }

    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    /// The counters.
    pub(super) fn shared(&self) -> &ControlBlock {
        // SAFETY: this part of the mapping is large enough and begins with a page. `ControlBlock`
        // consists of atomics, for which any bits are valid and may change at any time.
        unsafe { self.base.add(4 * self.capacity).cast().as_ref() }
    }

    /// Copies `bytes` into ring `ring` at `position`.
    ///
    /// # Safety
    /// These bytes of the ring must be this side's to write.
    pub(super) unsafe fn write(&self, ring: usize, position: usize, bytes: &[u8]) {
        let target = self.at(ring, position, bytes.len());
        // SAFETY: `at` is valid for this length; nobody reads there meanwhile, and `bytes` does
        // not overlap, as references into the arena are given out only for reading by `read`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target.as_ptr(), bytes.len()) };
    }

    /// Returns the `length` bytes of ring `ring` at `position`.
    ///
    /// # Safety
    /// These bytes must be this side's to read until the end of the borrow.
    pub(super) unsafe fn read(&self, ring: usize, position: usize, length: usize) -> &[u8] {
        // SAFETY: `at` is valid for this length and initialised; nobody writes there meanwhile. A
        // process that breaks this promise runs as the same user with the same token, so it could
        // change this process's memory in other ways too. Here it can change only payload.
        unsafe { std::slice::from_raw_parts(self.at(ring, position, length).as_ptr(), length) }
    }

    fn at(&self, ring: usize, position: usize, length: usize) -> NonNull<u8> {
        assert!(ring < 2 && position < self.capacity && length <= self.capacity);
        // SAFETY: inside the mapping, thanks to the second copy of the ring.
        unsafe { self.base.add(2 * ring * self.capacity + position) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's, and no reference outlives it.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), mapped_bytes(self.capacity)) };
    }
}

const fn file_bytes(capacity: usize) -> u64 {
    (2 * capacity + SHARED_BYTES) as u64
}

const fn mapped_bytes(capacity: usize) -> usize {
    4 * capacity + SHARED_BYTES
}

/// Creates zeroed memory of a fixed size that other processes can map.
pub(super) fn sealed_file(bytes: u64) -> io::Result<OwnedFd> {
    sealed_file_with(bytes, bytes, &[])
}

/// Creates memory that begins with `content`, and is allocated up to `allocated` of its `bytes`.
pub(super) fn sealed_file_with(allocated: u64, bytes: u64, content: &[u8]) -> io::Result<OwnedFd> {
    let file = create_file()?;
    // Allocates the memory now, while another kind of link is still possible.
    fallocate(&file, FallocateFlags::empty(), 0, allocated)?;
    if bytes > allocated {
        ftruncate(&file, bytes)?;
    }
    pwrite(&file, content, 0)?;
    fcntl_add_seals(&file, SEALS)?;
    Ok(file)
}

/// Makes sure that another process has created this memory by `sealed_file`.
pub(super) fn check_sealed(file: &OwnedFd, bytes: u64) -> io::Result<()> {
    if !fcntl_get_seals(file)?.contains(SEALS) {
        return Err(io::Error::other("the memory is not sealed"));
    }
    if fstat(file)?.st_size as u64 != bytes {
        return Err(io::Error::other("the memory has another size"));
    }
    Ok(())
}

pub(super) fn create_file() -> io::Result<OwnedFd> {
    let create = |flags| memfd_create("gradring", flags);
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Kernels before 6.3 do not know the last flag; later ones may insist on it.
    Ok(create(flags | MemfdFlags::NOEXEC_SEAL).or_else(|_| create(flags))?)
}
