//! Identities of pushes, versions and the terms of servers.

use serde::{Deserialize, Serialize};

/// How many entries of the log the weights have in them. The first entry brings the initial weights.
pub type Version = u64;

/// Grows whenever the servers are restored; messages of another term are not believed.
pub type Term = u64;

/// One membership of a worker: the term in which it began, and its number there. For one worker,
/// later ones are greater.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
pub struct Incarnation(pub Term, pub u32);

/// Which gradient. Nothing with the same identity is ever applied twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PushId {
    /// Index of the worker.
    pub worker: u32,
    /// Its membership.
    pub incarnation: Incarnation,
    /// Grows from push to push.
    pub number: u64,
}

/// Weights that were there: two servers that were at the same point had the same history.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
pub struct Point {
    /// When the last entry was ordered.
    pub term: Term,
    /// How many.
    pub version: Version,
}

/// Where each term went on from what an earlier one had: which points are in the past of the servers,
/// and which were given up when a server was lost.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Terms(Vec<(Term, Version)>);

/// Terms that are remembered. Those before never gave up anything that still could come up.
const TERMS_MAX: usize = 1024;

impl Terms {
    /// Before the first term.
    pub const NONE: Self = Self(Vec::new());

    /// The current one; 0 before the first.
    #[must_use]
    pub fn term(&self) -> Term {
        self.0.last().map_or(0, |(term, _)| *term)
    }

    /// With what version the current term began.
    #[must_use]
    pub fn start(&self) -> Version {
        self.0.last().map_or(0, |(_, version)| *version)
    }

    /// A new term that goes on from this version.
    #[must_use]
    pub fn followed_by(&self, term: Term, version: Version) -> Self {
        // One that gave up more makes those before it superfluous.
        let kept = self.0.iter().filter(|(_, earlier)| *earlier < version);
        let mut terms: Vec<_> = kept.copied().collect();
        terms.push((term, version));
        let excess = terms.len().saturating_sub(TERMS_MAX);
        Self(terms.split_off(excess))
    }

    /// Whether a point is in the past.
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
        // One that gives up as much as another makes it superfluous, too.
        assert_eq!(
            third.followed_by(4, 8),
            first.followed_by(2, 5).followed_by(4, 8)
        );
    }
}
