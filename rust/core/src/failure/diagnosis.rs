//! Diagnosis: the rank to blame, by the reports of all ranks about one position.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use gradring_proto::error::{Breach, Error, ErrorKind, Late, Text, ranks};
use gradring_proto::names::named;
use gradring_proto::wire::control::{Entered, Report, Waits};

named! {
    /// Problems at one position.
    pub enum Problem {
        /// The ranks called different collectives.
        Different: "different",
        /// All ranks made the same call, so a header was changed on its way.
        Changed: "changed",
        /// A rank has not entered.
        Late: "late",
        /// A rank has sent no report.
        Silent: "silent",
        /// All have entered, but one sends nothing.
        Stuck: "stuck",
    }
}

/// Description of one rank for an observer outside of the group, about no particular position.
#[derive(Debug, Clone)]
pub struct Statement {
    /// The rank.
    pub rank: usize,
    /// Collectives that it has entered, as far as it remembers.
    pub collectives: Vec<Known>,
    /// Ranks that it waits for in the first collective that is not done.
    pub awaited: Vec<usize>,
    /// Duration of that wait.
    pub idle: Duration,
}

/// A collective that a rank has entered.
#[derive(Debug, Clone)]
pub struct Known {
    /// Its ordinal.
    pub sequence: u64,
    /// The call and its step, if calls are to be compared.
    pub call: Option<(String, u64)>,
    /// `true` once the rank has left it.
    pub done: bool,
}

/// Result of `diagnose`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Findings {
    /// The position in question: the first collective that a rank has entered and not left.
    pub sequence: u64,
    /// The problem.
    pub problem: Problem,
    /// The rank to blame, if there is one.
    pub blamed: Option<usize>,
    /// Calls at that position, each with the ranks that made it.
    pub calls: Vec<(String, Vec<usize>)>,
    /// All ranks that have not entered it.
    pub late: Vec<usize>,
}

/// Diagnoses a group as its own failure monitor does; `None` if no rank is in a collective.
///
/// Statements about ranks outside the group are ignored.
pub fn diagnose(world_size: usize, statements: &[Statement]) -> Option<Findings> {
    let known = statements
        .iter()
        .flat_map(|statement| &statement.collectives);
    let under_way = known
        .filter(|known| !known.done)
        .map(|known| known.sequence);
    let sequence = under_way.min()?;
    let mut diagnosis = Diagnosis::new(sequence, world_size);
    for statement in statements {
        diagnosis.receive(statement.about(sequence));
    }
    let (problem, blamed) = diagnosis.problem();
    let mut late: Vec<usize> = diagnosis.late().collect();
    if problem == Problem::Late && late.is_empty() {
        late.extend(blamed);
    }
    let sides = diagnosis.sides();
    let one_step = sides
        .iter()
        .all(|side| side[0].1.step == sides[0][0].1.step);
    let call = |side: &Side<'_>| match one_step {
        true => side[0].1.call.clone(),
        false => side[0].1.in_its_step(),
    };
    let ranks = |side: &Side<'_>| side.iter().map(|&(rank, _)| rank).collect();
    Some(Findings {
        sequence,
        problem,
        blamed,
        calls: sides.iter().map(|side| (call(side), ranks(side))).collect(),
        late,
    })
}

impl Statement {
    /// Converts the statement into a report about one position. A rank may have forgotten the call
    /// of a past position.
    fn about(&self, sequence: u64) -> Report {
        let known = self
            .collectives
            .iter()
            .find(|known| known.sequence == sequence);
        let past = self
            .collectives
            .iter()
            .any(|known| known.sequence > sequence);
        let (call, step) = known
            .and_then(|known| known.call.clone())
            .unwrap_or_default();
        let header = match call.is_empty() {
            true => Vec::new(),
            false => format!("{step} {call}").into_bytes(),
        };
        Report {
            rank: self.rank,
            sequence,
            entered: (known.is_some() || past).then_some(Entered {
                header,
                call,
                step,
                left: None,
            }),
            // A rank that has not come so far may be kept by a call with one other rank.
            waits: (match known {
                Some(known) => !known.done,
                None => !past && !self.awaited.is_empty(),
            })
            .then(|| Waits {
                awaited: self.awaited.clone(),
                idle: self.idle,
                beside: known.is_none().then(String::new),
                in_advance: false,
            }),
        }
    }
}

/// Facts about one position.
#[derive(Debug)]
pub(crate) struct Diagnosis {
    pub sequence: u64,
    /// Reports by rank; `None` until a rank reports.
    reports: Vec<Option<Report>>,
    /// For a stall: the ranks that this rank waits for, and for how long.
    stalled: Option<(Vec<usize>, Duration)>,
    /// For a header that differs: the rank that sent it, and the call in it.
    suspect: Option<(usize, Text)>,
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

    pub(crate) fn about_header(&mut self, peer: usize, theirs: Text) {
        self.suspect = Some((peer, theirs));
    }

