use std::io::{IoSlice, IoSliceMut};
use std::net::{TcpListener, TcpStream};
use std::os::unix::thread::JoinHandleExt as _;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU32, Ordering};

use super::*;
use crate::link::Direction;
use crate::link::poll::WakeUp;
use crate::link::shm::tests::sleep;

const PATIENCE: Duration = Duration::from_secs(20);
const RING_BYTES: usize = 64 << 10;
/// Environment variable with the address at which the test's second process reaches the first.
const ADDRESS_VARIABLE: &str = "GRADRING_TEST_ADDRESS";

static NO_SLOTS: GroupSlots = GroupSlots {
    world_size: 2,
    own: None,
    received: None,
};

type Outcome = io::Result<Result<Paired, String>>;

fn pair_within(
    stream: &mut Connection,
    initiator: bool,
    doorbell: &impl AsFd,
    patience: Duration,
) -> Outcome {
    let own = own(initiator, doorbell);
    pair(
        stream,
        &own,
        RING_BYTES,
        Instant::now() + patience,
        &mut || true,
    )
}

fn own(initiator: bool, doorbell: &impl AsFd) -> Own<'_> {
    Own {
        name: if initiator { "rank 0" } else { "rank 1" },
        initiator,
        doorbell: doorbell.as_fd(),
        slots: &NO_SLOTS,
    }
}

/// Runs an initiator against `responder`, which gets the other end of its connection.
fn with_initiator(responder: impl FnOnce(Connection) -> Outcome) -> (Outcome, Outcome) {
    let (mut ours, theirs) = connection();
    std::thread::scope(|scope| {
        let initiator = scope.spawn(move || {
            let outcome = pair_within(&mut ours, true, &WakeUp::new()?, PATIENCE);
            if outcome.is_ok() {
                ours.write_all(b"next")?;
            }
            outcome
        });
        let stream = theirs.tcp().try_clone().unwrap();
        let mut stream = Connection::new(stream).unwrap();
        let responded = responder(theirs);
        let initiated = initiator.join().unwrap();
        if initiated.is_ok() {
            let mut next = [0; 4];
            let mut stream = DeadlineStream::new(&mut stream, Instant::now() + PATIENCE);
            stream.read_exact(&mut next).unwrap();
            assert_eq!(&next, b"next", "something was left unread");
        }
        (initiated, responded)
    })
}

/// Runs a responder that takes up the offer by `accept`.
fn respond_with(
    mut stream: Connection,
    accept: impl FnOnce(Vec<u8>) -> Result<Paired, String>,
) -> Outcome {
    let mut go_on = || true;
    let mut talk = talk(&mut stream, &mut go_on);
    let accepted = accept(talk.receive()?.unwrap());
    answer(&mut talk, accepted)
}

fn talk<'a>(stream: &'a mut Connection, go_on: GoOn<'a>) -> Talk<'a> {
    Talk {
        stream,
        deadline: Instant::now() + PATIENCE,
        go_on,
    }
}

fn connection() -> (Connection, Connection) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let connected = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let answerer = listener.accept().unwrap().0;
    [connected, answerer]
        .map(|tcp| Connection::new(tcp).unwrap())
        .into()
}

fn assert_connected(initiator: &mut ShmLink, responder: &mut ShmLink) {
    for (from, to) in [(0, 1), (1, 0)] {
        let ends = [&mut *initiator, &mut *responder];
        assert_eq!(ends[from].try_send(&[IoSlice::new(b"hello")]), Ok(Some(5)));
        assert_eq!(ends[to].readable(), Ok(&b"hello"[..]));
        ends[to].consume(5);
    }
}

/// The reason that both sides give for not sharing memory.
fn common_reason((initiated, responded): (Outcome, Outcome)) -> String {
    let reasons = [initiated, responded].map(|outcome| outcome.unwrap().err().unwrap());
    assert_eq!(reasons[0], reasons[1]);
    reasons[0].clone()
}

#[test]
fn two_ranks_of_one_host_pair() {
    let (initiated, responded) =
        with_initiator(|mut stream| pair_within(&mut stream, false, &WakeUp::new()?, PATIENCE));
    assert_connected(
        &mut initiated.unwrap().unwrap().0,
        &mut responded.unwrap().unwrap().0,
    );
}

