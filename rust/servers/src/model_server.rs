//! A server's share of one model: its copies of shards, the connections of workers and of other
//! servers, and the sequencer in server 0.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::access::ClientAccess;
use super::channel::{BEAT, MessageChannel, is_silent};
use super::circles::ModelWaits;
use super::connector::ServerConnector;
use super::disk::Store;
use super::link::PeerLink;
use super::liveness::WorkerLiveness;
use super::message::{Counted, Message};
use super::status::{ServerPlace, Stats};
use gradring_net::config::Config;
use gradring_net::host::host_name;
use gradring_proto::error::{Error, NotServed, Result};
use gradring_proto::parameters::identity::Version;
use gradring_proto::parameters::keepers::Keepers;
use gradring_proto::parameters::message::{Ask, Order, Report, WorkerRequest};
use gradring_proto::parameters::restoring::Origin;
use gradring_proto::parameters::sequencer::{Output, Sequencer};
use gradring_proto::parameters::server::Server as Protocol;
use gradring_proto::parameters::shard::Weights;
use gradring_proto::wire::handshake::ClientKind;

/// Time in which a worker must reconnect before it is lost.
const LOST_GRACE: Duration = Duration::from_secs(1);
/// Interval of statistics of gradients to workers.
const TELLING: Duration = Duration::from_secs(1);
/// Time limit for the other servers to receive the end of the job.
const ENDING_LIMIT: Duration = Duration::from_secs(5);

/// One server of a model.
pub(super) struct ModelServer {
    /// Number of the model.
    pub(super) number: usize,
    pub(super) place: ServerPlace,
    pub(super) config: Config,
    pub(super) access: Arc<ClientAccess>,
    pub(super) connector: ServerConnector,
    pub(super) keepers: Keepers,
    /// Copies of shards. The first is of its own shard: it has snapshots, and workers pull from it.
    pub(super) copies: Vec<Protocol<Store>>,
    /// Only in server 0.
    pub(super) sequencer: Option<Sequencer>,
    /// Orders of this process's sequencer to its own copies.
    pub(super) orders: VecDeque<(usize, Order)>,
    /// Number of the process and channel, by worker.
    pub(super) workers: BTreeMap<u32, (u64, MessageChannel)>,
    /// Channel from server 0 in the other servers, and since when it is missing.
    pub(super) upstream: Option<MessageChannel>,
    pub(super) upstream_away: Instant,
    /// Channels to the other servers, in server 0.
    pub(super) downstream: Vec<Option<MessageChannel>>,
    /// Round of the last long order that was sent over a keeper's current connection, by keeper.
    /// Long orders install or fetch a snapshot.
    pub(super) sent_rounds: BTreeMap<usize, u64>,
    pub(super) liveness: WorkerLiveness,
    /// In server 0, the time when all workers had left; the other servers are notified then.
    pub(super) ending: Option<Instant>,
    /// True for each server that was notified of the end.
    pub(super) notified: Vec<bool>,
    /// True once server 0 has announced the end.
    pub(super) is_over: bool,
    /// Number of restorations when the user was last informed of one.
    pub(super) restored: u64,
    /// Time of the last statistics to workers.
    pub(super) statistics_sent: Instant,
    /// Bytes sent and received on closed channels.
    pub(super) counted: (u64, u64),
}

impl ModelServer {
    /// Begins to wait for workers and servers, and connects to the other servers.
    pub(super) fn begin(&mut self, now: Instant) -> Result<()> {
        self.upstream_away = now;
        self.liveness.since = now;
        for (since, _) in self.liveness.away.values_mut() {
            *since = now;
        }
        if self.sequencer.is_some() {
            for server in 1..self.place.addresses.len() {
                self.connector.connect(server)?;
            }
        }
        Ok(())
    }

    /// Does all that is due.
    pub(super) fn turn(&mut self, now: Instant) -> Result<()> {
        self.connect(now)?;
        self.recv_from_workers(now)?;
        self.recv_from_servers(now)?;
        self.note_saved(now)?;
        self.sequence(now)?;
        self.say_where_it_goes_on();
        self.keep_up(now)?;
        self.remove_lost(now)?;
        if let Some(sequencer) = &self.sequencer
            && sequencer.start() > 0
            && sequencer.has_survivors()
        {
            self.liveness.have_been_there();
        }
        Ok(())
    }

