//! How a process says something to another one about the members of the next group.

use std::io;
use std::time::{Duration, Instant};

use crate::agreement::message::{Envelope, Outcome};
use crate::error::{Breach, Error, ErrorKind, NotFormed};
use crate::forming::rendezvous::connect::{LOOK_UP_GOES_ON, connect, in_time, resolve};
use crate::link::tcp::deadline_stream::DeadlineStream;
use crate::link::tcp::tls::{self, Tls};
use crate::wire::handshake::{self, Hello, Purpose};

/// What proves to others that it belongs to the job.
#[derive(Clone)]
pub(crate) struct Way {
    pub(crate) job: String,
    pub(crate) token: Vec<u8>,
    pub(crate) tls: Option<Tls>,
}

/// Whether another process has said that this one does not belong to its job.
fn turns_away(error: &Error) -> bool {
    matches!(
        error.kind,
        ErrorKind::Authentication(_)
            | ErrorKind::Config(_)
            | ErrorKind::Protocol(Breach::OtherVersion { .. })
            | ErrorKind::Rendezvous(NotFormed::OtherJob { .. } | NotFormed::Refused)
    )
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
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
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
        match converse() {
            Ok(reply) => Outcome::Reply(reply),
            Err(error) if turns_away(&error) => Outcome::TurnedAway(error.kind.to_string()),
            Err(_) => Outcome::Silent,
        }
    }
}
