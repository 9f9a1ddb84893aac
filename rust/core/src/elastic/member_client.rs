//! Requests to other processes about the members of the next group.

use std::io;
use std::sync::Arc;
use std::time::Duration;

pub(super) use gradring_net::session::connect::{Connector, Failure, Retry};
use gradring_net::session::credentials::Credentials;
use gradring_proto::consensus::message::{Envelope, Outcome};
use gradring_proto::error::{Breach, Error, ErrorKind, NotFormed, Result};
use gradring_proto::wire::handshake::{self, Hello, Purpose};

/// Sends requests to other processes of the job.
pub(crate) struct MemberClient {
    pub(crate) credentials: Arc<Credentials>,
}

/// Returns `true` for errors by which another process rejects this one as a member of its job.
fn turns_away(error: &Error) -> bool {
    matches!(
        error.kind,
        ErrorKind::Authentication(_)
            | ErrorKind::Config(_)
            | ErrorKind::Protocol(Breach::OtherVersion { .. })
            | ErrorKind::Rendezvous(NotFormed::OtherJob { .. } | NotFormed::Refused)
    )
}

impl MemberClient {
    /// Sends a request to the process at `host:port` and returns the outcome. Retries while that
    /// process hands its listener from one group to the next.
    pub(crate) fn call(&self, address: &str, envelope: &Envelope, limit: Duration) -> Outcome {
        let credentials = &*self.credentials;
        let retry = Retry::of_one_that_listens(limit);
        let reply = Connector::new(address, credentials, retry).connect(
            &mut || -> Result<()> { Ok(()) },
            |_, _| {
                let job = credentials.job.clone();
                Hello::new((0, 0), 0, Purpose::Membership { job })
            },
            |stream| {
                handshake::write_message(stream, envelope)?;
                handshake::read_message(stream)
            },
        );
        match reply {
            Ok((_, reply)) => Outcome::Reply(reply),
            Err(Failure::Unreachable(error, _))
                if error.kind() == io::ErrorKind::ConnectionRefused =>
            {
                Outcome::Refused
            }
            Err(Failure::Handshake(error)) if turns_away(&error) => {
                Outcome::TurnedAway(error.kind.to_string())
            }
            Err(_) => Outcome::Silent,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;
    use gradring_net::config::Config;
    use gradring_proto::consensus::message::MemberRequest;
    use gradring_proto::consensus::quorum::{Id, Peer};

    #[test]
    fn a_process_whose_listener_goes_from_one_group_to_the_next_is_told_again() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        // Both connections end before an answer, and then the port is closed.
        let groups = thread::spawn(move || {
            for _ in 0..2 {
                drop(listener.accept().unwrap());
            }
        });
        let credentials = Credentials::of(&Config::new(0, 1, "")).unwrap();
        let client = MemberClient { credentials };
        let from = Peer {
            id: Id([0; 16]),
            address: address.clone(),
        };
        let envelope = Envelope {
            from,
            to: None,
            request: MemberRequest::Leave,
        };
        let outcome = client.call(&address, &envelope, Duration::from_secs(60));
        groups.join().unwrap();
        assert_eq!(outcome, Outcome::Refused);
    }
}
