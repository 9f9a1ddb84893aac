//! Queue of launched collectives in order, and the state that determines the next one.

use std::collections::VecDeque;
use std::ops::Deref;
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
    /// The last different calls, of which one is reused if the next call is equal to it. The last
    /// call is the first here.
    recent: Vec<Prepared>,
}

/// Number of calls that are kept: more than a step of most programs that send small messages.
const RECENT: usize = 4;

/// The call of a collective that is to be launched.
pub(super) enum Asked<'a> {
    /// A call that may be new.
    New(Call),
    /// A call that the program makes again and again.
    Again(&'a Arc<Call>),
}

impl Asked<'_> {
    /// Returns `true` if the prepared call is this one.
    fn is(&self, known: &Arc<Call>) -> bool {
        match self {
            Self::New(call) => **known == *call,
            Self::Again(call) => Arc::ptr_eq(known, call) || **known == ***call,
        }
    }

    /// Marks the call as one that all ranks perform where their buffers are.
    pub(super) fn mark_mapped(&mut self) {
        let call = Call::clone(self);
        *self = Self::New(Call {
            is_mapped: true,
            ..call
        });
    }

    fn into_shared(self) -> Arc<Call> {
        match self {
            Self::New(call) => Arc::new(call),
            Self::Again(call) => Arc::clone(call),
        }
    }
}

impl Deref for Asked<'_> {
    type Target = Call;

    fn deref(&self) -> &Call {
        match self {
            Self::New(call) => call,
            Self::Again(call) => call,
        }
    }
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
            recent: Vec::with_capacity(RECENT),
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
        let call = &self.recent.first()?.call;
        Some((Arc::clone(call), own))
    }

    /// Changes how collectives launched from now on are performed.
    pub(super) fn set_policy(&mut self, policy: Policy) {
        self.policy = policy;
        self.recent.clear();
    }

    /// Prepares a call, or reuses a recent one: preparing slows small messages down, and programs
    /// that send many repeat them.
    pub(super) fn prepare(&mut self, rank: usize, call: Asked<'_>) -> Result<Prepared> {
        match self.recent.iter().position(|known| call.is(&known.call)) {
            Some(0) => {}
            Some(place) => self.recent[..=place].rotate_right(1),
            None => {
                let prepared = Prepared::new(call.into_shared(), rank, &self.policy)?;
                self.recent.truncate(RECENT - 1);
                self.recent.insert(0, prepared);
            }
        }
        Ok(self.recent[0].clone())
    }
}
