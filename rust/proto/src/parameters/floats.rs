//! Arrays of floats whose memory is reused.
//!
//! A gradient or a copy of weights lives for one step. Getting its memory from the system and
//! clearing it takes longer than filling it. So large memory is kept for the next array of the same
//! length and element type.

use std::borrow::Cow;
use std::iter::zip;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Mutex;

use half::{bf16, f16};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::float::{FloatType, Number, typed};
use crate::lock::lock;

/// Bytes from which memory is kept here. The C library keeps smaller pieces.
const LARGE_BYTES: usize = 1 << 20;

/// Values of one element type.
#[derive(Debug, Default, PartialEq)]
pub struct Array<T: Float>(Vec<T>);

/// Values of weights or a gradient.
#[derive(Debug, Clone, PartialEq)]
#[expect(missing_docs, reason = "these are the element types")]
pub enum Floats {
    F32(Array<f32>),
    F64(Array<f64>),
    Bf16(Array<bf16>),
    F16(Array<f16>),
}

/// Values in the program's memory.
#[derive(Debug, Clone, Copy)]
#[expect(missing_docs, reason = "these are the element types")]
pub enum FloatSlice<'a> {
    F32(&'a [f32]),
    F64(&'a [f64]),
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
}

/// Unused memory of this process for one element type. Used and unused memory together never exceed
/// the largest amount that was in use at one time.
#[derive(Debug)]
pub struct Shelf<T> {
    kept: Vec<Vec<T>>,
    kept_bytes: usize,
    used_bytes: usize,
    used_bytes_max: usize,
}

/// An element type with its arrays.
pub trait Float: Number {
    /// Type in which gradients are summed and multiplied. As in an all-reduce, 16-bit floats are
    /// summed in float32 and rounded once, at the end.
    type Sum: Float;
    /// This type, as models name it.
    const FLOAT_TYPE: FloatType;

    /// The same number in the type of sums.
    fn widened(self) -> Self::Sum;
    /// The numbers in the type of sums; not copied if that is this type.
    fn all_widened(values: &Array<Self>) -> Cow<'_, Array<Self::Sum>>;
    /// Sums rounded to this type; not copied if that is the type of sums.
    fn all_rounded(sums: Cow<'_, Array<Self::Sum>>) -> Cow<'_, Array<Self>>;

    /// The numbers of an array of this type; `None` for another type.
    fn array(floats: &Floats) -> Option<&Array<Self>>;
    /// The same for writing.
    fn array_mut(floats: &mut Floats) -> Option<&mut Array<Self>>;
    /// Makes an array one of any type.
    fn floats(array: Array<Self>) -> Floats;
    /// Unused memory for arrays of this type.
    fn shelf() -> &'static Mutex<Shelf<Self>>;
}

/// Functions that all types have.
macro_rules! common {
    ($float:ident, $variant:ident) => {
        const FLOAT_TYPE: FloatType = FloatType::$variant;

        fn array(floats: &Floats) -> Option<&Array<Self>> {
            match floats {
                Floats::$variant(array) => Some(array),
                _ => None,
            }
        }

        fn array_mut(floats: &mut Floats) -> Option<&mut Array<Self>> {
            match floats {
                Floats::$variant(array) => Some(array),
                _ => None,
            }
        }

        fn floats(array: Array<Self>) -> Floats {
            Floats::$variant(array)
        }

        fn shelf() -> &'static Mutex<Shelf<Self>> {
            static SHELF: Mutex<Shelf<$float>> = Mutex::new(Shelf::EMPTY);
            &SHELF
        }
    };
}

macro_rules! wide {
    ($($float:ident: $variant:ident,)*) => { $(
        impl Float for $float {
            type Sum = Self;

            common!($float, $variant);

            #[inline]
            fn widened(self) -> Self {
                self
            }

            fn all_widened(values: &Array<Self>) -> Cow<'_, Array<Self>> {
                Cow::Borrowed(values)
            }

            fn all_rounded(sums: Cow<'_, Array<Self>>) -> Cow<'_, Array<Self>> {
                sums
            }
        }
    )* };
}

wide! { f32: F32, f64: F64, }

macro_rules! narrow {
    ($($float:ident: $variant:ident,)*) => { $(
        impl Float for $float {
            type Sum = f32;

            common!($float, $variant);

            #[inline]
            fn widened(self) -> f32 {
                self.to_f32()
            }

            fn all_widened(values: &Array<Self>) -> Cow<'_, Array<f32>> {
                Cow::Owned(Array::mapped(values, $float::to_f32))
            }

            fn all_rounded(sums: Cow<'_, Array<f32>>) -> Cow<'_, Array<Self>> {
                Cow::Owned(Array::mapped(&sums, $float::from_f32))
            }
        }
    )* };
}

narrow! { bf16: Bf16, f16: F16, }

impl<T: Float> Array<T> {
    /// A copy of the values in new memory.
    #[must_use]
    pub fn copied(values: &[T]) -> Self {
        match kept(values.len()) {
            Some(mut copy) => {
                copy.copy_from_slice(values);
                copy.into()
            }
            None => values.to_vec().into(),
        }
    }

    /// An array with the result of a function for each value.
    fn mapped<S: Float>(values: &[S], function: fn(S) -> T) -> Self {
        let results = values.iter().map(|it| function(*it));
        match kept(values.len()) {
            Some(mut array) => {
                zip(&mut array, results).for_each(|(value, result)| *value = result);
                array.into()
            }
            None => results.collect::<Vec<_>>().into(),
        }
    }

    /// An array of equal values.
    #[must_use]
    pub fn repeated(value: T, length: usize) -> Self {
        match kept(length) {
            Some(mut values) => {
                values.fill(value);
                values.into()
            }
            None => vec![value; length].into(),
        }
    }
}

/// Evaluates an expression with the values of any element type.
macro_rules! each {
    ($type:ident, $floats:expr, $values:ident => $result:expr) => {
        match $floats {
            $type::F32($values) => $result,
            $type::F64($values) => $result,
            $type::Bf16($values) => $result,
            $type::F16($values) => $result,
        }
    };
}

impl Floats {
    /// An array of equal values.
    #[must_use]
    pub fn repeated(float_type: FloatType, value: f64, length: usize) -> Self {
        typed!(float_type, T => T::floats(Array::repeated(T::of(value), length)))
    }

    /// The element type.
    #[must_use]
    pub fn float_type(&self) -> FloatType {
        each!(Self, self, values => type_of(values))
    }

    /// Number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        each!(Self, self, values => values.len())
    }

    /// Returns whether there are no values.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Size of all values in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        self.len() * self.float_type().size_bytes()
    }

    /// The values.
    ///
    /// # Panics
    /// If they are of another element type.
    #[must_use]
    pub fn of<T: Float>(&self) -> &Array<T> {
        T::array(self).expect("the element type was checked")
    }

    /// The values, for writing.
    ///
    /// # Panics
    /// If they are of another element type.
    #[must_use]
    pub fn of_mut<T: Float>(&mut self) -> &mut Array<T> {
        T::array_mut(self).expect("the element type was checked")
    }
}

