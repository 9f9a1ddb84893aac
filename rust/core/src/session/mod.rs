//! Sessions between processes of a job, whatever they are for: what proves that a process belongs to
//! it (`credentials`).

pub(crate) mod credentials;
