//! Owner of a reference to a TensorFlow tensor in host memory.

use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use gradring_proto::buffer::Slice;
use gradring_proto::dtype::{DType, Element};
use gradring_proto::parameters::float::FloatType;
use gradring_proto::parameters::floats::FloatSlice;

use crate::api::{Api, DataType, RawTensor};
use crate::status::{Code, Failure};
use crate::values::Values;

/// TensorFlow's number and gradring's type of every element type of the ops.
const TYPES: [(DataType, DType); 7] = [
    (FLOAT32, DType::F32),
    (FLOAT64, DType::F64),
    (3, DType::I32),
    (4, DType::U8),
    (INT64, DType::I64),
    (BFLOAT16, DType::Bf16),
    (FLOAT16, DType::F16),
];

/// TensorFlow's numbers for the element types of variables on parameter servers.
const FLOAT32: DataType = 1;
const FLOAT64: DataType = 2;
const BFLOAT16: DataType = 14;
const FLOAT16: DataType = 19;
/// TensorFlow's number for int64.
pub(crate) const INT64: DataType = 9;

/// Returns gradring's type for TensorFlow's number.
pub(crate) fn dtype(number: DataType) -> Result<DType, Failure> {
    TYPES
        .iter()
        .find(|(theirs, _)| *theirs == number)
        .map(|(_, ours)| *ours)
        .ok_or_else(|| {
            Failure::new(
                Code::InvalidArgument,
                format!("gradring cannot reduce TensorFlow's data type number {number}"),
            )
        })
}

/// One reference to a tensor's memory.
///
/// The memory outlives TensorFlow's own references. The engine needs that, because it may still
/// work on the memory when a failed step drops its tensors.
pub(crate) struct Tensor {
    api: &'static Api,
    raw: NonNull<RawTensor>,
}

// SAFETY: TensorFlow counts references to tensor memory atomically, and a `TF_Tensor` has no ties
// to the thread that made it.
unsafe impl Send for Tensor {}
// SAFETY: methods with a shared reference only read the `TF_Tensor`, which never changes. Callers
// that read or write its memory promise exclusive access.
unsafe impl Sync for Tensor {}

impl Tensor {
    /// Takes over the reference `raw`.
    ///
    /// # Safety
    /// `raw` must be a live `TF_Tensor` in host memory that nothing else deletes.
    pub(crate) unsafe fn from_raw(api: &'static Api, raw: NonNull<RawTensor>) -> Self {
        Self { api, raw }
    }

