//! Rosters of an elastic job, the older sets that each roster has to respect, and the quorum rule.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};

/// Identity of a process in one membership: a random number, new at each start and each time that
/// the process gives its membership up. It is never used again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Id(pub [u8; 16]);

impl fmt::Debug for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..3]
            .iter()
            .try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A process and its address.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    /// Identity of the process.
    pub id: Id,
    /// `host:port`, constant for the process's whole life.
    pub address: String,
}

/// Number of a proposal. Rounds grow; the proposer distinguishes proposals of one round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Ballot {
    /// Greater than the round of every roster and proposal that the proposer knew.
    pub round: u64,
    /// The process that proposed.
    pub proposer: Id,
}

impl Ballot {
    /// Lower than all other ballots.
    pub const NONE: Self = Self {
        round: 0,
        proposer: Id([0; 16]),
    };
}

/// Members of an older roster, without those that were known to be dead.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Held {
    peers: Vec<Peer>,
    /// True if each of them was in the new roster, or dead, when that was decided.
    is_settled: bool,
}

/// The members of one proposal. They can be a group only if all of them accept the roster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Roster {
    /// Identity of the roster. Its round is the generation of the group.
    pub ballot: Ballot,
    /// Members in the order of the ring. Survivors keep their order, and their ranks as far as
    /// joiners take the ranks of lost members. So rank 0 may be a joiner.
    pub members: Vec<Peer>,
    /// The sets of which the members had to be a quorum, among them the members of the base.
    lineage: Vec<Held>,
}

/// Knowledge of a roster among the processes that decide about its successor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// All its members accepted it, connected, and have the state of the training.
    Established,
    /// Perhaps all its members accepted it; no deciding process knows.
    Open,
    /// One of its members has promised a higher ballot before it accepted, so it never will.
    Refuted,
}

impl Roster {
    /// The first roster of a job, whose members met outside of the consensus.
    #[must_use]
    pub fn founding(members: Vec<Peer>) -> Self {
        Self {
            ballot: Ballot {
                round: 1,
                proposer: members[0].id,
            },
            members,
            lineage: Vec::new(),
        }
    }

    /// Generation of the group.
    #[must_use]
    pub const fn generation(&self) -> u64 {
        self.ballot.round
    }

    /// Returns whether a process is a member.
    #[must_use]
    pub fn has(&self, id: Id) -> bool {
        self.position(id).is_some()
    }

    /// Rank of a member.
    #[must_use]
    pub fn position(&self, id: Id) -> Option<usize> {
        self.members.iter().position(|member| member.id == id)
    }

    /// The member that follows in the ring; `None` if this one is alone.
    #[must_use]
    pub fn after(&self, id: Id) -> Option<&Peer> {
        let next = (self.position(id)? + 1) % self.members.len();
        self.members.get(next).filter(|next| next.id != id)
    }

    /// Members of older rosters on which a decision may still depend, and which are not in this
    /// roster.
    pub fn previous_members(&self) -> impl Iterator<Item = &Peer> {
        let previous_members = self.lineage.iter().flat_map(|held| &held.peers);
        previous_members.filter(|previous| !self.has(previous.id))
    }

    /// The sets of which the members of the successor have to be a quorum.
    ///
    /// A set is dropped when two conditions hold. Each of its processes was in this roster or dead
    /// when this roster was decided, and this roster was established. So all living processes of
    /// the set have left every other roster that they had accepted. Deaths that are found later do
    /// not count: by then, other processes of the set may have decided without this roster.
    fn sets(&self, standing: Standing) -> impl Iterator<Item = &[Peer]> {
        let needed = move |held: &&Held| standing != Standing::Established || !held.is_settled;
        let older = self.lineage.iter().filter(needed);
        let own = (standing != Standing::Refuted).then_some(&self.members);
        older.map(|held| &*held.peers).chain(own.map(|own| &**own))
    }

    /// Returns whether `some` may decide about the successor: they must be a quorum of each set.
    #[must_use]
    pub fn may_be_succeeded_by(
        &self,
        some: &BTreeSet<Id>,
        standing: Standing,
        dead: &BTreeSet<Id>,
    ) -> bool {
        self.sets(standing).all(|set| is_quorum(some, set, dead))
    }

