//! Who is to blame, from what all ranks say they did at one position.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use crate::error::{Error, ErrorKind};
use crate::wire::control::{Entered, Report, Waits};

/// The facts collected about one position.
#[derive(Debug)]
pub(crate) struct Diagnosis {
    pub sequence: u64,
    /// By rank; `None` while a rank has said nothing.
    reports: Vec<Option<Report>>,
    /// If the diagnosis is about a collective that does not move: the ranks this rank waits for,
    /// and for how long.
    stalled: Option<(Vec<usize>, Duration)>,
    /// If it is about a header that differs: the rank it came from.
    suspect: Option<usize>,
}

impl Diagnosis {
    pub(crate) fn new(sequence: u64, world_size: usize) -> Self {
        Self {
            sequence,
            reports: vec![None; world_size],
            stalled: None,
            suspect: None,
        }
    }

    pub(crate) fn about_stall(&mut self, awaited: Vec<usize>, idle: Duration) {
        self.stalled = Some((awaited, idle));
    }

    pub(crate) fn about_header(&mut self, peer: usize) {
        self.suspect = Some(peer);
    }

    /// Adds what a rank says; `false` if that is known already or about something else.
    pub(crate) fn hear(&mut self, report: Report) -> bool {
        let slot = self.reports.get_mut(report.rank);
        match slot {
            Some(slot @ None) if report.sequence == self.sequence => {
                *slot = Some(report);
                true
            }
            _ => false,
        }
    }

    /// Whether all ranks have reported.
    pub(crate) fn complete(&self) -> bool {
        self.reports.iter().all(Option::is_some)
    }

    /// The cause, by what is known now.
    ///
    /// Calls that differ outweigh everything: the ranks outside the largest group of equal calls
    /// are wrong, and of groups of one size the one with the lowest rank is taken to be right.
    /// Otherwise a rank that has not entered is late, unless it waits in an earlier collective; a
    /// silent one is lost; and if all have entered, one for which others wait is at fault.
    pub(crate) fn cause(&self, hosts: &[String]) -> Error {
        if let Some(mismatch) = self.mismatch(hosts) {
            return mismatch;
        }
        // Of a suspect that does not answer, its header is all that is known.
        if self
            .suspect
            .is_some_and(|rank| self.has_entered(rank) != Some(false))
        {
            return self.garbled_header(hosts);
        }
        let ranks = 0..self.reports.len();
        let late = |&rank: &usize| self.has_entered(rank) == Some(false) && !self.waits(rank);
        let absent = ranks.clone().find(late);
        let silent = ranks.filter(|&rank| self.has_entered(rank).is_none());
        let silent = silent.max_by_key(|&rank| (self.waiting_for(rank), Reverse(rank)));
        let (rank, problem) = match (absent, silent, self.starving()) {
            (Some(rank), _, _) => (rank, "is alive but has not entered this collective"),
            (_, Some(rank), _) => (rank, "does not answer"),
            (_, _, Some(rank)) if self.has_entered(rank) == Some(false) => {
                (rank, "is alive but sends nothing")
            }
            (_, _, Some(rank)) => (rank, "has entered this collective but sends nothing"),
            (None, None, None) => {
                return self.garbled_header(hosts);
            }
        };
        let call = self.calls().next().map(|(_, entered)| entered.call.clone());
        let own = self.stalled.iter().map(|(_, idle)| *idle);
        let longest = own.chain(self.all_waits().map(|waits| waits.idle)).max();
        let mut error = Error::timeout(problem)
            .blaming(rank, &hosts[rank])
            .after(longest.unwrap_or_default());
        error.sequence = Some(self.sequence);
        error.collective = call;
        error
    }

    /// Whether a rank has entered the collective, if it has said so.
    fn has_entered(&self, rank: usize) -> Option<bool> {
        let report = self.reports[rank].as_ref()?;
        Some(report.entered.is_some())
    }

    /// The rank for which others wait in vain: rather one that waits for nobody itself, the one for
    /// which most wait, or for longest.
    fn starving(&self) -> Option<usize> {
        let awaited = (0..self.reports.len()).filter(|&rank| self.waiting_for(rank).0 > 0);
        let blamed =
            awaited.max_by_key(|&rank| (!self.waits(rank), self.waiting_for(rank), Reverse(rank)));
        blamed.or_else(|| self.stalled.as_ref()?.0.first().copied())
    }

    fn waits(&self, rank: usize) -> bool {
        let report = self.reports[rank].as_ref();
        report.is_some_and(|report| report.waits.is_some())
    }

    fn all_waits(&self) -> impl Iterator<Item = &Waits> {
        let reports = self.reports.iter().flatten();
        reports.filter_map(|report| report.waits.as_ref())
    }

