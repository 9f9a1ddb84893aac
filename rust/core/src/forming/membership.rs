//! Answers to requests of other processes about the members of the next group.
//!
//! Every listener of a process takes these requests, whatever group it is for. A process that
//! learns of a new group may still be in the old one, and a process that wants to join has none.

use std::io::{Read, Write};
use std::sync::{Arc, Weak};
use std::time::Instant;

use crate::forming::access::GroupAccess;
use gradring_net::link::forks::PerProcess;
use gradring_net::link::tcp::connection::Connection;
use gradring_net::link::tcp::deadline_stream::DeadlineStream;
pub(crate) use gradring_net::session::listener::Service;
use gradring_proto::consensus::message::{Envelope, Reply};
use gradring_proto::error::Result;
use gradring_proto::wire::handshake::{self, Hello, Purpose};

/// Answers requests for this process in one job.
pub(crate) trait Answers: Send + Sync {
    /// Name of the job.
    fn job(&self) -> &str;

    /// Returns the answer without waiting.
    fn answer(&self, envelope: &Envelope) -> Reply;
}

static ANSWERERS: PerProcess<Vec<Weak<dyn Answers>>> = PerProcess::new();

/// Lets `answers` receive requests for as long as it exists.
pub(crate) fn register(answers: &Arc<dyn Answers>) {
    let mut all = ANSWERERS.lock();
    all.retain(|other| other.strong_count() > 0);
    all.push(Arc::downgrade(answers));
}

/// Service for processes of the job.
pub(super) struct Membership(pub(super) Arc<GroupAccess>);

impl Service for Membership {
    fn serves(&self, purpose: &Purpose) -> bool {
        matches!(purpose, Purpose::Membership { .. })
    }

    fn admit(&self, hello: &Hello, _deadline: Instant) -> Result<()> {
        let Purpose::Membership { job } = &hello.purpose else {
            return Ok(());
        };
        let GroupAccess {
            credentials,
            config,
            ..
        } = &*self.0;
        credentials.check_job(job, (hello.rank, config.rank))
    }

    fn serve(&self, _hello: Hello, mut connection: Connection, deadline: Instant) -> Result<()> {
        let mut stream = DeadlineStream::new(&mut connection, deadline);
        answer(&mut stream, &self.0.credentials.job)
    }
}

/// Answers the request of an authenticated process of this job.
fn answer(stream: &mut (impl Read + Write), job: &str) -> Result<()> {
    let envelope = handshake::read_message(stream)?;
    let all: Vec<_> = ANSWERERS.lock().iter().filter_map(Weak::upgrade).collect();
    let replies = all
        .iter()
        .filter(|answers| answers.job() == job)
        .map(|answers| answers.answer(&envelope));
    // A process may have left the job and come back, so it can have several answers.
    let reply = replies
        .reduce(|one, other| match one {
            Reply::OtherProcess => other,
            one => one,
        })
        .unwrap_or(match envelope.to {
            Some(_) => Reply::OtherProcess,
            None => Reply::Noted(Vec::new()),
        });
    handshake::write_message(stream, &reply)
}