    /// Time of the next turn if nothing arrives before.
    pub(super) fn wake(&self, now: Instant) -> Instant {
        let wake = self.sequencer.as_ref().map(Sequencer::wake);
        wake.unwrap_or(now + BEAT).clamp(now, now + BEAT)
    }

    fn channels(&self) -> impl Iterator<Item = &MessageChannel> {
        let workers = self.workers.values().map(|(_, it)| it);
        let servers = self.downstream.iter().chain([&self.upstream]);
        workers.chain(servers.flatten())
    }

    pub(super) fn channels_mut(&mut self) -> impl Iterator<Item = &mut MessageChannel> {
        let workers = self.workers.values_mut().map(|(_, it)| it);
        let servers = self.downstream.iter_mut().chain([&mut self.upstream]);
        workers.chain(servers.flatten())
    }

    /// Takes a new link of a client.
    pub(super) fn accept(
        &mut self,
        client: ClientKind,
        link: PeerLink,
        now: Instant,
    ) -> Result<()> {
        let channel = MessageChannel::new(link, self.config.settings.checksum, now);
        match client {
            ClientKind::Worker {
                index,
                process,
                model,
            } => {
                // The model must be on the disk before a snapshot of it.
                self.copies[0].disk().set_model(model)?;
                let worker = index as u32;
                self.liveness.connected(worker);
                let before = self.workers.insert(worker, (process.0, channel));
                self.count(before.map(|(_, it)| it).as_ref());
            }
            ClientKind::Sequencer { .. } => {
                let before = self.upstream.replace(channel);
                self.count(before.as_ref());
            }
        }
        Ok(())
    }

    fn count(&mut self, ended: Option<&MessageChannel>) {
        if let Some(channel) = ended {
            self.counted.0 += channel.bytes_sent;
            self.counted.1 += channel.bytes_received;
        }
    }

    /// Takes new connections to other servers.
    fn connect(&mut self, now: Instant) -> Result<()> {
        for (server, outcome) in self.connector.outcomes() {
            let channel = MessageChannel::new(outcome?, self.config.settings.checksum, now);
            self.downstream[server] = Some(channel);
            let keepers = self.keepers;
            self.sent_rounds
                .retain(|keeper, _| keepers.server(*keeper) != server);
            if self.ending.is_some() {
                self.tell_end(server, now)?;
            }
        }
        Ok(())
    }

    fn recv_from_workers(&mut self, now: Instant) -> Result<()> {
        let there: Vec<_> = self.workers.keys().copied().collect();
        // A gradient is at most as long as the weights, plus the indices of its rows.
        let longest = |copy: &Protocol<Store>| {
            let shard = copy.at().and_then(|at| at.shard.as_ref());
            shard.map_or(u64::MAX, |shard| {
                let weights = shard.weights();
                let bytes = |it: &Weights| it.size_bytes() + it.len() * size_of::<u32>();
                weights.iter().map(bytes).sum::<usize>() as u64
            })
        };
        let values_max = self.copies.iter().map(longest).max().unwrap_or(0);
        for worker in there {
            let mut turn = 0;
            while let Some((_, channel)) = self.workers.get_mut(&worker) {
                channel.values_max = values_max;
                match channel.recv(&mut turn, now) {
                    Ok(Some(Message::Request(copy, request))) => match request.check_from(worker) {
                        Ok(()) => self.answer(copy, &request, now)?,
                        Err(_) => self.lose_worker(worker, now),
                    },
                    Ok(Some(_)) => {}
                    Ok(None) => break,
                    Err(_) => self.lose_worker(worker, now),
                }
            }
        }
        Ok(())
    }

    fn answer(&mut self, copy: usize, request: &WorkerRequest, now: Instant) -> Result<()> {
        let Some(keeper) = self.copies.get_mut(copy) else {
            return Ok(());
        };
        let reply = keeper.answer(request);
        let waits = matches!(request.ask, Ask::Pull { .. }) && keeper.term() == Some(request.term);
        if copy == 0
            && let Some(sequencer) = &mut self.sequencer
        {
            sequencer.answer(request, now);
        }
        let message = match (&request.ask, reply) {
            (Ask::Leave(_), _) => {
                self.liveness.leaves(request.worker);
                // Replies about the worker's gradients precede the goodbye.
                self.sequence(now)?;
                Message::Goodbye
            }
            (_, Some(reply)) => Message::Reply(copy, reply),
            (Ask::Stage { .. } | Ask::Pull { .. }, None) if !waits => Message::Retry(copy),
            _ => return Ok(()),
        };
        self.send_to_worker(request.worker, message, now)
    }