impl FloatSlice<'_> {
    /// The element type.
    #[must_use]
    pub fn float_type(&self) -> FloatType {
        each!(Self, self, values => type_of(values))
    }

    /// Number of values.
    #[must_use]
    pub const fn len(&self) -> usize {
        each!(Self, self, values => values.len())
    }

    /// Returns whether there are no values.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A copy of a range in new memory.
    ///
    /// # Panics
    /// If there are fewer values.
    #[must_use]
    pub fn copied(&self, range: Range<usize>) -> Floats {
        each!(Self, self, values => Float::floats(Array::copied(&values[range])))
    }

    /// Copies of ranges of equal length, in their order. Ranges with equal keys are summed.
    ///
    /// # Panics
    /// If there are fewer values.
    #[must_use]
    pub fn summed(&self, ranges: impl Iterator<Item = (u32, Range<usize>)>) -> (Vec<u32>, Floats) {
        each!(Self, self, values => {
            let (keys, sums) = summed(values, ranges);
            (keys, Float::floats(sums))
        })
    }

    /// Returns whether all values that both have are equal, or both not a number.
    #[must_use]
    pub fn agrees(&self, other: &Floats) -> bool {
        fn agree<T: Float>(one: &[T], other: &[T]) -> bool {
            zip(one, other).all(|(one, other)| one == other || one.is_nan() && other.is_nan())
        }
        match (self, other) {
            (Self::F32(one), Floats::F32(other)) => agree(one, other),
            (Self::F64(one), Floats::F64(other)) => agree(one, other),
            (Self::Bf16(one), Floats::Bf16(other)) => agree(one, other),
            (Self::F16(one), Floats::F16(other)) => agree(one, other),
            _ => false,
        }
    }
}