#[test]
fn the_slots_of_the_group_are_passed_on_with_the_link() {
    let (mut ours, mut theirs) = connection();
    let (initiated, responded) = std::thread::scope(|scope| {
        let initiator = scope.spawn(move || {
            let slots = GroupSlots {
                world_size: 2,
                own: Some(SlotFile::create(2).unwrap()),
                received: None,
            };
            let bell = WakeUp::new()?;
            let own = Own {
                slots: &slots,
                ..own(true, &bell)
            };
            let deadline = Instant::now() + PATIENCE;
            pair(&mut ours, &own, RING_BYTES, deadline, &mut || true)
        });
        let responded = pair_within(&mut theirs, false, &WakeUp::new().unwrap(), PATIENCE);
        (initiator.join().unwrap(), responded)
    });
    assert!(initiated.unwrap().unwrap().1.is_none());
    assert!(responded.unwrap().unwrap().1.is_some());
}

#[test]
fn strangers_that_connect_first_are_sent_away() {
    let bell = WakeUp::new().unwrap();
    let mut strangers = Vec::new();
    let (initiated, responded) = with_initiator(|stream| {
        respond_with(stream, |offer| {
            let name = &offer[..RANDOM_BYTES];
            for number in 0..6 {
                let mut stranger = reach(name, PATIENCE).unwrap();
                // Some guess the nonce, some send too few bytes, some send nothing.
                stranger
                    .write_all(&vec![number; 8 * usize::from(number % 3)])
                    .unwrap();
                strangers.push(stranger);
            }
            accept(&offer, &own(false, &bell), RING_BYTES, PATIENCE)
        })
    });
    assert_connected(
        &mut initiated.unwrap().unwrap().0,
        &mut responded.unwrap().unwrap().0,
    );
    for stranger in &strangers {
        assert!(
            passing::receive::<2>(stranger).is_err(),
            "a stranger got memory"
        );
    }
}

#[test]
fn a_responder_that_signals_interrupt_waits_on() {
    const SIGNALS: u32 = 1000;
    static HANDLED: AtomicU32 = AtomicU32::new(0);
    extern "C" fn handle(_: libc::c_int) {
        HANDLED.fetch_add(1, Ordering::Relaxed);
    }
    let handler = handle as extern "C" fn(libc::c_int);
    // SAFETY: the handler does nothing but count, and nothing else uses this signal.
    unsafe { libc::signal(libc::SIGUSR2, handler as libc::sighandler_t) };
    let offer = Offer::new(&own(true, &WakeUp::new().unwrap()), RING_BYTES).unwrap();
    let statement = [offer.name, offer.nonce].concat();
    let responder = std::thread::spawn(move || {
        accept(
            &statement,
            &own(false, &WakeUp::new().unwrap()),
            RING_BYTES,
            PATIENCE,
        )
    });
    let (mut ours, _theirs) = connection();
    let mut go_on = || true;
    let mut talk = talk(&mut ours, &mut go_on);
    let socket = offer.await_responder(&mut talk).unwrap();
    // The responder waits for the memory now, or will in a moment.
    while HANDLED.load(Ordering::Relaxed) < SIGNALS && !responder.is_finished() {
        let handled = HANDLED.load(Ordering::Relaxed);
        // SAFETY: the thread has not been joined.
        unsafe { libc::pthread_kill(responder.as_pthread_t(), libc::SIGUSR2) };
        while HANDLED.load(Ordering::Relaxed) == handled && !responder.is_finished() {
            std::thread::yield_now();
        }
    }
    let bell = WakeUp::new().unwrap();
    // If the responder has given up, its own error is more informative.
    let _ = passing::send(&socket, &[offer.file.as_fd(), bell.as_fd()]);
    let responded = responder.join().unwrap();
    assert!(responded.is_ok(), "{:?}", responded.err());
}

#[test]
fn who_does_not_find_the_socket_is_on_another_host() {
    let bell = WakeUp::new().unwrap();
    let reason = common_reason(with_initiator(|stream| {
        respond_with(stream, |mut offer| {
            offer[0] ^= 1;
            accept(&offer, &own(false, &bell), RING_BYTES, PATIENCE)
        })
    }));
    assert!(reason.starts_with("different hosts"), "{reason}");
}

#[test]
fn who_says_a_wrong_nonce_gets_nothing() {
    let bell = WakeUp::new().unwrap();
    let reason = common_reason(with_initiator(|stream| {
        respond_with(stream, |mut offer| {
            offer[RANDOM_BYTES] ^= 1;
            accept(&offer, &own(false, &bell), RING_BYTES, PATIENCE)
        })
    }));
    assert!(
        reason.starts_with("the memory did not get across"),
        "{reason}"
    );
}

#[test]
fn memory_of_another_size_than_agreed_is_refused() {
    let bell = WakeUp::new().unwrap();
    let reason = common_reason(with_initiator(|stream| {
        respond_with(stream, |offer| {
            accept(&offer, &own(false, &bell), 2 * RING_BYTES, PATIENCE)
        })
    }));
    assert!(reason.ends_with("the memory has another size"), "{reason}");
}

