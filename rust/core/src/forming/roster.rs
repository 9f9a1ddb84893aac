//! The agreed list of members, and facts that follow from it.

use std::net::SocketAddr;

use gradring_net::config::Config;
use gradring_net::host::{host_id, host_name};
use gradring_net::link::kind::Kind;
use gradring_proto::schedule::topology::Topology;
use gradring_proto::wire::handshake::RosterMember;

/// Members of the group, by rank.
#[derive(Debug, Clone)]
pub struct Roster {
    members: Vec<RosterMember>,
}

impl Roster {
    pub(crate) const fn new(members: Vec<RosterMember>) -> Self {
        Self { members }
    }

    pub(crate) fn members(&self) -> &[RosterMember] {
        &self.members
    }

    /// Name of the host that a rank runs on.
    #[must_use]
    pub fn host(&self, rank: usize) -> &str {
        &self.members[rank].host
    }

    /// Ranks grouped by host, and hosts by rack.
    #[must_use]
    pub(crate) fn topology(&self) -> Topology {
        let hosts = self.members.iter().map(|member| &member.host_id);
        Topology::by_host(hosts).in_racks(|rank| &self.members[rank].rack)
    }

    /// Versions that each rank runs, by its own report, in the order of ranks.
    pub fn versions(&self) -> impl Iterator<Item = &str> {
        self.members.iter().map(|member| member.versions.as_str())
    }

    /// The ranks to which processes of other hosts can connect.
    ///
    /// Each rank reports the address that its socket is bound to, which configured addresses do not
    /// show.
    pub fn reachable_from_other_hosts(&self) -> impl Iterator<Item = usize> {
        let members = self.members.iter().enumerate();
        members.filter_map(|(rank, member)| (!member.loopback_only).then_some(rank))
    }

    /// Returns `true` if two ranks report the same host.
    #[must_use]
    pub fn same_host(&self, one: usize, other: usize) -> bool {
        self.members[one].host_id == self.members[other].host_id
    }

    /// Index of a rank among those on its host.
    #[must_use]
    pub fn local_rank(&self, rank: usize) -> usize {
        self.topology().position(rank).1
    }

    /// Number of ranks on the host of `rank`.
    #[must_use]
    pub fn local_size(&self, rank: usize) -> usize {
        let topology = self.topology();
        topology.hosts()[topology.position(rank).0].len()
    }
}

/// Describes this process as a member reachable at `address`; its socket, if any, is bound to
/// `bound`.
pub(crate) fn this_member(
    address: String,
    bound: Option<SocketAddr>,
    config: &Config,
    kinds: &[Kind],
) -> RosterMember {
    RosterMember {
        address,
        loopback_only: bound.is_none_or(|bound| bound.ip().to_canonical().is_loopback()),
        host: host_name(),
        host_id: host_id(),
        rack: config.settings.rack.0.clone(),
        job: config.job.clone(),
        settings: config.settings.compared(),
        versions: config.versions.clone(),
        transports: kinds.iter().map(|kind| kind.name.into()).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_ranks_count_the_ranks_of_one_host() {
        let members = ["a", "b", "a", "b", "b"].map(|host| RosterMember {
            address: String::new(),
            loopback_only: true,
            host: host.into(),
            host_id: host.into(),
            rack: String::new(),
            job: String::new(),
            settings: String::new(),
            versions: String::new(),
            transports: Vec::new(),
        });
        let roster = Roster::new(members.into());
        let local: Vec<_> = (0..5)
            .map(|rank| (roster.local_rank(rank), roster.local_size(rank)))
            .collect();
        assert_eq!(local, [(0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]);
        assert_eq!(roster.topology().hosts(), [vec![0, 2], vec![1, 3, 4]]);
    }
}