    /// The successor of this roster.
    #[must_use]
    pub fn successor(
        &self,
        ballot: Ballot,
        members: Vec<Peer>,
        standing: Standing,
        dead: &BTreeSet<Id>,
    ) -> Self {
        let mut successor = Self {
            ballot,
            members,
            lineage: Vec::new(),
        };
        for set in self.sets(standing) {
            let peers: Vec<_> = living(set, dead).cloned().collect();
            let is_settled = peers.iter().all(|peer| successor.has(peer.id));
            let held = Held { peers, is_settled };
            if !successor.lineage.contains(&held) {
                successor.lineage.push(held);
            }
        }
        successor
    }
}

/// Returns whether `some` are more than half of the living processes in `set`. The dead do not
/// count. So two quorums of one set, each alive when the other was decided, have a process in
/// common.
fn is_quorum(some: &BTreeSet<Id>, set: &[Peer], dead: &BTreeSet<Id>) -> bool {
    let here = living(set, dead).filter(|peer| some.contains(&peer.id));
    2 * here.count() > living(set, dead).count()
}

fn living<'a>(set: &'a [Peer], dead: &BTreeSet<Id>) -> impl Iterator<Item = &'a Peer> {
    set.iter().filter(|peer| !dead.contains(&peer.id))
}

#[cfg(test)]
mod tests {
    use super::Standing::{Established, Open, Refuted};
    use super::*;

    fn peers(ids: &[u8]) -> Vec<Peer> {
        let peer = |&id: &u8| Peer {
            id: Id([id; 16]),
            address: format!("h{id}:1"),
        };
        ids.iter().map(peer).collect()
    }

    fn ids(ids: &[u8]) -> BTreeSet<Id> {
        ids.iter().map(|&id| Id([id; 16])).collect()
    }

    fn next(roster: &Roster, members: &[u8], standing: Standing, dead: &[u8]) -> Roster {
        let ballot = Ballot {
            round: roster.generation() + 1,
            proposer: Id([members[0]; 16]),
        };
        assert!(roster.may_be_succeeded_by(&ids(members), standing, &ids(dead)));
        roster.successor(ballot, peers(members), standing, &ids(dead))
    }

    #[test]
    fn a_quorum_is_more_than_half_of_those_that_live() {
        let five = Roster::founding(peers(&[1, 2, 3, 4, 5]));
        for (some, dead, may) in [
            (&[1, 2, 3][..], &[][..], true),
            (&[1, 2], &[], false),
            (&[1, 2], &[5], false),
            (&[1, 2], &[4, 5], true),
            (&[3], &[1, 2, 4, 5], true),
            (&[1, 2, 6, 7], &[], false),
            (&[], &[1, 2, 3, 4, 5], false),
        ] {
            let found = five.may_be_succeeded_by(&ids(some), Established, &ids(dead));
            assert_eq!(found, may, "{some:?} with {dead:?} dead");
        }
    }

    #[test]
    fn who_was_left_out_alive_is_held_until_it_is_in_or_dead_when_another_roster_is_decided() {
        let five = Roster::founding(peers(&[1, 2, 3, 4, 5]));
        let three = next(&five, &[1, 2, 3], Established, &[]);
        // 4 and 5 may still live, and would be enough if 1 and 2 were dead.
        assert!(!three.may_be_succeeded_by(&ids(&[2, 3]), Established, &ids(&[1])));
        assert!(three.may_be_succeeded_by(&ids(&[2, 3]), Established, &ids(&[1, 4])));
        assert_eq!(three.previous_members().count(), 2);
        let settled = next(&three, &[1, 2, 3], Established, &[4, 5]);
        assert!(settled.may_be_succeeded_by(&ids(&[1, 2]), Established, &ids(&[4, 5])));
        assert_eq!(settled.previous_members().count(), 0);
    }

    #[test]
    fn a_roster_that_may_not_have_been_established_holds_what_its_base_held() {
        let two = Roster::founding(peers(&[1, 2]));
        let grown = next(&two, &[1, 2, 3, 4, 5], Established, &[]);
        let joiners = ids(&[3, 4, 5]);
        assert!(grown.may_be_succeeded_by(&joiners, Established, &ids(&[])));
        assert!(!grown.may_be_succeeded_by(&joiners, Open, &ids(&[])));
        let (founders, none) = (ids(&[1, 2]), ids(&[]));
        assert!(!grown.may_be_succeeded_by(&founders, Open, &none));
        assert!(grown.may_be_succeeded_by(&founders, Refuted, &none));
    }
}
