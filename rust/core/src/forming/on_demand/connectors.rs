//! Connectors, which make links on request in threads of their own.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use super::{Continues, PeerConnector, Probe, configure};
use gradring_net::abort::Waker;
use gradring_net::caller::INTERRUPT_INTERVAL;
use gradring_net::link::mesh::LinkConnector;
use gradring_net::link::poll::WakeUp;
use gradring_net::link::tcp::connection::Connection;
use gradring_net::link::{Link, framing};
use gradring_proto::error::Error;
use gradring_proto::lock::lock;
use gradring_proto::wire::handshake::Traffic;

/// A connecting thread. Dropping the worker stops the thread, and waits for its end.
struct Worker<T> {
    made: Receiver<T>,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl<T: Send + 'static> Worker<T> {
    /// Starts a thread that works until the group fails or the worker is dropped. Returns `None` if
    /// the system has no thread left, which ends the group.
    fn spawn(
        connector: &Arc<PeerConnector>,
        waker: Arc<Waker>,
        body: impl FnOnce(&PeerConnector, Continues<'_>, &dyn Fn(T)) + Send + 'static,
    ) -> Option<Self> {
        let over = Arc::new(AtomicBool::new(false));
        let (of_thread, ended) = (Arc::clone(connector), Arc::clone(&over));
        let (to_asker, made) = channel();
        let work = move || {
            let continues = || !ended.load(Ordering::Acquire) && of_thread.abort.cause().is_none();
            let hand_over = |link| {
                // The receiver may be gone.
                let _ = to_asker.send(link);
                waker();
            };
            body(&of_thread, &continues, &hand_over);
        };
        let spawned = std::thread::Builder::new()
            .name("gradring-connect".into())
            .spawn(work);
        match spawned {
            Ok(thread) => Some(Self {
                made,
                over,
                thread: Some(thread),
            }),
            Err(error) => {
                let own = Error::no_thread(&error);
                let rank = connector.config.rank;
                let own = own.blaming(rank, connector.roster.host(rank));
                connector.supervisor.abort(own);
                None
            }
        }
    }
}

impl<T> Drop for Worker<T> {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has ended, too.
            let _ = thread.join();
        }
    }
}

/// Makes links for collectives of all ranks.
pub(super) struct ForCollectives {
    connector: Arc<PeerConnector>,
    waker: Arc<Waker>,
    /// Ranks that the thread was asked to connect with.
    asked: BTreeSet<usize>,
    /// Those of `asked` that have to connect to this rank, and have not yet.
    expected: Arc<Mutex<BTreeMap<usize, Probe>>>,
    here: BTreeMap<usize, Vec<Connection>>,
    to_worker: Option<Sender<usize>>,
    /// Dropped after the sender on which its thread waits.
    worker: Option<Worker<(usize, Vec<Connection>)>>,
}

impl ForCollectives {
    pub(super) fn new(connector: Arc<PeerConnector>, waker: Arc<Waker>) -> Self {
        Self {
            connector,
            waker,
            asked: BTreeSet::new(),
            expected: Arc::default(),
            here: BTreeMap::new(),
            to_worker: None,
            worker: None,
        }
    }

    /// Requests a link with a rank.
    fn ask(&mut self, peer: usize) {
        let to_worker = self.to_worker.get_or_insert_with(|| {
            let (to_worker, asked) = channel();
            let (waker, expected) = (Arc::clone(&self.waker), Arc::clone(&self.expected));
            self.worker = Worker::spawn(
                &self.connector,
                waker,
                move |connector, continues, hand_over| {
                    connect_each(connector, &asked, &expected, continues, hand_over);
                },
            );
            to_worker
        });
        if !self.connector.initiates(peer) {
            lock(&self.expected).insert(peer, Probe::new(peer));
        }
        // A thread that has ended has also ended the group.
        let _ = to_worker.send(peer);
    }

