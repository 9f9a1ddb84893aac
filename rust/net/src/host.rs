//! The host that this process runs on.

use std::fs;

/// Returns the host name; `localhost` if the kernel reports none.
pub fn host_name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "localhost".into(),
        name => name.into(),
    }
}

/// Returns an identifier that is equal exactly for processes of one kernel in one network
/// namespace.
pub fn host_id() -> String {
    // Containers may share a host name; two systems never share a boot id. A network namespace
    // counts as a host of its own: it shares no memory with others, and the network between them
    // may be slow.
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let network = fs::read_link("/proc/self/ns/net").unwrap_or_default();
    format!("{} {} {}", host_name(), boot_id.trim(), network.display())
}
