//! A collective with all that is known of it before it starts.

use std::sync::Arc;

use gradring_proto::collective::Call;
use gradring_proto::dtype::DType;
use gradring_proto::error::Result;
use gradring_proto::schedule::Algorithm;
use gradring_proto::schedule::choice::Policy;
use gradring_proto::wire::contract::{Contract, Header};

/// All that follows from a call and the policy.
#[derive(Clone)]
pub struct Prepared {
    /// The call.
    pub call: Arc<Call>,
    /// How it is performed.
    pub algorithm: Algorithm,
    /// Type in which elements travel, if it is not their own.
    pub wire_dtype: Option<DType>,
    contract: Contract,
}

/// A collective with its place in the order.
pub struct Launched {
    /// What it is.
    pub prepared: Prepared,
    pub(super) header: Header,
    /// Its ordinal.
    pub sequence: u64,
}

impl Prepared {
    /// The call of `rank`, performed as `policy` says.
    ///
    /// # Errors
    /// `Misuse` for a call that makes no sense.
    pub fn new(call: Call, rank: usize, policy: &Policy) -> Result<Self> {
        call.validate(rank, policy.topology.world_size(), policy.reaches_all())?;
        let algorithm = policy.choose(&call);
        Ok(Self {
            algorithm,
            wire_dtype: policy.wire_dtype(&call),
            contract: Contract::of(&call, algorithm),
            call: Arc::new(call),
        })
    }

    /// With the group's generation, its ordinal, and the step of the program that it belongs to.
    #[inline]
    #[must_use]
    pub fn launch(self, generation: u32, sequence: u64, step: u64) -> Launched {
        Launched {
            header: self.contract.header(generation, sequence, step),
            prepared: self,
            sequence,
        }
    }
}