    /// Adds a report. Returns `false` if it is known already or about another position.
    pub(crate) fn receive(&mut self, report: Report) -> bool {
        let slot = self.reports.get_mut(report.rank);
        match slot {
            Some(slot @ None) if report.sequence == self.sequence => {
                *slot = Some(report);
                true
            }
            _ => false,
        }
    }

    /// Returns `true` once all ranks have reported.
    pub(crate) fn complete(&self) -> bool {
        self.reports.iter().all(Option::is_some)
    }

    /// Returns the problem by the reports so far, and the rank to blame.
    ///
    /// Different calls outweigh everything: the ranks outside the largest group of equal calls are
    /// wrong. Among groups of equal size, the one with the lowest rank is taken to be right.
    /// Otherwise these rules apply, in order:
    ///
    /// * A rank that has not entered is late, unless it waits in an earlier collective or for one
    ///   other rank.
    /// * A rank without a report is lost.
    /// * If two ranks wait for each other, one in the collective and one beside it, the latter is
    ///   late.
    /// * A rank for which others wait is at fault.
    fn problem(&self) -> (Problem, Option<usize>) {
        if let Some((_, odd)) = self.mismatch() {
            return (Problem::Different, Some(odd[0].0));
        }
        match self.suspect {
            // The header is all that is known of a suspect that does not answer.
            Some((rank, _)) if self.has_entered(rank).is_none() => {
                return (Problem::Different, Some(rank));
            }
            Some((rank, _)) if self.has_entered(rank) == Some(true) => {
                return (Problem::Changed, Some(rank));
            }
            _ => {}
        }
        let silent = (0..self.reports.len()).filter(|&rank| self.has_entered(rank).is_none());
        let silent = silent.max_by_key(|&rank| (self.waiting_for(rank), Reverse(rank)));
        // A late rank for which nobody waits may be busy in a call of its own.
        let late = (self.late()).max_by_key(|&rank| (self.waiting_for(rank).0 > 0, Reverse(rank)));
        match (late, silent, self.waiting_pair(), self.starving()) {
            (Some(rank), _, _, _) => (Problem::Late, Some(rank)),
            (_, Some(rank), _, _) => (Problem::Silent, Some(rank)),
            (_, _, Some((problem, rank)), _) => (problem, Some(rank)),
            (_, _, _, Some(rank)) => (Problem::Stuck, Some(rank)),
            (None, None, None, None) => {
                let suspect = self.suspect.as_ref().map(|(rank, _)| *rank);
                (Problem::Changed, suspect)
            }
        }
    }

    /// Converts the problem into an error.
    pub(crate) fn cause(&self, hosts: &[String]) -> Error {
        let (problem, rank) = self.problem();
        let entered = rank.and_then(|rank| self.has_entered(rank)) == Some(true);
        let mut call = self.calls().next().map(|(_, entered)| entered.call.clone());
        let timeout = |how: Late| {
            let own = self.stalled.iter().map(|(_, idle)| *idle);
            let longest = own.chain(self.all_waits().map(|waits| waits.idle)).max();
            Error::from(how).after(longest.unwrap_or_default())
        };
        let mut error = match (problem, self.mismatch()) {
            (Problem::Different, Some((right, odd))) => {
                call = Some(right[0].1.call.clone());
                Error::new(ErrorKind::Mismatch {
                    theirs: describe_call(&odd, &right).into(),
                    others: format!("{} ({})", describe_call(&right, &odd), names(&right)).into(),
                })
            }
            (Problem::Different, None) => Error::new(ErrorKind::Mismatch {
                theirs: (self.suspect.iter())
                    .map(|(_, theirs)| format!("something else: {theirs}"))
                    .collect::<String>()
                    .into(),
                others: call.clone().unwrap_or_default().into(),
            }),
            (Problem::Changed, _) => Breach::HeaderChanged.into(),
            (Problem::Late, _) => timeout(match rank.and_then(|rank| self.beside(rank)) {
                Some(call) => Late::Beside { call: call.into() },
                None => Late::NotEntered,
            }),
            (Problem::Silent, _) => timeout(Late::Silent),
            (Problem::Stuck, _) if rank.is_some_and(|rank| self.beside(rank).is_some()) => {
                let circle = rank.map(|rank| self.circle(rank)).unwrap_or_default();
                timeout(Late::InACircle { circle })
            }
            (Problem::Stuck, _) if entered => timeout(Late::EnteredSendsNothing),
            (Problem::Stuck, _) => timeout(Late::SendsNothing),
        };
        if let Some(rank) = rank {
            error = error.blaming(rank, &hosts[rank]);
        }
        error.sequence = Some(self.sequence);
        error.collective = call;
        error
    }

    /// Ranks that have not entered, although no earlier collective keeps them from it.
    fn late(&self) -> impl Iterator<Item = usize> {
        let ranks = 0..self.reports.len();
        ranks.filter(|&rank| self.has_entered(rank) == Some(false) && !self.waits(rank))
    }

    /// Returns whether a rank has entered the collective; `None` until it reports.
    fn has_entered(&self, rank: usize) -> Option<bool> {
        let report = self.reports[rank].as_ref()?;
        Some(report.entered.is_some())
    }