    /// How many ranks wait for this one, and the longest time that one of them has.
    fn waiting_for(&self, rank: usize) -> (usize, Duration) {
        let waits = self.all_waits().filter(|w| w.awaited.contains(&rank));
        waits.fold((0, Duration::ZERO), |(count, longest), waits| {
            (count + 1, longest.max(waits.idle))
        })
    }

    /// All describe the collective alike, so the header changed on its way.
    fn garbled_header(&self, hosts: &[String]) -> Error {
        let mut error = Error::protocol("its header of a collective arrived changed");
        error.sequence = Some(self.sequence);
        error.collective = self.calls().next().map(|(_, entered)| entered.call.clone());
        match self.suspect {
            Some(rank) => error.blaming(rank, &hosts[rank]),
            None => error,
        }
    }

    fn calls(&self) -> impl Iterator<Item = (usize, &Entered)> {
        self.reports
            .iter()
            .flatten()
            .filter_map(|report| Some((report.rank, report.entered.as_ref()?)))
    }

    fn mismatch(&self, hosts: &[String]) -> Option<Error> {
        let mut groups: BTreeMap<&[u8], Vec<(usize, &Entered)>> = BTreeMap::new();
        for (rank, entered) in self.calls() {
            let group = groups.entry(&entered.header).or_default();
            group.push((rank, entered));
        }
        let right = groups
            .values()
            .max_by_key(|group| (group.len(), Reverse(group[0].0)))?;
        let (rank, theirs) = groups
            .values()
            .filter(|group| group[0].0 != right[0].0)
            .map(|group| group[0])
            .min_by_key(|(rank, _)| *rank)?;
        let names: Vec<String> = right.iter().map(|(rank, _)| rank.to_string()).collect();
        let names = names.join(", ");
        let (theirs, others) = match theirs.step == right[0].1.step {
            true => (theirs.call.clone(), right[0].1.call.clone()),
            false => (theirs.in_its_step(), right[0].1.in_its_step()),
        };
        let kind = ErrorKind::Mismatch {
            theirs,
            others: format!("{others} (rank {names})"),
        };
        let mut error = Error::new(kind).blaming(rank, &hosts[rank]);
        error.sequence = Some(self.sequence);
        error.collective = Some(right[0].1.call.clone());
        Some(error)
    }
}

