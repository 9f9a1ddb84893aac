//! Helpers that tests over real sockets share.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::net::TcpListener;

/// An address of this machine that nobody listened at a moment ago. Its port is none of those that
/// the system gives to connections, so nobody gets it by chance.
pub(crate) fn free_address() -> String {
    loop {
        let port = 10_240 + RandomState::new().hash_one(()) % 20_000;
        let address = format!("127.0.0.1:{port}");
        if TcpListener::bind(&address).is_ok() {
            return address;
        }
    }
}
