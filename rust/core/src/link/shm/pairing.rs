//! How two ranks come to share memory, over a connection on which they know each other already.
//!
//! ```text
//! initiator -> other  TCP   name of a Unix socket and a nonce      | why not
//! other -> initiator  Unix  the nonce
//! initiator -> other  Unix  the memory and its doorbell
//! other -> initiator  Unix  its doorbell
//! other -> initiator  TCP   it is mapped                           | why not
//! initiator -> other  TCP   both use it                            | why not
//! ```
//!
//! The Unix socket has an abstract name, which exists only in this host's network namespace, so to
//! reach it proves more than any comparison of host names. Everybody on the host can see the name
//! and call; only the nonce, known over TCP alone, is answered. Whoever says "why not" says it
//! over TCP, and nothing follows: both sides agree, and the connection is as before.

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
use super::{RING_BYTES, ShmLink, passing};
use crate::caller::INTERRUPT_INTERVAL;
use crate::link::poll;
use crate::link::tcp::connection::Connection;
use crate::link::tcp::patient::{GoOn, Patient, gave_up};
use crate::wire::pairing as wire;

/// Bytes of the random part of the socket's name, and of the nonce.
const RANDOM_BYTES: usize = 16;
/// Callers that have not said the nonce yet; a new one drives out the oldest.
const CALLERS_MAX: usize = 16;
/// How long the other side tries to reach the initiator, which waits for it: at most, and at most
/// this part of the time that is left, so that its answer still comes in time.
const REACHING_LIMIT: Duration = Duration::from_secs(10);
const REACHING_PART: u32 = 2;

type Nonce = [u8; RANDOM_BYTES];

/// Tries to share memory with the process at the other end of `stream`, which calls this at the
/// same time; exactly one of both is the initiator.
///
/// Returns the link, or why there is none: the same on both sides. `stream` carries nothing of this
/// afterwards. The other side rings `doorbell`, an eventfd. It asks now and then
/// whether to go on.
///
/// # Errors
/// When the connection fails, the other side is not done by `deadline`, or `go_on` says no.
pub(super) fn pair(
    stream: &mut Connection,
    initiator: bool,
    doorbell: &impl AsFd,
    deadline: Instant,
    go_on: GoOn<'_>,
) -> io::Result<Result<ShmLink, String>> {
    let mut talk = Talk {
        stream,
        deadline,
        go_on,
    };
    if initiator {
        invite(&mut talk, doorbell.as_fd())
    } else {
        visit(&mut talk, doorbell.as_fd())
    }
}

fn invite(talk: &mut Talk<'_>, doorbell: BorrowedFd<'_>) -> io::Result<Result<ShmLink, String>> {
    let invitation = match Invitation::new() {
        Ok(invitation) => invitation,
        Err(reason) => return talk.refuse(reason),
    };
    talk.go_on(&[invitation.name, invitation.nonce].concat())?;
    let guest = invitation.await_guest(talk).and_then(|guest| {
        let gifts = [invitation.file.as_fd(), doorbell];
        passing::send(&guest, &gifts)?;
        Ok(guest)
    });
    // A guest that waits in vain notices here, and says so.
    drop(invitation.listener);
    if let Err(reason) = talk.hear()? {
        return Ok(Err(reason));
    }
    // The guest's doorbell came before its answer.
    match guest.and_then(|guest| receive_doorbell(&guest)) {
        Ok(other_doorbell) => {
            talk.go_on(&[])?;
            Ok(Ok(ShmLink::new(invitation.arena, 0, other_doorbell)))
        }
        Err(error) => talk.refuse(format!("the initiator failed: {error}")),
    }
}

fn visit(talk: &mut Talk<'_>, doorbell: BorrowedFd<'_>) -> io::Result<Result<ShmLink, String>> {
    let accepted = match talk.hear()? {
        Ok(invitation) => {
            let left = talk.deadline.saturating_duration_since(Instant::now());
            let limit = REACHING_LIMIT.min(left / REACHING_PART);
            accept(&invitation, doorbell, limit.max(Duration::from_millis(1)))
        }
        Err(reason) => return Ok(Err(reason)),
    };
    match accepted {
        Ok(link) => {
            talk.go_on(&[])?;
            Ok(talk.hear()?.map(|_| link))
        }
        Err(reason) => talk.refuse(reason),
    }
}

/// What the other side needs in order to share memory.
struct Invitation {
    arena: Arena,
    file: OwnedFd,
    listener: UnixListener,
    name: [u8; RANDOM_BYTES],
    nonce: Nonce,
}

