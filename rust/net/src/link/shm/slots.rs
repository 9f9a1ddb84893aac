//! Slots of all ranks of a host in one segment of memory, for small messages to all.
//!
//! A rank writes a message once, into its own slot, and all others read it there. A link to each
//! would cost a copy and a cache line for each peer, and would wake ranks that wait on for others.
//!
//! The ranks perform *operations* together, in the same order; each has one or more *turns*
//! (`turns.rs`). In the first turn a rank publishes its message, and later ones may change parts of
//! it that no rank reads before. A rank that has ended an operation has seen all ranks in it. So
//! all have ended the one before, and its memory is free: two copies of each slot are enough.
//!
//! A message of a few bytes shares its cache line with the number of the turn, so a reader waits
//! for one line. The idea is that of small messages in Open MPI's component `xhc`; G. Katevenis,
//! M. Ploumidis and M. Marazakis, "A Framework for Hierarchical Single-copy MPI Collectives on
//! Multicore Nodes", IEEE CLUSTER 2022.
//!
//! Behind the slots are the heaps of all ranks (`heap.rs`), if the system lets them be. A message
//! about an array there says where the array begins.

use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd as _, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use rustix::event::Timespec;
use rustix::io::{Errno, pread};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::thread::futex;

use super::arena::{check_sealed, sealed_file_with};
use super::heap::{self, HUGE_PAGE_BYTES, Heap, Layout};
use gradring_proto::schedule::choice::SLOT_BYTES_MAX;
use gradring_proto::wire::signature::{self, HEADER_BYTES, Header};
use turns::AtomicU64;

mod turns;

/// Bytes of a message that fit behind the number of the turn.
const SHORT_BYTES: usize = 48;

/// Longest sleep, after which a rank looks whether the others still live.
const NAP_MAX: Duration = Duration::from_millis(20);

/// Front of a slot, with the number of the turn; all zeros at the start.
#[repr(C, align(128))]
struct Front {
    /// Last turn published here.
    turn: AtomicU64,
    /// Digest of the header, which all ranks compare.
    digest: AtomicU64,
    short: [u8; SHORT_BYTES],
    header: Header,
}

/// The beginning of the segment.
#[repr(C)]
struct Head {
    gate: Gate,
    /// Size of each heap, which the creator of the segment has chosen.
    heap_bytes: HeapBytes,
}

/// The futex of all who sleep, in a line of its own. It changes before they are woken.
#[repr(C, align(128))]
struct Gate(AtomicU32);

#[repr(C, align(128))]
struct HeapBytes([u8; size_of::<u64>()]);

/// State of a rank besides its operations, in a line of its own, because it changes rarely.
#[repr(C, align(128))]
struct Presence {
    /// Turn in which the rank sleeps, or 0.
    asleep: AtomicU64,
    /// CPU core from which the rank published last, plus one; zero before that.
    core: AtomicU32,
    /// Last operation that has failed on the rank, whose memory may change since then; or 0.
    abandoned: AtomicU64,
}

/// Entry of a rank in the segment, besides the copies of its slot.
#[repr(C)]
struct Entry {
    /// Fronts of successive operations, in turn.
    fronts: [Front; COPIES],
    presence: Presence,
}

/// Copies of each slot.
const COPIES: usize = 2;

/// The segment as a file, and the ranks that share it.
pub struct SlotFile {
    file: OwnedFd,
    world_size: usize,
    /// Size of each heap; 0 if there are none.
    heap_bytes: usize,
}

impl SlotFile {
    /// Creates the segment of a group.
    ///
    /// # Errors
    /// When the system has no memory or file descriptor left.
    pub fn create(world_size: usize) -> io::Result<Self> {
        let heap_bytes = heap::bytes_of_each(world_size, heaps_start(world_size));
        Self::create_with(world_size, heap_bytes)
    }

