//! Names, attributes and shapes of the ops.
//!
//! `GradringStart`, and the Starts with counts, hand tensors to the engine and return at once;
//! `GradringWait` blocks until the engine has finished with them. The `token` is a scalar resource
//! variable. TensorFlow takes every Start for a write to it, which keeps Starts in program order
//! even across `tf.cond` and `tf.while_loop`. The tensors named
//! `inflight` carry shapes and gradients through the graph. Their contents are undefined while the
//! engine works on them, and a Wait returns the memory that `inflight.rs` keeps, not its input
//! tensors. `GradringGate` passes a tensor on once a Start has run, so that ops which read its
//! output run later.
//!
//! `GradringPushOpen` begins a push to parameter servers. `GradringPushPiece` hands some gradients
//! to the thread that sends them, as soon as the backward pass has computed these; `GradringPush`
//! ends the push. `GradringPull` waits for the variables.

use std::ffi::{CStr, c_int};

use crate::api::{Api, InferShapes, RawStatus, RegisterError, ShapeContext, ShapeHandle};
use crate::status::{Code, Failure, Status, set};

pub(crate) const START: &CStr = c"GradringStart";
pub(crate) const ALL_GATHER_START: &CStr = c"GradringAllGatherStart";
pub(crate) const ALL_GATHER_V_START: &CStr = c"GradringAllGatherVStart";
pub(crate) const REDUCE_SCATTER_V_START: &CStr = c"GradringReduceScatterVStart";
pub(crate) const ALL_TO_ALL_V_START: &CStr = c"GradringAllToAllVStart";
pub(crate) const WAIT: &CStr = c"GradringWait";
pub(crate) const GATE: &CStr = c"GradringGate";
pub(crate) const PUSH_OPEN: &CStr = c"GradringPushOpen";
pub(crate) const PUSH_PIECE: &CStr = c"GradringPushPiece";
pub(crate) const PUSH: &CStr = c"GradringPush";
pub(crate) const PULL: &CStr = c"GradringPull";

/// Attributes, by the names used in graphs.
pub(crate) mod attr {
    use std::ffi::CStr;

    /// `all_reduce`, `reduce_scatter`, `reduce`, `broadcast` or `all_to_all`.
    pub(crate) const COLLECTIVE: &CStr = c"collective";
    /// Name of the reduce op; empty where nothing is reduced.
    pub(crate) const REDUCE_OP: &CStr = c"reduce_op";
    /// Rank that sends its contents in a broadcast, or gets the result of a reduce.
    pub(crate) const ROOT: &CStr = c"root";
    /// Name of the bucket in messages. (A node has a `name` of its own.)
    pub(crate) const LABEL: &CStr = c"label";
    /// Name of the bucket that ranks compare.
    pub(crate) const IDENTITY: &CStr = c"identity";
    /// `Communicator::id`.
    pub(crate) const COMMUNICATOR: &CStr = c"communicator";
    /// Reaction to values that are not finite: empty for none, `warn` or `raise`.
    pub(crate) const CHECK: &CStr = c"check";
    /// Names of the variables of which the tensors are gradients, one a line, for messages of the
    /// check.
    pub(crate) const VARIABLES: &CStr = c"variables";
    /// 1 if each rank has computed the tensors, which are gradients, from its own samples; else 0.
    pub(crate) const OF_OWN_SAMPLES: &CStr = c"of_own_samples";
    /// Origin of the op's execution: see [`crate::inflight::Origin`].
    pub(crate) const ORIGIN: &CStr = c"origin";
    /// `Worker::id` of the worker of servers.
    pub(crate) const CLIENT: &CStr = c"client";
    /// Form of each variable's gradient in a piece of a push, a letter each: `d` for dense, `r` for
    /// rows, `-` for none.
    pub(crate) const FORMS: &CStr = c"forms";
    /// Index of a piece of a push.
    pub(crate) const PIECE: &CStr = c"piece";
    /// Number of pieces of a push.
    pub(crate) const PIECES: &CStr = c"pieces";
    /// Element type of all tensors.
    pub(crate) const T: &CStr = c"T";
}

