//! Negotiation between two ranks of their kind of link, while their group forms.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Instant;

use super::kind::{GroupSlots, Introduction, Kind};
use super::mesh::Mesh;
use super::poll::WakeUp;
use super::tcp::connection::Connection;
use super::tcp::deadline_stream::GoOn;
use super::{KINDS, Link, framing, shm, tcp};
use gradring_proto::error::Error;
use gradring_proto::schedule::partners;
use gradring_proto::schedule::topology::Topology;
use gradring_proto::settings::wrong;

/// Value of the setting `transport` that offers all kinds.
pub const AUTO: &str = "auto";

/// Returns the kinds that a setting `transport` offers: all, or the one of that name.
///
/// # Errors
/// `Config` for an unknown name.
pub fn offered(transport: &str) -> Result<Vec<Kind>, Error> {
    let kinds = KINDS.iter().copied();
    let kinds: Vec<_> = kinds
        .filter(|kind| [AUTO, kind.name].contains(&transport))
        .collect();
    if kinds.is_empty() {
        let known: Vec<_> = KINDS.iter().map(|kind| kind.name).collect();
        let wanted = format!("{AUTO} or one of {}", known.join(", "));
        return Err(wrong("transport", transport, &wanted));
    }
    Ok(kinds)
}

/// Outcome of a rank's negotiations.
pub struct Agreed {
    /// Links of the rank.
    pub mesh: Mesh,
    /// Names of the kinds in use, joined by `+`.
    pub name: String,
    /// Reasons, by rank, why the best common kind could not be used.
    pub refused: BTreeMap<usize, String>,
}

/// Reason why two ranks have no link.
#[derive(Debug)]
pub enum Failed {
    /// Their connection failed during the negotiation.
    Broken {
        /// The other rank.
        peer: usize,
        /// The error; `TimedOut` if the peer did not finish in time.
        error: io::Error,
    },
    /// No common kind works.
    Refused {
        /// The other rank.
        peer: usize,
        /// Reason why the best common kind does not work.
        reason: String,
    },
}

/// Links a rank with each peer of `connections`, by the best common kind that works.
///
/// Peers come one after the other: rank `a` and rank `b` meet in round `a + b` modulo the number of
/// ranks. Each rank meets at most one peer per round, so the pairs of the earliest unfinished round
/// can always continue. Negotiating with all peers at once would need a thread for each.
///
/// # Errors
/// When a socket cannot be configured, or the system has no file descriptor left. The inner error
/// is a negotiation that failed or was not over by `deadline`.
pub fn agree(
    (rank, topology): (usize, &Topology),
    ours: &[Kind],
    offers: &[Vec<String>],
    mut connections: BTreeMap<usize, Vec<Connection>>,
    checked: bool,
    deadline: Instant,
    go_on: GoOn<'_>,
) -> io::Result<Result<Agreed, Failed>> {
    let mut all = connections.values().flatten();
    all.try_for_each(|connection| tcp::configure(connection.tcp()))?;
    let doorbell = Arc::new(WakeUp::new()?);
    let world_size = offers.len();
    let pairs = pairs_of_a_host(topology);
    let mut links: Vec<Option<Box<dyn Link>>> = (0..world_size).map(|_| None).collect();
    let (mut used, mut refused) = (vec![false; ours.len()], BTreeMap::new());
    let may_share = !checked && ours.iter().any(|kind| kind.name == shm::KIND.name);
    let mut slots = GroupSlots::of(rank, topology, may_share);
    let name = &format!("rank {rank}");
    let mut in_rounds: Vec<usize> = connections.keys().copied().collect();
    in_rounds.sort_unstable_by_key(|peer| (rank + peer) % world_size);
    for peer in in_rounds {
        let mut introduction = Introduction {
            connections: connections.remove(&peer).unwrap_or_default(),
            name,
            initiator: rank < peer,
            doorbell: doorbell.as_fd(),
            pairs,
            slots: &mut slots,
            deadline,
            go_on: &mut *go_on,
        };
        let (made, reason) = match best(&mut introduction, ours, &offers[peer], checked) {
            Ok(outcome) => outcome,
            Err(error) => return Ok(Err(Failed::Broken { peer, error })),
        };
        let Some((kind, link)) = made else {
            let reason = reason.unwrap_or_default();
            return Ok(Err(Failed::Refused { peer, reason }));
        };
        links[peer] = Some(link);
        used[kind] = true;
        refused.extend(reason.map(|reason| (peer, reason)));
    }
    let names = ours.iter().zip(used).filter(|(_, used)| *used);
    let names: Vec<_> = names.map(|(kind, _)| kind.name).collect();
    // Slots are for groups whose ranks have links through shared memory with all others.
    let all_share = names == [shm::KIND.name] && refused.is_empty();
    let slots = slots.own.or(slots.received).filter(|_| all_share);
    let slots = slots.and_then(|slots| slots.map(rank).ok());
    Ok(Ok(Agreed {
        mesh: Mesh::new(links, doorbell)?.with_slots(slots),
        name: match &*names {
            // A rank that is alone has no links.
            [] => tcp::KIND.name.into(),
            names => names.join("+"),
        },
        refused,
    }))
}

/// A link with the index of its kind, if one works, and the reason why a better kind does not.
pub(crate) type Best = (Option<(usize, Box<dyn Link>)>, Option<String>);

/// Makes a link with a peer that offers `theirs`, by the best common kind that works.
///
/// # Errors
/// When the negotiation fails or takes too long.
pub fn best(
    introduction: &mut Introduction<'_>,
    ours: &[Kind],
    theirs: &[String],
    checked: bool,
) -> io::Result<Best> {
    let mut refused = None;
    for (index, kind) in ours.iter().enumerate() {
        if !theirs.iter().any(|offer| offer == kind.name) {
            continue;
        }
        match (kind.link)(introduction)? {
            Ok(lanes) => return Ok((Some((index, framing::over(lanes, checked))), refused)),
            Err(reason) => drop(refused.get_or_insert(reason)),
        }
    }
    Ok((None, refused))
}

/// Returns the number of linked pairs of ranks on the host with the most of them.
pub fn pairs_of_a_host(topology: &Topology) -> usize {
    let host_of: BTreeMap<usize, usize> = (0..)
        .zip(topology.hosts())
        .flat_map(|(host, ranks)| ranks.iter().map(move |&rank| (rank, host)))
        .collect();
    let ends = |(host, ranks): (usize, &Vec<usize>)| {
        let partners = ranks.iter().flat_map(|&rank| partners(rank, topology));
        partners.filter(|peer| host_of[peer] == host).count()
    };
    let most = (0..).zip(topology.hosts()).map(ends).max();
    most.unwrap_or_default() / 2
}
