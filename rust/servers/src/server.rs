//! A server's process: one thread receives from all workers and servers, and acts on their
//! messages.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::channel;
use super::job::Job;
pub use super::status::{ServerPlace, Stats};
use gradring_core::forming::rendezvous::check_loopback;
use gradring_net::caller::{INTERRUPT_INTERVAL, Interrupt};
use gradring_net::config::Config;
use gradring_net::link::forks::Process;
use gradring_net::link::poll::WakeUp;
use gradring_proto::error::{Abort, Error, NotServed, Result};
use gradring_proto::lock::{self, lock};
use gradring_proto::parameters::floats::forget_kept;
use gradring_proto::parameters::rules::Rules;

/// One server of a job.
pub struct Server {
    place: ServerPlace,
    address: String,
    job: Mutex<Option<Box<Job>>>,
    published: Arc<Mutex<Stats>>,
    wake_up: Arc<WakeUp>,
    closing: AtomicBool,
    process: Process,
}

impl Server {
    /// Listens, and loads terms and snapshots from the directory.
    ///
    /// # Errors
    /// `Config` for unusable arguments or an unusable directory; `Rendezvous` for an address on
    /// which it cannot listen.
    pub fn new(
        place: ServerPlace,
        rules: &Rules,
        directory: Option<&Path>,
        worker_timeout: Duration,
        config: &Config,
    ) -> Result<Self> {
        rules.check(place.addresses.len())?;
        check_loopback(&place.addresses[place.server])?;
        let job = Job::new(&place, rules, directory, worker_timeout, config)?;
        Ok(Self {
            address: job.address(),
            published: job.published(),
            wake_up: job.wake_up(),
            job: Mutex::new(Some(Box::new(job))),
            place,
            closing: AtomicBool::new(false),
            process: Process::this(),
        })
    }

    /// Index of this server and all addresses.
    #[must_use]
    pub const fn place(&self) -> &ServerPlace {
        &self.place
    }

    /// Address of the listening socket.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Serves until all workers have left or are lost for good.
    ///
    /// # Errors
    /// When no worker connected, all workers were lost, server 0 was lost, or a disk failed; when
    /// the call is interrupted or the server closed.
    pub fn serve(&self, interrupt: Interrupt<'_>) -> Result<()> {
        self.check_process()?;
        let mut job = lock::take(&self.job).ok_or_else(closed)?;
        job.begin()?;
        let mut asked = Instant::now();
        loop {
            self.wake_up.reset();
            if self.closing.load(Ordering::Acquire) {
                return Err(closed());
            }
            let Some(limit) = job.turn(Instant::now())? else {
                job.finish();
                return Ok(());
            };
            let limit = limit.min(INTERRUPT_INTERVAL);
            channel::wait(job.channels_mut(), &self.wake_up, limit);
            if asked.elapsed() >= INTERRUPT_INTERVAL {
                asked = Instant::now();
                if interrupt.interrupts() {
                    if job.has_nobody_to_wait_for() {
                        job.finish();
                    }
                    return Err(Abort::Interrupted.into());
                }
            }
        }
    }

    /// Returns the statistics so far.
    ///
    /// # Errors
    /// In a fork.
    pub fn stats(&self) -> Result<Stats> {
        self.check_process()?;
        Ok(lock(&self.published).clone())
    }

    /// Ends `serve`, and releases the port and the directory.
    pub fn close(&self) {
        if self.process.is_this() {
            self.closing.store(true, Ordering::Release);
            self.wake_up.wake();
            drop(lock::take(&self.job));
            forget_kept();
        }
    }

    fn check_process(&self) -> Result<()> {
        if self.process.is_this() {
            return Ok(());
        }
        let what = "server".into();
        Err(NotServed::OfParent { what }.into())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if !self.process.is_this() {
            // Threads, sockets and the lock of the directory belong to the parent process.
            let job = self.job.get_mut().ok().and_then(Option::take);
            std::mem::forget(job);
        }
    }
}

fn closed() -> Error {
    let what = "server".into();
    NotServed::Closed { what }.into()
}
