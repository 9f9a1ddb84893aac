//! A transport outside of the crate: Unix sockets, for ranks of one host. It shows the parts of a
//! transport.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read as _, Write as _};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::thread;

use gradring_core::communicator::Communicator;
use gradring_net::config::{Config, Settings};
use gradring_net::link::kind::{Introduction, Kind, Lanes};
use gradring_net::link::poll::{self, PollFd};
use gradring_net::link::tcp::deadline_stream::DeadlineStream;
use gradring_net::link::{Broken, Direction, Link};
use gradring_proto::dtype::ReduceOp;

use common::free_address;

mod common;

const KIND: Kind = Kind { name: "unix", link };

struct UnixLink(UnixStream);

impl Link for UnixLink {
    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> Result<Option<usize>, Broken> {
        moved(self.0.write_vectored(parts))
    }

    fn try_receive(&mut self, parts: &mut [IoSliceMut<'_>]) -> Result<Option<usize>, Broken> {
        moved(self.0.read_vectored(parts))
    }

    fn may_sleep(&mut self, _direction: Direction) -> bool {
        true
    }

    fn awaited<'a>(&'a self, direction: Direction, awaited: &mut Vec<PollFd<'a>>) {
        awaited.push(match direction {
            Direction::Send => poll::writable(&self.0),
            Direction::Receive => poll::readable(&self.0),
        });
    }
}

fn moved(outcome: io::Result<usize>) -> Result<Option<usize>, Broken> {
    match outcome {
        Ok(0) => Err(Broken::closed()),
        Ok(count) => Ok(Some(count)),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(Broken::failed(error)),
    }
}

/// Connects two ranks. The initiator's port of their TCP connection names the Unix socket. The
/// initiator listens and sends `come`; the other rank connects and answers `here`.
fn link(introduction: &mut Introduction<'_>) -> io::Result<Result<Lanes, String>> {
    let Introduction {
        connections,
        initiator,
        deadline,
        go_on,
        ..
    } = introduction;
    let tcp = connections[0].tcp();
    let port = if *initiator {
        tcp.local_addr()?.port()
    } else {
        tcp.peer_addr()?.port()
    };
    let address = SocketAddr::from_abstract_name(format!("unix-link-{port}"))?;
    let mut talk = DeadlineStream::cancellable(&mut connections[0], *deadline, &mut **go_on);
    let stream = if *initiator {
        let listener = UnixListener::bind_addr(&address)?;
        talk.write_all(b"come")?;
        talk.read_exact(&mut [0; 4])?;
        listener.accept()?.0
    } else {
        talk.read_exact(&mut [0; 4])?;
        let stream = UnixStream::connect_addr(&address)?;
        talk.write_all(b"here")?;
        stream
    };
    stream.set_nonblocking(true)?;
    connections.clear();
    Ok(Ok(vec![Box::new(UnixLink(stream))]))
}

/// Sums the values of all ranks over Unix sockets.
fn sum(rank: usize, world_size: usize, rendezvous: &str, checksum: bool) -> Vec<f32> {
    let config = Config {
        settings: Settings {
            checksum,
            ..Settings::default()
        },
        ..Config::new(rank, world_size, rendezvous)
    };
    let group = Communicator::connect_over(&[KIND], &config, &mut || false).unwrap();
    assert_eq!(group.transport_name, "unix");
    let mut values = vec![(1 << rank) as f32; 300_001];
    group.all_reduce(&mut values, ReduceOp::Sum, "x").unwrap();
    group.close();
    values
}

#[test]
fn ranks_reduce_over_links_that_only_a_test_knows() {
    for (world_size, checksum) in [(2, false), (3, false), (3, true)] {
        let rendezvous = &free_address();
        thread::scope(|scope| {
            let start = |rank| scope.spawn(move || sum(rank, world_size, rendezvous, checksum));
            for values in (0..world_size).map(start).collect::<Vec<_>>() {
                let expected = ((1 << world_size) - 1) as f32;
                assert!(
                    values
                        .join()
                        .unwrap()
                        .iter()
                        .all(|&value| value == expected)
                );
            }
        });
    }
}
