//! Consensus of the processes of an elastic job on the members of its next generation.
//!
//! Pure code without sockets, threads or a clock. A [`Member`](member::Member) is the state of one
//! process. Its owner passes in requests of other processes (`answer`) and the outcomes of its own
//! requests (`on_outcome`). The owner also performs each `step`: send a request, connect as a
//! new group, or wait.
//!
//! *How.* When a group has failed, one of its members, the proposer, gathers promises for a ballot.
//! A process that has promised takes part in no lower ballot, and reports the roster at which it
//! is. The proposer waits until every member of that roster has promised, is proved dead, or has
//! been silent for long. If those that promised may decide (`quorum`), the proposer installs a new
//! roster. Each of its members has to accept it, and is at it from then on. The members connect as
//! any group does, and joiners get the state of the training. When all have both, the roster is
//! established. Connections alone are not enough: joiners would count from then on, and more than
//! half of a roster could continue without anything that was trained.
//!
//! *Death* is never concluded from silence. A process is dead if its address refuses, if another
//! process answers there, if it has sent a goodbye, or if the launcher reports its end. A process
//! that learns that others continued without it gives up its id, which counts as dead, and joins
//! under a new one.
//!
//! *While a roster connects*, each member repeatedly asks its successor in the ring whether that
//! member is still at the roster. This takes one request in flight per member, however large the
//! group is. If the successor is dead or has promised a higher ballot, this group cannot form, and
//! the asking member must re-form. If it has found a death, it proposes without waiting for its
//! turn, so all others re-form, too. Silence is no reason to re-form: the time limit for connecting
//! finds silent members.
//!
//! *Why two live rings are impossible.* A ring is alive while all its members are at its roster. So
//! rings with a common member are never alive together, and a member that has left a ring never
//! comes back, because ballots only grow. Take two rosters that descend from one base by different
//! ways. Both had to be quorums of the base's members, and each counted only dead processes as
//! dead. If one of them has a dead member, it is no ring any more. Otherwise both are more than
//! half of the same living processes, and have one in common. A roster need not be a quorum of an
//! older set that its line has dropped. But then an established roster of that line had all living
//! processes of the set, and each of them had left every other roster that it had accepted. Two
//! rules are the write quorum of all of Vertical Paxos (Lamport, Malkhi, Zhou: Vertical Paxos and
//! Primary-Backup Replication, 2009). First, every member has to accept. Second, a proposer takes
//! the highest roster of those it decides with as the base. Ballots and promises are those of
//! Lamport: Paxos Made Simple, 2001.
//!
//! *Limits.* If more than half of the members are silent, nobody continues: a group of two needs
//! proof. If all processes that continued have died, older members may continue from their older
//! state, under a generation that need not be greater than that of the dead.
//!
//! *Differences from plain two-phase commit.* Suppose that one of the deciding members has not
//! accepted a base, and by its promise never will. Then the base was never a group, and its own
//! members need not be held (`Standing::Refuted`). So silent joiners cannot outvote the members
//! that were to take them in. And a process that is left out gives up only if it cannot be part of
//! a quorum itself. So a roster that reached one process, which then died, does not end the others.

pub mod member;
pub mod message;
pub mod quorum;
pub mod timing;