    /// Creates a segment with heaps of this size, or without heaps if the system refuses them.
    fn create_with(world_size: usize, heap_bytes: usize) -> io::Result<Self> {
        match Self::create_exactly(world_size, heap_bytes) {
            Err(_) if heap_bytes > 0 => Self::create_exactly(world_size, 0),
            outcome => outcome,
        }
    }

    fn create_exactly(world_size: usize, heap_bytes: usize) -> io::Result<Self> {
        let mut head = [0; offset_of!(Head, heap_bytes) + size_of::<u64>()];
        head[offset_of!(Head, heap_bytes)..].copy_from_slice(&(heap_bytes as u64).to_ne_bytes());
        let bytes = file_bytes(world_size, heap_bytes as u64).ok_or(Errno::FBIG)?;
        let file = sealed_file_with(segment_bytes(world_size) as u64, bytes, &head)?;
        Ok(Self {
            file,
            world_size,
            heap_bytes,
        })
    }

    /// The segment of a group, which another rank has created.
    pub(super) fn received(file: OwnedFd, world_size: usize) -> io::Result<Self> {
        let mut heap_bytes = [0; size_of::<u64>()];
        pread(&file, &mut heap_bytes, offset_of!(Head, heap_bytes) as u64)?;
        let heap_bytes = u64::from_ne_bytes(heap_bytes);
        check_sealed(
            &file,
            file_bytes(world_size, heap_bytes).ok_or(Errno::FBIG)?,
        )?;
        Ok(Self {
            file,
            world_size,
            heap_bytes: heap_bytes as usize,
        })
    }

    pub(super) fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Maps the segment into the process of a rank.
    ///
    /// # Errors
    /// When the system has no memory left.
    pub fn map(&self, rank: usize) -> io::Result<Slots> {
        assert!(rank < self.world_size);
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        let length = segment_bytes(self.world_size);
        // SAFETY: a new mapping at an address of the system's choice.
        let base = unsafe { mmap(std::ptr::null_mut(), length, access, flags, &self.file, 0)? };
        let layout = Layout {
            start: heaps_start(self.world_size),
            bytes_of_each: self.heap_bytes,
            world_size: self.world_size,
        };
        Ok(Slots {
            base: NonNull::new(base.cast()).expect("the system maps nothing at zero"),
            world_size: self.world_size,
            rank,
            operation: 0,
            turn: 0,
            digest: 0,
            arrived: self.world_size,
            has_failed: false,
            // A group can do without it.
            heap: Heap::new(self.file.as_fd(), layout, rank),
        })
    }
}

/// The slots of a group, as one of its ranks uses them.
pub struct Slots {
    base: NonNull<u8>,
    world_size: usize,
    rank: usize,
    /// Number of operations begun.
    operation: u64,
    /// Number of turns published.
    turn: u64,
    /// Digest of the header of the operation.
    digest: u64,
    /// Number of ranks, counted from rank 0, that are known to have published the turn.
    arrived: usize,
    /// `true` once a peer has performed another operation. Then this rank waits for nobody here.
    has_failed: bool,
    /// The heap of this rank. Blocks of it may outlive the slots.
    heap: Option<Arc<Heap>>,
}

// SAFETY: the mapping belongs to this value, whichever thread holds it.
unsafe impl Send for Slots {}

impl Slots {
    /// Begins an operation, whose message has these parts. The next turn publishes it.
    ///
    /// # Panics
    /// When the message is longer than a slot.
    pub fn begin<'a>(
        &mut self,
        header: &Header,
        bytes: usize,
        parts: impl Iterator<Item = (usize, &'a [u8])>,
    ) {
        self.operation += 1;
        self.digest = digest(header);
        let front = self.front(self.rank);
        // SAFETY: this rank alone writes its front, and all others have ended the last operation
        // with this copy.
        unsafe {
            (&raw mut (*front.as_ptr()).header).write(*header);
            (*front.as_ptr()).digest.store(self.digest, Relaxed);
        }
        for (at, part) in parts {
            self.write(bytes, at, part);
        }
        self.note_core();
    }

