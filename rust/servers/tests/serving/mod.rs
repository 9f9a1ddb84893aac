//! Servers in threads of a test.

use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use gradring_net::config::Config;
use gradring_proto::error::Result;
use gradring_proto::parameters::rules::Rules;
use gradring_servers::server::{Server, ServerPlace};

pub(crate) fn config() -> Config {
    Config {
        token: b"secret".into(),
        ..Config::new(0, 1, "")
    }
}

pub(crate) struct Served {
    pub(crate) server: Arc<Server>,
    pub(crate) thread: JoinHandle<Result<()>>,
}

pub(crate) fn serve(
    addresses: &[String],
    server: usize,
    rules: &Rules,
    directory: Option<&Path>,
) -> Served {
    serve_as(&config(), addresses, server, rules, directory)
}

pub(crate) fn serve_as(
    config: &Config,
    addresses: &[String],
    server: usize,
    rules: &Rules,
    directory: Option<&Path>,
) -> Served {
    let place = ServerPlace {
        server,
        addresses: addresses.to_vec(),
    };
    let worker_timeout = Duration::from_secs(2);
    let server = Server::new(place, rules, directory, worker_timeout, config).unwrap();
    let server = Arc::new(server);
    let other = Arc::clone(&server);
    let thread = std::thread::spawn(move || other.serve(&mut || false));
    Served { server, thread }
}
