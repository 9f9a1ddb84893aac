//! The table of TensorFlow's C functions, found in the framework library that is already loaded.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

/// Reason why the ops could not be registered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RegisterError {
    /// The framework library is not in this process.
    #[error(
        "{library} is not loaded in this process; import tensorflow before registering \
         gradring's ops"
    )]
    NotLoaded {
        /// File name of the framework library.
        library: &'static str,
    },
    /// The framework library lacks a function.
    #[error("this TensorFlow has no {symbol}; install TensorFlow 2.16 or later")]
    MissingSymbol {
        /// Name of the function.
        symbol: String,
    },
    /// TensorFlow refused an op or a kernel.
    #[error(
        "TensorFlow refused {what}: {message}; check that only one copy of gradring is imported"
    )]
    Refused {
        /// The op or kernel.
        what: String,
        /// TensorFlow's message.
        message: String,
    },
}

#[cfg(target_os = "macos")]
const LIBRARY: &CStr = c"libtensorflow_framework.2.dylib";
#[cfg(not(target_os = "macos"))]
const LIBRARY: &CStr = c"libtensorflow_framework.so.2";

macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        $($(#[$doc])* #[repr(C)] pub(crate) struct $name { _private: [u8; 0] })*
    };
}

opaque! {
    /// `TF_Status`
    RawStatus;
    /// `TF_Tensor`
    RawTensor;
    /// `TF_OpKernelContext`
    RawContext;
    /// `TF_OpKernelConstruction`
    RawConstruction;
    /// `TF_OpDefinitionBuilder`
    OpBuilder;
    /// `TF_KernelBuilder`
    KernelBuilder;
    /// `TF_ShapeInferenceContext`
    ShapeContext;
    /// `TF_ShapeHandle`
    ShapeHandle;
}

/// `TF_DataType`
pub(crate) type DataType = c_int;
/// Called when a node is made; the result is passed to every compute call.
pub(crate) type Create = unsafe extern "C" fn(*mut RawConstruction) -> *mut c_void;
/// Called for every execution of a node.
pub(crate) type Compute = unsafe extern "C" fn(*mut c_void, *mut RawContext);
/// Called when a node is destroyed.
pub(crate) type Delete = unsafe extern "C" fn(*mut c_void);
/// Frees the memory of a tensor; gets its address, its length and an argument.
pub(crate) type Deallocate = unsafe extern "C" fn(*mut c_void, usize, *mut c_void);
/// Reads a number among the attributes of a node.
pub(crate) type ReadAttr<T> =
    unsafe extern "C" fn(*mut RawConstruction, *const c_char, *mut T, *mut RawStatus);
/// Called when a node is added to a graph.
pub(crate) type InferShapes = unsafe extern "C" fn(*mut ShapeContext, *mut RawStatus);