#[test]
fn a_doorbell_that_could_block_or_kill_is_refused() {
    let (socket, _) = connection();
    let reason = common_reason(with_initiator(|mut stream| {
        pair_within(&mut stream, false, &socket.as_fd(), PATIENCE)
    }));
    assert_eq!(reason, "the initiator failed: the doorbell is no eventfd");
}

#[test]
fn an_initiator_without_memory_says_so() {
    let (mut ours, mut theirs) = connection();
    // Longer than a reason may be, with its limit inside a character.
    let reason = format!("x{}", "é".repeat(255));
    let ours = talk(&mut ours, &mut || true).refuse(reason).unwrap();
    let theirs = pair_within(&mut theirs, false, &WakeUp::new().unwrap(), PATIENCE).unwrap();
    let (ours, theirs) = (ours.err().unwrap(), theirs.err().unwrap());
    assert_eq!(ours, theirs);
    assert!(!theirs.contains('\u{fffd}'));
}

#[test]
fn a_partner_that_goes_or_says_nothing_is_an_error() {
    let bell = WakeUp::new().unwrap();
    let kind = |outcome: Outcome| outcome.err().unwrap().kind();
    for initiator in [true, false] {
        let (mut ours, theirs) = connection();
        let outcome = pair_within(&mut ours, initiator, &bell, Duration::from_millis(50));
        assert_eq!(kind(outcome), ErrorKind::TimedOut);
        let (own, deadline) = (own(initiator, &bell), Instant::now() + PATIENCE);
        let outcome = pair(&mut ours, &own, RING_BYTES, deadline, &mut || false);
        assert_eq!(kind(outcome), ErrorKind::Other);
        drop(theirs);
        let (mut ours, theirs) = connection();
        drop(theirs);
        let outcome = pair_within(&mut ours, initiator, &bell, PATIENCE);
        assert_eq!(kind(outcome), ErrorKind::UnexpectedEof);
    }
}

#[test]
fn two_processes_exchange_bytes() {
    const TOTAL: usize = 3 << 20;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--ignored", "link::shm::pairing::tests::echo"])
        .env(ADDRESS_VARIABLE, listener.local_addr().unwrap().to_string())
        .spawn();
    let mut child = Ending(child.unwrap());
    let mut stream = Connection::new(listener.accept().unwrap().0).unwrap();
    let bell = WakeUp::new().unwrap();
    let (mut link, _) = pair_within(&mut stream, true, &bell, PATIENCE)
        .unwrap()
        .unwrap();
    let bytes: Vec<u8> = (0..TOTAL).map(|index| ((index * 7) >> 3) as u8).collect();
    let mut echoed = vec![0; TOTAL];
    let (mut sent, mut received) = (0, 0);
    while received < TOTAL {
        let mut directions = vec![Direction::Receive];
        if sent < TOTAL {
            directions.push(Direction::Send);
            let parts = [IoSlice::new(&bytes[sent..])];
            sent += link.try_send(&parts).unwrap().unwrap_or(0);
        }
        let parts = &mut [IoSliceMut::new(&mut echoed[received..])];
        received += link.try_receive(parts).unwrap().unwrap_or(0);
        if received < TOTAL {
            sleep(&link, &bell, &directions);
        }
    }
    assert!(bytes == echoed);
    drop(link);
    assert!(child.0.wait().unwrap().success());
}

#[test]
#[ignore = "the second process of another test"]
fn echo() {
    let tcp = TcpStream::connect(std::env::var(ADDRESS_VARIABLE).unwrap()).unwrap();
    let mut stream = Connection::new(tcp).unwrap();
    let bell = WakeUp::new().unwrap();
    let (mut link, _) = pair_within(&mut stream, false, &bell, PATIENCE)
        .unwrap()
        .unwrap();
    let mut pending = Vec::new();
    loop {
        match link.readable() {
            Ok(bytes) => {
                let count = bytes.len();
                pending.extend_from_slice(bytes);
                link.consume(count);
            }
            Err(broken) => {
                assert_eq!(broken.to_string(), "was closed by the other side");
                return;
            }
        }
        let mut directions = vec![Direction::Receive];
        if !pending.is_empty() {
            let sent = link.try_send(&[IoSlice::new(&pending)]).unwrap();
            pending.drain(..sent.unwrap_or(0));
        }
        if !pending.is_empty() {
            directions.push(Direction::Send);
        }
        sleep(&link, &bell, &directions);
    }
}

/// A process that does not outlive its test.
struct Ending(Child);

impl Drop for Ending {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
