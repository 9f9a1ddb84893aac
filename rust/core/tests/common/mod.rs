//! What tests over real sockets share.

use std::net::TcpListener;

use gradring_core::buffer::{Buffer, Slice};
use gradring_core::collective::{Collective, Request};
use gradring_core::communicator::Communicator;
use gradring_core::dtype::{DType, ReduceOp};
use gradring_core::error::Result;

/// An address of this machine that nobody listened at a moment ago.
pub(crate) fn free_address() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().to_string()
}

/// Sums `values` over all ranks.
pub(crate) fn all_reduce(communicator: &Communicator, values: &mut [f32]) -> Result<()> {
    let slice = Slice {
        start: values.as_mut_ptr().cast(),
        count: values.len(),
    };
    let request = Request {
        collective: Collective::AllReduce { op: ReduceOp::Sum },
        // SAFETY: `run` ends before `values` is used again.
        buffer: unsafe { Buffer::new(DType::F32, [slice], Box::new(())) },
        name: "x".into(),
        shapes: format!("[{}]", values.len()),
    };
    communicator.engine.run(request, &mut || false)
}
