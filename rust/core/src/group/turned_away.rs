//! Who was turned away while the group formed, for error messages.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// Different reasons that are kept.
const REASONS_MAX: usize = 8;

/// What those who were turned away would like the user to know. As text it is empty, or the end of
/// a sentence.
#[derive(Default)]
pub(crate) struct TurnedAway {
    /// How many there were, by the reason.
    reasons: Mutex<BTreeMap<String, usize>>,
}

impl TurnedAway {
    pub(crate) fn note(&self, reason: String) {
        let mut reasons = self.reasons.lock().unwrap_or_else(PoisonError::into_inner);
        if reasons.len() < REASONS_MAX || reasons.contains_key(&reason) {
            *reasons.entry(reason).or_default() += 1;
        }
    }
}

impl fmt::Display for TurnedAway {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reasons = self.reasons.lock().unwrap_or_else(PoisonError::into_inner);
        for (index, (reason, count)) in reasons.iter().enumerate() {
            f.write_str(if index == 0 { "; turned away: " } else { "; " })?;
            f.write_str(reason)?;
            if *count > 1 {
                write!(f, " ({count} times)")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_note_is_bounded_and_counts() {
        let turned_away = TurnedAway::default();
        assert_eq!(turned_away.to_string(), "");
        for visit in 0..1000 {
            turned_away.note(format!("reason {}", visit % 100));
        }
        let note = turned_away.to_string();
        assert!(
            note.starts_with("; turned away: reason 0 (10 times); reason 1"),
            "{note}"
        );
        assert_eq!(note.matches("times").count(), REASONS_MAX);
    }
}