    /// Writes a part of this rank's message of `bytes`, for the next turn. No rank may read it in
    /// an earlier turn of the operation.
    ///
    /// # Panics
    /// When the part lies outside of the message.
    pub fn write(&mut self, bytes: usize, at: usize, part: &[u8]) {
        assert!(at + part.len() <= bytes);
        let target = self.message(self.rank, bytes);
        // SAFETY: the bytes are in bounds, and this rank's to write, as the caller promises. A
        // reader at the wrong time would see wrong values and nothing worse: see `Arena::read`.
        unsafe {
            let target = target.as_ptr().add(at);
            std::ptr::copy_nonoverlapping(part.as_ptr(), target, part.len());
        }
    }

    /// Publishes what was written, as the next turn of the operation.
    pub fn publish(&mut self) {
        self.turn += 1;
        self.arrived = 0;
        turns::publish(self.shared(self.rank).turn, self.turn);
    }

    /// Looks which ranks have published the turn, in the order of ranks up to the first that has
    /// not. Returns the number of ranks known.
    ///
    /// # Errors
    /// The rank of a peer that performs another operation.
    pub fn poll(&mut self) -> Result<usize, usize> {
        while self.arrived < self.world_size {
            let front = self.shared(self.arrived);
            if !turns::has_published(front.turn, self.turn) {
                break;
            }
            if self.differs(self.arrived) {
                self.has_failed = true;
                return Err(self.arrived);
            }
            self.arrived += 1;
        }
        Ok(self.arrived)
    }

    /// Returns whether a rank has published this rank's turn.
    #[must_use]
    pub fn has_published(&self, rank: usize) -> bool {
        rank < self.arrived || turns::has_published(self.shared(rank).turn, self.turn)
    }

    /// Returns whether a rank, which has published this rank's turn, performs another operation.
    #[must_use]
    pub fn differs(&self, rank: usize) -> bool {
        self.shared(rank).digest.load(Relaxed) != self.digest
    }

    /// Returns a part of a rank's message of `bytes`, which the rank has published.
    ///
    /// # Panics
    /// When the part lies outside of the message.
    #[must_use]
    pub fn read(&self, rank: usize, bytes: usize, part: std::ops::Range<usize>) -> &[u8] {
        assert!(part.end <= bytes);
        let start = self.message(rank, bytes);
        // SAFETY: in bounds and initialised; its rank does not write there before all have ended
        // the operation. See `Arena::read` for a process that breaks this promise.
        unsafe { std::slice::from_raw_parts(start.as_ptr().add(part.start), part.len()) }
    }

    /// Returns the heap of this rank, if there is one.
    #[must_use]
    pub const fn heap(&self) -> Option<&Arc<Heap>> {
        self.heap.as_ref()
    }

    /// Returns whether `bytes` from this offset on lie in a heap.
    #[must_use]
    pub fn heap_holds(&self, offset: usize, bytes: usize) -> bool {
        let heap = self.heap.as_ref();
        heap.is_some_and(|heap| heap.holds(offset, bytes))
    }

    /// Returns a part of a rank's heap. The ranks agree by turns when none of them writes there.
    ///
    /// # Panics
    /// When the part does not lie in the heap.
    #[must_use]
    pub fn read_heap(&self, rank: usize, part: std::ops::Range<usize>) -> &[u8] {
        let heap = self.heap.as_ref().expect("the group agreed on heaps");
        heap.read(rank, part)
    }

    /// Tells the others that the operation has failed here, and that this rank's memory may change
    /// from now on.
    pub fn abandon(&self) {
        turns::abandon(&self.presence(self.rank).abandoned, self.operation);
    }

    /// Returns a rank that had abandoned the operation before this rank read its memory, or while
    /// it did.
    #[must_use]
    pub fn abandoned_by(&self) -> Option<usize> {
        turns::has_read();
        let has_abandoned =
            |rank| turns::has_abandoned(&self.presence(rank).abandoned, self.operation);
        (0..self.world_size).find(|&rank| has_abandoned(rank))
    }