    /// Call with one other rank that keeps a rank from the collective, if there is one.
    fn beside(&self, rank: usize) -> Option<&str> {
        self.reports[rank]
            .as_ref()?
            .waits
            .as_ref()?
            .beside
            .as_deref()
    }

    /// Finds two ranks that wait for each other: one in the collective, and one in a call with the
    /// first alone. Returns the problem and the rank to blame, usually the latter. If the former
    /// began the collective in advance, its program may still reach that call, so it is blamed
    /// instead.
    fn waiting_pair(&self) -> Option<(Problem, usize)> {
        let waits = |rank: usize| self.reports.get(rank)?.as_ref()?.waits.as_ref();
        let kept = (0..self.reports.len())
            .filter(|&rank| self.has_entered(rank) == Some(false) && self.beside(rank).is_some());
        let pairs = kept.filter_map(|rank| {
            let partner = *waits(rank)?.awaited.first()?;
            let there = waits(partner).filter(|there| there.beside.is_none())?;
            match (self.has_entered(partner)?, there.in_advance) {
                (true, true) => Some((Problem::Stuck, partner)),
                (true, false) => Some((Problem::Late, rank)),
                (false, _) => None,
            }
        });
        pairs.max_by_key(|&(_, rank)| (self.waiting_for(rank), Reverse(rank)))
    }

    /// Returns the rank for which others wait in vain: preferably one that waits for nobody, then
    /// the one with most waiting ranks, then the one with the longest wait.
    fn starving(&self) -> Option<usize> {
        let awaited = (0..self.reports.len()).filter(|&rank| self.waiting_for(rank).0 > 0);
        let blamed =
            awaited.max_by_key(|&rank| (!self.waits(rank), self.waiting_for(rank), Reverse(rank)));
        blamed.or_else(|| self.stalled.as_ref()?.0.first().copied())
    }

    /// Returns a circle of ranks that wait for each other. The search starts at `from` and follows
    /// the first rank that each waits for.
    fn circle(&self, from: usize) -> Vec<usize> {
        let next = |rank: &usize| {
            let report = self.reports[*rank].as_ref()?;
            let next = *report.waits.as_ref()?.awaited.first()?;
            (next < self.reports.len()).then_some(next)
        };
        let way: Vec<usize> = std::iter::successors(Some(from), next)
            .take(self.reports.len() + 1)
            .collect();
        // The way into the circle is not part of it.
        let entry = way.last().copied().unwrap_or(from);
        let mut circle: Vec<usize> = way.into_iter().rev().skip(1).collect();
        let end = circle.iter().position(|&rank| rank == entry);
        circle.truncate(end.map_or(circle.len(), |end| end + 1));
        circle.reverse();
        circle
    }

    fn waits(&self, rank: usize) -> bool {
        let report = self.reports[rank].as_ref();
        report.is_some_and(|report| report.waits.is_some())
    }

    fn all_waits(&self) -> impl Iterator<Item = &Waits> {
        let reports = self.reports.iter().flatten();
        reports.filter_map(|report| report.waits.as_ref())
    }

    /// Returns how many ranks wait for this one, and the longest of their waits.
    fn waiting_for(&self, rank: usize) -> (usize, Duration) {
        let waits = self.all_waits().filter(|w| w.awaited.contains(&rank));
        waits.fold((0, Duration::ZERO), |(count, longest), waits| {
            (count + 1, longest.max(waits.idle))
        })
    }

    fn calls(&self) -> impl Iterator<Item = (usize, &Entered)> {
        self.reports
            .iter()
            .flatten()
            .filter_map(|report| Some((report.rank, report.entered.as_ref()?)))
    }

    /// Ranks that report their call, grouped by call, in the order of ranks.
    fn sides(&self) -> Vec<Side<'_>> {
        let mut sides: BTreeMap<&[u8], Side<'_>> = BTreeMap::new();
        for (rank, entered) in self
            .calls()
            .filter(|(_, entered)| !entered.header.is_empty())
        {
            sides
                .entry(&entered.header)
                .or_default()
                .push((rank, entered));
        }
        let mut sides: Vec<_> = sides.into_values().collect();
        sides.sort_by_key(|side| side[0].0);
        sides
    }

    /// If calls differ, returns the side taken to be right, and the first of the others.
    fn mismatch(&self) -> Option<(Side<'_>, Side<'_>)> {
        let mut sides = self.sides();
        let right = (0..sides.len()).max_by_key(|&side| (sides[side].len(), Reverse(side)))?;
        let right = sides.remove(right);
        Some((right, sides.into_iter().next()?))
    }
}

/// Ranks with equal calls.
type Side<'a> = Vec<(usize, &'a Entered)>;

/// Describes the call of a side; with its step, if that differs from the other side's.
fn describe_call(side: &Side<'_>, other: &Side<'_>) -> String {
    let (entered, elsewhere) = (side[0].1, other[0].1);
    match entered.step == elsewhere.step {
        true => entered.call.clone(),
        false => entered.in_its_step(),
    }
}

fn names(side: &Side<'_>) -> String {
    ranks(&side.iter().map(|&(rank, _)| rank).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests;
