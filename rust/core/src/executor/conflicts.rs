//! Conflicts of an operation: the earlier operations that it must follow, and on which elements.
//!
//! Only the nearest conflicts are kept: on every element, the last operation that wrote it, or the
//! operations that have read it since. These follow all earlier operations on the same elements. So
//! an operation that never passes its nearest conflicts never passes any earlier operation. Each
//! operation has a few conflicts, however long the schedule is.

use std::collections::BTreeMap;
use std::ops::Range;

use gradring_proto::schedule::{Access, Use};

/// An earlier operation, and the elements on which it must stay ahead.
pub(super) type Conflict = (usize, Range<usize>);

/// Operations so far, by the memory that they touched.
#[derive(Default)]
pub(super) struct History {
    buffer: Touched,
    beside: Touched,
}

/// Accesses to one memory: disjoint ranges by their starts. Elements outside of all ranges were not
/// touched.
#[derive(Default)]
struct Touched(BTreeMap<usize, Segment>);

#[derive(Clone)]
struct Segment {
    end: usize,
    writer: Option<usize>,
    /// Operations that have read it since it was written.
    readers: Vec<usize>,
}

impl History {
    /// Adds operation `number` on `range` after all others, and appends its conflicts to
    /// `conflicts`. Returns their range.
    pub(super) fn add(
        &mut self,
        number: usize,
        range: &Range<usize>,
        access: Access,
        conflicts: &mut Vec<Conflict>,
    ) -> Range<usize> {
        let first = conflicts.len();
        let mut found = Found { conflicts, first };
        match access.buffer {
            Use::Nothing => {}
            Use::Read => self.buffer.read(number, range, &mut found),
            Use::Write => self.buffer.write(number, range, &mut found),
        }
        if access.beside {
            self.beside.write(number, range, &mut found);
        }
        first..conflicts.len()
    }
}

impl Touched {
    fn read(&mut self, number: usize, range: &Range<usize>, found: &mut Found<'_>) {
        self.split(range);
        let (mut reached, mut gaps) = (range.start, Vec::new());
        for (&start, segment) in self.0.range_mut(range.clone()) {
            gaps.push(reached..start);
            reached = segment.end;
            found.follow(segment.writer, start..segment.end);
            segment.readers.push(number);
        }
        gaps.push(reached..range.end);
        for gap in gaps.into_iter().filter(|gap| !gap.is_empty()) {
            let segment = Segment {
                end: gap.end,
                writer: None,
                readers: vec![number],
            };
            self.0.insert(gap.start, segment);
        }
    }

    fn write(&mut self, number: usize, range: &Range<usize>, found: &mut Found<'_>) {
        self.split(range);
        let mut starts = Vec::new();
        for (&start, segment) in self.0.range(range.clone()) {
            starts.push(start);
            let elements = start..segment.end;
            match segment.readers.is_empty() {
                true => found.follow(segment.writer, elements),
                false => found.follow(segment.readers.iter().copied(), elements),
            }
        }
        for start in starts {
            self.0.remove(&start);
        }
        let segment = Segment {
            end: range.end,
            writer: Some(number),
            readers: Vec::new(),
        };
        self.0.insert(range.start, segment);
    }

    /// Splits segments at both ends of `range`.
    fn split(&mut self, range: &Range<usize>) {
        for at in [range.start, range.end] {
            if let Some((_, segment)) = self.0.range_mut(..at).next_back()
                && segment.end > at
            {
                let rest = segment.clone();
                segment.end = at;
                self.0.insert(at, rest);
            }
        }
    }
}

/// Conflicts of all operations; those from `first` on belong to the newest one.
struct Found<'a> {
    conflicts: &'a mut Vec<Conflict>,
    first: usize,
}

impl Found<'_> {
    /// Adds conflicts on `elements` with these operations.
    fn follow(&mut self, earlier: impl IntoIterator<Item = usize>, elements: Range<usize>) {
        for number in earlier {
            match self.conflicts[self.first..].last_mut() {
                Some((last, range)) if *last == number && range.end == elements.start => {
                    range.end = elements.end;
                }
                _ => self.conflicts.push((number, elements.clone())),
            }
        }
    }
}

#[cfg(test)]
mod tests;
