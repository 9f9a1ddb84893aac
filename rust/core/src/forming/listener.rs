//! Listener of a rank. It lets members in while the group forms, and keeps connections made on
//! demand. It also answers inquiries, and requests about the next group, for processes that know
//! the token.

use std::collections::HashSet;
use std::io;
use std::mem::{Discriminant, discriminant};
use std::net::{SocketAddr, TcpListener};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use crate::forming::accepted::{AcceptedConnections, OnDemand};
use crate::forming::access::GroupAccess;
use crate::forming::inquiry::Inquiries;
use crate::forming::membership::Membership;
use gradring_net::link::tcp::connection::Connection;
pub(crate) use gradring_net::session::listener::{ListenOptions, Listener, Service, bind};
use gradring_proto::error::{NotFormed, NotServed, Result};
use gradring_proto::lock::lock;
use gradring_proto::wire::handshake::{Hello, Purpose};

/// Greeting and connection of a member.
type Admitted = (Hello, Connection);

/// The open port of a rank. Closes when dropped.
pub(crate) struct GroupListener {
    pub(crate) port: Listener,
    /// Authenticated members of the forming group.
    pub(crate) members: Receiver<Admitted>,
    /// Connections that members make later.
    pub(crate) accepted: Arc<AcceptedConnections>,
    pub(crate) access: Arc<GroupAccess>,
}

impl GroupListener {
    /// Listens at `host:port`, whose name has resolved to these addresses.
    pub(crate) fn open(
        address: &str,
        resolved: io::Result<Vec<SocketAddr>>,
        access: Arc<GroupAccess>,
    ) -> Result<Self> {
        let (socket, _) = bind(address, resolved, access.config.rank)?;
        Self::listen(access, |options| Listener::on(socket, address, options))
    }

    /// Listens on a socket of this process; the listener that used the socket yields.
    pub(crate) fn reopen(socket: &TcpListener, access: Arc<GroupAccess>) -> Result<Self> {
        Self::listen(access, |options| Listener::reopen(socket, options))
    }

    fn listen(
        access: Arc<GroupAccess>,
        open: impl FnOnce(ListenOptions) -> Result<Listener>,
    ) -> Result<Self> {
        let (sender, members) = channel();
        let accepted = Arc::<AcceptedConnections>::default();
        let port = open(ListenOptions {
            index: access.config.rank,
            credentials: Arc::clone(&access.credentials),
            policy: Arc::clone(&access) as _,
            services: vec![
                Arc::new(Members {
                    access: Arc::clone(&access),
                    sender,
                    admitted: Mutex::default(),
                }),
                Arc::new(OnDemand {
                    access: Arc::clone(&access),
                    accepted: Arc::clone(&accepted),
                }),
                Arc::new(Inquiries(Arc::clone(&access.own_state))),
                Arc::new(Membership(Arc::clone(&access))),
            ],
            no_service: NotServed::NotAServer,
        })?;
        Ok(Self {
            port,
            members,
            accepted,
            access,
        })
    }
}

/// Service that hands members to the thread that forms the group.
struct Members {
    access: Arc<GroupAccess>,
    sender: Sender<Admitted>,
    admitted: Mutex<HashSet<AdmittedPlace>>,
}

/// Rank, purpose and stream of a connection; each is admitted once.
type AdmittedPlace = (usize, Discriminant<Purpose>, usize);

fn place(hello: &Hello) -> AdmittedPlace {
    let stream = match hello.purpose {
        Purpose::Data { stream } => stream,
        _ => 0,
    };
    (hello.rank, discriminant(&hello.purpose), stream)
}

impl Service for Members {
    fn serves(&self, purpose: &Purpose) -> bool {
        use Purpose::{Control, Data, Join};
        matches!(purpose, Join(_) | Data { .. } | Control)
    }

    fn admit(&self, hello: &Hello, deadline: Instant) -> Result<()> {
        self.access.check(hello, deadline)?;
        if lock(&self.admitted).insert(place(hello)) {
            return Ok(());
        }
        let rank = hello.rank;
        Err(match hello.purpose {
            Purpose::Data { stream } => NotFormed::StreamTaken { rank, stream },
            _ => NotFormed::RankTaken { rank },
        }
        .into())
    }

    fn forget(&self, hello: &Hello) {
        lock(&self.admitted).remove(&place(hello));
    }

    fn is_of_members(&self) -> bool {
        true
    }

    fn serve(&self, hello: Hello, connection: Connection, _deadline: Instant) -> Result<()> {
        // Once the group has formed or failed, nobody waits for members.
        if self.access.lets_members_in() {
            drop(self.sender.send((hello, connection)));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_has_one_connection_for_each_purpose_and_stream() {
        let place_of = |purpose| place(&Hello::sample(purpose));
        let control = || place_of(Purpose::Control);
        let data = |stream| place_of(Purpose::Data { stream });
        let places = [control(), data(0), data(1), place_of(Purpose::Inquiry)];
        assert_eq!(HashSet::from(places).len(), places.len());
        assert_eq!((control(), data(1)), (places[0], places[2]));
    }
}
