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

/// The heap of a rank, at the beginning of the file or behind others.
fn heap(file: &OwnedFd, rank: usize, world_size: usize) -> Arc<Heap> {
    let layout = Layout {
        start: 0,
        bytes_of_each: BYTES,
        world_size,
    };
    Heap::new(file.as_fd(), layout, rank).unwrap()
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
    let (peer, heap) = (heap(&file, 0, 2), heap(&file, 1, 2));
    assert!(heap.addresses().is_empty(), "nothing is mapped yet");
    let block = heap.allocate(1000).unwrap();
    assert_eq!(heap.addresses().len(), BYTES);
    let _of_peer = peer.allocate(1);
    let offset = block.start().addr().get() - heap.addresses().start;
    assert_eq!(peer.read(1, offset..offset + 1000), [0; 1000]);
    fill(&block, 1000, 7);
    assert_eq!(peer.read(1, offset..offset + 1000), [7; 1000]);
    assert_eq!(peer.read(0, offset..offset + 1000), [0; 1000]);
    assert!(peer.holds(BYTES - 1, 1));
    assert!(!peer.holds(BYTES, 1));
    assert!(!peer.holds(usize::MAX, 2));
}

#[test]
fn memory_of_a_block_goes_back_to_the_system_and_comes_again_as_zeros() {
    let file = file(1);
    let heap = heap(&file, 0, 1);
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
    let heap = heap(&file, 0, 1);
    let block = heap.allocate(1).unwrap();
    drop((heap, file));
    fill(&block, 1, 1);
}

#[test]
fn a_heap_that_is_closed_gives_out_nothing_and_takes_blocks_back() {
    let file = file(1);
    let heap = heap(&file, 0, 1);
    let block = heap.allocate(1).unwrap();
    heap.close();
    assert!(heap.allocate(1).is_none());
    fill(&block, 1, 1);
    drop(block);
    assert_eq!(allocated(&file), 0);
}

#[test]
fn pages_are_allocated_without_the_advice_of_new_kernels_too() {
    let file = file(2);
    let heap = heap(&file, 1, 2);
    let block = heap.allocate(BYTES / 2).unwrap();
    block.remove().unwrap();
    assert_eq!(allocated(&file), 0);
    block.allocate_in_file().unwrap();
    assert_eq!(allocated(&file), BYTES / 2);
    fill(&block, BYTES / 2, 1);
    assert_eq!(allocated(&file), BYTES / 2, "these are its pages");
    drop(block);
    assert_eq!(allocated(&file), 0);
}

#[test]
fn locked_memory_is_given_back() {
    let file = file(1);
    let heap = heap(&file, 0, 1);
    let block = heap.allocate(1).unwrap();
    // SAFETY: changes nothing that the memory holds.
    let locked = unsafe { rustix::mm::mlock(block.start().as_ptr().cast(), 4096) };
    if locked.is_ok() {
        assert_eq!(block.advise(Advice::LinuxRemove), Err(Errno::INVAL));
    }
    drop(block);
    assert_eq!(allocated(&file), 0);
}

#[test]
fn a_heap_is_not_longer_than_the_memory_of_the_control_groups() {
    let root = std::env::temp_dir().join(format!("gradring-groups-{}", std::process::id()));
    let write = |path: &str, limit: &str| {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, limit).unwrap();
    };
    let own = "4:cpu,memory:/old/one\n1:name=systemd:/x\n0::/job/rank\n";
    assert_eq!(memory_limit(&root, own), u64::MAX);
    write("memory.max", "9000\n");
    write("job/rank/memory.max", "max\n");
    write("x/memory.max", "1\n");
    assert_eq!(memory_limit(&root, ""), 9000);
    assert_eq!(memory_limit(&root, own), 9000);
    write("job/memory.max", "8000\n");
    assert_eq!(memory_limit(&root, own), 8000);
    write("memory/old/one/memory.limit_in_bytes", "7000\n");
    assert_eq!(memory_limit(&root, own), 7000);
    write("memory/memory.limit_in_bytes", "6000\n");
    assert_eq!(memory_limit(&root, own), 6000);
    std::fs::remove_dir_all(root).unwrap();
}
