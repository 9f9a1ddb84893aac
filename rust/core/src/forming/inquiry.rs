//! Inquiries: asking a rank of a running job how it is, from outside of the job, and the answers.

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

/// Asks the rank that listens at `host:port`, inside TLS if its job uses it. One that hands its
/// listener from a group to the next one is asked again.
///
/// # Errors
/// `Rendezvous` when no process answers within `limit`; `Authentication` when the token is not that of
/// the job, or either side's certificate is not accepted; `Protocol` when what answers is no rank of this version.
pub fn inquire(
    address: &str,
    token: &[u8],
    tls: Option<&TlsFiles>,
    limit: Duration,
) -> Result<State> {
    let credentials = Credentials::load(token, tls)?;
    inquire_while(address, &credentials, limit, &|| true).map_err(|failure| failure.error(address))
}

/// As `inquire`, as long as `goes_on`.
pub(super) fn inquire_while(
    address: &str,
    credentials: &Credentials,
    limit: Duration,
    goes_on: &dyn Fn() -> bool,
) -> Result<State, Failure> {
    let retry = Retry::of_one_that_listens(limit);
    let asked = Connector::new(address, credentials, retry).connect(
        &mut || check(goes_on),
        // The process that asks has no rank in the group.
        |_, _| Hello::new((0, 0), 0, Purpose::Inquiry),
        |stream| handshake::read_message(stream),
    );
    asked.map(|(_, state)| state)
}

/// Answers those who ask how the rank is.
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
        // The process that asked may have gone.
        let _ = handshake::write_message(&mut stream, &self.0.state());
        Ok(())
    }
}

/// Fails when there is nobody any more for whom to go on.
pub(super) fn check(goes_on: &dyn Fn() -> bool) -> Result<()> {
    match goes_on() {
        true => Ok(()),
        false => Err(Abort::InterruptedForming.into()),
    }
}
