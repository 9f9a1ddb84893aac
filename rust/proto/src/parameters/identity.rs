//! Identities of pushes, versions and the terms of servers.

use serde::{Deserialize, Serialize};

/// Number of log entries that the weights contain. The first entry brings the initial weights.
pub type Version = u64;

/// Grows each time the servers are restored. Messages of another term never change the weights.
pub type Term = u64;

/// One membership of a worker: the term in which it began, and its number in that term. Later
/// memberships of one worker compare greater.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
pub struct Incarnation(pub Term, pub u32);

/// Identity of a gradient, which is applied at most once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PushId {
    /// Index of the worker.
    pub worker: u32,
    /// Membership in which the worker pushed it.
    pub incarnation: Incarnation,
    /// Grows with every push of the membership.
    pub number: u64,
}

/// Identity of weights: servers at the same point have the same history.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
pub struct Point {
    /// Term in which the last entry was ordered.
    pub term: Term,
    /// Number of entries.
    pub version: Version,
}

/// The version at which each term began. It shows which points are in the servers' past, and which
/// were abandoned when a server was lost.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Terms(Vec<(Term, Version)>);

/// Bound on the terms that are remembered. Points that older terms abandoned no longer occur in
/// messages.
const TERMS_MAX: usize = 1024;

impl Terms {
    /// No term yet.
    pub const NONE: Self = Self(Vec::new());

    /// The current term; 0 before the first.
    #[must_use]
    pub fn term(&self) -> Term {
        self.0.last().map_or(0, |(term, _)| *term)
    }

    /// The version with which the current term began; 0 before the first.
    #[must_use]
    pub fn start(&self) -> Version {
        self.0.last().map_or(0, |(_, version)| *version)
    }

    /// The terms with a new one that continues from `version`.
    #[must_use]
    pub fn followed_by(&self, term: Term, version: Version) -> Self {
        // The new term excludes every point that a term with the same or a later start excluded.
        let kept = self.0.iter().filter(|(_, earlier)| *earlier < version);
        let mut terms: Vec<_> = kept.copied().collect();
        terms.push((term, version));
        let excess = terms.len().saturating_sub(TERMS_MAX);
        Self(terms.split_off(excess))
    }

    /// Returns whether a point is in the servers' past: no later term has abandoned it.
    #[must_use]
    pub fn contains(&self, point: Point) -> bool {
        let later = self.0.iter().filter(|(term, _)| *term > point.term);
        point.term <= self.term() && later.into_iter().all(|(_, start)| point.version <= *start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terms_contain_what_no_later_one_has_given_up() {
        let first = Terms::default().followed_by(1, 0);
        let third = first.followed_by(2, 5).followed_by(3, 8);
        let contains = |terms: &Terms, term, version| terms.contains(Point { term, version });
        assert!(contains(&third, 1, 5) && contains(&third, 2, 8) && contains(&third, 3, 90));
        assert!(!contains(&third, 1, 6) && !contains(&third, 2, 9) && !contains(&third, 4, 1));
        let back = third.followed_by(4, 3);
        assert!(contains(&back, 1, 3) && !contains(&back, 2, 5) && !contains(&back, 1, 4));
        assert_eq!(back, first.followed_by(4, 3));
        assert_eq!((back.term(), back.start()), (4, 3));
        // A return to the same version makes an earlier one superfluous, too.
        assert_eq!(
            third.followed_by(4, 8),
            first.followed_by(2, 5).followed_by(4, 8)
        );
    }
}
