//! Views of the objects that TensorFlow hands to a kernel: its attributes, inputs and outputs.

use std::ffi::{CStr, c_int};
use std::ptr::{self, NonNull};

use crate::api::{Api, DataType, RawConstruction, RawContext, RawTensor, ReadAttr};
use crate::counters;
use crate::status::{Code, Failure, Status};
use crate::tensor::Tensor;

/// A node under construction: its attributes.
pub(crate) struct Construction {
    api: &'static Api,
    raw: *mut RawConstruction,
}

impl Construction {
    /// A view of `raw`.
    ///
    /// # Safety
    /// `raw` must stay alive as long as the view.
    pub(crate) unsafe fn new(api: &'static Api, raw: *mut RawConstruction) -> Self {
        Self { api, raw }
    }

    pub(crate) fn string(&self, name: &CStr) -> Result<String, Failure> {
        let status = Status::new(self.api);
        let (mut entries, mut length) = (0_i32, 0_i32);
        // SAFETY: all pointers are alive during the call.
        unsafe {
            (self.api.attr_size)(
                self.raw,
                name.as_ptr(),
                &raw mut entries,
                &raw mut length,
                status.as_ptr(),
            );
        }
        status.check()?;
        let mut bytes = vec![0_u8; usize::try_from(length).unwrap_or(0)];
        // SAFETY: the buffer has as many bytes as the length that is passed.
        unsafe {
            (self.api.attr_string)(
                self.raw,
                name.as_ptr(),
                bytes.as_mut_ptr().cast(),
                bytes.len(),
                status.as_ptr(),
            );
        }
        status.check()?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    pub(crate) fn int(&self, name: &CStr) -> Result<i64, Failure> {
        self.read(self.api.attr_int, name)
    }

    pub(crate) fn data_type(&self, name: &CStr) -> Result<DataType, Failure> {
        self.read(self.api.attr_type, name)
    }

    fn read<T: Default>(&self, function: ReadAttr<T>, name: &CStr) -> Result<T, Failure> {
        let (status, mut value) = (Status::new(self.api), T::default());
        // SAFETY: all pointers are alive during the call.
        unsafe { function(self.raw, name.as_ptr(), &raw mut value, status.as_ptr()) };
        status.check().map(|()| value)
    }

    /// Reports that the node cannot be made.
    pub(crate) fn fail(&self, failure: &Failure) {
        let status = Status::of(self.api, failure);
        // SAFETY: both objects are alive; the status is copied.
        unsafe { (self.api.fail_construction)(self.raw, status.as_ptr()) }
    }
}

/// One execution of a node: its inputs and outputs.
pub(crate) struct Context {
    api: &'static Api,
    raw: *mut RawContext,
}

impl Context {
    /// A view of `raw`.
    ///
    /// # Safety
    /// `raw` must stay alive as long as the view.
    pub(crate) unsafe fn new(api: &'static Api, raw: *mut RawContext) -> Self {
        Self { api, raw }
    }

    pub(crate) fn api(&self) -> &'static Api {
        self.api
    }

    /// Number of inputs.
    pub(crate) fn num_inputs(&self) -> c_int {
        // SAFETY: the context is alive.
        unsafe { (self.api.num_inputs)(self.raw) }
    }

    /// Number of the execution to which this call belongs. That is a run of a graph with all
    /// inlined functions, or of this op alone in eager mode.
    pub(crate) fn execution(&self) -> i64 {
        // SAFETY: the context is alive.
        unsafe { (self.api.step_id)(self.raw) }
    }

    /// Returns a reference to input `index`.
    pub(crate) fn input(&self, index: c_int) -> Result<Tensor, Failure> {
        let status = Status::new(self.api);
        let mut tensor = ptr::null_mut();
        // SAFETY: all pointers are alive; an index out of range is reported.
        unsafe { (self.api.get_input)(self.raw, index, &raw mut tensor, status.as_ptr()) }
        self.owned(tensor, &status)
    }

    /// Makes output `output` with the contents of input `input`, in memory that nothing else uses.
    /// That is the input's own memory if this op is its last reader, otherwise a copy.
    pub(crate) fn take_over(&self, input: c_int, output: c_int) -> Result<Tensor, Failure> {
        let (tensor, is_forwarded) = self.take_memory(input, output)?;
        if !is_forwarded {
            let source = self.input(input)?;
            // SAFETY: the output was allocated by this call.
            unsafe { tensor.copy_from(&source, 0) };
            counters::count_copy(source.size_bytes());
        }
        Ok(tensor)
    }

    /// Makes output `output` with the shape of input `input`, in memory that nothing else uses.
    /// Returns it, and whether it has the input's own memory and contents. Otherwise the contents
    /// are arbitrary.
    pub(crate) fn take_memory(
        &self,
        input: c_int,
        output: c_int,
    ) -> Result<(Tensor, bool), Failure> {
        // TensorFlow forwards only tensors with a single reference, so ours has to be dropped
        // first.
        let dims = self.input(input)?.dims();
        let status = Status::new(self.api);
        let mut forwarded: c_int = -1;
        // SAFETY: all pointers are alive and the lengths are those of their arrays.
        let tensor = unsafe {
            (self.api.forward_or_allocate)(
                self.raw,
                &raw const input,
                1,
                output,
                dims.as_ptr(),
                rank(&dims),
                &raw mut forwarded,
                status.as_ptr(),
            )
        };
        let tensor = self.owned(tensor, &status)?;
        let is_forwarded = forwarded == input;
        if is_forwarded {
            counters::FORWARDED_TENSORS.add(1);
        }
        Ok((tensor, is_forwarded))
    }

    /// Allocates memory for output `output`.
    pub(crate) fn allocate(
        &self,
        output: c_int,
        data_type: DataType,
        dims: &[i64],
        size_bytes: usize,
    ) -> Result<Tensor, Failure> {
        let status = Status::new(self.api);
        // SAFETY: all pointers are alive and the length is that of the array.
        let tensor = unsafe {
            (self.api.allocate_output)(
                self.raw,
                output,
                data_type,
                dims.as_ptr(),
                rank(dims),
                size_bytes,
                status.as_ptr(),
            )
        };
        self.owned(tensor, &status)
    }

    /// Makes `tensor`'s memory output `output`, without a copy.
    pub(crate) fn set_output(&self, output: c_int, tensor: &Tensor) -> Result<(), Failure> {
        let status = Status::new(self.api);
        // SAFETY: all pointers are alive; the output gets a reference of its own.
        unsafe { (self.api.set_output)(self.raw, output, tensor.as_ptr(), status.as_ptr()) }
        status.check()
    }

    /// Reports that this execution has failed.
    pub(crate) fn fail(&self, failure: &Failure) {
        let status = Status::of(self.api, failure);
        // SAFETY: both objects are alive; the status is copied.
        unsafe { (self.api.fail_context)(self.raw, status.as_ptr()) }
    }

    fn owned(&self, tensor: *mut RawTensor, status: &Status) -> Result<Tensor, Failure> {
        status.check()?;
        let raw = NonNull::new(tensor)
            .ok_or_else(|| Failure::new(Code::Internal, "TensorFlow returned no tensor"))?;
        // SAFETY: a successful call hands over a reference to a tensor; the kernels are
        // registered for the CPU only, so it is in host memory.
        Ok(unsafe { Tensor::from_raw(self.api, raw) })
    }
}

/// TensorFlow has at most 254 dimensions.
fn rank(dims: &[i64]) -> c_int {
    c_int::try_from(dims.len()).unwrap_or(c_int::MAX)
}
