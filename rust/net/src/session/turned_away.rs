//! Initiators that were turned away while a group formed, for error messages.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Mutex;

use super::listener::Initiator;
use gradring_proto::error::{Breach, Error, ErrorKind};
use gradring_proto::lock::lock;

/// Largest number of distinct reasons kept for members.
const MEMBERS_REASONS_MAX: usize = 8;
/// Largest number of distinct reasons kept for each sort of strangers.
const STRANGERS_REASONS_MAX: usize = 2;

/// Sorts of initiators. Each sort has its own limit, so strangers never displace members.
#[derive(PartialEq, Eq, PartialOrd, Ord, Clone, Copy)]
enum Sort {
    Member,
    OtherVersion,
    /// Name of the exception, and `true` if it came after TLS.
    Stranger(&'static str, bool),
}

/// Initiators that were turned away for one reason.
struct Visits {
    /// Name of the first initiator.
    initiator: String,
    reason: String,
    advice: &'static str,
    count: usize,
    /// `true` if all had the same name and exactly the same reason.
    equal: bool,
}

/// Summary of refused initiators for the user. Its text is empty, or the end of a sentence.
#[derive(Default)]
pub struct TurnedAway {
    /// Visits by sort and reason. Strangers' reasons are stored without digits, because a stranger
    /// may choose the numbers.
    visits: Mutex<BTreeMap<(Sort, String), Visits>>,
}

impl Sort {
    fn of(initiator: &Initiator, error: &Error) -> Self {
        if initiator.proved_rank.is_some() {
            Self::Member
        } else if matches!(error.kind, ErrorKind::Protocol(Breach::OtherVersion { .. })) {
            Self::OtherVersion
        } else {
            Self::Stranger(error.kind.exception(), initiator.is_connected)
        }
    }
}

impl TurnedAway {
    /// Records a visit. Returns a sentence for the user at the first visit for a reason.
    pub fn note(&self, initiator: &Initiator, error: &Error) -> Option<String> {
        let (initiator_name, reason) = (initiator.to_string(), error.happened().to_string());
        let sort = Sort::of(initiator, error);
        let (kind, reasons_max) = match sort {
            Sort::Member => (format!("{initiator_name}: {reason}"), MEMBERS_REASONS_MAX),
            _ => (
                reason.replace(|c: char| c.is_ascii_digit(), ""),
                STRANGERS_REASONS_MAX,
            ),
        };
        let mut visits = lock(&self.visits);
        if let Some(visits) = visits.get_mut(&(sort, kind.clone())) {
            visits.equal &= visits.initiator == initiator_name && visits.reason == reason;
            visits.count += 1;
            return None;
        }
        let of_this_sort = visits.keys().filter(|(other, _)| *other == sort);
        let is_kept = of_this_sort.count() < reasons_max;
        let message = is_kept.then(|| format!("turned away {initiator_name}: {error}"));
        if is_kept {
            let first = Visits {
                initiator: initiator_name,
                reason,
                advice: error.advice(),
                count: 1,
                equal: true,
            };
            visits.insert((sort, kind), first);
        }
        message
    }
}

impl fmt::Display for TurnedAway {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let visits = lock(&self.visits);
        for (index, visits) in visits.values().enumerate() {
            f.write_str(if index == 0 { "; turned away: " } else { "; " })?;
            write!(f, "{}: {}", visits.initiator, visits.reason)?;
            match visits {
                Visits { count: 1, .. } => {}
                Visits { equal: true, .. } => write!(f, " ({} times)", visits.count)?,
                _ => write!(f, " (and the like, {} times)", visits.count)?,
            }
        }
        // Advice comes at the end, each sentence once.
        let mut advices: Vec<_> = visits.values().map(|visits| visits.advice).collect();
        advices.sort_unstable();
        advices.dedup();
        let mut advices = advices.into_iter().filter(|advice| !advice.is_empty());
        advices.try_for_each(|advice| write!(f, "; {advice}"))
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use gradring_proto::error::{NotFormed, NotTrusted};
    use gradring_proto::wire::handshake;

    fn initiator(number: u32, proved_rank: Option<usize>) -> Initiator {
        Initiator {
            proved_rank,
            ..Initiator::new(Ipv4Addr::from(0x0a00_0000 + number).into())
        }
    }

    #[test]
    fn the_note_is_bounded_and_counts() {
        let turned_away = TurnedAway::default();
        assert_eq!(turned_away.to_string(), "");
        for visit in 0..1000 {
            let error = Error::aborted(&format!("reason {}", visit % 100));
            turned_away.note(&initiator(0, Some(3)), &error);
        }
        let note = turned_away.to_string();
        let first = "; turned away: rank 3 at 10.0.0.0: aborted the communicator: reason 0";
        assert!(note.starts_with(first), "{note}");
        assert_eq!(note.matches("(10 times)").count(), MEMBERS_REASONS_MAX);
    }

    #[test]
    fn strangers_do_not_crowd_out_what_others_were_turned_away_for() {
        let turned_away = TurnedAway::default();
        for number in 0..1000 {
            let (bytes, most) = (number as usize, 7);
            let alert = "x".repeat(bytes).into();
            let (initiator_speaks, responder) = (number, handshake::PROTOCOL_VERSION);
            for error in [
                Error::from(Breach::TooLong { bytes, most }),
                NotTrusted::OwnCertificate { alert }.into(),
                handshake::other_version(initiator_speaks, responder),
            ] {
                turned_away.note(&initiator(number, None), &error);
            }
        }
        let mut honest = initiator(7, None);
        honest.is_connected = true;
        turned_away.note(&honest, &NotTrusted::NoCertificate.into());
        turned_away.note(&initiator(8, Some(2)), &NotFormed::Busy.into());
        let note = turned_away.to_string();
        assert!(note.starts_with("; turned away: rank 2 at 10.0.0.8: its group has formed"));
        assert!(
            note.contains("10.0.0.7: it presents no certificate"),
            "{note}"
        );
        for (text, count) in [("speaks", 1), ("announced", 1), ("(alert", 2)] {
            assert_eq!(note.matches(text).count(), count, "{note}");
        }
        assert!(note.contains("(and the like, 1000 times)"), "{note}");
    }
}
