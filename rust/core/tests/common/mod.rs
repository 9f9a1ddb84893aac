//! Helpers that tests over real sockets share.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::net::TcpListener;

/// Returns an address of this machine at which nobody listened a moment ago. The system gives its
/// port to no outgoing connection, so nobody gets it by chance.
pub(crate) fn free_address() -> String {
    loop {
        let port = 10_240 + RandomState::new().hash_one(()) % 20_000;
        let address = format!("127.0.0.1:{port}");
        if TcpListener::bind(&address).is_ok() {
            return address;
        }
    }
}
