//! gradring's TensorFlow ops, registered through TensorFlow's C API at run time.
//!
//! This crate is built without TensorFlow's headers and libraries. It looks up the symbols in the
//! framework library that `import tensorflow` has already loaded, so one build serves many
//! versions. All code that is unsafe because of TensorFlow is in this crate.
//!
//! | module | holds |
//! |---|---|
//! | `api` | the table of C functions |
//! | `status`, `tensor`, `context` | safe owners and views of TensorFlow's objects |
//! | `ops` | names, attributes and shapes of the ops |
//! | `kernel` | registration of a kernel |
//! | `kernels` | code of the ops |
//! | `served`, `values` | code of the ops that exchange with parameter servers, and their memory |
//! | `check` | the search for gradients that are not finite |
//! | `equal_gradients` | the search for ranks that all compute the same gradients |
//! | `shared_by_nodes` | state that nodes of all graphs share |
//! | `inflight` | collectives between a Start and its Wait |
//! | `interrupts` | Ctrl-C while an op waits |
//! | `failures` | the error behind the message of a failed op |
//! | `counters` | numbers of ops, tensors and bytes in this process |

mod api;
mod check;
mod context;
pub mod counters;
mod equal_gradients;
mod executions;
pub mod failures;
mod inflight;
pub mod interrupts;
mod kernel;
mod kernels;
mod ops;
mod served;
mod shared_by_nodes;
mod status;
mod tensor;
mod values;

use std::sync::Mutex;

pub use api::RegisterError;

/// Registers the ops and their kernels with the TensorFlow that this process has imported.
///
/// Further calls do nothing.
///
/// # Errors
/// [`RegisterError`] when TensorFlow is not loaded, is too old, or refuses an op.
pub fn register() -> Result<(), RegisterError> {
    static REGISTERED: Mutex<bool> = Mutex::new(false);
    let mut registered = gradring_proto::lock::lock(&REGISTERED);
    if !*registered {
        let api = api::Api::get()?;
        ops::register(api)?;
        kernels::register(api)?;
        *registered = true;
    }
    Ok(())
}