const fn type_of<T: Float>(_: &[T]) -> FloatType {
    T::FLOAT_TYPE
}

/// Adds up in the type of sums, and rounds once.
fn summed<T: Float>(
    values: &[T],
    ranges: impl Iterator<Item = (u32, Range<usize>)>,
) -> (Vec<u32>, Array<T>) {
    let (mut keys, mut sums) = (Vec::new(), Vec::new());
    for (key, range) in ranges {
        let values = values[range].iter().map(|it| it.widened());
        if keys.last() == Some(&key) {
            let start = sums.len() - values.len();
            for (sum, value) in zip(&mut sums[start..], values) {
                *sum += value;
            }
        } else {
            keys.push(key);
            sums.extend(values);
        }
    }
    let sums = T::all_rounded(std::borrow::Cow::Owned(sums.into()));
    (keys, sums.into_owned())
}

/// Kept memory of this length with arbitrary contents, if there is some.
#[must_use]
pub fn kept<T: Float>(length: usize) -> Option<Vec<T>> {
    if is_large::<T>(length) {
        lock(T::shelf()).take(length)
    } else {
        None
    }
}

/// Frees kept memory once no training runs.
pub fn forget_kept() {
    fn forget<T: Float>() {
        let mut shelf = lock(T::shelf());
        shelf.used_bytes_max = shelf.used_bytes;
        shelf.free_kept();
    }
    for float_type in FloatType::ALL {
        typed!(float_type, T => forget::<T>());
    }
}

impl<T> Shelf<T> {
    pub(super) const EMPTY: Self = Self {
        kept: Vec::new(),
        kept_bytes: 0,
        used_bytes: 0,
        used_bytes_max: 0,
    };

    fn take(&mut self, length: usize) -> Option<Vec<T>> {
        let place = self.kept.iter().rposition(|it| it.len() == length)?;
        self.kept_bytes -= bytes::<T>(length);
        Some(self.kept.remove(place))
    }

    fn begin_use(&mut self, length: usize) {
        self.used_bytes += bytes::<T>(length);
        self.used_bytes_max = self.used_bytes_max.max(self.used_bytes);
        self.free_kept();
    }

    fn end_use(&mut self, values: Vec<T>) {
        self.used_bytes -= bytes::<T>(values.len());
        self.kept_bytes += bytes::<T>(values.len());
        self.kept.push(values);
    }

    /// Frees memory down to the bound, starting with what was unused for longest.
    fn free_kept(&mut self) {
        while self.used_bytes + self.kept_bytes > self.used_bytes_max {
            self.kept_bytes -= bytes::<T>(self.kept.remove(0).len());
        }
    }
}

const fn bytes<T>(length: usize) -> usize {
    length * size_of::<T>()
}

const fn is_large<T>(length: usize) -> bool {
    bytes::<T>(length) >= LARGE_BYTES
}

impl<T: Float> From<Vec<T>> for Array<T> {
    fn from(values: Vec<T>) -> Self {
        if is_large::<T>(values.len()) {
            lock(T::shelf()).begin_use(values.len());
        }
        Self(values)
    }
}

impl<T: Float> Drop for Array<T> {
    fn drop(&mut self) {
        if is_large::<T>(self.0.len()) {
            lock(T::shelf()).end_use(std::mem::take(&mut self.0));
        }
    }
}

impl<T: Float> Clone for Array<T> {
    fn clone(&self) -> Self {
        Self::copied(self)
    }
}

impl<T: Float> Deref for Array<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T: Float> DerefMut for Array<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.0
    }
}

impl Default for Floats {
    fn default() -> Self {
        Self::F32(Array::default())
    }
}

impl From<Vec<f32>> for Floats {
    fn from(values: Vec<f32>) -> Self {
        Self::F32(values.into())
    }
}

impl<'a> From<&'a [f32]> for FloatSlice<'a> {
    fn from(values: &'a [f32]) -> Self {
        Self::F32(values)
    }
}

