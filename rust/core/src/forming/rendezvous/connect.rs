//! Connections from a rank to the listeners of others, while its group forms.

use std::net::TcpStream;
use std::sync::Arc;

use super::Forming;
use crate::forming::roster::Roster;
use gradring_net::link::tcp::connection::Connection;
pub(super) use gradring_net::session::connect::{Connector, Failure, Retry};
use gradring_net::session::connect::{obstacle, with_addresses};
use gradring_proto::error::{Error, NotFormed, Result};
use gradring_proto::wire::handshake::{Hello, Purpose};

impl Forming<'_> {
    /// Connects to a rank for one purpose.
    pub(super) fn connect_to(
        &mut self,
        roster: &Roster,
        rank: usize,
        purpose: &Purpose,
    ) -> Result<Connection> {
        let member = &roster.members()[rank];
        self.meet(rank, &member.host, &member.address, |_, _| {
            Ok(purpose.clone())
        })
    }

    /// Connects to a rank and proves to be a member. Retries until the deadline, because the other
    /// side may start later, or be busy with strangers.
    pub(super) fn meet(
        &mut self,
        rank: usize,
        host: &str,
        address: &str,
        mut purpose: impl FnMut(&mut Self, &TcpStream) -> Result<Purpose>,
    ) -> Result<Connection> {
        // A silent peer is stopped or cut off; a retry would only delay the error.
        let again = |failure: &Failure, _| match failure {
            Failure::Unreachable(..) => failure.shortage().is_none(),
            _ => failure.is_passing(),
        };
        let retry = Retry {
            started: self.started,
            conversation: Some(self.config.conversation_limit()),
            ..Retry::until(self.deadline, &again)
        };
        let credentials = Arc::clone(&self.credentials);
        let connector = Connector {
            resolve: self.resolve,
            ..Connector::new(address, &credentials, retry)
        };
        let hello = |this: &mut Self, tcp: &TcpStream| {
            let purpose = purpose(this, tcp)?;
            let config = this.config;
            let hello = Hello::new((config.rank, rank), config.world_size, purpose)?;
            Ok(hello.within(this.group, config.generation))
        };
        let connected = connector.connect(self, hello, |_| Ok(()));
        connected.map_or_else(
            |failure| match failure {
                Failure::Own(error) => Err(error),
                Failure::Handshake(error) => Err(error.blaming(rank, host)),
                Failure::Unreachable(ref error, ref known) => {
                    Err(failure.shortage().unwrap_or_else(|| {
                        let fact = NotFormed::Unreachable {
                            initiator: self.config.rank,
                            address: address.into(),
                            error: with_addresses(error, known),
                            obstacle: obstacle(error),
                        };
                        Error::from(fact).blaming(rank, host)
                    }))
                }
            },
            |(connection, ())| Ok(connection),
        )
    }
}
