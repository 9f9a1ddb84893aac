//! Memory of pulled variables, which TensorFlow reads and this crate writes.
//!
//! A variable has two memories, of which one is its value. A pull writes into the other what has
//! changed since it was written last, so a pull of a few rows copies only these.
//!
//! TensorFlow writes into memory of which it has the only reference, also if that is a slice of
//! memory that it has not allocated (docs/internals/tensorflow.md). So this module holds a
//! reference of its own until the next pull but one. If others remain then, the memory is not used
//! again.

use std::ops::Range;
use std::slice;
use std::sync::Arc;

use gradring_servers::model::PulledModel;

/// Bytes of a variable at an address that TensorFlow takes without a copy.
pub(crate) struct Values {
    lines: Box<[Line]>,
    len: usize,
}

#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([u8; Self::BYTES]);

impl Line {
    const BYTES: usize = 64;
}

impl Values {
    fn zeros(len: usize) -> Self {
        let lines = vec![Line([0; Line::BYTES]); len.div_ceil(Line::BYTES)];
        Self {
            lines: lines.into(),
            len,
        }
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// Address of the first byte; dangling without any.
    pub(crate) const fn start(&self) -> *const u8 {
        self.lines.as_ptr().cast()
    }

    const fn all_mut(&mut self) -> &mut [u8] {
        // SAFETY: the lines have at least so many bytes, one after the other, and are borrowed.
        unsafe { slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }
}

/// One memory of a variable, and a reference `R` of TensorFlow's to it.
struct Copy<R> {
    values: Arc<Values>,
    held: R,
    /// Ranges of elements that have changed since they were written here.
    stale: Vec<Range<usize>>,
}

/// Memories of all variables, at most two of each, the newest last.
pub(crate) struct Copies<R>(Vec<Vec<Copy<R>>>);

impl<R> Copies<R> {
    pub(crate) const NONE: Self = Self(Vec::new());

    /// Writes pulled weights into memory for each variable, and returns references to it, which
    /// `share` makes.
    pub(crate) fn filled<E>(
        &mut self,
        pulled: &PulledModel,
        share: impl Fn(usize, &Arc<Values>) -> Result<R, E>,
    ) -> Result<Vec<&R>, E> {
        self.0.resize_with(pulled.variables().len(), Vec::new);
        for (variable, copies) in self.0.iter_mut().enumerate() {
            let (values, stale) = next(copies, variable, pulled);
            let values = written(values, stale, variable, pulled);
            let held = share(variable, &values)?;
            copies.push(Copy {
                values,
                held,
                stale: Vec::new(),
            });
        }
        let newest = self.0.iter().filter_map(|copies| copies.last());
        Ok(newest.map(|copy| &copy.held).collect())
    }
}

/// Returns memory for the next value of a variable, and the ranges that are to be written.
fn next<R>(
    copies: &mut Vec<Copy<R>>,
    variable: usize,
    pulled: &PulledModel,
) -> (Values, Vec<Range<usize>>) {
    let described = &pulled.variables()[variable];
    let changed = pulled.changed(variable);
    for copy in &mut *copies {
        copy.stale.extend_from_slice(&changed);
    }
    // The newest one is the value of the variable.
    let oldest = (copies.len() > 1).then(|| copies.remove(0));
    let free = oldest.and_then(
        |Copy {
             values,
             held,
             stale,
         }| {
            drop(held);
            Some((Arc::try_unwrap(values).ok()?, stale))
        },
    );
    free.unwrap_or_else(|| {
        (
            Values::zeros(described.size_bytes()),
            all(described.elements()),
        )
    })
}

fn written(
    mut values: Values,
    mut stale: Vec<Range<usize>>,
    variable: usize,
    pulled: &PulledModel,
) -> Arc<Values> {
    stale.sort_by_key(|range| range.start);
    let mut written = 0;
    for range in stale {
        // Rows that have changed in both of the last pulls are written once.
        let rest = range.start.max(written)..range.end;
        if !rest.is_empty() {
            pulled.put_range(variable, &rest, values.all_mut());
            written = rest.end;
        }
    }
    Arc::new(values)
}

fn all(len: usize) -> Vec<Range<usize>> {
    std::iter::once(0..len).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use gradring_proto::parameters::float::FloatType;
    use gradring_proto::parameters::optimizer::{Optimizer, Sgd};
    use gradring_servers::model::{Model, Variable};

    use super::*;

    const ROWS: usize = 8;

    /// A pull of a table of one column, in which all rows have this value.
    fn pulled(value: f32, changed: Option<Vec<u32>>) -> PulledModel {
        let table = Variable {
            name: "table".into(),
            shape: vec![ROWS, 1],
            float_type: FloatType::F32,
            decays: false,
        };
        let sgd = Optimizer::Sgd(Sgd {
            momentum: 0.0,
            is_nesterov: false,
        });
        let model = Model::new(vec![table], sgd, &BTreeMap::new(), 1);
        let weights = Arc::new(vec![value; ROWS].into());
        let pulled = vec![(Default::default(), vec![weights])];
        PulledModel::new(Arc::new(model), pulled, vec![vec![changed]]).expect("they fit")
    }

    fn filled(
        copies: &mut Copies<Arc<Values>>,
        value: f32,
        changed: Option<&[u32]>,
    ) -> Arc<Values> {
        let pulled = pulled(value, changed.map(<[u32]>::to_vec));
        let share = |_, values: &Arc<Values>| Ok::<_, ()>(Arc::clone(values));
        Arc::clone(copies.filled(&pulled, share).expect("it is shared")[0])
    }

    fn values(values: &Values) -> &[f32] {
        // SAFETY: the values are alive and nobody writes.
        unsafe { slice::from_raw_parts(values.start().cast(), values.len() / size_of::<f32>()) }
    }

    #[test]
    fn a_memory_gets_all_rows_that_have_changed_since_it_was_written() {
        let mut copies = Copies::NONE;
        let first = filled(&mut copies, 1.0, None);
        assert_eq!(values(&first), [1.0; ROWS]);
        assert!(first.start().addr().is_multiple_of(64));
        let second = filled(&mut copies, 2.0, Some(&[1]));
        assert_eq!(values(&second), [2.0; ROWS]);
        let place = first.start();
        drop(first);
        // The first memory is free again, and has missed row 1.
        let third = filled(&mut copies, 3.0, Some(&[4]));
        assert_eq!(third.start(), place);
        let mut expected = [1.0; ROWS];
        (expected[1], expected[4]) = (3.0, 3.0);
        assert_eq!(values(&third), expected);
        drop(third);
        drop(second);
        let fourth = filled(&mut copies, 4.0, None);
        assert_eq!((values(&fourth), copies.0[0].len()), (&[4.0; ROWS][..], 2));
    }

    #[test]
    fn nobody_writes_into_memory_that_others_read() {
        let mut copies = Copies::NONE;
        let first = filled(&mut copies, 1.0, None);
        drop(filled(&mut copies, 2.0, Some(&[0])));
        let third = filled(&mut copies, 3.0, Some(&[0]));
        assert_eq!(
            (values(&first), values(&third)),
            (&[1.0; ROWS][..], &[3.0; ROWS][..])
        );
        // Once others had the only reference, the memory is not used again.
        assert_eq!((Arc::strong_count(&first), copies.0[0].len()), (1, 2));
    }
}
