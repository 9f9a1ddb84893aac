//! Asking a rank of a running job how it is, from outside of the job.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::group::rendezvous::connect;
use crate::wire::handshake::{self, Hello, Purpose};
use crate::wire::state::State;

/// Asks the rank whose door is at `host:port`.
///
/// # Errors
/// `Rendezvous` when nobody answers within `limit`; `Authentication` when the token is not that of
/// the job; `Protocol` when whoever answers is no rank of this version.
pub fn inquire(address: &str, token: &[u8], limit: Duration) -> Result<State> {
    let unreachable = |error: std::io::Error| {
        Error::rendezvous(format!("nobody can be reached at {address}: {error}"))
    };
    let mut stream = connect(address, Instant::now() + limit).map_err(unreachable)?;
    stream
        .set_read_timeout(Some(limit))
        .and_then(|()| stream.set_write_timeout(Some(limit)))
        .map_err(unreachable)?;
    ask(&mut stream, token)
}

fn ask(stream: &mut TcpStream, token: &[u8]) -> Result<State> {
    // Whoever asks has no place in the group.
    handshake::call(stream, Hello::new(0, 0, Purpose::Inquiry)?, token)?;
    handshake::read_message(stream)
}
