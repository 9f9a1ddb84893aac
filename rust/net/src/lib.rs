//! Links and sessions between gradring's processes: a [`link`] carries the bytes of collectives and
//! messages, a [`session`] finds, proves and lets in who is at its ends. [`config`] is what all of it is
//! told, and an [`abort`] switch or the [`caller`] ends every wait.

pub mod abort;
pub mod caller;
pub mod config;
pub mod host;
pub mod link;
pub mod session;
