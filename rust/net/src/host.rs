//! The host that this process runs on.

use std::fs;

/// Its name.
pub fn host_name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "localhost".into(),
        name => name.into(),
    }
}

/// What is equal for processes that share memory and a network without a wire, and for no others.
pub fn host_id() -> String {
    // Containers may share a host name; two systems never share a boot id. Namespaces of the
    // network are hosts of their own: they share no memory, and talk over a line that may be slow.
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let network = fs::read_link("/proc/self/ns/net").unwrap_or_default();
    format!("{} {} {}", host_name(), boot_id.trim(), network.display())
}
