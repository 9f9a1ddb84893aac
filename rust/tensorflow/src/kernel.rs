//! Registration of a kernel, and the functions by which TensorFlow makes, runs and deletes it.

use std::ffi::{CStr, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::api::{Api, RawConstruction, RawContext, RegisterError};
use crate::context::{Construction, Context};
use crate::ops::accepted;
use crate::status::{Code, Failure, Status};

/// A node of a graph, or a cached eager op.
pub(crate) trait Kernel: Sized {
    /// Reads the attributes.
    fn create(node: &Construction) -> Result<Self, Failure>;
    /// Runs the node once; several threads may call it at the same time.
    fn compute(&self, context: &Context) -> Result<(), Failure>;
}

pub(crate) fn register<K: Kernel>(api: &'static Api, op: &CStr) -> Result<(), RegisterError> {
    let status = Status::new(api);
    // SAFETY: the strings are copied, the functions are statics of this library, which Python
    // never unloads, and registering consumes the builder.
    unsafe {
        let builder = (api.new_kernel)(
            op.as_ptr(),
            c"CPU".as_ptr(),
            Some(create::<K>),
            compute::<K>,
            Some(delete::<K>),
        );
        (api.register_kernel)(op.as_ptr(), builder, status.as_ptr());
    }
    accepted(&status, "kernel of", op)
}

unsafe extern "C" fn create<K: Kernel>(raw: *mut RawConstruction) -> *mut c_void {
    // The table exists, because this function was registered through it.
    let Ok(api) = Api::get() else {
        return std::ptr::null_mut();
    };
    // SAFETY: TensorFlow keeps the construction alive during this call.
    let node = unsafe { Construction::new(api, raw) };
    match guarded(|| K::create(&node)) {
        Ok(kernel) => Box::into_raw(Box::new(kernel)).cast(),
        Err(failure) => {
            node.fail(&failure);
            std::ptr::null_mut()
        }
    }
}

unsafe extern "C" fn compute<K: Kernel>(kernel: *mut c_void, raw: *mut RawContext) {
    let Ok(api) = Api::get() else { return };
    // SAFETY: TensorFlow keeps the context alive during this call.
    let context = unsafe { Context::new(api, raw) };
    // SAFETY: the pointer is null or comes from `create`; only shared references to it are made.
    let kernel = unsafe { kernel.cast::<K>().as_ref() };
    let outcome = kernel.map_or_else(
        || Err(Failure::new(Code::Internal, "this node was never created")),
        |kernel| guarded(|| kernel.compute(&context)),
    );
    if let Err(failure) = outcome {
        context.fail(&failure);
    }
}

unsafe extern "C" fn delete<K: Kernel>(kernel: *mut c_void) {
    if !kernel.is_null() {
        // SAFETY: `create` made the box, and TensorFlow deletes a kernel once, after its last use.
        drop(unsafe { Box::from_raw(kernel.cast::<K>()) });
    }
}

/// Turns a panic into a failure, because it must not unwind into TensorFlow.
fn guarded<T>(body: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
        Err(Failure::new(
            Code::Internal,
            "gradring's op panicked; report this with the message printed above",
        ))
    })
}
