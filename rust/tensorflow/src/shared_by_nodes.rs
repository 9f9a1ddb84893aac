//! State that nodes of all graphs share.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, LazyLock, Mutex, Weak};

use gradring_proto::lock::lock;

/// Values shared by all nodes with the same key; dropped with the last of these nodes.
pub(crate) struct WeakMap<K, V>(LazyLock<Mutex<HashMap<K, Weak<V>>>>);

impl<K: Eq + Hash, V: Default> WeakMap<K, V> {
    pub(crate) const fn new() -> Self {
        Self(LazyLock::new(Mutex::default))
    }

    pub(crate) fn of(&self, key: K) -> Arc<V> {
        let mut values = lock(&self.0);
        if let Some(value) = values.get(&key).and_then(Weak::upgrade) {
            return value;
        }
        values.retain(|_, value| value.strong_count() > 0);
        let value = Arc::default();
        values.insert(key, Arc::downgrade(&value));
        value
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[test]
    fn what_nodes_share_is_gone_with_the_last_of_them() {
        static COUNTS: WeakMap<i64, AtomicU64> = WeakMap::new();
        let (one, other) = (COUNTS.of(1), COUNTS.of(1));
        one.fetch_add(1, Ordering::Relaxed);
        assert_eq!(other.load(Ordering::Relaxed), 1);
        drop((one, other));
        assert_eq!(COUNTS.of(1).load(Ordering::Relaxed), 0);
        let _two = COUNTS.of(2);
        assert_eq!(COUNTS.0.lock().unwrap().len(), 1);
    }
}