/// The values travel behind the head of a message. In the head, one byte stands for an array, so a
/// head cannot claim more arrays than it has bytes. The byte is the element type.
impl Serialize for Floats {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.float_type().serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Floats {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        FloatType::deserialize(deserializer).map(|it| Self::repeated(it, 0.0, 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTH: usize = LARGE_BYTES / 4;

    fn held(shelf: &Shelf<f32>) -> Vec<usize> {
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
        assert_eq!(shelf.used_bytes_max, bytes::<f32>(2 * LENGTH));
        // The shelf keeps as much as the bound allows.
        for _ in 0..2 {
            shelf.begin_use(LENGTH);
        }
        shelf.end_use(vec![0.0; LENGTH]);
        shelf.free_kept();
        assert_eq!(held(&shelf), [LENGTH]);
        assert_eq!(
            (
                bytes::<f32>(3),
                is_large::<f32>(LENGTH),
                is_large::<f64>(LENGTH / 2 - 1)
            ),
            (12, true, false)
        );
    }

    #[test]
    fn numbers_are_their_type_in_the_head_of_a_message() {
        for (index, float_type) in (0..).zip(FloatType::ALL) {
            let message = (Floats::repeated(float_type, 2.5, 3), 7_u8);
            let bytes = postcard::to_stdvec(&message).unwrap();
            assert_eq!(bytes, [index, 7]);
            let read: (Floats, u8) = postcard::from_bytes(&bytes).unwrap();
            assert_eq!(read, (Floats::repeated(float_type, 0.0, 0), 7));
        }
        assert!(postcard::from_bytes::<Floats>(&[4]).is_err());
    }

    #[test]
    fn numbers_are_those_that_were_asked_for() {
        for length in [0, 1, LENGTH, 2 * LENGTH] {
            for round in 0..3 {
                let values: Vec<_> = (0..length).map(|it| (it + round) as f32).collect();
                let copy = Array::copied(&values).clone();
                assert_eq!(copy[..], values[..]);
                assert!(Array::repeated(2.5_f32, length).iter().all(|&it| it == 2.5));
            }
        }
        // No other test uses memory of this length.
        let length = 3 * LENGTH + 1;
        assert!(kept::<f32>(length).is_none());
        drop(Array::repeated(2.5_f32, length));
        assert_eq!(kept::<f32>(length).map(|it| it.len()), Some(length));
        drop(Array::repeated(2.5_f32, length));
        forget_kept();
        assert!(kept::<f32>(length).is_none());
        assert!(kept::<f32>(0).is_none());
    }

    #[test]
    fn repeated_ranges_are_summed_and_16_bits_are_rounded_once() {
        let ranges = || [(3, 0..2), (5, 2..4), (5, 0..2), (7, 1..3)].into_iter();
        let (keys, sums) = FloatSlice::F64(&[1.0, 2.0, 4.0, 8.0]).summed(ranges());
        assert_eq!(keys, [3, 5, 7]);
        assert_eq!(sums.of::<f64>()[..], [1.0, 2.0, 5.0, 10.0, 2.0, 4.0]);
        // Each sum of two would round to 256.
        let values = [256.0, 1.0, 1.0].map(bf16::from_f32);
        let ranges = (0..3).map(|it| (0, it..it + 1));
        let (_, sums) = FloatSlice::Bf16(&values).summed(ranges);
        assert_eq!(sums.of::<bf16>()[0].to_f32(), 258.0);
        // Without values, rows have no sums.
        let (keys, sums) = FloatSlice::F32(&[]).summed([(1, 0..0), (1, 0..0)].into_iter());
        assert_eq!((keys, sums.len()), (vec![1], 0));
    }

    #[test]
    fn values_agree_with_those_of_their_own_type() {
        let ours = FloatSlice::F64(&[1.0, f64::NAN]);
        let floats = |values: Vec<f64>| Floats::F64(values.into());
        assert!(ours.agrees(&floats(vec![1.0, f64::NAN])));
        assert!(ours.agrees(&floats(vec![1.0])));
        assert!(!ours.agrees(&floats(vec![1.5])));
        assert!(!ours.agrees(&vec![1.0_f32].into()));
    }
}
