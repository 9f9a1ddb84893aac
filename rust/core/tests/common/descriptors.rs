//! File descriptors for tests whose ranks are threads of one process.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the limit on this process's descriptors to its maximum.
pub(crate) fn allow_most() {
    let all = getrlimit(Resource::Nofile).maximum;
    let limit = Rlimit {
        current: all,
        maximum: all,
    };
    setrlimit(Resource::Nofile, limit).unwrap();
}
