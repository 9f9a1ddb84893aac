use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use common::free_address;

use super::*;
use gradring_net::config::Settings;
use gradring_net::link::KINDS;
use gradring_net::session::connect::STILL_RESOLVING;
use gradring_proto::error::ErrorKind;

#[path = "../../../tests/common/mod.rs"]
mod common;

const STREAMS: usize = 2;
const TIMEOUT: Duration = Duration::from_secs(3);

fn config(rank: usize, rendezvous: &str) -> Config {
    Config {
        settings: Settings {
            transport: "tcp".into(),
            streams: STREAMS,
            timeout: TIMEOUT,
            ..Settings::default()
        },
        token: b"secret".into(),
        ..Config::new(rank, 2, rendezvous)
    }
}

fn forming<'a>(config: &'a Config, interrupt: Interrupt<'a>) -> Forming<'a> {
    let credentials = Credentials::of(config).unwrap();
    let own_state = Arc::new(OwnState::new(config.rank, 2, 0));
    Forming::new(config, KINDS, credentials, own_state, interrupt)
}

/// Lets rank 1 join rank 0, and then open connections for these streams alone. Returns rank 0's
/// result, and the answer to rank 1's last connection.
fn connect_streams(streams: &[usize]) -> (Result<Formed>, Result<Connection>) {
    let address = free_address();
    let rank_0 = thread::spawn({
        let config = config(0, &address);
        move || form(&config, KINDS, &mut || false)
    });
    let config = config(1, &address);
    let mut interrupt = || false;
    let mut forming = forming(&config, &mut interrupt);
    let (_door, roster) = forming.join().unwrap();
    let mut connections: Vec<_> = streams
        .iter()
        .map(|&stream| forming.connect_to(&roster, 0, &Purpose::Data { stream }))
        .collect();
    (rank_0.join().unwrap(), connections.pop().unwrap())
}

#[test]
fn a_missing_stream_is_named() {
    let (formed, connected) = connect_streams(&[1]);
    assert!(connected.is_ok());
    let error = formed.err().expect("stream 0 is missing");
    assert!(
        matches!(error.kind, ErrorKind::Rendezvous { .. }),
        "{error}"
    );
    assert_eq!(error.blamed.as_ref().map(|blamed| blamed.rank), Some(1));
    assert!(
        error.to_string().contains("stream 0 of 2 is missing"),
        "{error}"
    );
}

#[test]
fn a_stream_that_exists_already_is_turned_away_on_both_sides() {
    let (formed, connected) = connect_streams(&[0, 0]);
    let answered = connected.err().unwrap();
    let problem = "stream 0 of rank 1 has been connected already";
    assert!(
        matches!(answered.kind, ErrorKind::Rendezvous { .. }),
        "{answered}"
    );
    assert!(answered.to_string().contains(problem), "{answered}");
    let error = formed.err().expect("stream 1 is missing");
    assert!(error.to_string().contains(problem), "{error}");
}

#[test]
fn a_stream_beyond_the_agreed_number_is_turned_away() {
    for stream in [STREAMS, usize::MAX] {
        let (_, connected) = connect_streams(&[stream]);
        let error = connected.err().unwrap();
        assert!(matches!(error.kind, ErrorKind::Protocol { .. }), "{error}");
    }
}

/// A resolver that does not answer for `slow.invalid`.
fn resolve_slowly(address: &str) -> std::io::Result<Vec<SocketAddr>> {
    if address.starts_with("slow.invalid") {
        thread::sleep(Duration::from_secs(30));
    }
    resolve(address)
}

/// Error of a rank whose resolver is slow.
fn form_slowly(config: &Config, resolve: Resolve, interrupt: Interrupt<'_>) -> Error {
    let mut forming = forming(config, interrupt);
    forming.resolve = resolve;
    forming.run().err().expect("nobody else comes")
}

/// Ranks for which the slow name is another rank's address, the rendezvous, and the listening
/// address.
fn slow_ranks() -> [Config; 3] {
    let settings = Settings {
        timeout: Duration::from_millis(200),
        ..Settings::default()
    };
    [
        Config {
            addresses: vec!["127.0.0.1:1".into(), "slow.invalid:4000".into()],
            settings: settings.clone(),
            ..config(0, "127.0.0.1:0")
        },
        Config {
            settings: settings.clone(),
            ..config(1, "slow.invalid:4000")
        },
        Config {
            settings: settings.clone(),
            ..config(0, "slow.invalid:4000")
        },
    ]
}

#[test]
fn a_name_that_is_looked_up_for_too_long_is_named() {
    for config in slow_ranks() {
        let error = form_slowly(&config, resolve_slowly, &mut || false);
        let rendezvous = matches!(error.kind, ErrorKind::Rendezvous { .. });
        assert!(rendezvous, "{error}");
        let text = error.to_string();
        assert!(text.contains("slow.invalid:4000"), "{text}");
        assert!(text.contains(STILL_RESOLVING), "{text}");
    }
}

#[test]
fn an_interrupt_ends_the_look_up_of_a_name() {
    static LOOKS_UP: AtomicBool = AtomicBool::new(false);
    let resolve = |address: &str| {
        LOOKS_UP.fetch_or(address.starts_with("slow.invalid"), Ordering::SeqCst);
        resolve_slowly(address)
    };
    for config in slow_ranks() {
        LOOKS_UP.store(false, Ordering::SeqCst);
        let error = form_slowly(&config, resolve, &mut || LOOKS_UP.load(Ordering::SeqCst));
        let aborted = matches!(error.kind, ErrorKind::Aborted { .. });
        assert!(aborted, "{error}");
    }
}
