//! Every decoder on messages of correct peers, with up to four changes each. No decoder panics or
//! accepts a forgery, and none allocates an announced length before its bytes have arrived.
//!
//! `GRADRING_FUZZ_SEED` and `GRADRING_FUZZ_EXECUTIONS` repeat a failure, or search longer.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use gradring_fuzzing::{DECODERS, Decoder};

const EXECUTIONS: u64 = 50_000;
/// Bound on a message of a member, with a margin for everything else.
const ALLOCATION_BYTES_MAX: usize = (1 << 20) + (64 << 10);

/// The system's allocator, which records this thread's largest allocation.
struct Watchful;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: all calls go to the system's allocator.
unsafe impl GlobalAlloc for Watchful {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.set(LARGEST.get().max(layout.size()));
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watchful = Watchful;

/// splitmix64 of G. Steele, D. Lea and C. Flood: every seed is a good one.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    /// One of `samples` with up to four changes.
    fn mutant(&mut self, samples: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = samples[self.below(samples.len())].clone();
        for _ in 0..self.below(5) {
            let at = self.below(bytes.len());
            let end = at + self.below(bytes.len() - at);
            match self.below(6) {
                0 if at < bytes.len() => bytes[at] ^= 1 << self.below(8),
                1 if at < bytes.len() => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][self.below(5)],
                2 => bytes.truncate(at),
                3 => drop(bytes.drain(at..end)),
                4 => drop(bytes.splice(at..at, [0xff; 9])),
                _ => {
                    let other = &samples[self.below(samples.len())];
                    bytes.splice(at..end, other[self.below(other.len())..].iter().copied());
                }
            }
        }
        bytes
    }
}

fn setting(name: &str, default: u64) -> u64 {
    let text = std::env::var(name).ok();
    text.map_or(default, |text| text.parse().expect("a number"))
}

fn hold(decoder: &Decoder, bytes: &[u8]) {
    LARGEST.set(0);
    (decoder.run)(bytes);
    let largest = LARGEST.get();
    assert!(
        largest <= ALLOCATION_BYTES_MAX,
        "{largest} bytes were allocated for a message of {}",
        bytes.len()
    );
}

#[test]
fn decoders_survive_whatever_arrives() {
    let first = setting("GRADRING_FUZZ_SEED", 1);
    let executions = setting("GRADRING_FUZZ_EXECUTIONS", EXECUTIONS);
    for decoder in &DECODERS {
        let samples = (decoder.samples)();
        for seed in first..first + executions {
            let bytes = Random(seed).mutant(&samples);
            let held = catch_unwind(AssertUnwindSafe(|| hold(decoder, &bytes)));
            assert!(
                held.is_ok(),
                "{} fails on {bytes:?}; repeat with GRADRING_FUZZ_SEED={seed} \
                 GRADRING_FUZZ_EXECUTIONS=1 cargo test -p gradring-core --test decoders",
                decoder.name
            );
        }
    }
}

#[test]
fn a_giant_length_allocates_nothing() {
    for decoder in &DECODERS {
        for length in [u32::MAX, u32::MAX >> 1, (1 << 20) + 1, 1 << 20] {
            hold(decoder, &length.to_le_bytes());
        }
    }
}
