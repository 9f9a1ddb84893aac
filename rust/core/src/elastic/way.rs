//! How a process says something to another one about the members of the next group.

use std::time::{Duration, Instant};
use std::{io, thread};

use crate::consensus::message::{Envelope, Outcome};
use crate::error::{Breach, Error, ErrorKind, NotFormed};
use crate::forming::listener::is_worth_another_try;
use crate::forming::rendezvous::connect::{
    LOOK_UP_GOES_ON, RETRY_INTERVAL, connect, in_time, resolve,
};
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
    /// Says something to the process at `host:port`, and tells what became of it. One that hands its
    /// listener from a group to the next one is told again.
    pub(crate) fn ask(&self, address: &str, envelope: &Envelope, limit: Duration) -> Outcome {
        let deadline = Instant::now() + limit;
        let name = address.to_owned();
        let found = in_time(deadline, LOOK_UP_GOES_ON, &mut || Ok(()), move || {
            resolve(&name)
        });
        let Ok(Ok(addresses)) = found else {
            return Outcome::Silent;
        };
        let converse = |tcp| {
            let mut connection =
                tls::connect(tcp, self.tls.as_ref(), address, deadline, &mut || true)?;
            let mut stream = DeadlineStream::new(&mut connection, deadline);
            let job = self.job.clone();
            let hello = Hello::new((0, 0), 0, Purpose::Membership { job })?;
            handshake::initiate(&mut stream, hello, &self.token)?;
            handshake::write_message(&mut stream, envelope)?;
            handshake::read_message(&mut stream)
        };
        loop {
            let tcp = match connect(&addresses, deadline) {
                Ok(tcp) => tcp,
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    return Outcome::Refused;
                }
                Err(_) => return Outcome::Silent,
            };
            let error = match converse(tcp) {
                Ok(reply) => return Outcome::Reply(reply),
                Err(error) if turns_away(&error) => {
                    return Outcome::TurnedAway(error.kind.to_string());
                }
                Err(error) => error,
            };
            if !is_worth_another_try(&error) || Instant::now() + RETRY_INTERVAL >= deadline {
                return Outcome::Silent;
            }
            thread::sleep(RETRY_INTERVAL);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::consensus::message::Request;
    use crate::consensus::quorum::{Id, Peer};

    #[test]
    fn a_process_whose_listener_goes_from_one_group_to_the_next_is_told_again() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        // Both connections end before they are answered, and then nobody listens.
        let groups = thread::spawn(move || {
            for _ in 0..2 {
                drop(listener.accept().unwrap());
            }
        });
        let way = Way {
            job: "job".into(),
            token: b"secret".to_vec(),
            tls: None,
        };
        let from = Peer {
            id: Id([0; 16]),
            address: address.clone(),
        };
        let envelope = Envelope {
            from,
            to: None,
            request: Request::Leave,
        };
        let outcome = way.ask(&address, &envelope, Duration::from_secs(60));
        groups.join().unwrap();
        assert_eq!(outcome, Outcome::Refused);
    }
}
