//! Speed of a link between two threads, each with its own mapping, as two processes have.
//!
//! `cargo test --release -p gradring-core --lib shm::bench -- --ignored --nocapture`

use std::io::{IoSlice, IoSliceMut};
use std::time::{Duration, Instant};

use super::tests::link;
use super::{RING_BYTES_MAX, RING_BYTES_MIN, ShmLink};

/// Larger than the caches.
const BUFFER_BYTES: usize = 100 << 20;
/// Moved and timed at once: less than a time slice, since other processes disturb spinning ones.
const PIECE_BYTES: usize = 10 << 20;
const ROUNDS: usize = 60;
const ROUND_TRIPS: u32 = 2_000;
/// Bytes that a receiver handles at a time when it works in place.
const TILE_BYTES: usize = 128 << 10;
/// Attempts before a waiting thread lets others have the processor.
const SPINS: u32 = 2_000;

#[test]
#[ignore = "measures"]
fn speed() {
    if cfg!(debug_assertions) {
        panic!("measure with --release");
    }
    let [source, mut target, mut other_target] = [1, 2, 3].map(|byte| vec![byte; BUFFER_BYTES]);
    let pieces = BUFFER_BYTES / PIECE_BYTES;
    let piece = |round: usize| round % pieces * PIECE_BYTES..(round % pieces + 1) * PIECE_BYTES;
    report("memcpy, one thread", |round| {
        target[piece(round)].copy_from_slice(&source[piece(round)]);
    });
    for capacity in [RING_BYTES_MIN, RING_BYTES_MAX, RING_BYTES_MAX * 4] {
        let [(mut a, _bell_a), (mut b, _bell_b)] = link(capacity);
        println!("rings of {} KiB", capacity >> 10);
        report_round_trips(&mut a, &mut b);
        report("one direction, into place", |round| {
            let (source, target) = (&source[piece(round)], &mut target[piece(round)]);
            run(
                || transfer(&mut a, source, &mut []),
                || transfer(&mut b, &[], target),
            );
        });
        report("one direction, read in the ring", |round| {
            let source = &source[piece(round)];
            run(|| transfer(&mut a, source, &mut []), || sum(&mut b));
        });
        report("both directions, into place", |round| {
            let (source, target) = (&source[piece(round)], &mut target[piece(round)]);
            let other_target = &mut other_target[piece(round)];
            run(
                || transfer(&mut a, source, other_target),
                || transfer(&mut b, source, target),
            );
        });
    }
}

fn run(a: impl FnOnce() + Send, b: impl FnOnce()) {
    std::thread::scope(|scope| {
        scope.spawn(a);
        b();
    });
}

/// Prints quartile and best of the rates at which `work` moves a piece (per direction).
fn report(name: &str, mut work: impl FnMut(usize)) {
    let times = measure(&mut work);
    let gbps = |time: Duration| PIECE_BYTES as f64 / time.as_secs_f64() / 1e9;
    let (quartile, best) = (gbps(times[ROUNDS / 4]), gbps(times[0]));
    println!("{name:<32} {quartile:6.1} GB/s upper quartile {best:6.1} best");
}

fn report_round_trips(a: &mut ShmLink, b: &mut ShmLink) {
    let message = [7; 64];
    let times = measure(&mut |_| {
        run(
            || {
                for _ in 0..ROUND_TRIPS {
                    transfer(a, &message, &mut []);
                    transfer(a, &[], &mut [0; 64]);
                }
            },
            || {
                for _ in 0..ROUND_TRIPS {
                    transfer(b, &[], &mut [0; 64]);
                    transfer(b, &message, &mut []);
                }
            },
        );
    });
    let [quartile, best] =
        [times[ROUNDS / 4], times[0]].map(|time| (time / ROUND_TRIPS).as_nanos());
    println!("round trip of 64 bytes           {quartile:6}   ns lower quartile {best:6} best");
}

fn measure(work: &mut impl FnMut(usize)) -> Vec<Duration> {
    let mut times: Vec<Duration> = (0..ROUNDS)
        .map(|round| {
            let started = Instant::now();
            work(round);
            started.elapsed()
        })
        .collect();
    times.sort();
    times
}

fn pause(spins: &mut u32) {
    *spins += 1;
    if spins.is_multiple_of(SPINS) {
        std::thread::yield_now();
    }
    std::hint::spin_loop();
}

/// Sends and receives in turns, spinning.
fn transfer(link: &mut ShmLink, source: &[u8], target: &mut [u8]) {
    let (mut sent, mut received, mut spins) = (0, 0, 0);
    while sent < source.len() || received < target.len() {
        let mut moved = false;
        if sent < source.len() {
            let end = source.len().min(sent + (1 << 20));
            let count = link.try_send(&[IoSlice::new(&source[sent..end])]).unwrap();
            sent += count.unwrap_or(0);
            moved |= count.is_some();
        }
        if received < target.len() {
            let end = target.len().min(received + (1 << 20));
            let parts = &mut [IoSliceMut::new(&mut target[received..end])];
            let count = link.try_receive(parts).unwrap();
            received += count.unwrap_or(0);
            moved |= count.is_some();
        }
        if !moved {
            pause(&mut spins);
        }
    }
}

/// Adds up what arrives, where it is.
fn sum(link: &mut ShmLink) {
    let (mut received, mut sum, mut spins) = (0, 0_u64, 0);
    while received < PIECE_BYTES {
        let bytes = link.readable().unwrap();
        let count = bytes.len().min(TILE_BYTES);
        if count == 0 {
            pause(&mut spins);
            continue;
        }
        let words = bytes[..count].chunks_exact(8);
        sum += words
            .map(|word| u64::from_le_bytes(word.try_into().unwrap()))
            .fold(0, u64::wrapping_add)
            & 1;
        link.consume(count);
        received += count;
    }
    std::hint::black_box(sum);
}