impl Invitation {
    fn new() -> Result<Self, String> {
        let (arena, file) = Arena::create(RING_BYTES)
            .map_err(|error| format!("no shared memory from the system: {error}"))?;
        let (mut name, mut nonce) = ([0; RANDOM_BYTES], [0; RANDOM_BYTES]);
        getrandom::fill(&mut name)
            .and_then(|()| getrandom::fill(&mut nonce))
            .map_err(|error| format!("no random numbers from the system: {error}"))?;
        let listener =
            listen(&name).map_err(|error| format!("no Unix socket from the system: {error}"))?;
        Ok(Self {
            arena,
            file,
            listener,
            name,
            nonce,
        })
    }

    /// The caller who knows the nonce.
    fn await_guest(&self, talk: &mut Talk<'_>) -> io::Result<UnixStream> {
        let mut callers = VecDeque::with_capacity(CALLERS_MAX + 1);
        loop {
            while let Ok((caller, _)) = self.listener.accept() {
                caller.set_nonblocking(true)?;
                if passing::is_same_user(&caller)? {
                    callers.push_back(caller);
                }
                if callers.len() > CALLERS_MAX {
                    callers.pop_front();
                }
            }
            if let Some(guest) = self.recognise(&mut callers) {
                return Ok(guest);
            }
            if talk.has_answer() {
                return Err(io::Error::other("an answer came before the visit"));
            }
            let left = talk.left()?;
            let sockets = [poll::readable(&self.listener), poll::readable(talk.stream)];
            let sockets = sockets
                .into_iter()
                .chain(callers.iter().map(poll::readable));
            poll::wait(sockets, left.min(INTERRUPT_INTERVAL));
        }
    }

    /// Takes the guest out of `callers`, and sends away all who said something else.
    fn recognise(&self, callers: &mut VecDeque<UnixStream>) -> Option<UnixStream> {
        for _ in 0..callers.len() {
            let mut caller = callers.pop_front()?;
            let mut said = [0; RANDOM_BYTES];
            match caller.read(&mut said) {
                Ok(RANDOM_BYTES) if is_equal(&said, &self.nonce) => return Some(caller),
                Err(error) if is_later(error.kind()) => callers.push_back(caller),
                _ => {}
            }
        }
        None
    }
}

/// The visitor's part over the Unix socket.
fn accept(invitation: &[u8], doorbell: BorrowedFd<'_>, limit: Duration) -> Result<ShmLink, String> {
    let Some((name, nonce)) = invitation.split_at_checked(RANDOM_BYTES) else {
        return Err("the invitation is too short".into());
    };
    let mut host = reach(name, limit)
        .map_err(|error| format!("different hosts or network namespaces ({error})"))?;
    let exchange = |host: &mut UnixStream| {
        if !passing::is_same_user(host)? {
            return Err(io::Error::other("different users"));
        }
        host.write_all(nonce)?;
        let [file, other_doorbell] = despite_signals(limit, || passing::receive(host))?;
        check_doorbell(&other_doorbell)?;
        let arena = Arena::open(file, RING_BYTES)?;
        passing::send(host, &[doorbell])?;
        Ok(ShmLink::new(arena, 1, other_doorbell))
    };
    exchange(&mut host).map_err(|error| format!("the memory did not get across: {error}"))
}

fn receive_doorbell(guest: &UnixStream) -> io::Result<OwnedFd> {
    let [doorbell] = passing::receive(guest)?;
    check_doorbell(&doorbell)?;
    Ok(doorbell)
}

/// Makes sure that ringing neither blocks nor raises SIGPIPE.
fn check_doorbell(doorbell: &OwnedFd) -> io::Result<()> {
    // Files, pipes and sockets have a type; what only the kernel makes, such as eventfds, has none.
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
    socket.listen(CALLERS_MAX as i32)?;
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

/// Repeats what signals interrupt, which is every call that waits on a socket with a time limit,
/// even if their handlers would have calls go on. All of it takes twice the `limit` at most.
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
        self.line().write_all(&wire::go_on(content))
    }

    fn refuse(&mut self, reason: String) -> io::Result<Result<ShmLink, String>> {
        let (message, reason) = wire::refusal(reason);
        self.line().write_all(&message)?;
        Ok(Err(reason))
    }

    /// The other side's next message: its content, or why there is no more to say.
    fn hear(&mut self) -> io::Result<Result<Vec<u8>, String>> {
        wire::read(&mut self.line())
    }

    fn line(&mut self) -> Patient<'_> {
        Patient::attentive(self.stream, self.deadline, &mut *self.go_on)
    }

    /// Whether the other side has said something, or gone.
    fn has_answer(&self) -> bool {
        self.stream.is_readable()
    }

    /// The time that is left, if there is no reason to give up.
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

fn is_later(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
    )
}

#[cfg(all(test, not(loom)))]
mod tests;
