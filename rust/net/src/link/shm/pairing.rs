//! Pairing of two ranks for shared memory, over their authenticated connection.
//!
//! ```text
//! initiator -> responder  TCP   name of a Unix socket and a nonce      | why not
//! responder -> initiator  Unix  the nonce
//! initiator -> responder  Unix  the memory and its doorbell, and the group's slots if it has them
//! responder -> initiator  Unix  its doorbell
//! responder -> initiator  TCP   it is mapped                           | why not
//! initiator -> responder  TCP   both use it                            | why not
//! ```
//!
//! The Unix socket has an abstract name, which exists only in this host's network namespace. So
//! reaching it proves more than comparing host names does. Every process of the host can see the
//! name and connect; the memory is passed only to a peer that sends the nonce, which it knows from
//! TCP. A side that cannot continue sends its reason ("why not") over TCP. The initiator's refusal
//! is final. Afterwards both sides agree on the reason, and the TCP connection is reusable.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use rustix::fs::{FileType, OFlags, fcntl_getfl, fcntl_setfl, fstat};
use socket2::{Domain, SockAddr, Socket, Type};

use super::arena::Arena;
use super::slots::SlotFile;
use super::{ShmLink, passing};
use crate::caller::INTERRUPT_INTERVAL;
use crate::link::kind::GroupSlots;
use crate::link::poll;
use crate::link::tcp::connection::Connection;
use crate::link::tcp::deadline_stream::{DeadlineStream, GoOn, gave_up};
use gradring_proto::error::Error;
use gradring_proto::wire::handshake::random;
use gradring_proto::wire::pairing as wire;

/// Bytes of the random part of the socket's name, and of the nonce.
const RANDOM_BYTES: usize = 16;
/// Largest number of connections that have not sent the nonce yet; a new one replaces the oldest.
const PENDING_MAX: usize = 16;
/// Longest time for which the responder tries to reach the initiator's socket. The remaining time
/// divided by `REACHING_PART` is a second limit, so that its reply still comes in time.
const REACHING_LIMIT: Duration = Duration::from_secs(10);
const REACHING_PART: u32 = 2;

type Nonce = [u8; RANDOM_BYTES];

/// Name, role and doorbell of one side.
pub(super) struct Own<'a> {
    /// Name of this process in messages.
    pub(super) name: &'a str,
    /// `true` on exactly one of the two sides.
    pub(super) initiator: bool,
    /// An eventfd that the other side rings.
    pub(super) doorbell: BorrowedFd<'a>,
    /// The group's slots, which the initiator passes on if it has them.
    pub(super) slots: &'a GroupSlots,
}

/// A link, and the slots of the group if the other side has passed them on.
pub(super) type Paired = (ShmLink, Option<SlotFile>);

impl Own<'_> {
    /// Returns a message about a resource that this process lacks, if that is the cause. It names
    /// the process, because the peer receives the message too.
    fn shortage(&self, error: &io::Error) -> Option<String> {
        let shortage = Error::out_of_resources(error, self.name)?;
        Some(shortage.kind.to_string())
    }

    fn reason(&self, what: &str, error: &io::Error) -> String {
        self.shortage(error)
            .unwrap_or_else(|| format!("{what}: {error}"))
    }
}

/// Tries to share memory with the process at the other end of `stream`, which calls this at the
/// same time with the same `ring_bytes`.
///
/// Returns the link, or the reason why there is none. Afterwards no bytes of the pairing are left
/// on `stream`. Polls `go_on` during waits.
///
/// # Errors
/// When the connection fails, the other side does not finish by `deadline`, or `go_on` returns
/// `false`.
pub(super) fn pair(
    stream: &mut Connection,
    own: &Own<'_>,
    ring_bytes: usize,
    deadline: Instant,
    go_on: GoOn<'_>,
) -> io::Result<Result<Paired, String>> {
    let mut talk = Talk {
        stream,
        deadline,
        go_on,
    };
    if own.initiator {
        initiate(&mut talk, own, ring_bytes)
    } else {
        respond(&mut talk, own, ring_bytes)
    }
}

