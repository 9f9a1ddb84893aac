use std::os::fd::{AsFd as _, OwnedFd};

use rustix::fs::{fstat, ftruncate};

use super::*;
use crate::link::shm::arena::create_file;

const BYTES: usize = 8 * HUGE_PAGE_BYTES;

fn file(ranks: usize) -> OwnedFd {
    let file = create_file().unwrap();
    ftruncate(&file, (ranks * BYTES) as u64).unwrap();
    file
}

fn fill(block: &Block, bytes: usize, value: u8) {
    // SAFETY: the block has so many bytes, and nothing refers to them.
    unsafe { block.start().write_bytes(value, bytes) };
}

/// Bytes of memory behind the file.
fn allocated(file: &OwnedFd) -> usize {
    fstat(file).unwrap().st_blocks as usize * 512
}

#[test]
fn what_a_rank_writes_into_a_block_is_what_all_read() {
    let file = file(2);
    let heap = Heap::map(file.as_fd(), BYTES, BYTES).unwrap();
    let heaps = Heaps::map(file.as_fd(), 0, BYTES, 2).unwrap();
    let block = heap.allocate(1000).unwrap();
    let offset = block.start().addr().get() - heap.addresses().start;
    assert_eq!(heaps.read(1, offset..offset + 1000), [0; 1000]);
    fill(&block, 1000, 7);
    assert_eq!(heaps.read(1, offset..offset + 1000), [7; 1000]);
    assert_eq!(heaps.read(0, offset..offset + 1000), [0; 1000]);
    assert!(heaps.holds(BYTES - 1, 1));
    assert!(!heaps.holds(BYTES, 1));
    assert!(!heaps.holds(usize::MAX, 2));
}

#[test]
fn memory_of_a_block_goes_back_to_the_system_and_comes_again_as_zeros() {
    let file = file(1);
    let heap = Heap::map(file.as_fd(), 0, BYTES).unwrap();
    assert_eq!(allocated(&file), 0);
    let block = heap.allocate(BYTES / 2).unwrap();
    assert!(allocated(&file) >= BYTES / 2);
    assert!(heap.allocate(BYTES).is_none());
    let start = block.start();
    fill(&block, BYTES / 2, 3);
    drop(block);
    assert_eq!(allocated(&file), 0);
    let again = heap.allocate(BYTES).unwrap();
    assert_eq!(again.start(), start);
    // SAFETY: the block has these bytes, and nothing writes them meanwhile.
    let bytes = unsafe { std::slice::from_raw_parts(again.start().as_ptr(), BYTES) };
    assert!(bytes.iter().all(|&byte| byte == 0));
}

#[test]
fn a_block_outlives_everything_else() {
    let file = file(1);
    let heap = Heap::map(file.as_fd(), 0, BYTES).unwrap();
    let block = heap.allocate(1).unwrap();
    drop((heap, file));
    fill(&block, 1, 1);
}
