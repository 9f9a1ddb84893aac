//! A collective with everything that is known before its start.

use std::sync::Arc;

use gradring_proto::collective::Call;
use gradring_proto::dtype::DType;
use gradring_proto::error::Result;
use gradring_proto::schedule::Algorithm;
use gradring_proto::schedule::choice::Policy;
use gradring_proto::wire::signature::{Header, Signature};

/// A call with everything that follows from it and from the policy.
#[derive(Clone)]
pub struct Prepared {
    /// The call.
    pub call: Arc<Call>,
    /// How it is performed.
    pub algorithm: Algorithm,
    /// Type in which elements travel, if it is not their own.
    pub wire_dtype: Option<DType>,
    /// `true` if it travels through the slots of all ranks.
    pub in_slots: bool,
    signature: Signature,
}

/// Name in statistics and records of the algorithm that reads buffers where they are.
pub const MAPPED: &str = "mapped";

/// Name of the algorithm of a call.
#[must_use]
pub fn algorithm_name(call: &Call, algorithm: Algorithm) -> &'static str {
    match call.is_mapped {
        true => MAPPED,
        false => algorithm.name(),
    }
}

/// A collective with its place in the order.
pub struct Launched {
    /// The call and its execution parameters.
    pub prepared: Prepared,
    pub(super) header: Header,
    /// Its ordinal.
    pub sequence: u64,
}

impl Prepared {
    /// Prepares the call of `rank` under `policy`.
    ///
    /// # Errors
    /// `Misuse` for a call that makes no sense.
    pub fn new(call: Arc<Call>, rank: usize, policy: &Policy) -> Result<Self> {
        call.validate(rank, policy.topology.world_size(), policy.reaches_all())?;
        let algorithm = policy.choose(&call);
        Ok(Self {
            algorithm,
            wire_dtype: policy.wire_dtype(&call),
            in_slots: policy.travels_in_slots(&call, algorithm),
            signature: Signature::of(&call, algorithm),
            call,
        })
    }

    /// Name of the algorithm, for statistics and records.
    #[must_use]
    pub fn algorithm_name(&self) -> &'static str {
        algorithm_name(&self.call, self.algorithm)
    }

    /// Adds the group's generation, the collective's ordinal, and the step of the program.
    #[inline]
    #[must_use]
    pub fn launch(self, generation: u32, sequence: u64, step: u64) -> Launched {
        Launched {
            header: self.signature.header(generation, sequence, step),
            prepared: self,
            sequence,
        }
    }
}
