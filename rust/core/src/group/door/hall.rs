//! Callers while they are greeted, who can be sent away.

use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Where callers are while they are greeted.
#[derive(Default)]
pub(super) struct Hall {
    /// In the order of their arrival.
    guests: Mutex<Vec<Guest>>,
}

struct Guest {
    number: u64,
    since: Instant,
    /// To end the conversation from outside.
    tcp: TcpStream,
}

/// A caller's place in the hall, given back when dropped.
pub(super) struct Place {
    hall: Arc<Hall>,
    number: u64,
}

impl Hall {
    fn guests(&self) -> MutexGuard<'_, Vec<Guest>> {
        self.guests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn has_place(&self, places: usize) -> bool {
        self.guests().len() < places
    }

    pub(super) fn enter(self: &Arc<Self>, tcp: &TcpStream) -> std::io::Result<Place> {
        let tcp = tcp.try_clone()?;
        let mut guests = self.guests();
        let number = guests.last().map_or(0, |guest| guest.number + 1);
        guests.push(Guest {
            number,
            since: Instant::now(),
            tcp,
        });
        Ok(Place {
            hall: Arc::clone(self),
            number,
        })
    }

    /// Ends the conversations that began longer ago than `limit`; their threads notice.
    pub(super) fn send_away_who_stayed(&self, limit: Duration) {
        for guest in self
            .guests()
            .iter()
            .filter(|guest| guest.since.elapsed() >= limit)
        {
            // One who has gone already needs not be sent away.
            let _ = guest.tcp.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.hall
            .guests()
            .retain(|guest| guest.number != self.number);
    }
}
