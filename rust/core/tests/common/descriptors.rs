//! For tests whose ranks are threads of one process.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Lets this process open as many descriptors as the system allows.
pub(crate) fn allow_most() {
    let all = getrlimit(Resource::Nofile).maximum;
    let limit = Rlimit {
        current: all,
        maximum: all,
    };
    setrlimit(Resource::Nofile, limit).unwrap();
}
