//! Liveness of workers: the server waits for some of those that are away.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use gradring_net::session::turned_away::TurnedAway;
use gradring_proto::error::{NotServed, Result, Text};

/// Workers of a model that are connected, have left, or are away.
pub(super) struct WorkerLiveness {
    /// Workers that are away: since when, and for how long a server waits for each.
    pub(super) away: BTreeMap<u32, (Instant, Duration)>,
    pub(super) left: BTreeSet<u32>,
    connected: BTreeSet<u32>,
    has_come: bool,
    worker_timeout: Duration,
    pub(super) since: Instant,
    timeout: Duration,
}

impl WorkerLiveness {
    /// Waits for the first `workers` workers. Others are waited for once they were connected.
    pub(super) fn new(
        workers: u32,
        worker_timeout: Duration,
        timeout: Duration,
        now: Instant,
    ) -> Self {
        Self {
            away: (0..workers).map(|it| (it, (now, timeout))).collect(),
            left: BTreeSet::new(),
            connected: BTreeSet::new(),
            has_come: false,
            worker_timeout,
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
        self.connected.insert(worker);
        self.away.remove(&worker);
        self.left.remove(&worker);
    }

    /// Records that a worker leaves; its connection may still be open.
    pub(super) fn leaves(&mut self, worker: u32) {
        self.connected.remove(&worker);
        self.away.remove(&worker);
        self.left.insert(worker);
    }

    pub(super) fn disconnected(&mut self, worker: u32, now: Instant) {
        self.connected.remove(&worker);
        if !self.left.contains(&worker) {
            self.away.insert(worker, (now, self.worker_timeout));
        }
    }

    /// Returns whether no worker is connected, and none will come back.
    pub(super) fn waits_for_nobody(&self, now: Instant) -> bool {
        let mut away = self.away.values();
        self.connected.is_empty()
            && away.all(|(since, limit)| now.saturating_duration_since(*since) >= *limit)
    }

    /// Returns whether the job is over, where it waits for nobody any more.
    pub(super) fn is_over(
        &self,
        server: usize,
        turned_away: &TurnedAway,
        now: Instant,
    ) -> Result<bool> {
        if !self.waits_for_nobody(now) {
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
