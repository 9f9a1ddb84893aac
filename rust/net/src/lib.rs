//! Links and sessions between gradring's processes. A [`link`] carries the bytes of collectives and
//! messages. A [`session`] connects, authenticates and admits the processes at its ends. [`config`]
//! holds the settings of both. An [`abort`] switch or the [`caller`] ends every wait.

pub mod abort;
pub mod caller;
pub mod config;
pub mod host;
pub mod link;
pub mod session;