fn initiate(
    talk: &mut Talk<'_>,
    own: &Own<'_>,
    ring_bytes: usize,
) -> io::Result<Result<Paired, String>> {
    let offer = match Offer::new(own, ring_bytes) {
        Ok(offer) => offer,
        Err(reason) => return talk.refuse(reason),
    };
    talk.go_on(&[offer.name, offer.nonce].concat())?;
    let responder = offer.await_responder(talk).and_then(|responder| {
        let slots = own.slots.own.as_ref().map(SlotFile::as_fd);
        let descriptors = [offer.file.as_fd(), own.doorbell].into_iter().chain(slots);
        passing::send(&responder, &descriptors.collect::<Vec<_>>())?;
        Ok(responder)
    });
    // A responder that waits in vain notices the closed listener, and replies.
    drop(offer.listener);
    let other_doorbell = match (talk.receive()?, responder) {
        // The responder sent its doorbell before its reply.
        (Ok(_), Ok(responder)) => {
            receive_doorbell(&responder).map_err(|error| own.reason("the initiator failed", &error))
        }
        (Err(reason), Ok(_)) => Err(reason),
        // Only the initiator knows why the responder has waited in vain.
        (Ok(_), Err(error)) => Err(own.reason("the initiator failed", &error)),
        (Err(reason), Err(error)) => Err(own.shortage(&error).unwrap_or(reason)),
    };
    match other_doorbell {
        Ok(other_doorbell) => {
            talk.go_on(&[])?;
            Ok(Ok((ShmLink::new(offer.arena, 0, other_doorbell), None)))
        }
        Err(reason) => talk.refuse(reason),
    }
}

fn respond(
    talk: &mut Talk<'_>,
    own: &Own<'_>,
    ring_bytes: usize,
) -> io::Result<Result<Paired, String>> {
    let accepted = match talk.receive()? {
        Ok(offer) => {
            let left = talk.deadline.saturating_duration_since(Instant::now());
            let limit = REACHING_LIMIT.min(left / REACHING_PART);
            let limit = limit.max(Duration::from_millis(1));
            accept(&offer, own, ring_bytes, limit)
        }
        Err(reason) => return Ok(Err(reason)),
    };
    answer(talk, accepted)
}

/// Sends the outcome of the offer to the initiator, and receives its final decision.
fn answer(
    talk: &mut Talk<'_>,
    accepted: Result<Paired, String>,
) -> io::Result<Result<Paired, String>> {
    let accepted = match accepted {
        Ok(paired) => {
            talk.go_on(&[])?;
            Ok(paired)
        }
        Err(reason) => talk.refuse(reason)?,
    };
    Ok(talk.receive()?.and(accepted))
}

/// The initiator's offer: shared memory, and a Unix socket at which it is passed on.
struct Offer {
    arena: Arena,
    file: OwnedFd,
    listener: UnixListener,
    name: [u8; RANDOM_BYTES],
    nonce: Nonce,
}

impl Offer {
    fn new(own: &Own<'_>, ring_bytes: usize) -> Result<Self, String> {
        let (arena, file) = Arena::create(ring_bytes)
            .map_err(|error| own.reason("no shared memory from the system", &error))?;
        let drawn = || random::<RANDOM_BYTES>().map_err(|error| error.kind.to_string());
        let (name, nonce) = (drawn()?, drawn()?);
        let listener =
            listen(&name).map_err(|error| own.reason("no Unix socket from the system", &error))?;
        Ok(Self {
            arena,
            file,
            listener,
            name,
            nonce,
        })
    }

    /// Waits for the connection that sends the nonce.
    fn await_responder(&self, talk: &mut Talk<'_>) -> io::Result<UnixStream> {
        let mut pending = VecDeque::with_capacity(PENDING_MAX + 1);
        loop {
            while let Some((connection, _)) = unless_later(self.listener.accept())? {
                connection.set_nonblocking(true)?;
                if passing::is_same_user(&connection)? {
                    pending.push_back(connection);
                }
                if pending.len() > PENDING_MAX {
                    pending.pop_front();
                }
            }
            if let Some(responder) = self.recognise(&mut pending) {
                return Ok(responder);
            }
            if talk.has_answer() {
                return Err(io::Error::other("an answer came before the nonce"));
            }
            let left = talk.left()?;
            let sockets = [poll::readable(&self.listener), poll::readable(talk.stream)];
            let sockets = sockets
                .into_iter()
                .chain(pending.iter().map(poll::readable));
            poll::wait(sockets, left.min(INTERRUPT_INTERVAL));
        }
    }

    /// Takes the responder out of `pending`, and closes connections that sent other bytes.
    fn recognise(&self, pending: &mut VecDeque<UnixStream>) -> Option<UnixStream> {
        for _ in 0..pending.len() {
            let mut connection = pending.pop_front()?;
            let mut received = [0; RANDOM_BYTES];
            match connection.read(&mut received) {
                Ok(RANDOM_BYTES) if is_equal(&received, &self.nonce) => return Some(connection),
                Err(error) if is_later(error.kind()) => pending.push_back(connection),
                _ => {}
            }
        }
        None
    }
}

