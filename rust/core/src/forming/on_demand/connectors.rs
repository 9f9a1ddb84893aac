//! Those who ask for links, each with a thread that makes them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use super::{GoesOn, PeerConnector, Probe, configure};
use gradring_net::abort::Waker;
use gradring_net::caller::INTERRUPT_INTERVAL;
use gradring_net::link::mesh::LinkConnector;
use gradring_net::link::poll::WakeUp;
use gradring_net::link::tcp::connection::Connection;
use gradring_net::link::{Link, framing};
use gradring_proto::error::Error;
use gradring_proto::lock::lock;
use gradring_proto::wire::handshake::Traffic;

/// A thread that connects; it is told to end, and has ended, when this is dropped.
struct Worker<T> {
    made: Receiver<T>,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl<T: Send + 'static> Worker<T> {
    /// A thread that goes on as long as the group does and nobody ends it; `None` if there is no room
    /// for it, which ends the group.
    fn spawn(
        connector: &Arc<PeerConnector>,
        waker: Arc<Waker>,
        body: impl FnOnce(&PeerConnector, GoesOn<'_>, &dyn Fn(T)) + Send + 'static,
    ) -> Option<Self> {
        let over = Arc::new(AtomicBool::new(false));
        let (of_thread, ended) = (Arc::clone(connector), Arc::clone(&over));
        let (to_asker, made) = channel();
        let work = move || {
            let goes_on = || !ended.load(Ordering::Acquire) && of_thread.abort.cause().is_none();
            let hand_over = |link| {
                // Nobody may want it any more.
                let _ = to_asker.send(link);
                waker();
            };
            body(&of_thread, &goes_on, &hand_over);
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
            // One that panicked has ended, too.
            let _ = thread.join();
        }
    }
}

/// Makes links for collectives of all ranks.
pub(super) struct ForCollectives {
    connector: Arc<PeerConnector>,
    waker: Arc<Waker>,
    /// Ranks that the thread was told of.
    asked: BTreeSet<usize>,
    /// Of these, those that are to connect and have not.
    expected: Arc<Mutex<BTreeMap<usize, Probe>>>,
    here: BTreeMap<usize, Vec<Connection>>,
    to_worker: Option<Sender<usize>>,
    /// Dropped after what it waits for.
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

    /// Has a link with a rank begun.
    fn ask(&mut self, peer: usize) {
        let to_worker = self.to_worker.get_or_insert_with(|| {
            let (to_worker, asked) = channel();
            let (waker, expected) = (Arc::clone(&self.waker), Arc::clone(&self.expected));
            self.worker = Worker::spawn(
                &self.connector,
                waker,
                move |connector, goes_on, hand_over| {
                    connect_each(connector, &asked, &expected, goes_on, hand_over);
                },
            );
            to_worker
        });
        if !self.connector.initiates(peer) {
            lock(&self.expected).insert(peer, Probe::new(peer));
        }
        // A thread that has ended has ended the group.
        let _ = to_worker.send(peer);
    }

    /// The connections with a rank, once they are there.
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

/// Connects to those that are `asked` for, or looks at them as long as they are `expected`; sleeps
/// when there is neither.
fn connect_each(
    connector: &PeerConnector,
    asked: &Receiver<usize>,
    expected: &Mutex<BTreeMap<usize, Probe>>,
    goes_on: GoesOn<'_>,
    hand_over: &dyn Fn((usize, Vec<Connection>)),
) {
    loop {
        // In a statement of its own, so that the lock does not last.
        let expects_nobody = lock(expected).is_empty();
        let next = match expects_nobody {
            true => asked.recv().map_err(RecvTimeoutError::from),
            false => asked.recv_timeout(INTERRUPT_INTERVAL),
        };
        match next {
            Ok(peer) if !connector.initiates(peer) => {}
            Ok(peer) => match connector.connect(peer, Traffic::Collectives, goes_on) {
                Ok(connections) => hand_over((peer, connections)),
                Err(trouble) => return connector.report(peer, trouble, goes_on),
            },
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        let due = lock(expected)
            .values()
            .find(|probe| probe.is_due())
            .cloned();
        let Some(mut probe) = due else { continue };
        if let Err(trouble) = probe.look(connector, goes_on) {
            return connector.report(probe.peer, trouble, goes_on);
        }
        // It may have come meanwhile.
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
    /// Once it was asked for; `None` in it if that has failed.
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
                move |connector, goes_on, hand_over| match connector
                    .agree(peer, sends, &doorbell, goes_on)
                {
                    Ok(agreed) => agreed.into_iter().for_each(hand_over),
                    Err(trouble) => connector.report(peer, trouble, goes_on),
                },
            )
        });
        worker.as_ref()?.made.try_recv().ok()
    }
}
