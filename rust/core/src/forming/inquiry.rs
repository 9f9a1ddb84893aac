//! Inquiries about the state of a rank of a running job, from outside of the job, and their
//! answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::observe::own_state::OwnState;
use gradring_net::config::TlsFiles;
use gradring_net::link::tcp::connection::Connection;
use gradring_net::link::tcp::deadline_stream::DeadlineStream;
pub(crate) use gradring_net::session::connect::{Connector, Failure, Retry};
use gradring_net::session::credentials::Credentials;
pub(crate) use gradring_net::session::listener::Service;
use gradring_proto::error::{Abort, Result};
use gradring_proto::wire::handshake::{self, Hello, Purpose};
use gradring_proto::wire::state::State;

/// Requests the state of the rank that listens at `host:port`, inside TLS if its job uses it.
/// Retries while that process hands its listener from one group to the next.
///
/// # Errors
/// `Rendezvous` if no process answers within `limit`. `Authentication` if the token is not the
/// job's, or either side's certificate is not accepted. `Protocol` if the answer is not from a rank
/// of this version.
pub fn inquire(
    address: &str,
    token: &[u8],
    tls: Option<&TlsFiles>,
    limit: Duration,
) -> Result<State> {
    let credentials = Credentials::load(token, tls)?;
    inquire_while(address, &credentials, limit, &|| true).map_err(|failure| failure.error(address))
}

/// Inquires like `inquire`, for as long as `continues` returns `true`.
pub(super) fn inquire_while(
    address: &str,
    credentials: &Credentials,
    limit: Duration,
    continues: &dyn Fn() -> bool,
) -> Result<State, Failure> {
    let retry = Retry::of_one_that_listens(limit);
    let asked = Connector::new(address, credentials, retry).connect(
        &mut || check(continues),
        // The requesting process has no rank in the group.
        |_, _| Hello::new((0, 0), 0, Purpose::Inquiry),
        |stream| handshake::read_message(stream),
    );
    asked.map(|(_, state)| state)
}

/// Service that answers inquiries.
pub(super) struct Inquiries(pub(super) Arc<OwnState>);

impl Service for Inquiries {
    fn serves(&self, purpose: &Purpose) -> bool {
        *purpose == Purpose::Inquiry
    }

    fn admit(&self, _hello: &Hello, _deadline: Instant) -> Result<()> {
        Ok(())
    }

    fn serve(&self, _hello: Hello, mut connection: Connection, deadline: Instant) -> Result<()> {
        let mut stream = DeadlineStream::new(&mut connection, deadline);
        // The requester may be gone.
        let _ = handshake::write_message(&mut stream, &self.0.state());
        Ok(())
    }
}

/// Fails once nobody wants the result any more.
pub(super) fn check(continues: &dyn Fn() -> bool) -> Result<()> {
    match continues() {
        true => Ok(()),
        false => Err(Abort::InterruptedForming.into()),
    }
}