/// The responder's part over the Unix socket.
fn accept(
    offer: &[u8],
    own: &Own<'_>,
    ring_bytes: usize,
    limit: Duration,
) -> Result<Paired, String> {
    let Some((name, nonce)) = offer.split_at_checked(RANDOM_BYTES) else {
        return Err("the offer is too short".into());
    };
    let mut initiator = reach(name, limit)
        .map_err(|error| own.reason("different hosts or network namespaces", &error))?;
    let exchange = |initiator: &mut UnixStream| {
        if !passing::is_same_user(initiator)? {
            return Err(io::Error::other("different users"));
        }
        initiator.write_all(nonce)?;
        let mut passed = despite_signals(limit, || passing::receive_all(initiator))?;
        let slots = (passed.len() > 2).then(|| passed.pop()).flatten();
        let [file, other_doorbell] = passing::exactly(passed)?;
        check_doorbell(&other_doorbell)?;
        let arena = Arena::open(file, ring_bytes)?;
        // A group can do without slots.
        let slots = slots.and_then(|file| SlotFile::received(file, own.slots.world_size).ok());
        passing::send(initiator, &[own.doorbell])?;
        Ok((ShmLink::new(arena, 1, other_doorbell), slots))
    };
    exchange(&mut initiator).map_err(|error| own.reason("the memory did not get across", &error))
}

fn receive_doorbell(responder: &UnixStream) -> io::Result<OwnedFd> {
    let [doorbell] = passing::receive(responder)?;
    check_doorbell(&doorbell)?;
    Ok(doorbell)
}

/// Makes sure that ringing neither blocks nor raises SIGPIPE.
fn check_doorbell(doorbell: &OwnedFd) -> io::Result<()> {
    // Files, pipes and sockets have a type; objects that exist only in the kernel, such as
    // eventfds, have none.
    if FileType::from_raw_mode(fstat(doorbell)?.st_mode) != FileType::Unknown {
        return Err(io::Error::other("the doorbell is no eventfd"));
    }
    Ok(fcntl_setfl(
        doorbell,
        fcntl_getfl(doorbell)? | OFlags::NONBLOCK,
    )?)
}

fn listen(name: &[u8]) -> io::Result<UnixListener> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.bind(&abstract_address(name)?)?;
    socket.listen(PENDING_MAX as i32)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

fn reach(name: &[u8], limit: Duration) -> io::Result<UnixStream> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    // The time to write also bounds the time to connect.
    socket.set_write_timeout(Some(limit))?;
    socket.set_read_timeout(Some(limit))?;
    let address = abstract_address(name)?;
    despite_signals(limit, || socket.connect(&address))?;
    Ok(socket.into())
}

/// Repeats a call that signals interrupt. That happens to every call that waits on a socket with a
/// time limit, even if handlers restart other calls (`SA_RESTART`). All repetitions take at most
/// twice the `limit`.
fn despite_signals<T>(limit: Duration, mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let started = Instant::now();
    loop {
        match call() {
            Err(error) if error.kind() == ErrorKind::Interrupted && started.elapsed() < limit => {}
            outcome => return outcome,
        }
    }
}

fn abstract_address(name: &[u8]) -> io::Result<SockAddr> {
    let digits: String = name.iter().map(|byte| format!("{byte:02x}")).collect();
    SockAddr::unix(OsStr::from_bytes(format!("\0gradring-{digits}").as_bytes()))
}

/// The conversation over TCP.
struct Talk<'a> {
    stream: &'a mut Connection,
    deadline: Instant,
    go_on: GoOn<'a>,
}

impl Talk<'_> {
    fn go_on(&mut self, content: &[u8]) -> io::Result<()> {
        self.line().write_all(&wire::encode(&Ok(content.to_vec())))
    }

    fn refuse(&mut self, reason: String) -> io::Result<Result<Paired, String>> {
        let reason = wire::cut(reason);
        self.line().write_all(&wire::encode(&Err(reason.clone())))?;
        Ok(Err(reason))
    }

    /// Receives the other side's next message: its content, or its reason for refusing.
    fn receive(&mut self) -> io::Result<Result<Vec<u8>, String>> {
        wire::read(&mut self.line())
    }

    fn line(&mut self) -> DeadlineStream<'_> {
        DeadlineStream::cancellable(self.stream, self.deadline, &mut *self.go_on)
    }

    /// Returns `true` if the other side has sent bytes or closed the connection.
    fn has_answer(&self) -> bool {
        self.stream.is_readable()
    }

    /// Returns the remaining time. Fails if there is none or `go_on` returns `false`.
    fn left(&mut self) -> io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        if !(self.go_on)() {
            return Err(gave_up());
        }
        Ok(left)
    }
}

/// Compares in a time that does not depend on the contents.
fn is_equal(a: &Nonce, b: &Nonce) -> bool {
    let difference = a.iter().zip(b).fold(0, |all, (a, b)| all | (a ^ b));
    std::hint::black_box(difference) == 0
}

/// Turns an error that means "nothing yet" into `None`.
fn unless_later<T>(outcome: io::Result<T>) -> io::Result<Option<T>> {
    match outcome {
        Err(error) if is_later(error.kind()) => Ok(None),
        outcome => outcome.map(Some),
    }
}

fn is_later(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
    )
}

#[cfg(all(test, not(loom)))]
mod tests;
