//! Links between workers and servers, negotiated over connections whose handshake is done.

use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use gradring_net::config::Config;
use gradring_net::link::Link;
use gradring_net::link::kind::{GroupSlots, Introduction, Kind};
use gradring_net::link::negotiation::{best, offered};
use gradring_net::link::poll::WakeUp;
use gradring_net::link::tcp::connection::Connection;
use gradring_net::link::tcp::deadline_stream::{DeadlineStream, GoOn};
use gradring_proto::error::{NotServed, Result};
use gradring_proto::wire::handshake::{self, broken};

/// A server's message to each client that it has admitted.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct LinkOffer {
    /// Kinds of links that the server offers, by name.
    pub(super) transports: Vec<String>,
    /// Links of the whole job, at most. Both ends need the same number, because it decides the size
    /// of rings in shared memory.
    pub(super) pairs: usize,
}

/// A link and the name of its kind.
pub(crate) struct PeerLink {
    pub(super) link: Box<dyn Link>,
    pub(super) transport: &'static str,
}

/// Builds links from connections.
pub(super) struct Linker {
    /// Name of this process in warnings and messages to peers.
    name: String,
    kinds: Vec<Kind>,
    /// Number of connections of a link.
    pub(super) streams: usize,
    /// Receives a warning if two processes of a host cannot share memory.
    on_warning: fn(String),
    /// Woken by peers that share memory with this process.
    doorbell: Arc<WakeUp>,
}

impl Linker {
    /// Makes a linker from the settings `transport` and `streams`.
    pub(super) fn new(name: String, config: &Config, doorbell: Arc<WakeUp>) -> Result<Self> {
        config.validate()?;
        Ok(Self {
            name,
            kinds: offered(&config.settings.transport)?,
            streams: config.settings.streams,
            on_warning: config.on_warning,
            doorbell,
        })
    }

    /// Kinds of links that this process offers, by name.
    pub(super) fn transports(&self) -> Vec<String> {
        self.kinds.iter().map(|kind| kind.name.into()).collect()
    }

    /// Builds a link to a server, after it has received the server's offer.
    pub(super) fn initiate(
        &self,
        mut connections: Vec<Connection>,
        server: usize,
        deadline: Instant,
        go_on: GoOn<'_>,
    ) -> Result<PeerLink> {
        let mut stream = DeadlineStream::cancellable(&mut connections[0], deadline, &mut *go_on);
        let offer = handshake::read_message(&mut stream)?;
        let peer = format!("parameter server {server}");
        self.link(connections, &peer, true, &offer, deadline, go_on)
    }

    /// Builds a link to a client that offers `theirs`, after it has sent the server's offer.
    pub(super) fn respond(
        &self,
        mut connections: Vec<Connection>,
        peer: &str,
        theirs: Vec<String>,
        pairs: usize,
        deadline: Instant,
    ) -> Result<PeerLink> {
        let offer = LinkOffer {
            transports: self.transports(),
            pairs,
        };
        let mut stream = DeadlineStream::new(&mut connections[0], deadline);
        handshake::write_message(&mut stream, &offer)?;
        let offer = LinkOffer {
            transports: theirs,
            ..offer
        };
        self.link(connections, peer, false, &offer, deadline, &mut || true)
    }

    fn link(
        &self,
        connections: Vec<Connection>,
        peer: &str,
        initiator: bool,
        theirs: &LinkOffer,
        deadline: Instant,
        go_on: GoOn<'_>,
    ) -> Result<PeerLink> {
        let first = connections[0].tcp();
        let ends = (first.local_addr(), first.peer_addr());
        let is_near = matches!(ends, (Ok(own), Ok(other)) if own.ip() == other.ip());
        let mut introduction = Introduction {
            connections,
            name: &self.name,
            initiator,
            doorbell: self.doorbell.as_fd(),
            pairs: theirs.pairs,
            slots: &mut GroupSlots::default(),
            deadline,
            go_on,
        };
        // Frames need no checksums: messages have their own, which snapshots on a disk need as
        // well.
        let checked = false;
        let made = best(&mut introduction, &self.kinds, &theirs.transports, checked);
        match made.map_err(|error| broken(&error))? {
            (Some((kind, link)), refused) => {
                if let Some(reason) = refused.filter(|_| is_near) {
                    let how = format!("uses TCP to {peer} of the same host: {reason}");
                    (self.on_warning)(format!("{} {how}", self.name));
                }
                Ok(PeerLink {
                    link,
                    transport: self.kinds[kind].name,
                })
            }
            (None, reason) => {
                let reason = reason.unwrap_or_else(|| "they have nothing in common".into());
                Err(NotServed::NoLink {
                    theirs: theirs.transports.join("+").into(),
                    ours: self.transports().join("+").into(),
                    reason: reason.into(),
                }
                .into())
            }
        }
    }
}