    /// Returns the connections with a rank, once they are complete.
    fn connections(&mut self, peer: usize) -> Option<Vec<Connection>> {
        if self.asked.insert(peer) {
            self.ask(peer);
        }
        if self.connector.initiates(peer) {
            let made = self.worker.iter().flat_map(|worker| worker.made.try_iter());
            self.here.extend(made);
            return self.here.remove(&peer);
        }
        let streams = self.connector.config.settings.streams;
        let accepted = &self.connector.accepted;
        let connections = accepted.take(peer, Traffic::Collectives, streams)?;
        lock(&self.expected).remove(&peer);
        Some(connections)
    }
}

/// Connects to the `asked` ranks, and probes the `expected` ones. Sleeps when there are neither.
fn connect_each(
    connector: &PeerConnector,
    asked: &Receiver<usize>,
    expected: &Mutex<BTreeMap<usize, Probe>>,
    continues: Continues<'_>,
    hand_over: &dyn Fn((usize, Vec<Connection>)),
) {
    loop {
        // A statement of its own releases the lock before the wait.
        let expects_nobody = lock(expected).is_empty();
        let next = match expects_nobody {
            true => asked.recv().map_err(RecvTimeoutError::from),
            false => asked.recv_timeout(INTERRUPT_INTERVAL),
        };
        match next {
            Ok(peer) if !connector.initiates(peer) => {}
            Ok(peer) => match connector.connect(peer, Traffic::Collectives, continues) {
                Ok(connections) => hand_over((peer, connections)),
                Err(trouble) => return connector.report(peer, trouble, continues),
            },
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        let due = lock(expected)
            .values()
            .find(|probe| probe.is_due())
            .cloned();
        let Some(mut probe) = due else { continue };
        if let Err(trouble) = probe.poll(connector, continues) {
            return connector.report(probe.peer, trouble, continues);
        }
        // The rank may have connected meanwhile.
        lock(expected)
            .entry(probe.peer)
            .and_modify(|known| *known = probe);
    }
}

impl LinkConnector for ForCollectives {
    fn link(&mut self, peer: usize) -> Option<Box<dyn Link>> {
        let connections = self.connections(peer)?;
        let connector = &self.connector;
        if let Err(error) = configure(&connections) {
            connector.report(peer, error.into(), &|| true);
            return None;
        }
        let lanes = connections.into_iter().map(|lane| Box::new(lane) as _);
        let checked = connector.config.settings.checksum;
        Some(framing::over(lanes.collect(), checked))
    }
}

/// Makes the link of a channel.
pub(super) struct ForTwo {
    connector: Arc<PeerConnector>,
    peer: usize,
    sends: bool,
    doorbell: Arc<WakeUp>,
    waker: Arc<Waker>,
    /// Set by the first request; contains `None` if the thread could not start.
    worker: Option<Option<Worker<Box<dyn Link>>>>,
}

impl ForTwo {
    pub(super) fn new(
        connector: Arc<PeerConnector>,
        peer: usize,
        sends: bool,
        doorbell: Arc<WakeUp>,
        waker: Waker,
    ) -> Self {
        Self {
            connector,
            peer,
            sends,
            doorbell,
            waker: Arc::new(waker),
            worker: None,
        }
    }
}

impl LinkConnector for ForTwo {
    fn link(&mut self, _end: usize) -> Option<Box<dyn Link>> {
        let worker = self.worker.get_or_insert_with(|| {
            let (peer, sends, doorbell) = (self.peer, self.sends, Arc::clone(&self.doorbell));
            let waker = Arc::clone(&self.waker);
            Worker::spawn(
                &self.connector,
                waker,
                move |connector, continues, hand_over| match connector
                    .agree(peer, sends, &doorbell, continues)
                {
                    Ok(agreed) => agreed.into_iter().for_each(hand_over),
                    Err(trouble) => connector.report(peer, trouble, continues),
                },
            )
        });
        worker.as_ref()?.made.try_recv().ok()
    }
}
