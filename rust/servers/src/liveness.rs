//! Liveness of workers: the server waits for some of those that are away.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use gradring_net::session::turned_away::TurnedAway;
use gradring_proto::error::{NotServed, Result, Text};

/// Workers that are connected, have left, or are away.
pub(super) struct WorkerLiveness {
    /// Workers that are away: since when, and for how long a server waits for each.
    pub(super) away: BTreeMap<u32, (Instant, Duration)>,
    pub(super) left: BTreeSet<u32>,
    has_come: bool,
    worker_timeout: Duration,
    workers: u32,
    pub(super) since: Instant,
    timeout: Duration,
}

impl WorkerLiveness {
    pub(super) fn new(
        workers: u32,
        worker_timeout: Duration,
        timeout: Duration,
        now: Instant,
    ) -> Self {
        Self {
            away: (0..workers).map(|it| (it, (now, timeout))).collect(),
            left: BTreeSet::new(),
            has_come: false,
            worker_timeout,
            workers,
            since: now,
            timeout,
        }
    }

    /// Shortens the wait for workers that are away: all were connected to an earlier server, so
    /// some may have left.
    pub(super) fn have_been_there(&mut self) {
        for (_, limit) in self.away.values_mut() {
            *limit = self.worker_timeout;
        }
    }

    pub(super) fn connected(&mut self, worker: u32) {
        self.has_come = true;
        self.away.remove(&worker);
        self.left.remove(&worker);
    }

    pub(super) fn disconnected(&mut self, worker: u32, now: Instant) {
        if !self.left.contains(&worker) {
            self.away.insert(worker, (now, self.worker_timeout));
        }
    }

    /// Returns whether the job is over: no worker is connected, and none will come back.
    pub(super) fn is_over(
        &self,
        server: usize,
        turned_away: &TurnedAway,
        now: Instant,
    ) -> Result<bool> {
        let are_there = self.workers as usize - self.away.len() - self.left.len();
        let mut away = self.away.values();
        let is_late =
            |(since, limit): &(Instant, Duration)| now.saturating_duration_since(*since) >= *limit;
        if are_there > 0 || !away.all(is_late) {
            return Ok(false);
        }
        if !self.left.is_empty() {
            return Ok(true);
        }
        let within = self.timeout;
        if !self.has_come {
            // Workers need a moment to notice a restart, however short their limit is.
            if now.saturating_duration_since(self.since) < within {
                return Ok(false);
            }
            let turned_away = Text::of(turned_away);
            return Err(NotServed::NobodyCame {
                server,
                within,
                turned_away,
            }
            .into());
        }
        let workers = self.away.keys().map(|it| *it as usize).collect();
        Err(NotServed::AllLost { server, workers }.into())
    }
}
