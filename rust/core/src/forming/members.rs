//! What processes say to each other about the members of their next group, on its way.
//!
//! Every listener of a process takes it, whatever group it is for: one that is told of a new group
//! may still be in the old one, and one that wants to join has none.

use std::io::{ErrorKind as IoErrorKind, Read, Write};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::agreement::message::{Envelope, Outcome, Reply};
use crate::error::Result;
use crate::forming::rendezvous::connect::{LOOK_UP_GOES_ON, connect, in_time, resolve};
use crate::link::forks::PerProcess;
use crate::link::tcp::deadline_stream::DeadlineStream;
use crate::link::tcp::tls::{self, Tls};
use crate::wire::handshake::{self, Hello, Purpose};

/// Answers for this process in one job.
pub(crate) trait Answers: Send + Sync {
    /// Which job.
    fn job(&self) -> &str;

    /// What it says; without waiting.
    fn answer(&self, envelope: &Envelope) -> Reply;
}

static ANSWERERS: PerProcess<Vec<Weak<dyn Answers>>> = PerProcess::new();

/// From now on, as long as it exists, it is asked.
pub(crate) fn register(answers: &Arc<dyn Answers>) {
    let mut all = ANSWERERS.lock();
    all.retain(|other| other.strong_count() > 0);
    all.push(Arc::downgrade(answers));
}

/// Answers an authenticated process that has connected to say something of this job.
pub(crate) fn answer(stream: &mut (impl Read + Write), job: &str) -> Result<()> {
    let envelope = handshake::read_message(stream)?;
    let all: Vec<_> = ANSWERERS.lock().iter().filter_map(Weak::upgrade).collect();
    let replies = all
        .iter()
        .filter(|answers| answers.job() == job)
        .map(|answers| answers.answer(&envelope));
    // A process may have been in the job before, and come back.
    let reply = replies
        .reduce(|one, other| match one {
            Reply::OtherProcess => other,
            one => one,
        })
        .unwrap_or(match envelope.to {
            Some(_) => Reply::OtherProcess,
            None => Reply::Noted(Vec::new()),
        });
    handshake::write_message(stream, &reply)
}

/// How a process reaches others.
#[derive(Clone)]
pub(crate) struct Way {
    pub(crate) job: String,
    pub(crate) token: Vec<u8>,
    pub(crate) tls: Option<Tls>,
}

impl Way {
    /// Says something to the process at `host:port`, and tells what became of it.
    pub(crate) fn ask(&self, address: &str, envelope: &Envelope, limit: Duration) -> Outcome {
        let deadline = Instant::now() + limit;
        let name = address.to_owned();
        let found = in_time(deadline, LOOK_UP_GOES_ON, &mut || Ok(()), move || {
            resolve(&name)
        });
        let Ok(Ok(addresses)) = found else {
            return Outcome::Silent;
        };
        let tcp = match connect(&addresses, deadline) {
            Ok(tcp) => tcp,
            Err(error) if error.kind() == IoErrorKind::ConnectionRefused => {
                return Outcome::Refused;
            }
            Err(_) => return Outcome::Silent,
        };
        let converse = || {
            let mut connection =
                tls::connect(tcp, self.tls.as_ref(), address, deadline, &mut || true)?;
            let mut stream = DeadlineStream::new(&mut connection, deadline);
            let job = self.job.clone();
            let hello = Hello::new((0, 0), 0, Purpose::Membership { job })?;
            handshake::initiate(&mut stream, hello, &self.token)?;
            handshake::write_message(&mut stream, envelope)?;
            handshake::read_message(&mut stream)
        };
        // One that does not know the token, or is of another job, proves nothing about the process
        // that was meant: it may share the address with it by mistake.
        converse().map_or(Outcome::Silent, Outcome::Reply)
    }
}
