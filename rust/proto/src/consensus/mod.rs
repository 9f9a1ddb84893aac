//! Consensus of the processes of an elastic job on the members of its next generation.
//!
//! Pure code without sockets, threads or a clock. A [`Member`](member::Member) is the state of one
//! process. Its owner passes on what others ask (`answer`) and what became of its own requests
//! (`heard`), and does what `step` says: send a request, connect as a new group, or wait.
//!
//! *How.* A proposer among those whose group has failed gathers promises for a ballot. A process that
//! has promised takes part in nothing lower, and tells at which roster it is. When every member of
//! that roster has promised, is proved dead, or has been silent for long, and those that promised may
//! decide (`quorum`), the proposer installs a new roster. Each of its members has to accept it, and
//! is at it from then on. They connect as any group does, and joiners get the state of the training;
//! when all have both, the roster is established. Connections alone are not enough: joiners would count
//! from then on, and more than half of a roster could go on with nothing of what was trained.
//!
//! *Death* is never concluded from silence. A process is dead if its address refuses, if another
//! process answers there, if it has said goodbye, or if the launcher says so. A process that is told
//! that others went on without it gives up its id, which therefore is dead, and joins as a new one.
//!
//! *While they connect*, each member asks the one that follows on it in the ring again and again
//! whether it is still at the roster: one request in flight for each, however many they are. If that
//! one is dead, or has promised a higher ballot, there will be no such group. The asker must re-form,
//! and if it has found a death it proposes without waiting for its turn, so that all others must.
//! Silence is no reason; who is silent while it connects is found by the time that connecting may take.
//!
//! *Why two live rings are impossible.* A ring is alive while all its members are at its roster, so
//! rings with a common member are never alive together, and a member that has left never comes back:
//! ballots only grow. Take two rosters that descend from one base by different ways. Both had to be
//! quorums of the base's members. Each counted as dead only the dead, so either one of them has a
//! dead member and is no ring any more, or both are more than half of the same living processes and
//! have one in common. A roster need not be a quorum of an older set that its line has dropped; but
//! then a roster of that line was established that had all of the set that lived, and each of those
//! had left whatever else it had accepted. That every member has to accept, and that a proposer takes
//! the highest roster of those it decides with as the base, is the write quorum of all of Vertical Paxos
//! (Lamport, Malkhi, Zhou: Vertical Paxos and Primary-Backup Replication, 2009); ballots and promises
//! are those of Lamport: Paxos Made Simple, 2001.
//!
//! *What is given up.* If silent members hold more than half, nobody goes on: a group of two needs
//! proof. If those that went on have all died, older members may go on from their older state, under
//! a generation that need not be greater than that of the dead.
//!
//! *Where it differs from plain two-phase commit.* A base that one of the deciding members has not
//! accepted, and by its promise never will, was never a group: its own members need not be held
//! (`Standing::Refuted`), so silent joiners cannot outvote the members that were to take them in. And
//! a process that is left out gives up only if it cannot be part of a quorum itself, so a roster that
//! reached one process, which then died, does not end the others.

pub mod member;
pub mod message;
pub mod quorum;
pub mod timing;
