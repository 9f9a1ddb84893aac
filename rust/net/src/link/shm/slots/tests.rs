use std::sync::Barrier;
use std::time::Instant;

use super::*;
use gradring_proto::collective::Call;
use gradring_proto::schedule::Algorithm;
use gradring_proto::wire::signature::Signature;

fn header(sequence: u64, count: usize) -> Header {
    Signature::of(&Call::float_sum(count), Algorithm::OneShot).header(0, sequence, 0)
}

/// Slots of all ranks in this process, each with its own mapping.
fn group(world_size: usize) -> Vec<Slots> {
    let file = SlotFile::create(world_size).unwrap();
    (0..world_size)
        .map(|rank| {
            let file = file.as_fd().try_clone_to_owned().unwrap();
            let received = SlotFile::received(file, world_size).unwrap();
            received.map(rank).unwrap()
        })
        .collect()
}

fn begin(slots: &mut Slots, sequence: u64, message: &[u8]) {
    let header = header(sequence, message.len());
    slots.begin(&header, message.len(), [(0, message)].into_iter());
    slots.publish();
}

/// Waits until all ranks have published, asleep or awake.
fn await_all(slots: &mut Slots, sleeps: bool) {
    while slots.poll().unwrap() < slots.world_size {
        match sleeps {
            true => drop(slots.nap(NAP_MAX)),
            false => std::thread::yield_now(),
        }
    }
    slots.wake_sleepers();
}

#[test]
fn all_ranks_read_what_each_has_written_in_each_operation() {
    for world_size in [2, 3, 5] {
        std::thread::scope(|scope| {
            for mut slots in group(world_size) {
                scope.spawn(move || {
                    for operation in 1..200 {
                        let length = [0, 4, 48, 52, 5000, SLOT_BYTES_MAX][operation % 6];
                        let of = |rank: usize| vec![(operation + rank) as u8; length];
                        let own = of(slots.rank);
                        begin(&mut slots, operation as u64, &own);
                        let sleeps = (operation + slots.rank) % 3 > 0;
                        await_all(&mut slots, sleeps);
                        let most = 1.min(length)..length;
                        for rank in 0..world_size {
                            assert_eq!(
                                slots.read(rank, length, most.clone()),
                                &of(rank)[most.clone()]
                            );
                        }
                        // A second turn changes the byte that no rank has read.
                        if length > 0 {
                            slots.write(length, 0, &[7]);
                            slots.publish();
                            await_all(&mut slots, sleeps);
                            let changed =
                                (0..world_size).all(|rank| slots.read(rank, length, 0..1) == [7]);
                            assert!(changed);
                        }
                    }
                });
            }
        });
    }
}

#[test]
fn a_nap_ends_when_all_have_published_and_otherwise_soon() {
    let mut group = group(2);
    let (mut second, mut first) = (group.pop().unwrap(), group.pop().unwrap());
    begin(&mut first, 1, b"abcd");
    assert_eq!(first.poll(), Ok(1));
    assert!(first.is_waiting());
    let started = Instant::now();
    assert!(first.nap(Duration::from_secs(60)));
    assert!(started.elapsed() >= NAP_MAX);
    let ready = Barrier::new(2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            ready.wait();
            while first.nap(NAP_MAX) {}
            assert_eq!(first.poll(), Ok(2));
        });
        ready.wait();
        std::thread::sleep(Duration::from_millis(5));
        begin(&mut second, 1, b"efgh");
        await_all(&mut second, false);
    });
    assert!(!first.is_waiting());
    assert!(!first.nap(NAP_MAX), "nobody is missing");
}

#[test]
fn a_peer_in_another_operation_is_named_with_its_header() {
    let mut group = group(3);
    begin(&mut group[0], 5, b"abcd");
    begin(&mut group[1], 5, b"abcd");
    begin(&mut group[2], 5, b"abcdefgh");
    assert_eq!(group[0].poll(), Err(2));
    assert_eq!(group[0].header_of(2), header(5, 8));
    assert!(group[0].has_published(1));
    // A rank that is in a collective over links sees both operations of this ordinal.
    assert_eq!(
        group[0].foreign_header(1, &header(5, 9)),
        Some(header(5, 4))
    );
    assert_eq!(group[0].foreign_header(1, &header(6, 9)), None);
    assert_eq!(group[0].foreign_header(1, &header(4, 9)), None);
}

#[test]
fn each_rank_knows_from_which_core_another_has_published_last() {
    let mut group = group(2);
    assert_eq!(group[0].core_of(1), None);
    crate::link::tcp::on_each_core(|core| {
        group[1].note_core();
        assert_eq!(group[0].core_of(1), Some(core));
    });
    assert_eq!(group.remove(0).core_of(0), None);
}

#[test]
fn memory_of_another_size_or_without_seals_is_refused() {
    let file = |ranks| SlotFile::create(ranks).unwrap().file;
    assert!(SlotFile::received(file(3), 2).is_err());
    assert!(SlotFile::received(file(2), 2).is_ok());
    let plain = rustix::fs::memfd_create("plain", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&plain, heaps_start(2) as u64).unwrap();
    assert!(SlotFile::received(plain, 2).is_err());
}

#[test]
fn a_group_does_without_heaps_that_the_system_refuses() {
    for bytes in [1 << 62, usize::MAX] {
        let file = SlotFile::create_with(2, bytes).unwrap();
        assert_eq!(file.heap_bytes, 0);
        assert!(file.map(0).unwrap().heap().is_none());
    }
    let group = group(2);
    let heap = group[0].heap().expect("this machine has heaps");
    assert!(heap.addresses().is_empty(), "nobody has asked for a block");
}

#[test]
fn a_rank_that_abandons_an_operation_is_known_in_this_operation() {
    let mut group = group(3);
    for sequence in 1..4 {
        for slots in &mut group {
            begin(slots, sequence, b"abcd");
        }
        assert!(group.iter().all(|slots| slots.abandoned_by().is_none()));
        if sequence == 2 {
            group[1].abandon();
            assert!(group.iter().all(|slots| slots.abandoned_by() == Some(1)));
        }
    }
}

#[test]
fn headers_that_differ_in_a_bit_have_other_digests() {
    let own = header(3, 4);
    for place in 0..8 * HEADER_BYTES {
        let mut other = own;
        other[place / 8] ^= 1 << (place % 8);
        assert_ne!(digest(&own), digest(&other));
    }
}