    /// Returns the header of the operation that a peer has published last here.
    #[must_use]
    pub fn header_of(&self, rank: usize) -> Header {
        // SAFETY: any bytes are a header. If the peer writes them meanwhile, they are mixed.
        unsafe { (&raw const (*self.front(rank).as_ptr()).header).read_volatile() }
    }

    /// Returns the header of a peer's operation in place of a collective that this rank performs by
    /// links: an operation of the same ordinal.
    #[must_use]
    pub fn foreign_header(&self, peer: usize, own: &Header) -> Option<Header> {
        (0..COPIES).find_map(|copy| {
            let front = self.front_of(peer, copy);
            // SAFETY: as in `header_of`; mixed bytes do not have their digest.
            let (header, known) = unsafe {
                let front = front.as_ptr();
                let header = (&raw const (*front).header).read_volatile();
                (header, (*front).digest.load(Relaxed))
            };
            let is_whole = signature::is_header(&header) && digest(&header) == known;
            (is_whole && signature::sequence(&header) == signature::sequence(own)).then_some(header)
        })
    }

    /// Returns whether this rank waits for others to publish its turn.
    #[must_use]
    pub const fn is_waiting(&self) -> bool {
        self.arrived < self.world_size && !self.has_failed
    }

    /// Wakes the ranks that sleep in this turn, which all ranks have published.
    pub fn wake_sleepers(&self) {
        let takes = |rank| turns::takes_sleeper(&self.presence(rank).asleep, self.turn);
        // All are taken, since one wake-up is for all.
        if (0..self.world_size).filter(|&rank| takes(rank)).count() > 0 {
            self.gate().fetch_add(1, Relaxed);
            let _ = futex::wake(self.gate(), futex::Flags::empty(), i32::MAX as u32);
        }
    }

    /// Sleeps until all ranks have published the turn, at most for `limit` and `NAP_MAX`. Returns
    /// whether this rank has slept and some are still missing.
    pub(in crate::link) fn nap(&self, limit: Duration) -> bool {
        let before = self.gate().load(Relaxed);
        let asleep = &self.presence(self.rank).asleep;
        turns::announce_sleep(asleep, self.turn);
        let is_missing = |rank| !self.has_published(rank);
        let waits = (self.arrived..self.world_size).any(is_missing);
        if waits {
            let limit = Timespec::try_from(limit.min(NAP_MAX)).expect("a nap is short");
            // An error ends the nap: a signal, the limit, or a wake-up that came before.
            let _ = futex::wait(self.gate(), futex::Flags::empty(), before, Some(&limit));
        }
        turns::awake(asleep);
        waits && (self.arrived..self.world_size).any(is_missing)
    }

    /// Publishes the CPU core of this thread.
    pub(in crate::link) fn note_core(&self) {
        let core = rustix::thread::sched_getcpu() as u32 + 1;
        let noted = &self.presence(self.rank).core;
        if noted.load(Relaxed) != core {
            noted.store(core, Relaxed);
        }
    }

    /// Returns the CPU core from which a rank published last, if it has published.
    pub(in crate::link) fn core_of(&self, rank: usize) -> Option<usize> {
        let noted = self.presence(rank).core.load(Relaxed);
        (noted as usize).checked_sub(1)
    }

    fn gate(&self) -> &AtomicU32 {
        // SAFETY: the mapping begins with it. Any bits are valid, and may change at any time.
        unsafe { &(*self.base.cast::<Head>().as_ptr()).gate.0 }
    }

    fn entry(&self, rank: usize) -> NonNull<Entry> {
        assert!(rank < self.world_size);
        // SAFETY: inside of the mapping, behind the gate.
        unsafe { self.base.add(size_of::<Head>()).cast::<Entry>().add(rank) }
    }