    fn send_to_worker(&mut self, worker: u32, message: Message, now: Instant) -> Result<()> {
        match self.workers.get_mut(&worker) {
            Some((_, channel)) => channel.send(message, now),
            None => Ok(()),
        }
    }

    fn send_to_server(&mut self, server: usize, message: Message, now: Instant) -> Result<()> {
        match &mut self.downstream[server] {
            Some(channel) => channel.send(message, now),
            None => Ok(()),
        }
    }

    /// Sends an order to a keeper; a long one, or a request for long data, once over each
    /// connection.
    fn order(&mut self, keeper: usize, order: Order, now: Instant) -> Result<()> {
        let (server, copy) = (self.keepers.server(keeper), self.keepers.copy(keeper));
        if server == self.place.server {
            self.orders.push_back((copy, order));
            return Ok(());
        }
        if let Order::FetchState(start) | Order::InstallSnapshot(start, _) = &order
            && self.downstream[server].is_some()
            && self.sent_rounds.insert(keeper, start.round) == Some(start.round)
        {
            return Ok(());
        }
        self.send_to_server(server, Message::Order(copy, order), now)
    }

    /// Passes a report to the sequencer, in this process or in server 0.
    fn report(&mut self, copy: usize, report: Report, now: Instant) -> Result<()> {
        match (&mut self.sequencer, &mut self.upstream) {
            (Some(sequencer), _) => sequencer.receive(self.keepers.on(0, copy), report, now),
            (None, Some(upstream)) => upstream.send(Message::Report(copy, report), now)?,
            (None, None) => {}
        }
        Ok(())
    }

    fn recv_from_servers(&mut self, now: Instant) -> Result<()> {
        let mut turn = 0;
        while let Some(channel) = &mut self.upstream {
            match channel.recv(&mut turn, now) {
                Ok(Some(Message::Order(copy, order))) => self.apply(copy, order, now)?,
                Ok(Some(Message::Goodbye)) => self.is_over = true,
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(_) => self.lose_upstream(now),
            }
        }
        for server in 0..self.downstream.len() {
            let mut turn = 0;
            while let Some(channel) = &mut self.downstream[server] {
                match channel.recv(&mut turn, now) {
                    Ok(Some(Message::Report(copy, report))) => {
                        if let Some(sequencer) = &mut self.sequencer
                            && copy < self.copies.len()
                        {
                            sequencer.receive(self.keepers.on(server, copy), report, now);
                        }
                    }
                    Ok(Some(_)) => {}
                    Ok(None) => break,
                    Err(error) => self.lose_server(server, &error)?,
                }
            }
        }
        Ok(())
    }

    fn apply(&mut self, copy: usize, order: Order, now: Instant) -> Result<()> {
        let Some(keeper) = self.copies.get_mut(copy) else {
            return Ok(());
        };
        let (report, replies) = keeper.apply(order);
        // Terms that are not on the disk must not be reported as begun.
        keeper.disk().check()?;
        for (worker, reply) in replies {
            self.send_to_worker(worker, Message::Reply(copy, reply), now)?;
        }
        report.map_or(Ok(()), |report| self.report(copy, report, now))
    }

    /// Counts snapshots that are on the disk, and reports them to the sequencer.
    fn note_saved(&mut self, now: Instant) -> Result<()> {
        let first = &mut self.copies[0];
        let points = first.disk().completed()?;
        if points.is_empty() {
            return Ok(());
        }
        for point in points {
            first.saved(point);
        }
        let version = first.at().map(|at| at.point.version);
        let (Some(term), Some(after)) = (first.term(), version) else {
            return Ok(());
        };
        let nothing = Order::Append {
            term,
            after,
            entries: vec![],
            acknowledged: vec![],
            stable: 0,
        };
        self.apply(0, nothing, now)
    }

