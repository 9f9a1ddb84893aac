//! The collectives that were launched, in their order, and what is known of the next one.

use std::collections::VecDeque;
use std::sync::Arc;

use super::Driver;
use super::steps::Steps;
use crate::drive::{Launched, Prepared};
use crate::work::Work;
use gradring_proto::buffer::Buffer;
use gradring_proto::collective::Call;
use gradring_proto::error::Result;
use gradring_proto::schedule::choice::Policy;

/// A collective that is queued, and what it works on.
type Waiting = (Launched, Buffer, Work);
/// What it takes to drive the collective whose turn has come.
pub(super) type Turn = (Box<Driver>, Waiting);

/// The order of collectives.
pub(super) struct Queue {
    pub(super) waiting: VecDeque<Waiting>,
    /// None while somebody drives a collective, and once the engine is closed: with it go sockets,
    /// mappings, descriptors and memory, however long somebody keeps the engine.
    pub(super) driver: Option<Box<Driver>>,
    /// Whether somebody drives a collective right now.
    pub(super) driving: bool,
    /// Whether that one lets the program act at the moment, which may take its time.
    pub(super) asking: bool,
    /// The thread inside a blocking call; that call is the last one, since none may follow it.
    blocked: Option<Here>,
    pub(super) launched: u64,
    pub(super) steps: Steps,
    pub(super) closed: bool,
    pub(super) policy: Policy,
    /// The last call, in case the next one is the same.
    last: Option<Prepared>,
}

thread_local! {
    static HERE: u8 = const { 0 };
}

/// A thread, as long as it lives: cheaper than its official number, which small messages notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Here(usize);

impl Here {
    fn now() -> Self {
        HERE.with(|here| Self((&raw const *here).addr()))
    }
}

impl Queue {
    pub(super) fn new(policy: Policy, driver: Box<Driver>) -> Self {
        Self {
            waiting: VecDeque::new(),
            driver: Some(driver),
            driving: false,
            asking: false,
            blocked: None,
            launched: 0,
            steps: Steps::default(),
            closed: false,
            policy,
            last: None,
        }
    }

    /// The next collective up to the ordinal `last`, for somebody who drives it now, if nobody else
    /// does.
    pub(super) fn next(&mut self, last: u64) -> Option<Turn> {
        self.waiting
            .front()
            .filter(|(launched, ..)| launched.sequence <= last)?;
        let driver = self.driver.take()?;
        self.driving = true;
        Some((driver, self.waiting.pop_front()?))
    }

    /// Whether a collective launched now has its turn at once.
    pub(super) fn is_idle(&self) -> bool {
        !self.driving && self.waiting.is_empty()
    }

    /// This thread is inside a blocking call, the one prepared last.
    pub(super) fn block(&mut self) {
        self.blocked = Some(Here::now());
    }

    /// This thread's blocking call is over.
    pub(super) fn unblock(&mut self) {
        self.blocked.take_if(|thread| *thread == Here::now());
    }

    /// The blocking call under way, if there is one, and whether it is this thread's.
    pub(super) fn blocking(&self) -> Option<(Arc<Call>, bool)> {
        let own = self.blocked? == Here::now();
        let call = &self.last.as_ref()?.call;
        Some((Arc::clone(call), own))
    }

    /// Changes how collectives launched from now on are performed.
    pub(super) fn set_policy(&mut self, policy: Policy) {
        self.policy = policy;
        self.last = None;
    }

    /// Small messages notice what preparing costs, and those who send many repeat themselves.
    pub(super) fn prepare(&mut self, rank: usize, call: Call) -> Result<Prepared> {
        if let Some(last) = self.last.as_ref().filter(|last| *last.call == call) {
            return Ok(last.clone());
        }
        let prepared = Prepared::new(call, rank, &self.policy)?;
        self.last = Some(prepared.clone());
        Ok(prepared)
    }
}
