//! Sessions between processes of a job, for any purpose. `credentials` prove that a process belongs
//! to the job, `connect` reaches another process, `listener` accepts connections, and `turned_away`
//! summarises refused initiators for error messages.

pub mod connect;
pub mod credentials;
pub mod listener;
mod pending;
pub mod turned_away;