const ELEMENT_TYPES: &CStr = c"T: {float, double, half, bfloat16, int32, int64, uint8}";
const LENGTH: &CStr = c"N: int >= 1";
/// Element types of all variables of an optimizer.
const VARIABLE_TYPES: &CStr = c"T: list({float, double, half, bfloat16}) >= 1";

/// Attributes of every Start besides those of its tensors.
const START_ATTRS: [&CStr; 8] = [
    ELEMENT_TYPES,
    c"label: string",
    c"identity: string",
    c"communicator: int",
    c"check: string",
    c"variables: string",
    c"of_own_samples: int",
    c"origin: {'eager', 'function', 'dataset'}",
];

/// Registers all ops.
pub(crate) fn register(api: &'static Api) -> Result<(), RegisterError> {
    let start_attrs = [
        LENGTH,
        c"collective: {'all_reduce', 'reduce_scatter', 'reduce', 'broadcast', 'all_to_all'}",
        c"reduce_op: string",
        c"root: int",
    ];
    Op {
        name: START,
        inputs: &[c"token: resource", c"tensors: N * T"],
        outputs: &[c"inflight: N * T", c"handle: int64"],
        attrs: &[&start_attrs[..], &START_ATTRS].concat(),
        is_stateful: true,
        shapes: start_shapes,
    }
    .register(api)?;
    Op {
        name: ALL_GATHER_START,
        inputs: &[c"token: resource", c"counts: int64", c"tensor: T"],
        outputs: &[c"inflight: T", c"handle: int64"],
        attrs: &START_ATTRS,
        is_stateful: true,
        shapes: unknown_shapes,
    }
    .register(api)?;
    Op {
        name: ALL_GATHER_V_START,
        inputs: &[
            c"token: resource",
            c"counts: int64",
            c"memory: N * T",
            c"parts: N * T",
        ],
        outputs: &[c"inflight: N * T", c"handle: int64"],
        attrs: &[&[LENGTH][..], &START_ATTRS].concat(),
        is_stateful: true,
        shapes: memory_shapes,
    }
    .register(api)?;
    Op {
        name: REDUCE_SCATTER_V_START,
        inputs: &[c"token: resource", c"counts: int64", c"tensors: N * T"],
        outputs: &[c"inflight: N * T", c"handle: int64"],
        attrs: &[&[LENGTH, c"reduce_op: string"][..], &START_ATTRS].concat(),
        is_stateful: true,
        shapes: start_with_counts_shapes,
    }
    .register(api)?;
    Op {
        name: ALL_TO_ALL_V_START,
        inputs: &[
            c"token: resource",
            c"sent: int64",
            c"received: int64",
            c"tensor: T",
        ],
        outputs: &[c"inflight: T", c"handle: int64"],
        attrs: &START_ATTRS,
        is_stateful: true,
        shapes: unknown_shapes,
    }
    .register(api)?;
    Op {
        name: WAIT,
        inputs: &[c"inflight: N * T", c"handle: int64"],
        outputs: &[c"reduced: N * T"],
        attrs: &[LENGTH, ELEMENT_TYPES],
        is_stateful: true,
        shapes: passed_on_shapes,
    }
    .register(api)?;
    Op {
        name: GATE,
        inputs: &[c"tensor: T", c"handle: int64"],
        outputs: &[c"passed: T"],
        attrs: &[ELEMENT_TYPES],
        is_stateful: false,
        shapes: passed_on_shapes,
    }
    .register(api)?;
    Op {
        name: PUSH_OPEN,
        inputs: &[c"token: resource", c"found: T"],
        outputs: &[c"handle: int64"],
        attrs: &[VARIABLE_TYPES, c"pieces: int >= 1", c"client: int"],
        is_stateful: true,
        shapes: scalar_shape,
    }
    .register(api)?;
    Op {
        name: PUSH_PIECE,
        // Without a resource, the op would follow all stateful ops of the program.
        inputs: &[
            c"token: resource",
            c"handle: int64",
            c"dense: D",
            c"indices: R * int64",
            c"values: V",
        ],
        outputs: &[c"pushed: int64"],
        attrs: &[
            c"D: list({float, double, half, bfloat16}) >= 0",
            c"R: int >= 0",
            c"V: list({float, double, half, bfloat16}) >= 0",
            c"piece: int >= 0",
            c"forms: string",
            c"client: int",
        ],
        is_stateful: true,
        shapes: scalar_shape,
    }
    .register(api)?;
    Op {
        name: PUSH,
        inputs: &[
            c"token: resource",
            c"learning_rate: double",
            c"weight_decay: double",
            c"pieces: N * int64",
        ],
        outputs: &[c"handle: int64"],
        attrs: &[LENGTH, c"client: int"],
        is_stateful: true,
        shapes: scalar_shape,
    }
    .register(api)?;
    Op {
        name: PULL,
        inputs: &[c"handle: int64", c"present: T"],
        outputs: &[c"pulled: T"],
        attrs: &[VARIABLE_TYPES, c"client: int"],
        is_stateful: true,
        shapes: following_shapes,
    }
    .register(api)
}