impl Entered {
    /// The call and its step, and why that is another one than elsewhere, if the rank knows it.
    fn in_its_step(&self) -> String {
        let mut text = format!("{} in step {}", self.call, self.step);
        if let Some((step, by)) = &self.left {
            text.push_str(&format!(", after it left step {step} by {by}"));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn diagnose(calls: &[Option<&str>]) -> Error {
        let mut diagnosis = Diagnosis::new(4, calls.len());
        diagnosis.about_stall(vec![0], Duration::from_secs(30));
        for (rank, call) in calls.iter().enumerate() {
            assert!(diagnosis.hear(Report {
                rank,
                sequence: 4,
                entered: call.map(|call| Entered {
                    header: call.as_bytes().into(),
                    call: call.into(),
                    step: 0,
                    left: None,
                }),
                waits: call.map(|_| Waits {
                    awaited: vec![(rank + 1) % calls.len()],
                    idle: Duration::from_secs(60 - rank as u64),
                }),
            }));
        }
        assert!(diagnosis.complete());
        diagnosis.cause(&vec![String::from("h"); calls.len()])
    }

    fn blamed(error: &Error) -> usize {
        error.blamed.as_ref().unwrap().rank
    }

    #[test]
    fn the_odd_one_out_is_blamed_wherever_it_is() {
        for odd in 0..4 {
            let mut calls = [Some("a"); 4];
            calls[odd] = Some("b");
            let error = diagnose(&calls);
            assert_eq!(blamed(&error), odd);
            assert!(matches!(&error.kind, ErrorKind::Mismatch { theirs, .. } if theirs == "b"));
        }
        assert_eq!(blamed(&diagnose(&[Some("a"), Some("b")])), 1);
    }

    #[test]
    fn calls_that_differ_in_their_step_alone_are_told_apart() {
        let mut diagnosis = Diagnosis::new(4, 2);
        for rank in 0..2 {
            let step = 3 + rank as u64;
            assert!(diagnosis.hear(Report {
                rank,
                sequence: 4,
                entered: Some(Entered {
                    header: vec![step as u8],
                    call: "a".into(),
                    step,
                    left: (rank == 1).then(|| (3, "ValueError: bad".into())),
                }),
                waits: None,
            }));
        }
        let error = diagnosis.cause(&["h"; 2].map(String::from)).to_string();
        let told = "rank 1 on h called a in step 4, after it left step 3 by ValueError: bad; the \
                    others called a in step 3 (rank 0)";
        assert!(error.contains(told), "{error}");
    }

    #[test]
    fn a_rank_that_has_not_entered_is_late() {
        let error = diagnose(&[Some("a"), Some("a"), None]);
        assert_eq!(blamed(&error), 2);
        assert!(matches!(error.kind, ErrorKind::CollectiveTimeout { .. }));
    }

    /// The cause of a stall that all have reported on, given what each rank says.
    fn diagnose_waits(entered: &[bool], waits: &[Option<(&[usize], u64)>]) -> Error {
        let mut diagnosis = Diagnosis::new(4, entered.len());
        for (rank, (&entered, waits)) in entered.iter().zip(waits).enumerate() {
            assert!(diagnosis.hear(Report {
                rank,
                sequence: 4,
                entered: entered.then(|| Entered {
                    header: b"a".into(),
                    call: "a".into(),
                    step: 0,
                    left: None,
                }),
                waits: waits.map(|(awaited, seconds)| Waits {
                    awaited: awaited.to_vec(),
                    idle: Duration::from_secs(seconds),
                }),
            }));
        }
        diagnosis.cause(&vec![String::from("h"); entered.len()])
    }

    #[test]
    fn a_rank_that_waits_in_an_earlier_collective_is_not_late() {
        // Rank 0 is stuck behind rank 2, which sends it nothing; rank 1 is stuck behind rank 0.
        let waits = [Some((&[2][..], 30)), Some((&[0][..], 31)), None];
        let error = diagnose_waits(&[false, true, true], &waits);
        assert_eq!(blamed(&error), 2);
    }

    #[test]
    fn a_rank_that_has_only_just_entered_is_blamed_by_all_that_waited_for_it() {
        let waits = [Some((&[1, 2][..], 30)), Some((&[2][..], 31)), None];
        let error = diagnose_waits(&[true; 3], &waits);
        assert_eq!(blamed(&error), 2);
        let waits = waits.map(|waits| Some(waits.unwrap_or((&[0], 29))));
        let error = diagnose_waits(&[true; 3], &waits);
        assert_eq!(blamed(&error), 2, "for which most ranks wait");
        assert_eq!(error.elapsed, Some(Duration::from_secs(31)));
    }

    #[test]
    fn of_the_silent_ranks_the_one_that_is_awaited_is_named() {
        let mut diagnosis = Diagnosis::new(1, 4);
        diagnosis.about_stall(vec![2], Duration::from_secs(1));
        diagnosis.hear(Report {
            rank: 3,
            sequence: 1,
            entered: Some(Entered {
                header: b"a".into(),
                call: "a".into(),
                step: 0,
                left: None,
            }),
            waits: Some(Waits {
                awaited: vec![2],
                idle: Duration::from_secs(1),
            }),
        });
        assert_eq!(blamed(&diagnosis.cause(&["h"; 4].map(String::from))), 2);
    }

    #[test]
    fn a_changed_header_of_a_rank_that_has_left_is_not_taken_for_silence() {
        let mut diagnosis = Diagnosis::new(1, 2);
        diagnosis.about_header(1);
        let error = diagnosis.cause(&["h"; 2].map(String::from));
        assert_eq!(blamed(&error), 1);
        assert!(matches!(error.kind, ErrorKind::Protocol { .. }));
    }

    #[test]
    fn the_rank_awaited_for_longest_is_blamed_when_all_have_entered() {
        // Rank 0 has waited longest, for rank 1; the asking rank itself waits for rank 0.
        let error = diagnose(&[Some("a"); 3]);
        assert_eq!(blamed(&error), 1);
        assert!(matches!(error.kind, ErrorKind::CollectiveTimeout { .. }));
    }

    #[test]
    fn a_header_that_differs_though_all_called_alike_was_changed_on_its_way() {
        let mut diagnosis = Diagnosis::new(4, 3);
        diagnosis.about_header(2);
        for rank in 0..3 {
            // Rank 1 has not come so far; that is not what went wrong.
            let entered = (rank != 1).then(|| Entered {
                header: b"a".into(),
                call: "a".into(),
                step: 0,
                left: None,
            });
            diagnosis.hear(Report {
                rank,
                sequence: 4,
                entered,
                waits: None,
            });
        }
        let error = diagnosis.cause(&vec![String::from("h"); 3]);
        assert_eq!(blamed(&error), 2);
        assert!(matches!(error.kind, ErrorKind::Protocol { .. }));
    }

    #[test]
    fn a_silent_rank_is_named() {
        let mut diagnosis = Diagnosis::new(1, 2);
        diagnosis.about_stall(vec![1], Duration::from_secs(1));
        diagnosis.hear(Report {
            rank: 0,
            sequence: 1,
            entered: None,
            waits: None,
        });
        assert!(!diagnosis.complete());
        assert_eq!(blamed(&diagnosis.cause(&["h".into(), "h".into()])), 0);
    }
}
