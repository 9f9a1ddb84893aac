//! Queue of launched collectives in order, and the state that determines the next one.

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

/// A queued collective with its buffer and work.
type Waiting = (Launched, Buffer, Work);
/// The driver, with the collective whose turn has come.
pub(super) type Turn = (Box<Driver>, Waiting);

/// Launched collectives in order.
pub(super) struct Queue {
    pub(super) waiting: VecDeque<Waiting>,
    /// `None` while a thread drives a collective, and once the engine is closed. Dropping the
    /// driver frees sockets, mappings, descriptors and memory, even if the program keeps the
    /// engine.
    pub(super) driver: Option<Box<Driver>>,
    /// `true` while a thread drives a collective.
    pub(super) driving: bool,
    /// `true` while that thread lets the program act, which may take long.
    pub(super) asking: bool,
    /// Thread inside a blocking call. That call is the last one launched, since none may follow it.
    blocked: Option<Here>,
    pub(super) launched: u64,
    pub(super) steps: Steps,
    pub(super) closed: bool,
    pub(super) policy: Policy,
    /// The last call, reused if the next one is equal.
    last: Option<Prepared>,
}

thread_local! {
    static HERE: u8 = const { 0 };
}

/// Identity of a living thread. It is cheaper than `ThreadId`, which slows small messages down.
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

    /// Takes the next collective up to the ordinal `last`, with the driver, unless another thread
    /// drives.
    pub(super) fn next(&mut self, last: u64) -> Option<Turn> {
        self.waiting
            .front()
            .filter(|(launched, ..)| launched.sequence <= last)?;
        let driver = self.driver.take()?;
        self.driving = true;
        Some((driver, self.waiting.pop_front()?))
    }

    /// Returns `true` if a collective launched now starts at once.
    pub(super) fn is_idle(&self) -> bool {
        !self.driving && self.waiting.is_empty()
    }

    /// Marks this thread as inside a blocking call, the one prepared last.
    pub(super) fn block(&mut self) {
        self.blocked = Some(Here::now());
    }

    /// Ends the blocking call of this thread.
    pub(super) fn unblock(&mut self) {
        self.blocked.take_if(|thread| *thread == Here::now());
    }

    /// The present blocking call, and whether this thread makes it.
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

    /// Prepares a call, or reuses the last one: preparing slows small messages down, and programs
    /// that send many repeat them.
    pub(super) fn prepare(&mut self, rank: usize, call: Call) -> Result<Prepared> {
        if let Some(last) = self.last.as_ref().filter(|last| *last.call == call) {
            return Ok(last.clone());
        }
        let prepared = Prepared::new(call, rank, &self.policy)?;
        self.last = Some(prepared.clone());
        Ok(prepared)
    }
}