    /// Runs the sequencer, and applies its orders to this server's own copies.
    fn sequence(&mut self, now: Instant) -> Result<()> {
        loop {
            let Some(sequencer) = &mut self.sequencer else {
                return Ok(());
            };
            for output in sequencer.step(now) {
                match output {
                    Output::Keeper(keeper, order) => self.order(keeper, order, now)?,
                    Output::Worker(worker, reply) => {
                        self.send_to_worker(worker, Message::Reply(0, reply), now)?;
                    }
                }
            }
            if self.orders.is_empty() {
                return Ok(());
            }
            while let Some((copy, order)) = self.orders.pop_front() {
                self.apply(copy, order, now)?;
            }
        }
    }

    /// Warns the user with which weights servers continue, unless they continue from memory.
    fn say_where_it_goes_on(&mut self) {
        let Some(sequencer) = &self.sequencer else {
            return;
        };
        if self.restored == sequencer.restored() {
            return;
        }
        self.restored = sequencer.restored();
        let what = match sequencer.origin() {
            Some(Origin::Snapshots) => format!("go on from snapshot {}", sequencer.start()),
            Some(Origin::NothingInCommon) => "begin anew: they have no snapshot in common".into(),
            _ => return,
        };
        let of = self.copies[0].disk().directory();
        let of = of.map_or_else(String::new, |of| format!(" of {}", of.display()));
        let (server, host) = (self.place.server, host_name());
        (self.config.on_warning)(format!(
            "parameter server {server} on {host}: all servers {what}{of}"
        ));
    }

    /// Renames the directory of a job that has ended well.
    pub(super) fn finish(&mut self) {
        for copy in &mut self.copies {
            copy.disk().finish();
        }
    }

    /// Sends queued messages, and drops connections that are broken or silent.
    fn keep_up(&mut self, now: Instant) -> Result<()> {
        let too_long = self.config.timing.silence;
        let ended = |channel: &mut MessageChannel| -> Result<Option<Error>> {
            channel.keep_alive(now, BEAT)?;
            let broken = channel.flush().err();
            Ok(broken.or_else(|| is_silent(channel, too_long, now)))
        };
        let mut lost = Vec::new();
        let is_due = now >= self.statistics_sent + TELLING;
        self.statistics_sent = if is_due { now } else { self.statistics_sent };
        let statistics = self.sequencer.as_ref().filter(|_| is_due).map(counted);
        for (worker, (_, channel)) in &mut self.workers {
            if let Some(counted) = &statistics
                && channel.is_flushed()
            {
                channel.send(Message::Counted(counted.clone()), now)?;
            }
            if ended(channel)?.is_some() {
                lost.push(*worker);
            }
        }
        for worker in lost {
            self.lose_worker(worker, now);
        }
        if let Some(channel) = &mut self.upstream
            && ended(channel)?.is_some()
        {
            self.lose_upstream(now);
        }
        for server in 0..self.downstream.len() {
            if let Some(channel) = &mut self.downstream[server]
                && let Some(error) = ended(channel)?
            {
                self.lose_server(server, &error)?;
            }
        }
        Ok(())
    }

    fn lose_worker(&mut self, worker: u32, now: Instant) {
        if let Some((process, channel)) = self.workers.remove(&worker) {
            self.count(Some(&channel));
            self.access.gone(self.number, worker as usize, process);
            self.liveness.disconnected(worker, now);
        }
    }

    /// Workers that wait for each other; only in server 0.
    pub(super) fn waits(&self) -> Option<ModelWaits> {
        let waits = self.sequencer.as_ref()?.waits();
        let received = |(worker, (_, channel)): (&u32, &(_, MessageChannel))| {
            (*worker, channel.bytes_received)
        };
        Some(ModelWaits {
            has_weights: self.copies[0].at().is_some_and(|at| at.point.version > 0),
            received: self.workers.iter().map(received).collect(),
            pushed: self.sequencer.as_ref()?.pushed().clone(),
            waits,
        })
    }

    /// Lets the workers that wait go on without these, until each of these pushes again.
    pub(super) fn go_on_without(&mut self, workers: &BTreeSet<u32>, now: Instant) -> Result<()> {
        if let Some(sequencer) = &mut self.sequencer {
            sequencer.go_on_without(workers, now);
        }
        self.sequence(now)
    }