/// The definition of an op.
struct Op<'a> {
    name: &'a CStr,
    inputs: &'a [&'a CStr],
    outputs: &'a [&'a CStr],
    attrs: &'a [&'a CStr],
    /// A stateful op is neither merged with an equal one, nor folded, nor pruned. Automatic control
    /// dependencies order it with others.
    is_stateful: bool,
    shapes: InferShapes,
}

impl Op<'_> {
    fn register(&self, api: &'static Api) -> Result<(), RegisterError> {
        let status = Status::new(api);
        let parts = [
            (api.op_add_input, self.inputs),
            (api.op_add_output, self.outputs),
            (api.op_add_attr, self.attrs),
        ];
        // SAFETY: all strings are C strings, which are copied. The builder is alive until the last
        // call consumes it. The shape function is a static of this library, which Python never
        // unloads.
        unsafe {
            let builder = (api.new_op)(self.name.as_ptr());
            for (add, specs) in parts {
                specs.iter().for_each(|spec| add(builder, spec.as_ptr()));
            }
            // TensorFlow ignores the value.
            if self.is_stateful {
                (api.op_set_stateful)(builder, true);
            }
            (api.op_set_shapes)(builder, self.shapes);
            (api.register_op)(builder, status.as_ptr());
        }
        accepted(&status, "op", self.name)
    }
}

/// Returns the result of registering an op or its kernel.
pub(crate) fn accepted(status: &Status, part: &str, op: &CStr) -> Result<(), RegisterError> {
    status.check().map_err(|failure| RegisterError::Refused {
        what: format!("the {part} {}", op.to_string_lossy()),
        message: failure.message().to_owned(),
    })
}

/// Outputs have the shapes of the inputs after the token; the handle is a scalar.
unsafe extern "C" fn start_shapes(context: *mut ShapeContext, status: *mut RawStatus) {
    // SAFETY: TensorFlow passes live objects.
    unsafe { infer(context, status, |shapes| shapes.copy_from(1)) };
}

/// Outputs have the shapes of the inputs after the token and the counts; the handle is a scalar.
unsafe extern "C" fn start_with_counts_shapes(context: *mut ShapeContext, status: *mut RawStatus) {
    // SAFETY: TensorFlow passes live objects.
    unsafe { infer(context, status, |shapes| shapes.copy_from(2)) };
}

/// Outputs have the shapes of the first half of the inputs after the token and the counts; the
/// handle is a scalar.
unsafe extern "C" fn memory_shapes(context: *mut ShapeContext, status: *mut RawStatus) {
    // SAFETY: TensorFlow passes live objects.
    unsafe {
        infer(context, status, |shapes| {
            let count = (shapes.num_inputs() - 2) / 2;
            for index in 0..count {
                shapes.copy(index + 2, index)?;
            }
            shapes.set_scalar(count)
        });
    }
}

