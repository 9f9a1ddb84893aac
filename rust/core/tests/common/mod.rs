//! Helpers that tests over real sockets share.

use std::net::TcpListener;

/// An address of this machine that nobody listened at a moment ago.
pub(crate) fn free_address() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().to_string()
}