    fn lose_upstream(&mut self, now: Instant) {
        let before = self.upstream.take();
        self.count(before.as_ref());
        self.upstream_away = now;
    }

    fn lose_server(&mut self, server: usize, error: &Error) -> Result<()> {
        let before = self.downstream[server].take();
        self.count(before.as_ref());
        self.connector.note(server, error);
        if self.notified[server] {
            // This server knows of the end, and has ended itself.
            return Ok(());
        }
        self.connector.connect(server)
    }

    /// Removes members that have not reconnected in time, so that nobody waits for them.
    fn remove_lost(&mut self, now: Instant) -> Result<()> {
        let (Some(sequencer), Some(term)) = (&mut self.sequencer, self.copies[0].term()) else {
            return Ok(());
        };
        for (worker, incarnation) in sequencer.members() {
            let away = self.liveness.away.get(&worker);
            if away.is_some_and(|(since, _)| now.saturating_duration_since(*since) >= LOST_GRACE) {
                let ask = Ask::Leave(incarnation);
                sequencer.answer(&WorkerRequest { term, worker, ask }, now);
            }
        }
        Ok(())
    }

    /// Returns whether all servers know of the end, or have had enough time to learn of it.
    pub(super) fn has_ended(&mut self, now: Instant) -> Result<bool> {
        let Some(since) = self.ending else {
            return Ok(false);
        };
        for server in 0..self.downstream.len() {
            if !self.notified[server] && self.downstream[server].is_some() {
                self.tell_end(server, now)?;
            }
        }
        let mut others = std::iter::zip(&self.notified, &self.downstream).skip(1);
        let all_notified = others.all(|(notified, downstream)| *notified && downstream.is_none());
        let mut workers = self.workers.values();
        let is_flushed = workers.all(|(_, channel)| channel.is_flushed());
        Ok((all_notified && is_flushed) || now >= since + ENDING_LIMIT)
    }

    fn tell_end(&mut self, server: usize, now: Instant) -> Result<()> {
        self.notified[server] = true;
        self.send_to_server(server, Message::Goodbye, now)
    }

    /// Fails if server 0 has been away for too long.
    pub(super) fn check_upstream(&self, now: Instant) -> Result<()> {
        let waited = now.saturating_duration_since(self.upstream_away);
        if self.upstream.is_some() || waited < self.config.settings.timeout {
            return Ok(());
        }
        let doing = format!("serve of parameter server {}", self.place.server);
        Err(NotServed::Unreachable {
            server: 0,
            address: self.place.addresses[0].as_str().into(),
            doing: doing.into(),
            waited,
            why: "it orders the updates, and has not connected".into(),
        }
        .into())
    }

    /// Statistics so far.
    pub(super) fn stats(&self) -> Stats {
        let mut stats = Stats {
            term: self.copies[0].term().unwrap_or(0),
            staged: self.copies.iter().map(Protocol::staged).sum(),
            replicas: self.copies.iter().skip(1).map(kept).collect(),
            connections: self.channels().count(),
            left: self.liveness.left.iter().copied().collect(),
            ..Stats::default()
        };
        (stats.bytes_sent, stats.bytes_received) = self.counted;
        for channel in self.channels() {
            stats.bytes_sent += channel.bytes_sent;
            stats.bytes_received += channel.bytes_received;
        }
        if let Some(at) = self.copies[0].at() {
            stats.version = at.point.version;
            stats.history = at.history.0;
            stats.applied.clone_from(&at.applied);
        }
        if let Some(sequencer) = &self.sequencer {
            stats.restored = sequencer.restored();
            let members = sequencer.members().into_iter();
            stats.members = members.map(|(worker, _)| worker).collect();
            stats.counted = counted(sequencer);
        }
        stats
    }
}

fn counted(sequencer: &Sequencer) -> Counted {
    let Some((counts, queue, version)) = sequencer.counts() else {
        return Counted::default();
    };
    Counted {
        version,
        // The first version has the initial weights.
        updates: version - sequencer.start().max(version.min(1)),
        queue,
        counts,
        staleness: sequencer.staleness(),
    }
}

fn kept(copy: &Protocol<Store>) -> (Version, u64) {
    copy.at()
        .map_or((0, 0), |at| (at.point.version, at.history.0))
}
