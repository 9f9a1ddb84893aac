//! Asking a rank of a running job how it is, from outside of the job.

use std::time::{Duration, Instant};

use crate::config::TlsFiles;
use crate::error::{Abort, Error, NotFormed, Result, Text};
use crate::forming::listener::is_worth_another_try;
use crate::forming::rendezvous::connect::{
    LOOK_UP_GOES_ON, RETRY_INTERVAL, connect, in_time, resolve,
};
use crate::link::tcp::deadline_stream::DeadlineStream;
use crate::link::tcp::tls;
use crate::session::credentials::Credentials;
use crate::wire::handshake::{self, Hello, Purpose};
use crate::wire::state::State;

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
    inquire_while(address, &credentials, limit, &|| true)
}

/// As `inquire`, as long as `goes_on`.
pub(super) fn inquire_while(
    address: &str,
    credentials: &Credentials,
    limit: Duration,
    goes_on: &dyn Fn() -> bool,
) -> Result<State> {
    let deadline = Instant::now() + limit;
    let unreachable = |error: std::io::Error| {
        Error::from(NotFormed::NobodyThere {
            address: address.into(),
            error: Text::of(error),
        })
    };
    let name = address.to_owned();
    let look_up = move || resolve(&name);
    let mut check = || match goes_on() {
        true => Ok(()),
        false => Err(Abort::InterruptedForming.into()),
    };
    let addresses = in_time(deadline, LOOK_UP_GOES_ON, &mut check, look_up)?;
    let addresses = addresses.map_err(unreachable)?;
    let ask = || {
        let tcp = connect(&addresses, deadline).map_err(unreachable)?;
        let mut go_on = || goes_on();
        let mut connection =
            tls::connect(tcp, credentials.tls.as_ref(), address, deadline, &mut go_on)?;
        let mut stream = DeadlineStream::cancellable(&mut connection, deadline, &mut go_on);
        // The process that asks has no rank in the group.
        handshake::initiate(
            &mut stream,
            Hello::new((0, 0), 0, Purpose::Inquiry)?,
            &credentials.token,
        )?;
        handshake::read_message(&mut stream)
    };
    let mut known = None;
    loop {
        let error = match ask() {
            Ok(state) => return Ok(state),
            // An attempt that the deadline cut short knows less than the one before it.
            Err(error) if Instant::now() >= deadline => return Err(known.unwrap_or(error)),
            Err(error) => error,
        };
        if !goes_on()
            || !is_worth_another_try(&error)
            || Instant::now() + RETRY_INTERVAL >= deadline
        {
            return Err(error);
        }
        known = Some(error);
        std::thread::sleep(RETRY_INTERVAL);
    }
}
