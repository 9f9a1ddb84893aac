//! Checks of each run: the invariants that every run must satisfy.

use std::collections::BTreeSet;

use super::faults::Fault;
use super::group::{Ended, Run};
use super::process::Outcome;
use crate::world::time::{Moment, NEVER, SECOND, nanoseconds};
use gradring_net::config::timing::Timing;
use gradring_proto::error::Error;

/// Most time that news, a turn of the monitor and a wake-up take together, with a margin.
const SLACK: Moment = 2 * SECOND;

impl Run {
    /// Returns in a few words how the run ended.
    ///
    /// # Errors
    /// The invariant that the run violates.
    pub(super) fn verify(&self) -> Result<String, String> {
        if let Some(moment) = self.unfinished {
            return Err(format!("it did not end in {} s", moment / SECOND));
        }
        for (rank, ended) in self.survivors() {
            match &ended.outcome {
                None => return Err(format!("rank {rank} never ended")),
                Some((_, Outcome::Wrong(problem))) => {
                    return Err(format!("rank {rank}: {problem}"));
                }
                Some((moment, Outcome::Failed(error))) => {
                    self.check_failure(rank, *moment, error)?
                }
                Some((_, Outcome::Done)) => {}
            }
        }
        self.check_news()?;
        self.agreed()
    }

    fn survivors(&self) -> impl Iterator<Item = (usize, &Ended)> {
        let ranks = self.ranks.iter().enumerate();
        ranks.filter(|(_, ended)| ended.survives)
    }

    fn faults(&self) -> impl Iterator<Item = (&Fault, Moment)> {
        let faults = self.scenario.faults.iter().zip(&self.struck);
        faults.filter_map(|(fault, struck)| Some((fault, (*struck)?)))
    }

    fn causes(&self) -> impl Iterator<Item = (usize, &Error)> {
        self.survivors()
            .filter_map(|(rank, ended)| match &ended.outcome {
                Some((_, Outcome::Failed(error))) => Some((rank, error)),
                _ => None,
            })
    }

    /// Checks that a fault explains the error, and that the rank received the error in time.
    fn check_failure(&self, rank: usize, moment: Moment, error: &Error) -> Result<(), String> {
        let blamed = error.blamed.as_ref().map(|blamed| blamed.rank);
        let limits = self.scenario.limits;
        // The effects of two faults on each other cannot be predicted.
        let several = self.faults().count() > 1;
        let explains = |(fault, struck): &(&Fault, Moment)| {
            let by_this_rank = fault.divides() && rank == fault.trigger().rank;
            let alone = !fault.passes(limits.timeout)
                && (self.is_scattered(moment)
                    || fault.exceptions().contains(&error.kind.exception())
                        && (by_this_rank || blamed.is_some_and(|it| self.may_blame(fault, it))));
            *struck <= moment && (several || alone)
        };
        if !self.faults().any(|fault| explains(&fault)) {
            return Err(format!(
                "rank {rank} got an error that nothing explains: {error}"
            ));
        }
        let noticed =
            nanoseconds(limits.timeout.max(Timing::USUAL.silence) + Timing::USUAL.diagnosis);
        let latest = self.faults().map(|(fault, struck)| {
            let lasts = Some(fault.lasts()).filter(|&lasts| lasts < NEVER);
            struck + lasts.unwrap_or(0)
        });
        let latest = latest.max().unwrap_or(0).max(self.last_done_before(moment));
        let latest = latest + self.scenario.computing_max() + noticed + SLACK;
        if moment > latest {
            return Err(format!("rank {rank} got its error late: {error}"));
        }
        Ok(())
    }

    /// Time at which the last rank finished its program, before `moment`. Collectives that need
    /// nothing from a silent link continue, and the waiting begins only afterwards.
    fn last_done_before(&self, moment: Moment) -> Moment {
        let done = self.ranks.iter().filter_map(|ended| match ended.outcome {
            Some((at, Outcome::Done)) if at < moment => Some(at),
            _ => None,
        });
        done.max().unwrap_or(0)
    }

    /// Returns whether finished ranks had left the group by `moment`. They forward nothing, so the
    /// other ranks may never learn the cause.
    fn is_scattered(&self, moment: Moment) -> bool {
        let left = |ended: &Ended| ended.left.is_some_and(|left| left < moment);
        let done = |ended: &Ended| matches!(ended.outcome, Some((_, Outcome::Done)));
        self.ranks.iter().any(|ended| left(ended) && done(ended))
    }

    fn may_blame(&self, fault: &Fault, blamed: usize) -> bool {
        let trigger = fault.trigger();
        let entered = |(rank, ended): (usize, &Ended)| {
            rank != trigger.rank && ended.launched > trigger.number
        };
        let witnesses = self
            .ranks
            .iter()
            .enumerate()
            .filter(|ended| entered(*ended))
            .count();
        // Without a majority, nobody can know which rank is wrong.
        let undecided = matches!(fault, Fault::CallsAnother { .. }) && witnesses < 2;
        undecided || fault.culprits(self.ranks.len()).contains(&blamed)
    }

    /// Checks that all ranks know of the end of a process or a control connection, whatever they
    /// do.
    fn check_news(&self) -> Result<(), String> {
        let ([_], Some((fault, struck))) = (&self.scenario.faults[..], self.faults().next()) else {
            return Ok(());
        };
        let Some(news) = fault.is_known_after() else {
            return Ok(());
        };
        let by = struck + nanoseconds(news) + SLACK;
        let unaware = |(rank, ended): &(usize, &Ended)| {
            *rank != fault.trigger().rank
                && ended.aborted.is_none_or(|moment| moment > by)
                && ended
                    .outcome
                    .as_ref()
                    .is_some_and(|(moment, _)| *moment > by)
        };
        // Ranks that have left forward nothing, and heartbeats go to neighbours only.
        if self.is_scattered(by) {
            return Ok(());
        }
        match self.survivors().find(unaware) {
            Some((rank, _)) => Err(format!("rank {rank} was not told in time")),
            None => Ok(()),
        }
    }

    /// Checks that all failed ranks have the same cause.
    fn agreed(&self) -> Result<String, String> {
        let several = self.scenario.faults.len() > 1;
        let causes: BTreeSet<_> = self
            .causes()
            .map(|(_, error)| {
                let blamed = error.blamed.as_ref().map(|blamed| blamed.rank);
                (error.kind.exception(), blamed)
            })
            .collect();
        let last = self
            .survivors()
            .filter_map(|(_, ended)| ended.outcome.as_ref());
        let last = last.map(|(moment, _)| *moment).max().unwrap_or(0);
        let divided =
            several || self.is_scattered(last) || self.scenario.faults.iter().any(Fault::divides);
        if causes.len() > 1 && !divided {
            return Err(format!("ranks have different causes: {causes:?}"));
        }
        Ok(match causes.first() {
            None => "finished".into(),
            Some(_) if causes.len() > 1 => "different causes".into(),
            Some((exception, _)) => (*exception).into(),
        })
    }
}