    /// Creates an int64 scalar whose memory is `value`, which is dropped with TensorFlow's last
    /// reference.
    pub(crate) fn scalar<T: Send + 'static>(api: &'static Api, value: T) -> Result<Self, Failure> {
        const { assert!(size_of::<T>() == size_of::<i64>()) };
        let memory = Box::into_raw(Box::new(Aligned(value)));
        // SAFETY: the memory is that of one int64, and the function frees it once.
        let raw = unsafe {
            (api.new_tensor)(
                INT64,
                std::ptr::null(),
                0,
                memory.cast(),
                size_of::<i64>(),
                drop_scalar::<T>,
                std::ptr::null_mut(),
            )
        };
        let raw = NonNull::new(raw)
            .ok_or_else(|| Failure::new(Code::Internal, "TensorFlow returned no tensor"))?;
        Ok(Self { api, raw })
    }

    /// Creates a tensor whose memory is `values`, of which it holds a reference.
    pub(crate) fn shared(
        api: &'static Api,
        float_type: FloatType,
        dims: &[i64],
        values: &Arc<Values>,
    ) -> Result<Self, Failure> {
        let memory = values.start().cast_mut().cast();
        let reference = Arc::into_raw(Arc::clone(values)).cast_mut();
        let data_type = match float_type {
            FloatType::F32 => FLOAT32,
            FloatType::F64 => FLOAT64,
            FloatType::Bf16 => BFLOAT16,
            FloatType::F16 => FLOAT16,
        };
        // SAFETY: the memory has so many bytes, all of which are numbers. The function drops the
        // reference once, after TensorFlow's last use.
        let raw = unsafe {
            (api.new_tensor)(
                data_type,
                dims.as_ptr(),
                c_int::try_from(dims.len()).unwrap_or(c_int::MAX),
                memory,
                values.len(),
                drop_values,
                reference.cast(),
            )
        };
        let raw = NonNull::new(raw)
            .ok_or_else(|| Failure::new(Code::Internal, "TensorFlow returned no tensor"))?;
        Ok(Self { api, raw })
    }

    pub(crate) fn as_ptr(&self) -> *mut RawTensor {
        self.raw.as_ptr()
    }

    /// TensorFlow's number of the element type.
    pub(crate) fn data_type(&self) -> DataType {
        // SAFETY: the tensor is alive.
        unsafe { (self.api.tensor_type)(self.raw.as_ptr()) }
    }

    /// Sizes of the dimensions.
    pub(crate) fn dims(&self) -> Vec<i64> {
        // SAFETY: the tensor is alive.
        let rank = unsafe { (self.api.tensor_num_dims)(self.raw.as_ptr()) };
        (0..rank)
            // SAFETY: the tensor is alive and has more than `axis` dimensions.
            .map(|axis| unsafe { (self.api.tensor_dim)(self.raw.as_ptr(), axis) })
            .collect()
    }

    /// Length in bytes.
    pub(crate) fn size_bytes(&self) -> usize {
        // SAFETY: the tensor is alive.
        unsafe { (self.api.tensor_size_bytes)(self.raw.as_ptr()) }
    }

    /// Address of the first byte; null or dangling for an empty tensor.
    pub(crate) fn data(&self) -> *mut u8 {
        // SAFETY: the tensor is alive.
        unsafe { (self.api.tensor_data)(self.raw.as_ptr()) }.cast()
    }

    /// Returns the elements as one slice of a bucket; `None` for an empty tensor.
    pub(crate) fn slice(&self, dtype: DType) -> Option<Slice> {
        let count = self.size_bytes() / dtype.size_bytes();
        (count > 0).then(|| Slice {
            start: self.data(),
            count,
        })
    }

    /// Returns the values of an int64 tensor.
    pub(crate) fn read_i64(&self) -> Result<Vec<i64>, Failure> {
        if self.data_type() != INT64 {
            return Err(Failure::new(Code::Internal, "expected an int64 tensor"));
        }
        let count = self.size_bytes() / size_of::<i64>();
        let start = self.data().cast::<i64>();
        Ok((0..count)
            // SAFETY: the memory holds `count` values; their alignment is not relied on.
            .map(|index| unsafe { start.add(index).read_unaligned() })
            .collect())
    }

    /// Returns the values of a tensor of floats.
    pub(crate) fn floats(&self) -> Result<FloatSlice<'_>, Failure> {
        match self.data_type() {
            FLOAT32 => Ok(FloatSlice::F32(self.values())),
            FLOAT64 => Ok(FloatSlice::F64(self.values())),
            BFLOAT16 => Ok(FloatSlice::Bf16(self.values())),
            FLOAT16 => Ok(FloatSlice::F16(self.values())),
            _ => Err(Failure::new(Code::Internal, "expected a tensor of floats")),
        }
    }

    fn values<T: Element>(&self) -> &[T] {
        let (start, count) = match self.size_bytes() {
            0 => (NonNull::dangling().as_ptr(), 0),
            bytes => (self.data().cast(), bytes / size_of::<T>()),
        };
        // SAFETY: the callers have checked that the memory holds such values. It is aligned for
        // these at least, and TensorFlow changes no memory to which others refer.
        unsafe { std::slice::from_raw_parts(start, count) }
    }

    /// Copies `source`'s bytes into this tensor, from byte `offset` on.
    ///
    /// # Safety
    /// The memory of this tensor must be this op's alone: a freshly allocated output.
    pub(crate) unsafe fn copy_from(&self, source: &Self, offset: usize) {
        // SAFETY: the caller's promise is the same.
        unsafe { self.copy_part_from(source, 0..source.size_bytes(), offset) }
    }

    /// Copies the bytes `part` of `source` into this tensor, from byte `offset` on.
    ///
    /// # Safety
    /// As for `copy_from`.
    pub(crate) unsafe fn copy_part_from(&self, source: &Self, part: Range<usize>, offset: usize) {
        let length = part.len();
        assert!(part.end <= source.size_bytes());
        assert!(
            offset
                .checked_add(length)
                .is_some_and(|end| end <= self.size_bytes())
        );
        if length > 0 {
            // SAFETY: both ranges are in bounds, checked above; a fresh output overlaps nothing.
            unsafe {
                let from = source.data().add(part.start);
                std::ptr::copy_nonoverlapping(from, self.data().add(offset), length);
            }
        }
    }
}

/// Alignment of TensorFlow's widest vectors. TensorFlow would copy memory with less, and free the
/// original at once.
#[repr(C, align(64))]
struct Aligned<T>(T);

unsafe extern "C" fn drop_scalar<T>(memory: *mut c_void, _length: usize, _argument: *mut c_void) {
    // SAFETY: `Tensor::scalar` made the box, and TensorFlow calls this once, after its last use.
    drop(unsafe { Box::from_raw(memory.cast::<Aligned<T>>()) });
}

unsafe extern "C" fn drop_values(_memory: *mut c_void, _length: usize, reference: *mut c_void) {
    // SAFETY: `Tensor::shared` made the reference, and TensorFlow calls this once.
    drop(unsafe { Arc::from_raw(reference.cast_const().cast::<Values>()) });
}

impl Drop for Tensor {
    fn drop(&mut self) {
        // SAFETY: this object owns the reference.
        unsafe { (self.api.delete_tensor)(self.raw.as_ptr()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_type_has_a_tensorflow_number() {
        for wanted in DType::ALL {
            assert_eq!(
                TYPES.iter().filter(|(_, dtype)| *dtype == wanted).count(),
                1
            );
        }
        assert!(dtype(7).is_err());
    }
}
