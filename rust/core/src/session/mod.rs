//! Sessions between processes of a job, whatever they are for: what proves that a process belongs to
//! it (`credentials`), and reaching another one (`connect`).

pub(crate) mod connect;
pub(crate) mod credentials;
