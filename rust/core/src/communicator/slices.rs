//! Collectives over slices, for Rust programs with contiguous values.

use super::Communicator;
use gradring_proto::buffer::Buffer;
use gradring_proto::collective::{Collective, Request, push_shape};
use gradring_proto::dtype::{Element, ReduceOp};
use gradring_proto::error::Result;

/// Each call waits for its end. All ranks make the same calls in the same order, with equal counts,
/// types and names. A name may be empty. An error leaves the contents of `values` undefined.
impl Communicator {
    /// Reduces `values` over all ranks, in place; they end with the same bits on every rank.
    ///
    /// # Errors
    /// The first cause of failure in the group, which names the rank to blame where there is one.
    pub fn all_reduce<T: Element>(&self, values: &mut [T], op: ReduceOp, name: &str) -> Result<()> {
        self.in_place(Collective::AllReduce { op }, values, name)
    }

    /// Overwrites `values` with those of rank `root`.
    ///
    /// # Errors
    /// `Config` if `root` is not a rank; otherwise as for `all_reduce`.
    pub fn broadcast<T: Element>(&self, values: &mut [T], root: usize, name: &str) -> Result<()> {
        self.in_place(Collective::Broadcast { root }, values, name)
    }

    /// Sends `values` to rank `to`; does not return before that rank has begun to receive. Other
    /// ranks take no part.
    ///
    /// # Errors
    /// `Config` if `to` is not another rank; otherwise as for `all_reduce`.
    pub fn send<T: Element>(&self, values: &mut [T], to: usize, name: &str) -> Result<()> {
        self.in_place(Collective::Send { to }, values, name)
    }

    /// Overwrites `values` with those that rank `from` sends.
    ///
    /// # Errors
    /// `Config` if `from` is not another rank; otherwise as for `all_reduce`.
    pub fn receive<T: Element>(&self, values: &mut [T], from: usize, name: &str) -> Result<()> {
        self.in_place(Collective::Receive { from }, values, name)
    }

    /// Returns when every rank has called it.
    ///
    /// # Errors
    /// As for `all_reduce`.
    pub fn barrier(&self) -> Result<()> {
        self.engine.run(Request::barrier(), &mut || false)
    }

    fn in_place<T: Element>(
        &self,
        collective: Collective,
        values: &mut [T],
        name: &str,
    ) -> Result<()> {
        let mut shapes = String::new();
        push_shape(&mut shapes, [values.len()]);
        let (start, count) = (values.as_mut_ptr().cast(), values.len());
        let request = Request {
            collective,
            // SAFETY: `Element` is sealed, so `values` are elements of `DTYPE`, aligned. `run` has
            // dropped the buffer when it returns, and `values` is borrowed until then.
            buffer: unsafe { Buffer::contiguous(T::DTYPE, start, count) },
            name: name.into(),
            shapes,
        };
        self.run(request, &mut || false)
    }
}