/// Outputs have the shapes of the inputs; the last input is the handle.
unsafe extern "C" fn passed_on_shapes(context: *mut ShapeContext, status: *mut RawStatus) {
    // SAFETY: TensorFlow passes live objects.
    unsafe {
        infer(context, status, |shapes| {
            for index in 0..shapes.num_inputs() - 1 {
                shapes.copy(index, index)?;
            }
            Ok(())
        });
    }
}

/// The only output is a scalar.
unsafe extern "C" fn scalar_shape(context: *mut ShapeContext, status: *mut RawStatus) {
    // SAFETY: TensorFlow passes live objects.
    unsafe { infer(context, status, |shapes| shapes.set_scalar(0)) };
}

/// Outputs have the shapes of the inputs after the first.
unsafe extern "C" fn following_shapes(context: *mut ShapeContext, status: *mut RawStatus) {
    // SAFETY: TensorFlow passes live objects.
    unsafe {
        infer(context, status, |shapes| {
            for index in 1..shapes.num_inputs() {
                shapes.copy(index, index - 1)?;
            }
            Ok(())
        });
    }
}

/// The size of the gathered dimension depends on the counts, which are not known in the graph.
unsafe extern "C" fn unknown_shapes(context: *mut ShapeContext, status: *mut RawStatus) {
    // SAFETY: TensorFlow passes live objects.
    unsafe {
        infer(context, status, |shapes| {
            (shapes.api.shape_set_unknown)(shapes.raw, shapes.status.as_ptr());
            shapes.status.check()?;
            shapes.set_scalar(1)
        });
    }
}

/// Runs a shape function and reports its failure.
///
/// # Safety
/// Both pointers must be alive.
unsafe fn infer(
    raw: *mut ShapeContext,
    status: *mut RawStatus,
    body: impl FnOnce(&Shapes) -> Result<(), Failure>,
) {
    // The table exists, because this function was registered through it.
    let Ok(api) = Api::get() else { return };
    let shapes = Shapes {
        api,
        raw,
        status: Status::new(api),
    };
    if let Err(failure) = body(&shapes) {
        set(api, status, &failure);
    }
}

/// A node whose shapes are being inferred.
struct Shapes {
    api: &'static Api,
    raw: *mut ShapeContext,
    status: Status,
}

impl Shapes {
    fn num_inputs(&self) -> c_int {
        // SAFETY: the context is alive during `infer`.
        let count = unsafe { (self.api.shape_num_inputs)(self.raw) };
        c_int::try_from(count).unwrap_or(c_int::MAX)
    }

    /// Outputs have the shapes of the inputs from `first` on; the last output is a scalar.
    fn copy_from(&self, first: c_int) -> Result<(), Failure> {
        let tensors = self.num_inputs() - first;
        for index in 0..tensors {
            self.copy(first + index, index)?;
        }
        self.set_scalar(tensors)
    }

    /// Output `output` has the shape of input `input`.
    fn copy(&self, input: c_int, output: c_int) -> Result<(), Failure> {
        // SAFETY: takes nothing; the shape is deleted by `set`.
        let shape = unsafe { (self.api.new_shape)() };
        // SAFETY: all pointers are alive; an index out of range is reported.
        unsafe { (self.api.shape_input)(self.raw, input, shape, self.status.as_ptr()) };
        self.set(output, shape)
    }

    fn set_scalar(&self, output: c_int) -> Result<(), Failure> {
        // SAFETY: the context is alive; the shape is deleted by `set`.
        let shape = unsafe { (self.api.shape_scalar)(self.raw) };
        self.set(output, shape)
    }

    fn set(&self, output: c_int, shape: *mut ShapeHandle) -> Result<(), Failure> {
        let mut outcome = self.status.check();
        if outcome.is_ok() {
            // SAFETY: all pointers are alive; an index out of range is reported.
            unsafe { (self.api.shape_set_output)(self.raw, output, shape, self.status.as_ptr()) };
            outcome = self.status.check();
        }
        // SAFETY: the shape was made for this call and is not used again.
        unsafe { (self.api.delete_shape)(shape) };
        outcome.map_err(|failure| {
            let text = format!("shape inference of a gradring op: {}", failure.message());
            Failure::new(Code::Internal, text)
        })
    }
}
