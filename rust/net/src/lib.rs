//! How gradring's processes reach each other: [`link`]s carry the bytes of collectives and messages,
//! and a [`session`] finds, proves and lets in who is at their ends. [`config`] is what all of it is
//! told, and an [`abort`] switch or the [`caller`] ends every wait.

pub mod abort;
pub mod caller;
pub mod config;
pub mod host;
pub mod link;
pub mod session;