macro_rules! functions {
    ($($field:ident = $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// TensorFlow's C functions; each field has the name of its function in snake case.
        pub(crate) struct Api {
            $(pub(crate) $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Api {
            fn load() -> Result<Self, RegisterError> {
                let library = Library::loaded()?;
                Ok(Self {
                    $($field: {
                        let address = library.symbol($symbol)?;
                        // SAFETY: the address is that of the C function of this name, whose
                        // documented signature is the one written in the table.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($argument),*) $(-> $result)?,
                            >(address)
                        }
                    },)*
                })
            }
        }
    };
}

functions! {
    new_status = c"TF_NewStatus": fn() -> *mut RawStatus;
    delete_status = c"TF_DeleteStatus": fn(*mut RawStatus);
    set_status = c"TF_SetStatus": fn(*mut RawStatus, c_int, *const c_char);
    get_code = c"TF_GetCode": fn(*const RawStatus) -> c_int;
    message = c"TF_Message": fn(*const RawStatus) -> *const c_char;

    new_op = c"TF_NewOpDefinitionBuilder": fn(*const c_char) -> *mut OpBuilder;
    op_add_input = c"TF_OpDefinitionBuilderAddInput": fn(*mut OpBuilder, *const c_char);
    op_add_output = c"TF_OpDefinitionBuilderAddOutput": fn(*mut OpBuilder, *const c_char);
    op_add_attr = c"TF_OpDefinitionBuilderAddAttr": fn(*mut OpBuilder, *const c_char);
    op_set_stateful = c"TF_OpDefinitionBuilderSetIsStateful": fn(*mut OpBuilder, bool);
    op_set_shapes = c"TF_OpDefinitionBuilderSetShapeInferenceFunction":
        fn(*mut OpBuilder, InferShapes);
    register_op = c"TF_RegisterOpDefinition": fn(*mut OpBuilder, *mut RawStatus);

    new_shape = c"TF_NewShapeHandle": fn() -> *mut ShapeHandle;
    delete_shape = c"TF_DeleteShapeHandle": fn(*mut ShapeHandle);
    shape_num_inputs = c"TF_ShapeInferenceContextNumInputs": fn(*mut ShapeContext) -> i64;
    shape_input = c"TF_ShapeInferenceContextGetInput":
        fn(*mut ShapeContext, c_int, *mut ShapeHandle, *mut RawStatus);
    shape_scalar = c"TF_ShapeInferenceContextScalar": fn(*mut ShapeContext) -> *mut ShapeHandle;
    shape_set_output = c"TF_ShapeInferenceContextSetOutput":
        fn(*mut ShapeContext, c_int, *mut ShapeHandle, *mut RawStatus);
    shape_set_unknown = c"TF_ShapeInferenceContextSetUnknownShape":
        fn(*mut ShapeContext, *mut RawStatus);

    new_kernel = c"TF_NewKernelBuilder":
        fn(*const c_char, *const c_char, Option<Create>, Compute, Option<Delete>)
            -> *mut KernelBuilder;
    register_kernel = c"TF_RegisterKernelBuilder":
        fn(*const c_char, *mut KernelBuilder, *mut RawStatus);

    attr_size = c"TF_OpKernelConstruction_GetAttrSize":
        fn(*mut RawConstruction, *const c_char, *mut i32, *mut i32, *mut RawStatus);
    attr_string = c"TF_OpKernelConstruction_GetAttrString":
        fn(*mut RawConstruction, *const c_char, *mut c_char, usize, *mut RawStatus);
    attr_int = c"TF_OpKernelConstruction_GetAttrInt64":
        fn(*mut RawConstruction, *const c_char, *mut i64, *mut RawStatus);
    attr_type = c"TF_OpKernelConstruction_GetAttrType":
        fn(*mut RawConstruction, *const c_char, *mut DataType, *mut RawStatus);
    fail_construction = c"TF_OpKernelConstruction_Failure":
        fn(*mut RawConstruction, *mut RawStatus);

    step_id = c"TF_StepId": fn(*mut RawContext) -> i64;
    num_inputs = c"TF_NumInputs": fn(*mut RawContext) -> c_int;
    get_input = c"TF_GetInput": fn(*mut RawContext, c_int, *mut *mut RawTensor, *mut RawStatus);
    set_output = c"TF_SetOutput": fn(*mut RawContext, c_int, *const RawTensor, *mut RawStatus);
    allocate_output = c"TF_AllocateOutput":
        fn(*mut RawContext, c_int, DataType, *const i64, c_int, usize, *mut RawStatus)
            -> *mut RawTensor;
    forward_or_allocate = c"TF_ForwardInputOrAllocateOutput":
        fn(*mut RawContext, *const c_int, c_int, c_int, *const i64, c_int, *mut c_int,
           *mut RawStatus) -> *mut RawTensor;
    fail_context = c"TF_OpKernelContext_Failure": fn(*mut RawContext, *mut RawStatus);

    new_tensor = c"TF_NewTensor":
        fn(DataType, *const i64, c_int, *mut c_void, usize, Deallocate, *mut c_void)
            -> *mut RawTensor;
    delete_tensor = c"TF_DeleteTensor": fn(*mut RawTensor);
    tensor_type = c"TF_TensorType": fn(*const RawTensor) -> DataType;
    tensor_num_dims = c"TF_NumDims": fn(*const RawTensor) -> c_int;
    tensor_dim = c"TF_Dim": fn(*const RawTensor, c_int) -> i64;
    tensor_data = c"TF_TensorData": fn(*const RawTensor) -> *mut c_void;
    tensor_size_bytes = c"TF_TensorByteSize": fn(*const RawTensor) -> usize;
}

impl Api {
    /// Returns the table of the TensorFlow in this process, which is looked up once.
    pub(crate) fn get() -> Result<&'static Self, RegisterError> {
        static API: OnceLock<Api> = OnceLock::new();
        if let Some(api) = API.get() {
            return Ok(api);
        }
        let api = Self::load()?;
        Ok(API.get_or_init(|| api))
    }
}

/// The framework library, kept loaded for the life of the process.
struct Library {
    handle: *mut c_void,
}

impl Library {
    fn loaded() -> Result<Self, RegisterError> {
        // SAFETY: the name is a C string; RTLD_NOLOAD runs no initialiser.
        let handle = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_NOW) };
        if handle.is_null() {
            return Err(RegisterError::NotLoaded {
                library: LIBRARY.to_str().unwrap_or_default(),
            });
        }
        Ok(Self { handle })
    }

    fn symbol(&self, name: &CStr) -> Result<*mut c_void, RegisterError> {
        // SAFETY: the handle came from dlopen and is never closed; the name is a C string.
        let address = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        if address.is_null() {
            return Err(RegisterError::MissingSymbol {
                symbol: name.to_string_lossy().into_owned(),
            });
        }
        Ok(address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_tensorflow_registering_says_to_import_it() {
        let error = Api::get().err().map(|error| error.to_string());
        assert!(
            error
                .as_deref()
                .is_some_and(|text| text.contains("import tensorflow")),
            "{error:?}"
        );
    }
}
