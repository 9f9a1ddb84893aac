//! TensorFlow's status object, and failures that are written into it.

use std::ffi::{CStr, CString, c_int};

use gradring_proto::error::{Error, ErrorKind};

use crate::api::{Api, RawStatus};
use crate::failures;

/// The status codes that gradring uses, with TensorFlow's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Code {
    /// An attribute or a shape cannot be used.
    InvalidArgument = 3,
    /// The collective took too long; TensorFlow's own collectives use the same code.
    DeadlineExceeded = 4,
    /// The collective failed. Other codes for lost peers, such as UNAVAILABLE, would reach the
    /// user of a `tf.function` as an internal error.
    Aborted = 10,
    /// A defect in gradring.
    Internal = 13,
}

/// Reason why a kernel cannot continue; becomes the op's status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    code: c_int,
    message: String,
}

impl Failure {
    pub(crate) fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code: code as c_int,
            message: message.into(),
        }
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }
}

impl From<Error> for Failure {
    /// Remembers the error, so that Python can find it by the message: see [`failures::find`].
    fn from(error: Error) -> Self {
        let code = match error.kind {
            ErrorKind::CollectiveTimeout { .. } => Code::DeadlineExceeded,
            _ => Code::Aborted,
        };
        let text = failures::text(&error);
        failures::remember(&error);
        Self::new(code, text)
    }
}

/// Owner of a `TF_Status`.
pub(crate) struct Status {
    api: &'static Api,
    raw: *mut RawStatus,
}

impl Status {
    pub(crate) fn new(api: &'static Api) -> Self {
        // SAFETY: takes nothing; returns a status that this object owns.
        let raw = unsafe { (api.new_status)() };
        Self { api, raw }
    }

    /// Creates a status that carries `failure`.
    pub(crate) fn of(api: &'static Api, failure: &Failure) -> Self {
        let status = Self::new(api);
        set(api, status.raw, failure);
        status
    }

    /// Returns the pointer, for functions that report into a status.
    pub(crate) fn as_ptr(&self) -> *mut RawStatus {
        self.raw
    }

    /// Returns the result that the last function reported.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        // SAFETY: the status is alive.
        let code = unsafe { (self.api.get_code)(self.raw) };
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the message is a C string that lives until the status changes.
        let message = unsafe { CStr::from_ptr((self.api.message)(self.raw)) };
        Err(Failure {
            code,
            message: message.to_string_lossy().into_owned(),
        })
    }
}

impl Drop for Status {
    fn drop(&mut self) {
        // SAFETY: this object owns the status.
        unsafe { (self.api.delete_status)(self.raw) }
    }
}

/// Writes `failure` into a status that TensorFlow owns and keeps alive during this call.
pub(crate) fn set(api: &Api, raw: *mut RawStatus, failure: &Failure) {
    let message = CString::new(failure.message.replace('\0', " ")).unwrap_or_default();
    // SAFETY: the caller's status is alive; the message is copied.
    unsafe { (api.set_status)(raw, failure.code, message.as_ptr()) }
}
