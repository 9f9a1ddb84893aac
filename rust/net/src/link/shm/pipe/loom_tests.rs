//! Small transfers in all interleavings, with all values that weak memory may show.
//!
//! The ring's bytes are loom cells, which notice every access that is not ordered after the other
//! side's last one. A sleep that nobody ends is a deadlock, which loom reports.

use loom::cell::UnsafeCell;
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use super::*;

/// Bytes of a ring: so few that every byte meets an empty or a full ring, and the seam.
const CAPACITY: usize = 1;
/// Bytes of a transfer.
const COUNT: u8 = 2;
/// Preemptions per run. According to loom, three find nearly all mistakes; more would take hours.
const PREEMPTIONS_MAX: usize = 3;

/// State that two sides share: the memory, and a doorbell each.
struct World {
    shared: ControlBlock,
    /// Indexed by the side that produces.
    rings: [[UnsafeCell<u8>; CAPACITY]; 2],
    bells: [Bell; 2],
}

/// An eventfd.
struct Bell {
    rung: Mutex<bool>,
    changed: Condvar,
}

/// One side, used as `ShmLink` and a transport use it.
struct End {
    world: Arc<World>,
    side: Side,
}

/// Runs side 0 and side 1 in every possible way.
fn explore(run_0: fn(&mut End), run_1: fn(&mut End)) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS_MAX);
    builder.check(move || {
        let world = Arc::new(World {
            shared: ControlBlock::new(),
            rings: [(); 2].map(|()| [(); CAPACITY].map(|()| UnsafeCell::new(0))),
            bells: [(); 2].map(|()| Bell {
                rung: Mutex::new(false),
                changed: Condvar::new(),
            }),
        });
        let end = |number| End {
            world: Arc::clone(&world),
            side: Side::new(number, CAPACITY),
        };
        let (mut end_0, mut end_1) = (end(0), end(1));
        let other = thread::spawn(move || run_1(&mut end_1));
        run_0(&mut end_0);
        other.join().unwrap();
    });
}

impl End {
    /// Sends one byte when there is capacity.
    fn send(&mut self, byte: u8) -> Result<(), Broken> {
        while self.side.free_capacity(&self.world.shared, 1)? == 0 {
            self.sleep(Direction::Send);
        }
        let cell = &self.world.rings[self.side.number][self.side.write_position()];
        // SAFETY: loom checks that nobody else accesses the cell.
        cell.with_mut(|cell| unsafe { *cell = byte });
        if self.side.publish(&self.world.shared, 1) {
            self.ring();
        }
        Ok(())
    }

    /// Receives one byte when there is one.
    fn receive(&mut self) -> Result<u8, Broken> {
        while self.side.filled(&self.world.shared, 1)? == 0 {
            self.sleep(Direction::Receive);
        }
        let cell = &self.world.rings[1 - self.side.number][self.side.read_position()];
        // SAFETY: loom checks that nobody else writes the cell.
        let byte = cell.with(|cell| unsafe { *cell });
        if self.side.give_back(&self.world.shared, 1) {
            self.ring();
        }
        Ok(byte)
    }

    fn sleep(&self, direction: Direction) {
        self.side.announce_sleep(&self.world.shared, direction);
        let bell = &self.world.bells[self.side.number];
        if !self.side.ready(&self.world.shared, direction) {
            let mut rung = bell.rung.lock().unwrap();
            while !*rung {
                rung = bell.changed.wait(rung).unwrap();
            }
        }
        self.side.awake(&self.world.shared);
        *bell.rung.lock().unwrap() = false;
    }

    fn close(&self) {
        if self.side.close(&self.world.shared) {
            self.ring();
        }
    }

    fn ring(&self) {
        let bell = &self.world.bells[1 - self.side.number];
        *bell.rung.lock().unwrap() = true;
        bell.changed.notify_one();
    }
}

#[test]
fn bytes_arrive_in_order_and_the_end_comes_after_them() {
    explore(
        |end| {
            for byte in 0..COUNT {
                end.send(byte).unwrap();
            }
            end.close();
        },
        |end| {
            for byte in 0..COUNT {
                assert_eq!(end.receive(), Ok(byte));
            }
            assert_eq!(end.receive(), Err(Broken::closed()));
        },
    );
}

#[test]
fn both_directions_work_at_once() {
    let run = |end: &mut End| {
        end.send(7).unwrap();
        assert_eq!(end.receive(), Ok(7));
    };
    explore(run, run);
}

#[test]
fn the_end_wakes_a_sender() {
    explore(
        |end| {
            let sent = (0..).find_map(|byte| end.send(byte).err());
            assert_eq!(sent, Some(Broken::closed()));
        },
        |end| {
            end.close();
        },
    );
}
