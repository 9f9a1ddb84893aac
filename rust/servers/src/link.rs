//! Links between workers and servers: what both make of connections on which they know each other.

use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use gradring_net::config::Config;
use gradring_net::link::Link;
use gradring_net::link::kind::{Introduction, Kind};
use gradring_net::link::negotiation::{best, offered};
use gradring_net::link::poll::WakeUp;
use gradring_net::link::tcp::connection::Connection;
use gradring_net::link::tcp::deadline_stream::{DeadlineStream, GoOn};
use gradring_proto::error::{NotServed, Result};
use gradring_proto::wire::handshake::{self, broken};

/// What a server tells who has connected, once it has let it in.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Terms {
    /// What it offers to make links of, by name.
    pub(super) transports: Vec<String>,
    /// Between how many pairs of workers and servers there are links at most, so that both sides say
    /// the same.
    pub(super) pairs: usize,
}

/// A link, and what it is made of.
pub(crate) struct PeerLink {
    pub(super) link: Box<dyn Link>,
    pub(super) transport: &'static str,
}

/// Makes links.
pub(super) struct Linker {
    /// This process, as others are told of it.
    name: String,
    kinds: Vec<Kind>,
    /// How many connections a link is made of.
    pub(super) streams: usize,
    /// Hears why memory is not shared.
    on_warning: fn(String),
    /// Rung by those that share memory with it.
    doorbell: Arc<WakeUp>,
}

impl Linker {
    /// By the settings `transport` and `streams`.
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

    /// What it offers, by name.
    pub(super) fn transports(&self) -> Vec<String> {
        self.kinds.iter().map(|kind| kind.name.into()).collect()
    }

    /// A link over connections to a server, which says its terms.
    pub(super) fn initiate(
        &self,
        mut connections: Vec<Connection>,
        server: usize,
        deadline: Instant,
        go_on: GoOn<'_>,
    ) -> Result<PeerLink> {
        let mut stream = DeadlineStream::cancellable(&mut connections[0], deadline, &mut *go_on);
        let terms = handshake::read_message(&mut stream)?;
        let peer = format!("parameter server {server}");
        self.link(connections, &peer, true, &terms, deadline, go_on)
    }

    /// A link over connections of one that offers `theirs`, by the terms of a server.
    pub(super) fn respond(
        &self,
        mut connections: Vec<Connection>,
        peer: &str,
        theirs: Vec<String>,
        pairs: usize,
        deadline: Instant,
    ) -> Result<PeerLink> {
        let terms = Terms {
            transports: self.transports(),
            pairs,
        };
        let mut stream = DeadlineStream::new(&mut connections[0], deadline);
        handshake::write_message(&mut stream, &terms)?;
        let terms = Terms {
            transports: theirs,
            ..terms
        };
        self.link(connections, peer, false, &terms, deadline, &mut || true)
    }

    fn link(
        &self,
        connections: Vec<Connection>,
        peer: &str,
        initiator: bool,
        theirs: &Terms,
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
            deadline,
            go_on,
        };
        // Messages have checksums of their own, which those on a disk need, too.
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
