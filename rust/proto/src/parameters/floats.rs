//! Float32 arrays whose memory is reused.
//!
//! A gradient or a copy of weights lives for one step. Getting its memory from the system and
//! clearing it takes longer than filling it. So large memory is kept for the next array of the same
//! length.

use std::ops::{Deref, DerefMut};
use std::sync::Mutex;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::lock::lock;

/// Bytes from which memory is kept here. The C library keeps smaller pieces.
const LARGE_BYTES: usize = 1 << 20;

/// Float32 values of weights or a gradient.
#[derive(Debug, Default, PartialEq)]
pub struct Floats(Vec<f32>);

/// Unused memory of this process. Used and unused memory together never exceed the largest amount
/// that was in use at one time.
struct Shelf {
    kept: Vec<Vec<f32>>,
    kept_bytes: usize,
    used_bytes: usize,
    used_bytes_max: usize,
}

static SHELF: Mutex<Shelf> = Mutex::new(Shelf::EMPTY);

impl Floats {
    /// A copy of the values in new memory.
    #[must_use]
    pub fn copied(values: &[f32]) -> Self {
        match kept(values.len()) {
            Some(mut copy) => {
                copy.copy_from_slice(values);
                copy.into()
            }
            None => values.to_vec().into(),
        }
    }

    /// An array of equal values.
    #[must_use]
    pub fn repeated(value: f32, length: usize) -> Self {
        match kept(length) {
            Some(mut values) => {
                values.fill(value);
                values.into()
            }
            None => vec![value; length].into(),
        }
    }
}

/// Kept memory of this length with arbitrary contents, if there is some.
pub fn kept(length: usize) -> Option<Vec<f32>> {
    if is_large(length) {
        lock(&SHELF).take(length)
    } else {
        None
    }
}

/// Frees kept memory once no training runs.
pub fn forget_kept() {
    let mut shelf = lock(&SHELF);
    shelf.used_bytes_max = shelf.used_bytes;
    shelf.free_kept();
}

impl Shelf {
    const EMPTY: Self = Self {
        kept: Vec::new(),
        kept_bytes: 0,
        used_bytes: 0,
        used_bytes_max: 0,
    };

    fn take(&mut self, length: usize) -> Option<Vec<f32>> {
        let place = self.kept.iter().rposition(|it| it.len() == length)?;
        self.kept_bytes -= bytes(length);
        Some(self.kept.remove(place))
    }

    fn begin_use(&mut self, length: usize) {
        self.used_bytes += bytes(length);
        self.used_bytes_max = self.used_bytes_max.max(self.used_bytes);
        self.free_kept();
    }

    fn end_use(&mut self, values: Vec<f32>) {
        self.used_bytes -= bytes(values.len());
        self.kept_bytes += bytes(values.len());
        self.kept.push(values);
    }

    /// Frees memory down to the bound, starting with what was unused for longest.
    fn free_kept(&mut self) {
        while self.used_bytes + self.kept_bytes > self.used_bytes_max {
            self.kept_bytes -= bytes(self.kept.remove(0).len());
        }
    }
}

const fn bytes(length: usize) -> usize {
    length * size_of::<f32>()
}

const fn is_large(length: usize) -> bool {
    bytes(length) >= LARGE_BYTES
}

impl From<Vec<f32>> for Floats {
    fn from(values: Vec<f32>) -> Self {
        if is_large(values.len()) {
            lock(&SHELF).begin_use(values.len());
        }
        Self(values)
    }
}

impl Drop for Floats {
    fn drop(&mut self) {
        if is_large(self.0.len()) {
            lock(&SHELF).end_use(std::mem::take(&mut self.0));
        }
    }
}

impl Clone for Floats {
    fn clone(&self) -> Self {
        Self::copied(self)
    }
}

/// The values travel behind the head of a message. In the head, one byte stands for an array, so a
/// head cannot claim more arrays than it has bytes.
impl Serialize for Floats {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u8(0)
    }
}

impl<'de> Deserialize<'de> for Floats {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        u8::deserialize(deserializer).map(|_| Self::default())
    }
}

impl Deref for Floats {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.0
    }
}

impl DerefMut for Floats {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTH: usize = LARGE_BYTES / 4;

    fn held(shelf: &Shelf) -> Vec<usize> {
        shelf.kept.iter().map(Vec::len).collect()
    }

    #[test]
    fn memory_is_used_again_and_never_more_than_once_was_in_use() {
        let mut shelf = Shelf::EMPTY;
        let mut used = Vec::new();
        for _ in 0..2 {
            shelf.begin_use(LENGTH);
            used.push(vec![0.0; LENGTH]);
        }
        for values in used.drain(..) {
            shelf.end_use(values);
        }
        assert_eq!(held(&shelf), [LENGTH, LENGTH]);
        assert!(shelf.take(LENGTH + 1).is_none());
        // New memory displaces kept memory.
        shelf.begin_use(LENGTH + 1);
        assert!(held(&shelf).is_empty());
        shelf.end_use(vec![0.0; LENGTH + 1]);
        assert_eq!(shelf.take(LENGTH + 1).map(|it| it.len()), Some(LENGTH + 1));
        assert!(shelf.take(LENGTH + 1).is_none());
        assert_eq!((shelf.used_bytes, shelf.kept_bytes), (0, 0));
        assert_eq!(shelf.used_bytes_max, bytes(2 * LENGTH));
        // The shelf keeps as much as the bound allows.
        for _ in 0..2 {
            shelf.begin_use(LENGTH);
        }
        shelf.end_use(vec![0.0; LENGTH]);
        shelf.free_kept();
        assert_eq!(held(&shelf), [LENGTH]);
        assert_eq!(
            (bytes(3), is_large(LENGTH), is_large(LENGTH - 1)),
            (12, true, false)
        );
    }

    #[test]
    fn numbers_are_one_byte_in_the_head_of_a_message() {
        let message = (Floats::repeated(2.5, 3), 7_u8);
        let bytes = postcard::to_stdvec(&message).unwrap();
        assert_eq!(bytes, [0, 7]);
        let read: (Floats, u8) = postcard::from_bytes(&bytes).unwrap();
        assert_eq!(read, (Floats::default(), 7));
    }

    #[test]
    fn numbers_are_those_that_were_asked_for() {
        for length in [0, 1, LENGTH, 2 * LENGTH] {
            for round in 0..3 {
                let values: Vec<_> = (0..length).map(|it| (it + round) as f32).collect();
                let copy = Floats::copied(&values).clone();
                assert_eq!(copy[..], values[..]);
                assert!(Floats::repeated(2.5, length).iter().all(|&it| it == 2.5));
            }
        }
        // No other test uses memory of this length.
        let length = 3 * LENGTH + 1;
        assert!(kept(length).is_none());
        drop(Floats::repeated(2.5, length));
        assert_eq!(kept(length).map(|it| it.len()), Some(length));
        drop(Floats::repeated(2.5, length));
        forget_kept();
        assert!(kept(length).is_none());
        assert!(kept(0).is_none());
    }
}