    fn front_of(&self, rank: usize, copy: usize) -> NonNull<Front> {
        assert!(copy < COPIES);
        // SAFETY: a part of the entry.
        unsafe {
            let fronts = &raw mut (*self.entry(rank).as_ptr()).fronts;
            NonNull::new_unchecked(fronts.cast::<Front>().add(copy))
        }
    }

    /// The front of a rank in this operation.
    fn front(&self, rank: usize) -> NonNull<Front> {
        self.front_of(rank, self.copy())
    }

    /// The numbers of a front. Nothing refers to its bytes, which may change at any time.
    fn shared(&self, rank: usize) -> Numbers<'_> {
        let front = self.front(rank).as_ptr();
        // SAFETY: atomics, for which any bits are valid and may change at any time.
        unsafe {
            Numbers {
                turn: &(*front).turn,
                digest: &(*front).digest,
            }
        }
    }

    fn presence(&self, rank: usize) -> &Presence {
        // SAFETY: atomics, as in `shared`.
        unsafe { &(*self.entry(rank).as_ptr()).presence }
    }

    const fn copy(&self) -> usize {
        self.operation as usize % COPIES
    }

    /// First byte of a rank's message of `bytes` in this operation.
    fn message(&self, rank: usize, bytes: usize) -> NonNull<u8> {
        assert!(bytes <= SLOT_BYTES_MAX);
        if bytes <= SHORT_BYTES {
            let front = self.front(rank).as_ptr();
            // SAFETY: a part of the front.
            return unsafe { NonNull::new_unchecked((&raw mut (*front).short).cast()) };
        }
        let slot = (rank * COPIES + self.copy()) * SLOT_BYTES_MAX;
        // SAFETY: inside of the mapping, whose length is `segment_bytes`.
        unsafe { self.base.add(entries_bytes(self.world_size) + slot) }
    }
}

/// The numbers that a rank publishes with its message.
struct Numbers<'a> {
    turn: &'a AtomicU64,
    digest: &'a AtomicU64,
}

impl Drop for Slots {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's, and no reference outlives it.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), segment_bytes(self.world_size)) };
    }
}

/// Bytes of all entries, in whole pages of any kernel that we know.
const fn entries_bytes(world_size: usize) -> usize {
    (size_of::<Head>() + world_size * size_of::<Entry>()).next_multiple_of(64 << 10)
}

/// Bytes that all ranks map besides the heaps.
const fn segment_bytes(world_size: usize) -> usize {
    entries_bytes(world_size) + world_size * COPIES * SLOT_BYTES_MAX
}

/// Place of the first heap.
const fn heaps_start(world_size: usize) -> usize {
    segment_bytes(world_size).next_multiple_of(HUGE_PAGE_BYTES)
}

/// Bytes of the segment with heaps of this size; `None` if they are too many.
fn file_bytes(world_size: usize, heap_bytes: u64) -> Option<u64> {
    let heaps = heap_bytes.checked_mul(world_size as u64)?;
    heaps.checked_add(heaps_start(world_size) as u64)
}

/// A digest of a header that differs for different headers, except by a chance of one in 2^64.
fn digest(header: &Header) -> u64 {
    /// A multiplier of G. Steele and S. Vigna, "Computationally easy, spectrally good multipliers
    /// for congruential pseudorandom number generators", Softw. Pract. Exp. 52 (2022).
    const MULTIPLIER: u64 = 0xd134_2543_de82_ef95;
    let words = header.chunks_exact(size_of::<u64>()).map(|word| {
        let word = word.try_into().expect("a header has whole words");
        u64::from_le_bytes(word)
    });
    let mixed = words.fold(HEADER_BYTES as u64, |mixed, word| {
        let next = (mixed ^ word).wrapping_mul(MULTIPLIER);
        next ^ (next >> 32)
    });
    mixed | 1
}

#[cfg(all(test, not(loom)))]
mod tests;
