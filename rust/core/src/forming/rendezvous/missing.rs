//! Ranks that did not join, and the state of their addresses.

use std::collections::BTreeMap;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use super::Forming;
use crate::forming::listener::GroupListener;
use gradring_net::caller::INTERRUPT_INTERVAL;
use gradring_net::config::Config;
use gradring_net::session::connect::{Resolve, STILL_RESOLVING, connect};
use gradring_proto::error::{Error, Missing, NotFormed, Result, Text};

/// Time limit of a probe of the address of a rank that did not join.
const PROBE_LIMIT: Duration = Duration::from_secs(1);
/// Most ranks that an error names; each takes a thread that probes its address.
pub(super) const NAMED_MAX: usize = 32;

impl Forming<'_> {
    /// Ranks that have not joined; for rank 0.
    pub(super) fn late(&self) -> Vec<usize> {
        let joined = self.joined();
        let others = 1..self.config.world_size;
        others.filter(|rank| !joined.contains_key(rank)).collect()
    }

    /// Error for the ranks that did not join.
    pub(super) fn missing(&mut self, listener: &GroupListener) -> Result<Error> {
        let Config {
            world_size,
            rendezvous,
            addresses,
            settings,
            ..
        } = self.config;
        let missing = self.late();
        let named = &missing[..missing.len().min(NAMED_MAX)];
        let states = self.probe_all(named)?;
        let fact = |&rank: &usize| Missing {
            rank,
            found: (addresses.get(rank).zip(states.get(&rank)))
                .map(|(address, state)| (address.as_str().into(), state.as_str().into())),
        };
        let fact = NotFormed::MissingRanks {
            missing: named.iter().map(fact).collect(),
            more: missing.len() - named.len(),
            world_size: *world_size,
            rendezvous: rendezvous.as_str().into(),
            within: settings.timeout,
            turned_away: Text::of(&listener.access.turned_away),
        };
        let host = addresses.get(missing[0]);
        let host = host.map_or("an unknown host", String::as_str);
        Ok(Error::from(fact).blaming(missing[0], host))
    }

    /// State of these ranks' addresses, for those that have one. Each probe has a thread, which may
    /// outlive the wait for it.
    fn probe_all(&mut self, ranks: &[usize]) -> Result<BTreeMap<usize, String>> {
        let until = Instant::now() + PROBE_LIMIT;
        let (sender, news) = channel();
        let mut found = BTreeMap::new();
        for &rank in ranks {
            let Some(address) = self.config.addresses.get(rank).cloned() else {
                continue;
            };
            found.insert(rank, STILL_RESOLVING.to_owned());
            let (resolve, sender) = (self.resolve, sender.clone());
            // The receiver may be gone.
            let tell = move |state: &str| drop(sender.send((rank, state.to_owned())));
            let attempt = move || probe(&address, resolve, until, tell);
            if let Err(error) = std::thread::Builder::new().spawn(attempt) {
                found.insert(rank, format!("no thread to look at it: {error}"));
            }
        }
        drop(sender);
        while let Some(left) = until.checked_duration_since(Instant::now()) {
            match news.recv_timeout(INTERRUPT_INTERVAL.min(left)) {
                Ok((rank, state)) => drop(found.insert(rank, state)),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => self.go_on_or_abort()?,
            }
        }
        // States that arrived in time count, however late they are read.
        found.extend(news.try_iter());
        Ok(found)
    }
}

/// Reports the state of an address, and reports again when more is known.
fn probe(address: &str, resolve: Resolve, until: Instant, tell: impl Fn(&str)) {
    let addresses = match resolve(address) {
        Ok(addresses) => addresses,
        Err(error) => return tell(&error.to_string()),
    };
    tell("no answer in time");
    match connect(&addresses, until) {
        Ok(_) => tell("something listens there, but it did not join"),
        Err(error) => tell(&error.to_string()),
    }
}
